"""Waits until the engine has ended what it runs, as its gauge of active requests says. Knows only the metrics port."""

from __future__ import annotations

import http.client
import re
import time
from collections.abc import Callable

from python_backend.server.addresses import Addresses

_ACTIVE = re.compile(r'^nv_trt_llm_request_metrics\{[^}]*request_type="active"[^}]*\} (\S+)$', re.MULTILINE)
_LAST_STEPS_S = 0.25  # the gauge is up to 0.1 s old, and the last responses still pass through postprocessing


def wait_until_idle(
    addresses: Addresses, timeout_s: float, give_up: Callable[[], bool] = lambda: False, period_s: float = 0.05
) -> bool:
    """True as soon as all engines say that nothing is active, or there is none; False after timeout_s or give_up()."""
    deadline = time.monotonic() + timeout_s
    idle_since: float | None = None
    while idle_since is None or time.monotonic() < idle_since + _LAST_STEPS_S:
        if any(_active_requests(addresses)):
            idle_since = None
        elif idle_since is None:
            idle_since = time.monotonic()
        if give_up() or (idle_since is None and time.monotonic() > deadline):
            return False
        time.sleep(period_s)
    return True


def has_engine(addresses: Addresses) -> bool:
    """Whether somebody says how much is active."""
    return bool(_active_requests(addresses))


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
