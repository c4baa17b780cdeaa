"""Every config.pbtxt of model_repo/ made from the contract; nothing of one deployment is in it.

Knows nothing of specs. `python -m build_engines template` writes the files, a test keeps them equal.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from build_engines.wiring import ENSEMBLE_STEPS
from python_backend.contract import TensorSpec, model_contract

MODELS = ("ensemble", "ensemble_unary", "preprocessing", "tensorrt_llm", "postprocessing")
BLS = "tensorrt_llm_bls"  # only where a draft model proposes tokens
GENERATED = (*MODELS, BLS)
# Which contract a model speaks, where its name does not say it.
CONTRACT_OF = {"ensemble_unary": "ensemble"}
_HEADER = """\
# {name}: tensors and wiring of the contract; `python -m build_engines build` adds what a deployment decides.
"""


def template(name: str) -> Any:
    """The ModelConfig of one model of the repository."""
    contract = model_contract(CONTRACT_OF.get(name, name))
    config = pb.ModelConfig(name=name)
    for tensor in contract.inputs.values():
        _add_input(config, tensor)
    for tensor in contract.outputs.values():
        config.output.add(name=tensor.name, data_type=pb.DataType.Value(tensor.data_type), dims=tensor.dims)
    if name == "ensemble":
        config.platform = "ensemble"
        _add_steps(config)
    else:
        config.backend = "python"
        config.instance_group.add(count=1, kind=pb.ModelInstanceGroup.KIND_CPU)
    return config


def contract_name(model: str, config: Any) -> str:
    """The contract that a model speaks, whatever its own name."""
    return CONTRACT_OF.get(model) or ("tensorrt_llm" if config.backend == "tensorrtllm" else model)


def to_text(config: Any) -> str:
    """A ModelConfig as the text of a config.pbtxt."""
    return str(_HEADER.format(name=config.name) + text_format.MessageToString(config))


def from_text(text: str) -> Any:
    """The ModelConfig in the text of a config.pbtxt.

    Raises:
        google.protobuf.text_format.ParseError: not a ModelConfig.
    """
    return text_format.Parse(text, pb.ModelConfig())


def _add_input(config: Any, tensor: TensorSpec) -> None:
    entry = config.input.add(
        name=tensor.name,
        data_type=pb.DataType.Value(tensor.data_type),
        dims=tensor.dims,
        optional=tensor.optional,
        # An ensemble and Python models see each request by itself; ragged batches exist for C++ backends only.
        allow_ragged_batch=tensor.ragged and config.name == "tensorrt_llm",
    )
    if tensor.scalar and config.name == "tensorrt_llm":
        entry.reshape.SetInParent()


def _add_steps(config: Any) -> None:
    for step in ENSEMBLE_STEPS:
        entry = config.ensemble_scheduling.step.add(model_name=step.model, model_version=-1)
        entry.input_map.update(step.inputs)
        entry.output_map.update(step.outputs)
