"""Triton loads this file; the model is in python_backend.triton.bls."""

import sys
from pathlib import Path

# The server's Python ignores PYTHONPATH: find the checkout that this repository lies in.
sys.path[:0] = [str(up) for up in Path(__file__).resolve().parents if (up / "python_backend" / "triton").is_dir()]

from python_backend.triton.bls import TritonPythonModel  # noqa: E402

__all__ = ["TritonPythonModel"]
