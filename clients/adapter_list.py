"""`python -m clients adapters`: which adapters a server has."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from clients.grpc_client import DEFAULT_URL

OK, NO_ADAPTERS, NO_SERVER = 0, 1, 3
_MODEL = "adapters"


def adapters(url: str = DEFAULT_URL) -> list[dict[str, Any]]:
    """Name, task id, rank, modules, bytes, hash and base model of each adapter, by name.

    Raises:
        InferenceServerException: no server answers at `url`, or it serves no adapters.
    """
    with triton.InferenceServerClient(url) as client:
        return [json.loads(text) for text in client.infer(_MODEL, []).as_numpy("ADAPTERS")]


def main(argv: Sequence[str] | None = None) -> int:
    """Print them, one in a line, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m clients adapters", description=__doc__)
    parser.add_argument("--url", default=DEFAULT_URL, help="host:port of gRPC (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="everything that is known of each, as JSON lines")
    arguments = parser.parse_args(argv)
    try:
        found = adapters(arguments.url)
    except InferenceServerException as error:
        unknown = "unknown model" in str(error)
        text = "this server has no adapters; add a section lora to its spec" if unknown else str(error)
        sys.stderr.write(f"error: {text}\n")
        return NO_ADAPTERS if unknown else NO_SERVER
    for entry in found:
        line = f"{entry['name']}\ttask id {entry['task_id']}\trank {entry['rank']}\t{', '.join(entry['modules'])}"
        sys.stdout.write((json.dumps(entry) if arguments.json else line) + "\n")
    return OK
