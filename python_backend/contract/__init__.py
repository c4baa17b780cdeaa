"""The wire contract: every tensor and parameter by name, type and shape. Imports nothing of ours."""

from python_backend.contract.tensors import ModelContract, ParameterSpec, TensorSpec, model_contract

__all__ = ["ModelContract", "ParameterSpec", "TensorSpec", "model_contract"]
