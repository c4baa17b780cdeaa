"""Where a request's spans belong: Triton's own trace of the step, as a W3C traceparent. Knows nothing of spans."""

from __future__ import annotations

import json
from typing import Any


def traceparent_of(request: Any) -> str:
    """The span that Triton has opened for this step of the request; empty when it does not trace it."""
    context = request.trace().get_context()
    return str(json.loads(context).get("traceparent", "")) if context else ""
