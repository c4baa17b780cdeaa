"""Requests whose structure has to be complete by max_tokens: which are let in, and their masks.

Knows nothing of Triton's objects.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from python_backend.errors import InvalidRequest, LimitExceeded, Unsupported
from python_backend.guided.closing import Closer, ClosingMask
from python_backend.guided.completion import TokenOrder

if TYPE_CHECKING:
    from collections.abc import Callable

    from python_backend.engine.masks import FutureMask, MakeMask
    from python_backend.guided.closing import ClosableMask
    from python_backend.request import GenerationRequest
    from python_backend.text.tokenizer import Tokenizer

_MAX_KNOWN = 512
_LONGEST = 4096


class ClosingService:
    """Completions for one tokenizer; safe from any thread, and all of them are found on one of its own."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="guide-closing")
        self._closer: Closer | None = None
        self._known: OrderedDict[object, list[int] | None] = OrderedDict()

    def stop(self) -> None:
        """End the thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def prepare(self, request: GenerationRequest, start: Callable[[], ClosableMask], masks: FutureMask) -> None:
        """Find a way to the end on a thread that nobody else waits for; then the masks are there, or refused.

        Whoever makes the masks later (the engine, on its step thread) searches for nothing.

        Args:
            request: with a guide that `check` has let in.
            start: makes a mask at the beginning of the guide.
            masks: gets the masks; InvalidRequest where no completion found fits into max_tokens, LimitExceeded where
                none was found.
        """

        def work() -> None:
            try:
                make = self._closing(request, start)
            except Exception as error:  # whatever it is, it belongs to this request
                masks.set_exception(error)
            else:
                masks.set_result(make)

        self._pool.submit(work)

    def check(self, request: GenerationRequest) -> None:
        """Refuse what could forbid the tokens that close.

        Raises:
            Unsupported: the request has bad words, no_repeat_ngram_size, a bias of -inf, no end id, or beams.
        """
        if (width := request.sampling.beam_width) > 1:
            raise Unsupported(
                f"beam_width is {width}; a request with guided_decoding_close is served with 1 only. "
                "Ask for samples with num_return_sequences, or leave guided_decoding_close out."
            )
        bias = request.embedding_bias
        reasons = {
            "bad_words": bool(request.bad_words),
            "no_repeat_ngram_size": bool(request.sampling.no_repeat_ngram_size),
            "an embedding_bias of -inf": bias is not None and bool(np.isneginf(bias).any()),
            "end_id -1": not request.end_ids,
        }
        for reason, holds in reasons.items():
            if holds:
                raise Unsupported(
                    f"guided_decoding_close cannot be kept together with {reason}, which may forbid the tokens that "
                    "close the structure. Leave one of them out."
                )

    def _closing(self, request: GenerationRequest, start: Callable[[], ClosableMask]) -> MakeMask:
        assert request.guide is not None
        marker, max_tokens = request.guide.begin_after, request.sampling.max_tokens
        lead_in = self._tokenizer.encode(marker, add_special_tokens=False) if marker else []
        closer = self._closer = self._closer or self._make_closer()
        completion = self._completion(request, closer, start, lead_in)
        if completion is None:
            raise LimitExceeded(
                "guided_decoding_close: no completion of the structure was found in reasonable time. Simplify the "
                "structure, or leave guided_decoding_close out."
            )
        if len(completion) > max_tokens:
            raise InvalidRequest(
                f"guided_decoding_close: max_tokens is {max_tokens}, and the shortest answer found takes "
                f"{len(completion)} tokens. Raise max_tokens, or leave guided_decoding_close out."
            )
        return lambda: ClosingMask(
            start(),
            closer,
            completion=completion,
            max_tokens=max_tokens,
            end_ids=request.end_ids,
            lead_in=lead_in,
        )

    def _completion(
        self, request: GenerationRequest, closer: Closer, start: Callable[[], ClosableMask], lead_in: list[int]
    ) -> list[int] | None:
        """From the beginning; what was found for a guide is remembered."""
        key = (request.guide, request.end_ids)
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        found = self._known[key] = closer.completion(start(), _LONGEST, request.end_ids, lead_in)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return found

    def _make_closer(self) -> Closer:
        texts = [self._tokenizer.decode([i]) for i in range(self._tokenizer.vocab_size)]
        return Closer(TokenOrder(texts), self._vocab_size)
