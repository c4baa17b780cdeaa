"""What a request may say about log-probabilities, as tensors and as request parameters."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit import fake_pb_utils

fake_pb_utils.install()

from python_backend.errors import InvalidRequest  # noqa: E402
from python_backend.triton.parse import parse_requests  # noqa: E402
from tests.unit.test_parse import LIMITS, ints, prompt  # noqa: E402


def parse(parameters=None, **tensors):
    (request,) = parse_requests(prompt(**tensors), LIMITS, lambda: "0", parameters)
    return request


def text(value: str) -> np.ndarray:
    return np.array([[value.encode()]], object)


def test_nothing_is_asked_for_unless_it_is():
    request = parse()
    assert (request.top_logprobs, request.top_prompt_logprobs, request.logprobs_mode) == (None, None, "raw")


@pytest.mark.parametrize("count", [0, 1, 20])
def test_counts_are_taken(count):
    request = parse(top_logprobs=ints([count]), top_prompt_logprobs=ints([count]), logprobs_mode=text("processed"))
    assert (request.top_logprobs, request.top_prompt_logprobs) == (count, count)
    assert request.logprobs_mode == "processed"


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"logprobs": True}, (0, None)),
        ({"logprobs": False, "prompt_logprobs": False}, (None, None)),
        ({"logprobs": 3, "prompt_logprobs": True}, (3, 0)),
    ],
)
def test_the_usual_names_are_request_parameters(parameters, expected):
    request = parse(parameters)
    assert (request.top_logprobs, request.top_prompt_logprobs) == expected
    assert request.warnings == []


def test_the_input_outranks_the_parameter():
    assert parse({"logprobs": True}, top_logprobs=ints([4])).top_logprobs == 4


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("count", [-1, 21, 2**31 - 1])
def test_counts_out_of_range_are_refused_with_the_range(name, count):
    with pytest.raises(InvalidRequest, match=rf"^top_{name} is {count}; allowed: 0 to 20 "):
        parse(**{f"top_{name}": ints([count])})
    with pytest.raises(InvalidRequest, match=rf"^Parameter {name} is {count}; allowed: 0 to 20 "):
        parse({name: count})


@pytest.mark.parametrize("value", ["5", 2.5, [1]])
def test_a_parameter_that_is_no_count_is_refused(value):
    with pytest.raises(InvalidRequest, match="Parameter logprobs is "):
        parse({"logprobs": value})


def test_an_unknown_mode_and_one_without_log_probs_are_refused():
    with pytest.raises(InvalidRequest, match=r"^logprobs_mode is 'cooked'; allowed: raw and processed\.$"):
        parse(top_logprobs=ints([1]), logprobs_mode=text("cooked"))
    with pytest.raises(InvalidRequest, match="logprobs_mode was sent without top_logprobs"):
        parse(top_prompt_logprobs=ints([1]), logprobs_mode=text("processed"))
