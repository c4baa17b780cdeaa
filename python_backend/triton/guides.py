"""Constrained decoding of one engine: from a request's guide to the masks that the engine waits for.

Knows nothing of Triton's objects.
"""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from python_backend.errors import Overloaded, StackError
from python_backend.guided.after_marker import AfterMarker
from python_backend.guided.compiler import GuideCompiler, ReadyGuide
from python_backend.telemetry.guides import GuideMetrics
from python_backend.triton.closing import ClosingService

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from python_backend.engine.masks import FutureMask
    from python_backend.guided.closing import ClosableMask
    from python_backend.guided.limits import GuideLimits
    from python_backend.request import GenerationRequest, Guide
    from python_backend.telemetry.families import MetricFactory
    from python_backend.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


class GuideService:
    """Compiled guides for the requests of one engine."""

    def __init__(
        self, tokenizer: Tokenizer, tokenizer_dir: Path, vocab_size: int, limits: GuideLimits, backend: str
    ) -> None:
        self._tokenizer = tokenizer
        self._closing = ClosingService(tokenizer, vocab_size)
        self._metrics: GuideMetrics | None = None
        self._compile_times_s: deque[float] = deque(maxlen=1024)  # for the one thread that talks to Triton's metrics
        self._compiler = GuideCompiler(
            tokenizer_dir / "tokenizer.json",
            vocab_size,
            tokenizer.end_ids,
            backend=backend,
            special_tokens=tuple(tokenizer.vocabulary.special_texts),
            limits=limits,
            on_compiled=self._compile_times_s.append,
        )

    def start(self, metrics: MetricFactory, labels: Mapping[str, str], warm_up: Iterable[Guide]) -> None:
        """Start the workers and compile what the deployment names; what fails there is logged."""
        self._metrics = GuideMetrics(metrics, labels)
        self._compiler.start()
        for guide in warm_up:
            try:
                self._compiler.submit(guide).add_done_callback(_log_failure)
            except Overloaded:
                _log.warning("The warm-up list is longer than the workers' queue; the rest is compiled on demand.")
                return

    def stop(self) -> None:
        """End the workers."""
        self._compiler.stop()
        self._closing.stop()

    def masks(self, request: GenerationRequest) -> FutureMask:
        """What the engine waits for. Warnings about the guide are added to the request's before it is there.

        Raises:
            Overloaded: too many guides wait to be compiled.
            Unsupported: the request is to be closed in time, and something else in it may forbid that.
        """
        assert request.guide is not None
        masks: FutureMask = Future()

        def ready(compiled: Future[ReadyGuide]) -> None:
            failure = compiled.exception()
            if failure is not None:
                masks.set_exception(failure)
                return
            guide = compiled.result()
            request.warnings.extend(guide.warnings)
            if closing:
                self._closing.prepare(request, lambda: self._begin(guide, request), masks)
            else:
                masks.set_result(lambda: self._begin(guide, request))

        closing = request.guide.close
        if closing:
            self._closing.check(request)
        self._compiler.submit(request.guide).add_done_callback(ready)
        return masks

    def _begin(self, ready: ReadyGuide, request: GenerationRequest) -> ClosableMask:
        assert request.guide is not None
        matcher, marker = ready.guide.start(request.end_ids), request.guide.begin_after
        return AfterMarker(matcher, marker, request.end_ids, self._decode) if marker else matcher

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def ended(self, guide: Guide, failed: bool) -> None:
        """Count a request with this guide; after one that failed the guide is compiled anew."""
        if self._metrics is not None:
            self._metrics.ended(guide.kind)
        if failed:
            self._compiler.forget(guide)

    def update(self, mask_times_s: list[float]) -> None:
        """Bring the metrics up to date, given the seconds of each mask since the last call."""
        if self._metrics is None:
            return
        self._metrics.masks(mask_times_s)
        while self._compile_times_s:
            self._metrics.compiled(self._compile_times_s.popleft())
        stats = self._compiler.stats()
        self._metrics.cache(stats.hits, stats.misses)


def _log_failure(compiled: Future[Any]) -> None:
    failure = compiled.exception()
    if isinstance(failure, StackError):
        _log.warning("A guide of the warm-up list is refused: %s", failure)
