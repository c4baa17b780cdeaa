"""Waits until the engine has ended what it runs, as its gauge of active requests says. Knows only the metrics port."""

from __future__ import annotations

import http.client
import re
import time

from python_backend.server.addresses import Addresses

_ACTIVE = re.compile(r'^nv_trt_llm_request_metrics\{[^}]*request_type="active"[^}]*\} (\S+)$', re.MULTILINE)
_LAST_STEPS_S = 0.1  # the last responses still pass through postprocessing and to their clients


def wait_until_idle(addresses: Addresses, timeout_s: float, period_s: float = 0.05) -> bool:
    """True as soon as nothing is active, or nobody says how much is; False when that takes longer than timeout_s."""
    deadline = time.monotonic() + timeout_s
    while any(_active_requests(addresses)):
        if time.monotonic() > deadline:
            return False
        time.sleep(period_s)
    time.sleep(_LAST_STEPS_S)
    return True


def _active_requests(addresses: Addresses) -> list[float]:
    """One figure for each engine; empty when the metrics cannot be read."""
    connection = http.client.HTTPConnection(addresses.host, addresses.metrics, timeout=2)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode(errors="replace")
    except OSError:
        return []
    finally:
        connection.close()
    return [float(value) for value in _ACTIVE.findall(text)]
