"""docs/contract.md says what the code does, and everything in the contract has its place."""

from __future__ import annotations

import pytest

from python_backend.contract import model_contract
from tests.tools import make_contract_page
from tests.tools.make_contract_page import OUTPUTS, PAGE, page


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.tools.make_contract_page"


@pytest.mark.parametrize("model", ["ensemble", "preprocessing", "tensorrt_llm", "postprocessing"])
def test_every_tensor_is_on_the_page(model):
    contract = model_contract(model)
    text = page()
    for name in [*contract.inputs, *contract.outputs]:
        assert f"| `{name}` |" in text


def test_every_output_of_the_engine_has_a_note_and_no_note_is_left_over():
    assert set(OUTPUTS) == set(model_contract("tensorrt_llm").outputs)


def test_every_parameter_is_honoured_refused_or_without_effect():
    settings = make_contract_page.settings
    honoured = set(settings.ModelParameters.model_fields)
    groups = [honoured, set(settings.REFUSED), set(settings.WITHOUT_EFFECT)]
    assert set().union(*groups) == set(model_contract("tensorrt_llm").parameters)
    assert sum(map(len, groups)) == len(set().union(*groups))
