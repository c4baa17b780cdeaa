"""Where a request's spans belong: Triton's own trace of the step, as a W3C traceparent. Knows nothing of spans."""

from __future__ import annotations

import json
from typing import Any

from python_backend.triton.parameters import parameters_of

TRACEPARENT = "traceparent"
"""Request parameter in place of Triton's own trace, which does not go on into requests of a model to another one.

`InferenceRequest(trace=…)` would make it go on, but only from within `execute`: Triton 2.51 frees the trace when that
returns, and a request that is sent later has it read freed memory.
"""


def traceparent_of(request: Any) -> str:
    """The span that Triton has opened for this step of the request, or the one that is named in its stead.

    Empty when the request is not traced.
    """
    context = request.trace().get_context()
    found = json.loads(context) if context else parameters_of(request.parameters())
    return str(found.get(TRACEPARENT, ""))
