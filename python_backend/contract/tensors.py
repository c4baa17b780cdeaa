"""Tensor and parameter tables of the classic TensorRT-LLM models plus our optional additions.

`classic.json` is upstream's contract as data; `additions.json` is ours. Knows nothing of Triton.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent

# `${logits_datatype}` and friends are decided when the repository is rendered.
DEFAULT_TYPES = {
    "${logits_datatype}": "TYPE_FP32",
    "${encoder_input_features_data_type}": "TYPE_FP16",
    "${prompt_embedding_table_data_type}": "TYPE_FP16",
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output; `dims` leave the batch dimension out, -1 is any length."""

    name: str
    data_type: str  # as in config.pbtxt: TYPE_INT32, TYPE_STRING, …
    dims: tuple[int, ...]
    optional: bool = False
    ragged: bool = False
    scalar: bool = False  # declared [1] and handed to the model without that dimension
    ours: bool = False


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One entry of `parameters` in config.pbtxt; upstream reads every value as text."""

    key: str
    meaning: str
    type: str
    default: Any = None
    values: tuple[str, ...] = ()
    mandatory: bool = False


@dataclass(frozen=True, slots=True)
class ModelContract:
    """What one model of the repository takes, gives and is configured by."""

    name: str
    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    parameters: dict[str, ParameterSpec]


def _tensor(entry: dict[str, Any], *, ours: bool, optional: bool) -> TensorSpec:
    dims = tuple(entry["dims"])
    if entry["name"] == "lora_config":
        # Upstream's template says [-1, 3] and its converter writes 4 columns: accept both.
        dims = (-1, -1)
    return TensorSpec(
        name=entry["name"],
        data_type=DEFAULT_TYPES.get(entry["data_type"], entry["data_type"]),
        dims=dims,
        optional=optional,
        ragged=bool(entry.get("allow_ragged_batch")),
        scalar=entry.get("reshape") == [],
        ours=ours,
    )


@cache
def _tables() -> tuple[dict[str, Any], dict[str, Any]]:
    classic = json.loads((_HERE / "classic.json").read_text())["classic"]
    additions = json.loads((_HERE / "additions.json").read_text())
    return classic, additions


@cache
def model_contract(name: str) -> ModelContract:
    """The contract of `ensemble`, `preprocessing`, `tensorrt_llm`, `postprocessing` or `tensorrt_llm_bls`.

    Raises:
        KeyError: the contract has no model of that name.
    """
    classic, additions = _tables()
    ours = additions.get(name, {"optional": [], "inputs": [], "outputs": []})
    inputs = {
        e["name"]: _tensor(e, ours=False, optional=e["optional"] or e["name"] in ours["optional"])
        for e in classic[name]["inputs"]
    }
    inputs |= {e["name"]: _tensor(e, ours=True, optional=True) for e in ours["inputs"]}
    outputs = {e["name"]: _tensor(e, ours=False, optional=True) for e in classic[name]["outputs"]}
    outputs |= {e["name"]: _tensor(e, ours=True, optional=True) for e in ours["outputs"]}
    parameters = {
        p["key"]: ParameterSpec(
            key=p["key"],
            meaning=p["meaning"],
            type=p["type"],
            default=p.get("default"),
            values=tuple(p.get("values", ())),
            mandatory=bool(p.get("mandatory")),
        )
        for p in classic[name]["parameters"] + ours.get("parameters", [])
    }
    return ModelContract(name, inputs, outputs, parameters)
