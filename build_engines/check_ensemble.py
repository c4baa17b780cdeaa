"""Checks the wiring of one ensemble: names, types, shapes, and Triton's rule about decoupled steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tritonclient.grpc import model_config_pb2 as pb

from build_engines.placeholders import UNKNOWN_NUMBER


@dataclass(slots=True)
class _Wire:
    """One tensor of the ensemble: who makes it."""

    source: str
    data_type: int
    dims: list[int]
    used: bool = False


@dataclass(slots=True)
class _Wiring:
    """The wires laid so far, and what was found on the way."""

    wires: dict[str, _Wire]
    findings: list[str] = field(default_factory=list)
    decoupled: str | None = None  # the last decoupled step

    def connect(self, step: str, name: str, target: str, tensor: Any) -> None:
        """Lead the ensemble tensor `name` into the input `target` of a step."""
        wire = self.wires.get(name)
        if wire is None:
            self.findings.append(
                f"step {step}: {target} takes {name}, which neither the ensemble nor a step gives; map it."
            )
            return
        wire.used = True
        self._compare(f"step {step}: {target}", tensor, name, wire)
        if self.decoupled not in (None, wire.source):
            self.findings.append(
                f"step {step}: {target} takes {name} from {wire.source}; after the decoupled {self.decoupled} "
                "a step may take its tensors only: let that one give it."
            )

    def give(self, step: str, name: str, tensor: Any) -> None:
        """Lay the wire that a step's output makes."""
        if name in self.wires:
            self.findings.append(f"step {step}: {name} is already given by {self.wires[name].source}; rename one.")
            return
        self.wires[name] = _Wire(step, tensor.data_type, list(tensor.dims))

    def end(self, output: Any) -> None:
        """Lead a wire out of the ensemble."""
        wire = self.wires.get(output.name)
        if wire is None or wire.source == "ensemble":
            self.findings.append(f"output {output.name} is given by no step; map it, or remove it.")
            return
        wire.used = True
        self._compare(f"output {output.name}", output, output.name, wire)

    def _compare(self, place: str, tensor: Any, name: str, wire: _Wire) -> None:
        if tensor.data_type != wire.data_type and pb.TYPE_INVALID not in (tensor.data_type, wire.data_type):
            types = pb.DataType.Name(tensor.data_type), pb.DataType.Name(wire.data_type)
            self.findings.append(f"{place} is {types[0]}, but {name} of {wire.source} is {types[1]}; make them equal.")
        if not _fit(tensor.dims, wire.dims):
            dims = f"{place} has dims {list(tensor.dims)}, but {name} of {wire.source} has {wire.dims}"
            self.findings.append(f"{dims}; make them equal.")


def check_ensemble(ensemble: Any, configs: dict[str, Any]) -> list[str]:
    """What is wrong with the steps of `ensemble`, given the configurations of all models of the repository."""
    wiring = _Wiring({t.name: _Wire("ensemble", t.data_type, list(t.dims)) for t in ensemble.input})
    for step in ensemble.ensemble_scheduling.step:
        model = configs.get(step.model_name)
        if model is None:
            wiring.findings.append(
                f"step {step.model_name}: no such model in the repository; add it, or correct the name."
            )
            continue
        sizes = {model.max_batch_size, ensemble.max_batch_size}
        if len(sizes) > 1 and UNKNOWN_NUMBER not in sizes:
            wiring.findings.append(
                f"step {step.model_name}: max_batch_size is {model.max_batch_size}, the ensemble's "
                f"{ensemble.max_batch_size}; make them equal."
            )
        _check_step(step, model, wiring)
    for output in ensemble.output:
        wiring.end(output)
    unused = [name for name, wire in wiring.wires.items() if wire.source == "ensemble" and not wire.used]
    wiring.findings += [f"input {name} goes nowhere; map it in a step, or remove it." for name in unused]
    return wiring.findings


def _check_step(step: Any, model: Any, wiring: _Wiring) -> None:
    inputs = {tensor.name: tensor for tensor in model.input}
    outputs = {tensor.name: tensor for tensor in model.output}
    for target, name in step.input_map.items():
        if target in inputs:
            wiring.connect(step.model_name, name, target, inputs[target])
        else:
            wiring.findings.append(
                f"step {step.model_name}: the model has no input {target}; correct the key, or remove it."
            )
    missing = (tensor.name for tensor in inputs.values() if not tensor.optional)
    wiring.findings += [
        f"step {step.model_name}: required input {name} is not mapped; map it."
        for name in missing
        if name not in step.input_map
    ]
    for source, name in step.output_map.items():
        if source in outputs:
            wiring.give(step.model_name, name, outputs[source])
        else:
            wiring.findings.append(
                f"step {step.model_name}: the model has no output {source}; correct the key, or remove it."
            )
    if model.model_transaction_policy.decoupled:
        wiring.decoupled = step.model_name


def _fit(one: Iterable[int], other: Iterable[int]) -> bool:
    first, second = list(one), list(other)
    return len(first) == len(second) and all(a == b or -1 in (a, b) for a, b in zip(first, second, strict=True))
