"""Checks a model repository without a server: every finding at once, none of them a guess.

Knows nothing of specs; the contract and the files are all it looks at.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from google.protobuf.text_format import ParseError
from tritonclient.grpc import model_config_pb2 as pb

from build_engines.check_ensemble import check_ensemble
from build_engines.repository import TEMPLATES
from build_engines.templates import CONTRACT_OF, from_text
from python_backend.contract import TensorSpec, model_contract

_PLACEHOLDER = re.compile(r"\$\{[^}]*\}")


def check_repository(repository: Path) -> list[str]:
    """What is wrong with a repository, one sentence per finding with the file it is about; empty when in order."""
    if not repository.is_dir():
        return [f"{repository}: no such directory."]
    findings: list[str] = []
    configs: dict[str, Any] = {}
    for directory in sorted(path for path in repository.iterdir() if path.is_dir()):
        path = directory / "config.pbtxt"
        config = _read(path, findings)
        if config is None:
            continue
        configs[directory.name] = config
        found = _check_files(directory, config) + _check_contract(directory.name, config)
        if repository.resolve() != TEMPLATES:  # templates hold no parameters yet
            found += _check_parameters(directory.name, config)
        findings += [f"{path}: {text}" for text in found]
    if not configs:
        findings.append(f"{repository}: no model in it (a directory with a config.pbtxt).")
    for name, config in configs.items():
        if config.HasField("ensemble_scheduling"):
            findings += [f"{repository / name / 'config.pbtxt'}: {text}" for text in check_ensemble(config, configs)]
    return findings


def _read(path: Path, findings: list[str]) -> Any | None:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        findings.append(f"{path}: cannot be read: {error}.")
        return None
    for number, line in enumerate(text.splitlines(), 1):
        findings.extend(f"{path}:{number}: {found} was never filled in." for found in _PLACEHOLDER.findall(line))
    try:
        return from_text(text)
    except ParseError as error:
        findings.append(f"{path}:{error.GetLine() or 1}: not a model configuration: {error}")
        return None


def _check_files(directory: Path, config: Any) -> list[str]:
    findings = []
    if config.name != directory.name:
        findings.append(f"name is {config.name!r}; it must be the directory's, {directory.name!r}.")
    versions = [path for path in directory.iterdir() if path.is_dir() and path.name.isdigit()]
    if not versions:
        findings.append("the model has no version directory (1/).")
    if config.backend == "python":
        findings += [f"{v.name}/model.py is missing." for v in versions if not (v / "model.py").is_file()]
    return findings


def _check_contract(name: str, config: Any) -> list[str]:
    try:
        contract = model_contract(CONTRACT_OF.get(name, name))
    except KeyError:
        return []  # a model of the user's own
    return _check_tensors("input", config.input, contract.inputs) + _check_tensors(
        "output", config.output, contract.outputs
    )


def _check_tensors(kind: str, given: Any, contract: dict[str, TensorSpec]) -> list[str]:
    findings = []
    names = [tensor.name for tensor in given]
    findings += [f"{kind} {name} is declared twice." for name in sorted({n for n in names if names.count(n) > 1})]
    findings += [f"{kind} {name} of the contract is missing." for name in contract if name not in names]
    for tensor in given:
        spec = contract.get(tensor.name)
        if spec is None:
            findings.append(f"{kind} {tensor.name} is not in the contract.")
            continue
        data_type = pb.DataType.Name(tensor.data_type)
        if data_type != spec.data_type:
            findings.append(f"{kind} {tensor.name} is {data_type}; the contract says {spec.data_type}.")
        if tuple(tensor.dims) != spec.dims:
            findings.append(f"{kind} {tensor.name} has dims {list(tensor.dims)}; the contract says {list(spec.dims)}.")
        if kind == "input" and tensor.optional != spec.optional:
            wanted = "optional" if spec.optional else "required"
            findings.append(f"input {tensor.name} must be {wanted}.")
    return findings


def _check_parameters(name: str, config: Any) -> list[str]:
    try:
        known = model_contract(name).parameters
    except KeyError:
        return []
    findings = []
    values = {key: entry.string_value for key, entry in config.parameters.items()}
    for key, text in values.items():
        spec = known.get(key)
        if spec is None:
            findings.append(f"parameter {key} is not in the contract.")
        elif spec.type == "path" and text and not Path(text).exists():
            findings.append(f"parameter {key}: {text} does not exist.")
        elif spec.values and text and text not in spec.values:
            findings.append(f"parameter {key} is {text!r}; allowed: {', '.join(spec.values)}.")
    findings += [
        f"parameter {key} is missing: {spec.meaning}."
        for key, spec in known.items()
        if spec.mandatory and not values.get(key)
    ]
    if config.max_batch_size < 1:
        findings.append(f"max_batch_size is {config.max_batch_size}; the contract's tensors have a batch dimension.")
    return findings
