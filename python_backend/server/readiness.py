"""Finds out whether a request would succeed, by sending one. Knows only HTTP and the text-level tensors."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable

from python_backend.errors import BuildError
from python_backend.server.addresses import Addresses

_WARM_UP = {"text_input": "Hello", "max_tokens": 2}


def wait_until_loaded(addresses: Addresses, keep_waiting: Callable[[], bool], period_s: float = 0.05) -> bool:
    """True when Triton says that all models are loaded; False when keep_waiting() said no before that."""
    while keep_waiting():
        if _status(addresses, "/v2/health/ready") == 200:
            return True
        time.sleep(period_s)
    return False


def check_request(addresses: Addresses, model: str, timeout_s: float = 120.0) -> None:
    """Sends one small request to model, and sees that all three ports answer.

    Raises:
        BuildError: the request did not succeed; the message holds the server's own.
    """
    connection = http.client.HTTPConnection(addresses.host, addresses.http, timeout=timeout_s)
    try:
        connection.request("POST", f"/v2/models/{model}/generate", json.dumps(_WARM_UP))
        response = connection.getresponse()
        body = response.read().decode(errors="replace")
    except OSError as error:
        raise BuildError(f"model {model} did not answer the first request: {error}.") from None
    finally:
        connection.close()
    if response.status != 200:
        raise BuildError(f"model {model} refused the first request: {_message(body)}")
    if "text_output" not in json.loads(body):
        raise BuildError(f"model {model} answered the first request without text_output: {body[:200]}")
    for name, port in (("gRPC", addresses.grpc), ("metrics", addresses.metrics)):
        _wait_until_it_listens(addresses.host, name, port)


def wait_until_healthy(addresses: Addresses, keep_waiting: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Waits for a yes of the model `health`, so that a probe agrees with READY; a repository may be without it.

    Raises:
        BuildError: it goes on saying no; the message holds its reason.
    """
    deadline = time.monotonic() + timeout_s
    while keep_waiting():
        status, body = _ask_health(addresses)
        if status != 503:  # 200; or 400, 404: there is no such model
            return
        if time.monotonic() > deadline:
            raise BuildError(f"model health has not said yes for {timeout_s:.0f} s: {_message(body)}")
        time.sleep(0.01)


def _ask_health(addresses: Addresses) -> tuple[int, str]:
    connection = http.client.HTTPConnection(addresses.host, addresses.http, timeout=30)
    try:
        connection.request("POST", "/v2/models/health/infer", json.dumps({"inputs": []}))
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    except OSError as error:
        raise BuildError(f"model health did not answer: {error}.") from None
    finally:
        connection.close()


def _wait_until_it_listens(host: str, name: str, port: int, timeout_s: float = 5) -> None:
    """Triton opens its ports one after the other, metrics last: the first answer may come before that."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=timeout_s).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise BuildError(f"Triton does not listen on its {name} port {port}: {error}.") from None
            time.sleep(0.02)
        else:
            return


def _status(addresses: Addresses, path: str) -> int:
    connection = http.client.HTTPConnection(addresses.host, addresses.http, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return 0  # does not listen yet
    finally:
        connection.close()


def _message(body: str) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body[:500]
