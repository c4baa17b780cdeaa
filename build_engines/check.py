"""Checks a model repository without a server: every finding at once, none of them a guess.

Knows nothing of specs; the contract and the files are all it looks at.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.text_format import ParseError
from tritonclient.grpc import model_config_pb2 as pb

from build_engines.check_engine import check_engine
from build_engines.check_ensemble import check_ensemble
from build_engines.pbtxt_lines import lines_of
from build_engines.placeholders import UNKNOWN_TYPE, holds_placeholder, placeholder_findings, readable
from build_engines.repository import TEMPLATES
from build_engines.templates import contract_name, from_text
from build_engines.trtllm.llmapi import llmapi_contract
from python_backend.contract import TensorSpec, model_contract

_PLACE = re.compile(r"(input|output|parameter|step) ([^\s:]+)(?:: (\w+))?")
# Have the engine's own data type.
_ENGINE_TYPED = ("lora_weights", "LORA_WEIGHTS", "OUT_LORA_WEIGHTS", "prompt_embedding_table")
_FLOATS = ("TYPE_FP16", "TYPE_BF16", "TYPE_FP32")
# Upstream requires them. We also take messages in place of a text; and a request without max_tokens that has another
# input more than it needs passes Triton's count of the inputs, and then no step of the ensemble ever runs.
_OPTIONAL_WITH_US = ("text_input", "QUERY", "max_tokens", "REQUEST_OUTPUT_LEN")


@dataclass(frozen=True, slots=True)
class _Model:
    """One model of the repository as it is written."""

    directory: Path
    config: Any
    text: str
    own_engine: bool  # whether our own engine serves the repository, which needs our additions everywhere

    def line(self, finding: str) -> str:
        """`path` or `path:line` of what a finding is about."""
        path = self.directory / "config.pbtxt"
        match = _PLACE.match(finding)
        if match is None:
            return str(path)
        place = tuple(part for part in match.groups() if part)
        lines = lines_of(self.text)
        line = lines.get(place) or lines.get(place[:2])
        return f"{path}:{line}" if line else str(path)


def check_repository(repository: Path, *, built: bool = True) -> list[str]:
    """What is wrong with a repository, one sentence per finding with its file and line; empty when in order.

    Args:
        repository: directory of models, ours or upstream's.
        built: whether the directories that parameters name must be there and agree; a dry run has none.
    """
    if not repository.is_dir():
        return [f"{repository}: no such directory."]
    findings: list[str] = []
    models = _read_all(repository, findings)
    if not models and not findings:
        findings.append(f"{repository}: no model in it (a directory with a config.pbtxt).")
    configs = {name: model.config for name, model in models.items()}
    for name, model in models.items():
        found = _check_files(model.directory, model.config, built=built) + _check_contract(name, model)
        if repository.resolve() != TEMPLATES:  # templates hold no parameters yet
            found += _check_parameters(name, model, built=built)
        steps = [step.model_name for step in model.config.ensemble_scheduling.step]
        if steps and all(step in models or not (repository / step).is_dir() for step in steps):  # else: unreadable
            found += check_ensemble(model.config, configs)
        findings += [f"{model.line(text)}: {text}" for text in found]
    if built:
        findings += [f"{models[name].line(text)}: {text}" for name, text in check_engine(configs)]
    return findings


def _read_all(repository: Path, findings: list[str]) -> dict[str, _Model]:
    shim = repository / "tensorrt_llm" / "1" / "model.py"
    own_engine = shim.is_file() and "python_backend." in shim.read_text(errors="replace")
    models: dict[str, _Model] = {}
    for directory in sorted(path for path in repository.iterdir() if path.is_dir()):
        path = directory / "config.pbtxt"
        config = _read(path, findings)
        if config is not None:
            models[directory.name] = _Model(directory, config, path.read_text(encoding="utf-8"), own_engine)
    return models


def _read(path: Path, findings: list[str]) -> Any | None:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        findings.append(f"{path}: cannot be read: {error}.")
        return None
    findings += [f"{path}:{number}: {found}" for number, found in placeholder_findings(text)]
    try:
        return from_text(readable(text))
    except ParseError as error:
        findings.append(f"{path}:{error.GetLine() or 1}: not a model configuration: {error}. Correct the line.")
        return None


def _check_files(directory: Path, config: Any, *, built: bool) -> list[str]:
    findings = []
    if config.name != directory.name:
        findings.append(f"name is {config.name!r}; it must be the directory's, {directory.name!r}.")
    versions = [path for path in directory.iterdir() if path.is_dir() and path.name.isdigit()]
    if not versions:
        findings.append("the model has no version directory; make one, 1/, even if it stays empty.")
    upstreams = not built and (directory / "1" / "model.yaml").is_file()  # its model.py is fetched by the build
    if config.backend == "python" and not upstreams:
        missing = [v.name for v in versions if not (v / "model.py").is_file()]
        findings += [f"{name}/model.py is missing; Triton would wait for it without end. Add it." for name in missing]
    return findings


def _check_contract(name: str, model: _Model) -> list[str]:
    if (model.directory / "1" / "model.yaml").is_file():  # the LLM API's model, by upstream's name
        contract = llmapi_contract()
    else:
        try:
            contract = model_contract(contract_name(name, model.config))
        except KeyError:
            return []  # a model of the user's own
    config = model.config
    return _check_tensors("input", config.input, contract.inputs, model) + _check_tensors(
        "output", config.output, contract.outputs, model
    )


def _check_tensors(kind: str, given: Any, contract: dict[str, TensorSpec], model: _Model) -> list[str]:
    findings = []
    names = [tensor.name for tensor in given]
    wanted = [name for name, spec in contract.items() if model.own_engine or not spec.ours]
    twice = {name for name in names if names.count(name) > 1}
    if model.config.HasField("ensemble_scheduling") and kind == "output":
        twice = {
            name for name in twice if len({str(t) for t in given if t.name == name}) > 1
        }  # Triton takes equal ones
    findings += [f"{kind} {name} is declared twice; remove one." for name in sorted(twice)]
    findings += [f"{kind} {_missing(kind, contract[name])}" for name in wanted if name not in names]
    for tensor in given:
        spec = contract.get(tensor.name)
        if spec is None:
            findings.append(f"{kind} {tensor.name} is not in the contract; remove it, or correct its name.")
        else:
            findings += [f"{kind} {tensor.name} {text}" for text in _check_tensor(kind, tensor, spec, model)]
    return findings


def _missing(kind: str, spec: TensorSpec) -> str:
    how = f"{spec.data_type}, dims {list(spec.dims)}" + (", optional" if kind == "input" and spec.optional else "")
    return (
        f"{spec.name} of the contract is missing: requests that {'send' if kind == 'input' else 'ask for'} it are "
        f"refused. Declare it ({how})."
    )


def _check_tensor(kind: str, tensor: Any, spec: TensorSpec, model: _Model) -> list[str]:
    found = []
    data_type = pb.DataType.Name(tensor.data_type)
    allowed = _FLOATS if spec.name in _ENGINE_TYPED and not model.own_engine else (spec.data_type,)
    if data_type not in (*allowed, UNKNOWN_TYPE):
        found.append(f"is {data_type}; the contract says {' or '.join(allowed)}.")
    if spec.name == "lora_config" and tuple(tensor.dims) == (-1, 3):
        found.append(
            "has dims [-1, 3]; converters write 4 columns since DoRA, which Triton would refuse. Write [-1, -1]."
        )
    elif tuple(tensor.dims) != spec.dims:
        found.append(f"has dims {list(tensor.dims)}; the contract says {list(spec.dims)}.")
    if kind == "input" and tensor.optional != spec.optional:
        relaxed = spec.name in _OPTIONAL_WITH_US and not model.own_engine
        if not relaxed:
            found.append(f"must be {'optional' if spec.optional else 'required'}.")
    return found


def _check_parameters(name: str, model: _Model, *, built: bool) -> list[str]:
    try:
        known = model_contract(contract_name(name, model.config)).parameters
    except KeyError:
        return []
    if (model.directory / "1" / "model.yaml").is_file():
        return []
    config = model.config
    findings = []
    values = {key: entry.string_value for key, entry in config.parameters.items()}
    for key, text in values.items():
        spec = known.get(key)
        if spec is None:
            findings.append(f"parameter {key} is not in the contract; nothing reads it. Remove it.")
        elif holds_placeholder(text):
            continue  # found already, on its line
        elif spec.type == "path" and built and text and not Path(text).exists():
            findings.append(f"parameter {key}: {text} does not exist; build it, or correct the path.")
        elif spec.values and text and text not in spec.values:
            findings.append(f"parameter {key} is {text!r}; allowed: {', '.join(spec.values)}.")
        elif text:
            findings += [f"parameter {key} is {text!r}; {wanted}." for wanted in _wrong_number(spec.type, text)]
    findings += [
        f"parameter {key} is missing; set it: {spec.meaning}."
        for key, spec in known.items()
        if spec.mandatory and not values.get(key)
    ]
    if config.max_batch_size < 1:
        text = "the contract's tensors have a batch dimension, so it must be 1 or more"
        findings.append(f"max_batch_size is {config.max_batch_size}; {text}.")
    return findings


def _wrong_number(kind: str, text: str) -> list[str]:
    if kind in ("int", "uint64"):
        return [] if text.isdigit() else ["it must be a whole number, 0 or more"]
    if kind == "float":
        try:
            return [] if 0 <= float(text) <= 1 else ["it must lie between 0 and 1"]
        except ValueError:
            return ["it must be a number"]
    if kind == "bool":
        return [] if text.lower() in ("true", "false", "0", "1") else ["it must be true or false"]
    return []
