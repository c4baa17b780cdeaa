"""From the engine's events to output tensors: which ones a request gets is decided once, then only those are built.

Knows nothing of Triton's objects; it gives names and numpy arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from python_backend.logprobs.content import ContentWriter, prompt_content

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from numpy.typing import NDArray

    from python_backend.engine.output import PerfMetrics, RequestOutput, SequenceOutput
    from python_backend.logprobs.tokens import TokenTable
    from python_backend.request import GenerationRequest

    Arrays = list[tuple[str, NDArray[Any]]]
    Writer = Callable[[RequestOutput], NDArray[Any]]
    Plan = list[tuple[str, Writer]]
    CleanStart = Callable[[list[int]], list[int]]

_NO_ID = -1
_LENGTHS = [np.array([[n]], np.int32) for n in range(33)]


class Responder:
    """Builds the responses of one engine request (one prompt).

    Args:
        request: what was asked for.
        wanted: names of the outputs that the client wants.
        clean_start: gives of the tokens sent before those that detokenization needs again.
        tokens: what the JSON of log-probabilities calls the tokens.
    """

    __slots__ = ("_every", "_last", "_opened", "_perf", "_request", "_tokens", "_wanted")

    def __init__(
        self, request: GenerationRequest, wanted: Collection[str], clean_start: CleanStart, tokens: TokenTable
    ) -> None:
        self._request = request
        self._tokens = tokens
        self._every = _pick(self._plan_every(clean_start), wanted)
        self._wanted = wanted
        self._last = _pick([("finish_reason", _finish_reason), ("text_cut", _text_cut)], wanted)
        self._perf = _pick(_PERF, wanted) if request.return_perf_metrics else []
        self._opened = False

    def arrays(self, event: RequestOutput) -> Arrays | None:
        """The outputs of one response by name; None when the event has nothing to show."""
        sequences = event.sequences
        ended = any(sequence.finish_reason is not None for sequence in sequences)
        if not ended and not event.finished and not any(sequence.token_ids for sequence in sequences):
            return None
        arrays = [(name, write(event)) for name, write in self._every]
        if not self._opened:
            self._opened = True
            # Not before now: a guide may have been compiled, and spoken of, after the request came.
            arrays += [(name, write(event)) for name, write in _pick(self._plan_first(), self._wanted)]
        if event.context_logits is not None and "context_logits" in self._wanted:
            arrays.append(("context_logits", event.context_logits[None]))
        if event.prompt_log_probs is not None and "prompt_logprobs" in self._wanted:
            content = prompt_content(self._tokens, self._request.prompt_ids, event.prompt_log_probs)
            arrays.append(("prompt_logprobs", _texts([content])))
        if ended:
            arrays += [(name, write(event)) for name, write in self._last]
        if event.perf is not None and self._perf:
            arrays += [(name, write(event)) for name, write in self._perf]
        return arrays

    def _plan_every(self, clean_start: CleanStart) -> Plan:
        request = self._request
        with_prompt = not request.streaming and not request.exclude_input
        prompt = request.prompt_ids if with_prompt else []
        plan: Plan = [("output_ids", _output_ids(prompt)), ("sequence_length", _sequence_length(len(prompt)))]
        if request.streaming and request.sampling.beam_width == 1:
            # Tool calls are read anew from all of the answer each time.
            plan.append(("detokenize_context", _detokenize_context(list if request.tool_format else clean_start)))
        if request.tool_format:
            plan.append(("tool_format", _constant(_texts([request.tool_format]))))
        if request.return_log_probs:
            plan += [("cum_log_probs", _cum_log_probs), ("output_log_probs", _output_log_probs)]
        if request.top_logprobs is not None:
            plan.append(("logprobs", LogprobsWriter(self._tokens, repeats=request.sampling.beam_width > 1)))
        if request.return_generation_logits:
            plan.append(("generation_logits", _streamed_logits if request.streaming else _whole_logits))
        if request.batch_size > 1:
            plan.append(("batch_index", _constant(np.array([[request.batch_index]], np.int32))))
        if request.sampling.num_return_sequences > 1 and request.sampling.beam_width == 1:
            plan.append(("sequence_index", _sequence_index))
        if request.return_num_input_tokens:
            plan.append(("num_input_tokens", _constant(np.array([[len(request.prompt_ids)]], np.int32))))
        if request.return_num_output_tokens:
            plan.append(("num_output_tokens", _num_output_tokens(len(prompt))))
        return plan

    def _plan_first(self) -> Plan:
        warnings = self._request.warnings
        plan: Plan = [("warnings", _constant(_texts(warnings)))] if warnings else []
        if self._request.top_logprobs is not None:
            plan.append(("logprobs_distribution", _constant(_texts([self._request.logprobs_mode]))))
        return plan


def _pick(plan: Plan, wanted: Collection[str]) -> Plan:
    return [(name, write) for name, write in plan if name in wanted]


def _constant(array: NDArray[Any]) -> Writer:
    return lambda event: array


def _texts(texts: Iterable[str]) -> NDArray[Any]:
    """BYTES [1, n]."""
    encoded = [text.encode("utf-8", "replace") for text in texts]
    array = np.empty((1, len(encoded)), dtype=object)
    array[0, :] = encoded
    return array


def _length(n: int) -> NDArray[Any]:
    return _LENGTHS[n] if n < len(_LENGTHS) else np.array([[n]], np.int32)


def _padded(rows: list[list[int]]) -> NDArray[Any]:
    """int32 [1, rows, longest], padded with -1 on the right."""
    array = np.full((1, len(rows), max(map(len, rows), default=0)), _NO_ID, np.int32)
    for i, row in enumerate(rows):
        array[0, i, : len(row)] = row
    return array


def _output_ids(prompt: list[int]) -> Writer:
    def write(event: RequestOutput) -> NDArray[Any]:
        sequences = event.sequences
        if len(sequences) == 1:
            ids = sequences[0].token_ids
            return np.array(prompt + ids if prompt else ids, np.int32).reshape(1, 1, -1)
        return _padded([prompt + sequence.token_ids for sequence in sequences])

    return write


def _sequence_length(prompt_len: int) -> Writer:
    def write(event: RequestOutput) -> NDArray[Any]:
        sequences = event.sequences
        if len(sequences) == 1:
            return _length(prompt_len + len(sequences[0].token_ids))
        return np.array([[prompt_len + len(sequence.token_ids) for sequence in sequences]], np.int32)

    return write


def _detokenize_context(clean_start: CleanStart) -> Writer:
    def write(event: RequestOutput) -> NDArray[Any]:
        tails = [clean_start(sequence.context_ids) for sequence in event.sequences]
        width = max(map(len, tails))
        return np.array([[[_NO_ID] * (width - len(tail)) + tail for tail in tails]], np.int32)

    return write


class LogprobsWriter:
    """One JSON list for each sequence of an event; it remembers how much text every sequence has had."""

    def __init__(self, tokens: TokenTable, repeats: bool) -> None:
        """With `repeats` an event holds all tokens of its sequences, as those of beams do."""
        self._tokens, self._repeats = tokens, repeats
        self._writers: dict[int, ContentWriter] = {}

    def __call__(self, event: RequestOutput) -> NDArray[Any]:
        """BYTES [1, sequences]."""
        if self._repeats:
            self._writers.clear()
        return _texts(self._list(sequence) for sequence in event.sequences)

    def _list(self, sequence: SequenceOutput) -> str:
        writer = self._writers.get(sequence.index)
        if writer is None:
            writer = self._writers[sequence.index] = ContentWriter(self._tokens)
        return writer.write(sequence.token_ids, sequence.top_log_probs, sequence.text_cut)


def _cum_log_probs(event: RequestOutput) -> NDArray[Any]:
    return np.array([[sequence.cum_log_prob for sequence in event.sequences]], np.float32)


def _output_log_probs(event: RequestOutput) -> NDArray[Any]:
    """float32 [1, sequences, n]: of all tokens generated so far, padded with -1."""
    rows = [sequence.log_probs for sequence in event.sequences]
    array = np.full((1, len(rows), max(map(len, rows))), _NO_ID, np.float32)
    for i, row in enumerate(rows):
        array[0, i, : len(row)] = row
    return array


def _logits_of(sequences: list[SequenceOutput]) -> NDArray[Any]:
    """float32 [sequences, longest, vocab], zeros behind the shorter ones."""
    longest = max(len(sequence.generation_logits) for sequence in sequences)
    vocab = next((len(row) for sequence in sequences for row in sequence.generation_logits), 0)
    array = np.zeros((len(sequences), longest, vocab), np.float32)
    for i, sequence in enumerate(sequences):
        if sequence.generation_logits:
            array[i, : len(sequence.generation_logits)] = sequence.generation_logits
    return array


def _whole_logits(event: RequestOutput) -> NDArray[Any]:
    return _logits_of(event.sequences)[None]


def _streamed_logits(event: RequestOutput) -> NDArray[Any]:
    """Upstream swaps sequences and tokens when it streams: [1, new tokens, sequences, vocab]."""
    return np.ascontiguousarray(_logits_of(event.sequences).swapaxes(0, 1))[None]


def _sequence_index(event: RequestOutput) -> NDArray[Any]:
    return _length(event.sequences[0].index)


def _num_output_tokens(prompt_len: int) -> Writer:
    def write(event: RequestOutput) -> NDArray[Any]:
        return _length(sum(prompt_len + len(sequence.token_ids) for sequence in event.sequences))

    return write


def _finish_reason(event: RequestOutput) -> NDArray[Any]:
    return _texts(sequence.finish_reason or "" for sequence in event.sequences)


def _text_cut(event: RequestOutput) -> NDArray[Any]:
    return np.array([[sequence.text_cut for sequence in event.sequences]], np.int32)


def _perf(name: str, read: Callable[[PerfMetrics], float], dtype: type) -> tuple[str, Writer]:
    def write(event: RequestOutput) -> NDArray[Any]:
        assert event.perf is not None  # asked only then
        return np.array([[read(event.perf)]], dtype)

    return name, write


_PERF: Plan = [
    _perf("kv_cache_alloc_new_blocks", lambda perf: perf.alloc_new_blocks, np.int32),
    _perf("kv_cache_reused_blocks", lambda perf: perf.reused_blocks, np.int32),
    _perf("kv_cache_alloc_total_blocks", lambda perf: perf.alloc_total_blocks, np.int32),
    _perf("arrival_time_ns", lambda perf: perf.arrival_ns, np.int64),
    _perf("first_scheduled_time_ns", lambda perf: perf.first_scheduled_ns, np.int64),
    _perf("first_token_time_ns", lambda perf: perf.first_token_ns, np.int64),
    _perf("last_token_time_ns", lambda perf: perf.last_token_ns, np.int64),
    # Upstream sends these three always; nothing speculates here.
    _perf("acceptance_rate", lambda perf: 0.0, np.float32),
    _perf("total_accepted_draft_tokens", lambda perf: 0, np.int32),
    _perf("total_draft_tokens", lambda perf: 0, np.int32),
]
