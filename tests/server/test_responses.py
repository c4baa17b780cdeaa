"""A model that asks others survives it, thousands of times, on a real Triton.

Without `responses_to` its process died after 1, 260 and 1,285 calls.
"""

from __future__ import annotations

import signal
from pathlib import Path

from tests.server.launched import LaunchedServer
from tests.server.wire import post

_CALLS = 2000

_CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""

_ANSWERING = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        count = request.inputs()[0].as_numpy()
        text = np.array([[b"text"]], object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("COUNT", count), pb_utils.Tensor("TEXT", text)])
"""

_ASKING = """
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import triton_python_backend_utils as pb_utils

from python_backend.triton.responses import responses_to


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        self._busy = True
        threading.Thread(target=self._compute).start()
        with ThreadPoolExecutor(4) as pool:
            answered = sum(pool.map(self._ask, range(int(request.inputs()[0].as_numpy().flat[0]))))
        self._busy = False
        return pb_utils.InferenceResponse([pb_utils.Tensor("COUNT", np.array([[answered]], np.int32))])

    def _ask(self, number):
        request = pb_utils.InferenceRequest(
            model_name="answering",
            inputs=[pb_utils.Tensor("COUNT", np.array([[number]], np.int32))],
            requested_output_names=["COUNT", "TEXT"],
        )
        return any(not response.has_error() for response in responses_to(request))

    def _compute(self):
        # Somebody else holds the interpreter's lock and makes objects, as the threads of a server do.
        while self._busy:
            [{"a": [i], "b": (i, str(i))} for i in range(300)]
"""


def test_thousands_of_requests_to_another_model_end_well(tiny_repository: Path) -> None:
    for name, code in (("answering", _ANSWERING), ("asking", _ASKING)):
        (tiny_repository / name / "1").mkdir(parents=True)
        (tiny_repository / name / "config.pbtxt").write_text(f'name: "{name}"\n{_CONFIG}')
        (tiny_repository / name / "1" / "model.py").write_text(code)
    launched = LaunchedServer("--model-repository", str(tiny_repository))
    try:
        server = launched.wait_ready()
        count = {"name": "COUNT", "shape": [1, 1], "datatype": "INT32", "data": [_CALLS]}
        status, answer = post(server, "asking/infer", {"inputs": [count]})
        assert status == 200, answer
        assert answer["outputs"][0]["data"] == [_CALLS]
        launched.signal(signal.SIGTERM)
        assert launched.wait() == 0, launched.output
    finally:
        launched.process.kill()
