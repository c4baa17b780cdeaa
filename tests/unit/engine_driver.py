"""Runs an LLMEngine over a few requests and collects what it says, for tests."""

from __future__ import annotations

import queue
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from python_backend.engine.config import EngineConfig
from python_backend.engine.llm_engine import LLMEngine
from python_backend.request import GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from python_backend.engine.output import RequestOutput

FAMILIES = Path(__file__).parents[1] / "data" / "families"
SAMPLING = set(SamplingParams.__dataclass_fields__)


def make_request(request_id: str, prompt_ids: list[int], **options: Any) -> GenerationRequest:
    """A streaming request unless told otherwise; options go to SamplingParams or to the request."""
    sampling = {name: options.pop(name) for name in SAMPLING & options.keys()}
    options.setdefault("streaming", True)
    return GenerationRequest(request_id, prompt_ids, SamplingParams(**{"max_tokens": 16, **sampling}), **options)


@dataclass
class Answer:
    """Everything that came back for one request."""

    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # by sample or beam
    reasons: dict[int, str] = field(default_factory=dict)
    events: list[RequestOutput] = field(default_factory=list)
    error: Exception | None = None


class Driver:
    """An engine and its events."""

    def __init__(self, engine: LLMEngine, events: queue.Queue[list[RequestOutput]]) -> None:
        self.engine, self.events = engine, events

    def run(self, *requests: GenerationRequest, timeout_s: float = 60) -> dict[str, Answer]:
        """Submit all at once and wait for every end."""
        for request in requests:
            self.engine.submit(request)
        return self.collect(len(requests), timeout_s)

    def collect(self, num_requests: int, timeout_s: float = 60) -> dict[str, Answer]:
        answers: dict[str, Answer] = defaultdict(Answer)
        while num_requests:
            for event in self.events.get(timeout=timeout_s):
                answer = answers[event.request.request_id]
                answer.events.append(event)
                answer.error = event.error
                for news in event.sequences:
                    if event.request.sampling.beam_width > 1:
                        answer.tokens[news.index] = []
                    answer.tokens[news.index] += news.token_ids
                    if news.finish_reason is not None:
                        answer.reasons[news.index] = news.finish_reason
                num_requests -= event.finished
        return answers

    def tokens(self, *requests: GenerationRequest) -> dict[str, list[int]]:
        """The tokens of every request's first sample."""
        return {request_id: answer.tokens[0] for request_id, answer in self.run(*requests).items()}


@contextmanager
def running_engine(family: str = "llama", *, start: bool = True, **config: Any) -> Iterator[Driver]:
    """An engine on a tiny model of `family`, exact unless told otherwise; checks its memory at the end."""
    options: dict[str, Any] = {
        "precision": "exact", "max_batch_size": 32, "max_num_tokens": 512, "max_seq_len": 512, "max_input_len": 500,
        "kv_cache_tokens": 4096, **config,
    }  # fmt: skip
    events: queue.Queue[list[RequestOutput]] = queue.Queue()
    engine = LLMEngine(FAMILIES / family, EngineConfig(**options), events.put)
    if start:
        engine.start()
    try:
        yield Driver(engine, events)
    finally:
        engine.stop()
    engine.core.blocks.check_integrity()
    assert engine.stats().kv_blocks_used == 0
