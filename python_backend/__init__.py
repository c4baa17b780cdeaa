"""An LLM stack for Triton Inference Server that behaves the same with and without a GPU."""

__version__ = "0.1.0"
