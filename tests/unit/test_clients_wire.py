"""What the clients put on the wire and take off it, piece by piece."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import InferInput, InferResult, service_pb2

from clients import GenerateRequest, RequestRefused, StreamBroken, errors, http_wire, wire
from clients.sse import EventParser
from clients.types import DATATYPES

ROOT = Path(__file__).parents[2]


def test_every_input_of_the_ensemble_is_a_field_of_its_type() -> None:
    classic = json.loads((ROOT / "python_backend/contract/classic.json").read_text())["classic"]["ensemble"]["inputs"]
    ours = json.loads((ROOT / "python_backend/contract/additions.json").read_text())["ensemble"]["inputs"]
    names = {"TYPE_STRING": "BYTES"}
    expected = {
        entry["name"]: names.get(entry["data_type"], entry["data_type"].removeprefix("TYPE_"))
        for entry in [*classic, *ours]
    }
    assert expected == DATATYPES


def test_unset_fields_are_not_sent() -> None:
    assert GenerateRequest(text_input="a", max_tokens=3).tensors() == {"text_input": "a", "max_tokens": 3}


def test_falsy_values_are_sent() -> None:
    request = GenerateRequest(text_input="", temperature=0.0, top_k=0, stream=False, max_tokens=1)
    assert request.tensors() == {"text_input": "", "max_tokens": 1, "stream": False, "temperature": 0.0, "top_k": 0}


@pytest.mark.parametrize(
    ("values", "top_p"),
    [
        ({"temperature": 0.7}, 1.0),
        ({"temperature": 0.7, "top_p": 0.5}, 0.5),
        ({"temperature": 0.7, "top_k": 5}, None),
        ({"temperature": 0.0}, None),
        ({}, None),
    ],
)
def test_a_temperature_alone_asks_for_sampling(values: dict[str, float], top_p: float | None) -> None:
    assert GenerateRequest.of("a", **values).tensors().get("top_p") == top_p


def test_a_request_needs_exactly_one_of_text_and_messages() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        GenerateRequest(max_tokens=1)
    with pytest.raises(ValueError, match="exactly one"):
        GenerateRequest.of([{"role": "user", "content": "a"}], text_input="b")


def test_a_misspelt_field_is_named() -> None:
    with pytest.raises(TypeError, match="No such request field: max_token"):
        GenerateRequest.of("a", max_token=3)


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        ("INT32", 7),
        ("INT32", [1, -2, 3]),
        ("UINT64", 2**64 - 1),
        ("FP32", 0.5),
        ("BOOL", True),
        ("BYTES", "Grüße\n🦙"),
        ("BYTES", ["a", "", "世界"]),
        ("FP16", np.arange(6, dtype=np.float32).reshape(2, 3)),
    ],
)
def test_tensors_are_encoded_as_tritonclient_does_it(datatype: str, value: object) -> None:
    shape, raw = wire.encode("x", datatype, value)
    dtypes = {"BYTES": np.object_, "INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32, "BOOL": np.bool_}
    array = np.array(value, dtype=dtypes.get(datatype, np.float16))
    array = array.reshape(1, -1) if array.ndim < 2 else array[None]
    theirs = InferInput("x", list(array.shape), datatype)
    theirs.set_data_from_numpy(array)
    assert shape == list(array.shape)
    assert raw == theirs._get_content()


@pytest.mark.parametrize(
    ("datatype", "value"), [("UINT64", -1), ("INT32", 2**31), ("INT32", "x"), ("INT32", 1.5), ("BYTES", 3)]
)
def test_a_value_that_does_not_fit_is_refused_by_name(datatype: str, value: object) -> None:
    with pytest.raises(RequestRefused, match=f"seed is {value!r}; it has to be {datatype}"):
        wire.encode("seed", datatype, value)


@given(st.lists(st.text(), min_size=1, max_size=4))
def test_strings_come_back_as_they_were(texts: list[str]) -> None:
    shape, raw = wire.encode("x", "BYTES", texts)
    message = service_pb2.ModelInferResponse()
    message.outputs.add(name="x", datatype="BYTES", shape=shape)
    message.raw_output_contents.append(raw)
    assert wire.decode(message)["x"] == texts
    assert [t.decode() for t in InferResult(message).as_numpy("x").reshape(-1)] == texts


def test_a_string_that_claims_to_be_longer_than_it_is_is_noticed() -> None:
    message = service_pb2.ModelInferResponse()
    message.outputs.add(name="x", datatype="BYTES", shape=[1, 1])
    message.raw_output_contents.append(struct.pack("<I", 9) + b"short")
    with pytest.raises(ValueError, match="cut off"):
        wire.decode(message)


def test_a_stop_request_has_the_mandatory_inputs_with_their_batch_dimension() -> None:
    message = wire.infer_request("tensorrt_llm", "id", wire.stop_tensors())
    shapes = {tensor.name: list(tensor.shape) for tensor in message.inputs}
    assert shapes == {name: [1, 1] for name in ("input_ids", "input_lengths", "request_output_len", "stop")}


_STREAM = (
    'data: {"a":1}\n\n: comment\nevent: x\ndata: zwei\ndata:Zeilen 🦙\r\n\r\ndata: drei\r\rid: 7\n\ndata: unfinished'
)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 1000])
def test_events_survive_any_cut_of_the_bytes(size: int) -> None:
    raw = b"\xef\xbb\xbf" + _STREAM.encode()
    parser = EventParser()
    events = [event for start in range(0, len(raw), size) for event in parser.feed(raw[start : start + size])]
    assert events == ['{"a":1}', "zwei\nZeilen 🦙", "drei"]


@given(st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]))), st.integers(1, 9))
def test_every_text_survives_the_event_stream(texts: list[str], size: int) -> None:
    raw = b"".join(b"data: " + text.encode() + b"\n\n" for text in texts)
    parser = EventParser()
    events = [event for start in range(0, len(raw), size) for event in parser.feed(raw[start : start + size])]
    assert events == texts


def test_an_event_that_is_no_object_is_broken() -> None:
    with pytest.raises(StreamBroken, match="rubbish"):
        http_wire.outputs("rubbish")
    with pytest.raises(StreamBroken, match="no answer"):
        http_wire.outputs("[1]")


def test_scalars_and_lists_of_json_become_the_same_tensors_as_over_grpc() -> None:
    event = {"id": "i", "model_name": "m", "text_output": "a", "cum_log_probs": -0.5, "output_log_probs": [-0.5, -1.0]}
    outputs = http_wire.outputs(json.dumps(event))
    assert outputs["text_output"] == ["a"]
    assert outputs["cum_log_probs"].tolist() == [-0.5]
    assert outputs["output_log_probs"].tolist() == [-0.5, -1.0]
    assert "model_name" not in outputs


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, b'{"error":"max_tokens is 0; allowed: >= 1."}', errors.RequestRefused),
        (400, b'data: {"error":"in ensemble \'ensemble\', no"}\n\n', errors.RequestRefused),
        (404, b'{"error":"Request for unknown model"}', errors.RequestRefused),
        (500, b'{"error":"Unable to parse \'data\'"}', errors.RequestRefused),
        (500, b'{"error":"Stub process \'x\' is not healthy."}', errors.ServerFailure),
        (400, b'{"error":"Exceeds maximum queue size"}', errors.QueueFull),
        (503, b'{"error":"Server not ready"}', errors.ServerUnavailable),
        (502, b"<html>Bad gateway</html>", errors.StreamBroken),
    ],
)
def test_http_failures_are_typed(status: int, body: bytes, kind: type[errors.ClientError]) -> None:
    assert type(errors.from_http(status, body, "http://x")) is kind
