"""`python -m clients adapters`: which adapters a server has."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from clients.errors import unreachable
from clients.grpc_client import DEFAULT_URL

OK, NO_ADAPTERS, NO_SERVER = 0, 1, 3
_MODEL = "adapters"


def adapters(url: str = DEFAULT_URL) -> list[dict[str, Any]]:
    """Of each adapter: name and state; of a ready one task id, rank, modules, bytes, hash, base model and owner as
    well; of a refused one the reason.

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
        text = (
            "this server has no adapters; add a section lora to its spec" if unknown else _failure(error, arguments.url)
        )
        sys.stderr.write(f"error: {text}\n")
        return NO_ADAPTERS if unknown else NO_SERVER
    for entry in found:
        sys.stdout.write((json.dumps(entry) if arguments.json else _line(entry)) + "\n")
    return OK


def _failure(error: InferenceServerException, url: str) -> str:
    message = str(error.message())
    return str(unreachable(url, message)) if error.status() == "StatusCode.UNAVAILABLE" else message


def _line(entry: dict[str, Any]) -> str:
    if entry["state"] != "ready":
        return f"{entry['name']}\t{entry['state']}: {entry['reason']}"
    facts = [entry["name"], entry["state"], f"task id {entry['task_id']}", f"rank {entry['rank']}"]
    facts.append(", ".join(entry["modules"]))
    facts += [f"{word} {entry[key]}" for word, key in (("base", "base_model"), ("owner", "owner")) if entry[key]]
    return "\t".join(facts)
