"""Writes a model repository that loads in a second: an ensemble around a Python model that echoes text."""

from __future__ import annotations

from pathlib import Path

_TENSORS = """
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
        { name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] optional: true } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
"""

_ECHO_CONFIG = f"""
name: "echo"
backend: "python"
max_batch_size: 4
model_transaction_policy {{ decoupled: true }}
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
{_TENSORS}
"""

_ENSEMBLE_CONFIG = f"""
name: "ensemble"
platform: "ensemble"
max_batch_size: 4
{_TENSORS}
ensemble_scheduling {{ step [ {{
  model_name: "echo" model_version: -1
  input_map {{ key: "text_input" value: "text_input" }}
  input_map {{ key: "max_tokens" value: "max_tokens" }}
  output_map {{ key: "text_output" value: "text_output" }}
}} ] }}
"""

_ECHO_MODEL = """
import threading

import triton_python_backend_utils as pb_utils

from python_backend.triton.cancel import ShutdownWatcher


class TritonPythonModel:
    def initialize(self, args):
        self._stopping = threading.Event()
        ShutdownWatcher(self._stopping.set).start()

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self._answer, args=(request,)).start()

    def _answer(self, request):
        sender = request.get_response_sender()
        text = pb_utils.get_input_tensor_by_name(request, "text_input")
        words = text.as_numpy().reshape(-1)[0].split()
        if words[0] == b"sleep":
            self._stopping.wait(float(words[1]))
        sender.send(
            pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text.as_numpy())]),
            flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
        )
"""


def write_tiny_repository(folder: Path, model: str = _ECHO_MODEL) -> Path:
    """Writes the repository into folder and returns it; model is the source of the echo model."""
    for name, config in (("echo", _ECHO_CONFIG), ("ensemble", _ENSEMBLE_CONFIG)):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
    (folder / "echo" / "1" / "model.py").write_text(model)
    return folder
