"""`python -m python_backend.engine.drive`: the engine alone, driven by lines of JSON, for measurements.

Reads one run per line from standard input, {"prompts": [[ids]], "max_tokens": [n], "streaming": true}, submits all its
requests at once and answers with {"wall_s", "output_tokens", "ttft_s": [s], "latency_s": [s]} when the last has ended.
The first line out is {"ready_s"}. Requests are greedy and no token ends them. Knows nothing of Triton or text.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from python_backend.engine.config import EngineConfig
from python_backend.engine.llm_engine import LLMEngine
from python_backend.engine.output import RequestOutput
from python_backend.errors import StackError
from python_backend.request import GenerationRequest, SamplingParams


@dataclass(slots=True)
class Run:
    """What one run has seen so far; times are time.monotonic() seconds."""

    pending: int
    begun: float = 0.0
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    output_tokens: int = 0
    failure: str | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def take(self, event: RequestOutput, now: float) -> None:
        """Count one event of the engine."""
        name = event.request.request_id
        new_tokens = sum(len(sequence.token_ids) for sequence in event.sequences)
        self.output_tokens += new_tokens
        if new_tokens:
            self.first.setdefault(name, now)
        if event.error is not None:
            self.failure = str(event.error)
        if event.finished or event.error is not None:
            self.last[name] = now
            self.pending -= 1
            if self.pending == 0:
                self.done.set()

    def report(self) -> dict[str, Any]:
        """The answer line."""
        if self.failure is not None:
            return {"error": self.failure}
        return {
            "wall_s": max(self.last.values()) - self.begun,
            "output_tokens": self.output_tokens,
            "ttft_s": [moment - self.begun for _, moment in sorted(self.first.items())],
            "latency_s": [moment - self.begun for _, moment in sorted(self.last.items())],
        }


class Driver:
    """One engine and the run under way."""

    def __init__(self, engine_dir: Path, changes: dict[str, Any]) -> None:
        built = json.loads((engine_dir / "config.json").read_text())
        config = replace(EngineConfig(**built["build_config"]), **changes)
        self._run = Run(pending=0)
        self.engine = LLMEngine(engine_dir / built["checkpoint_dir"], config, self._take)
        self.engine.start()

    def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Submit all requests of a run and wait for the last to end."""
        prompts, lengths = asked["prompts"], asked["max_tokens"]
        requests = [
            GenerationRequest(f"{number:05}", prompt, SamplingParams(max_tokens=length), streaming=asked["streaming"])
            for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        self._run = Run(pending=len(requests), begun=time.monotonic())
        try:
            for request in requests:
                self.engine.submit(request)
        except StackError as error:
            return {"error": str(error)}
        self._run.done.wait()
        return self._run.report()

    def _take(self, events: list[RequestOutput]) -> None:
        now = time.monotonic()
        for event in events:
            self._run.take(event, now)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve runs until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m python_backend.engine.drive", description=__doc__)
    parser.add_argument("--engine", type=Path, required=True, help="directory of the engine's config.json")
    parser.add_argument("--set", default="{}", metavar="JSON", help="fields of EngineConfig to change")
    arguments = parser.parse_args(argv)
    begun = time.monotonic()
    driver = Driver(arguments.engine, json.loads(arguments.set))
    _answer({"ready_s": time.monotonic() - begun})
    for line in sys.stdin:
        _answer(driver.run(json.loads(line)))
    driver.engine.stop()
    return 0


def _answer(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
