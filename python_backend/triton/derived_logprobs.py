"""`logprobs` where the engine gives no more than logits, as TensorRT-LLM's does: asked for by preprocessing, made from
generation_logits by postprocessing.

Knows nothing of how text is made. A step behind the engine sees the engine's tensors alone, so the number of
alternatives is the deployment's (parameter top_logprobs of both models), unless who calls postprocessing sends another.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from python_backend.errors import InvalidRequest, out_of_range
from python_backend.logprobs.content import ContentWriter
from python_backend.logprobs.derive import derive_scores
from python_backend.logprobs.tokens import TokenTable
from python_backend.triton import pb
from python_backend.triton.log_prob_inputs import MAX_ALTERNATIVES

if TYPE_CHECKING:
    from collections.abc import Hashable

    import numpy.typing as npt

    from python_backend.text.tokenizer import Tokenizer

DEFAULT_ALTERNATIVES = 5
_MAX_STREAMS = 4096


def wants_logits(tensors: pb.Tensors, at_most: int, batch: int) -> npt.NDArray[np.bool_] | None:
    """What to send as return_generation_logits, [B, 1]: log-probs need them; None leaves it out.

    Raises:
        InvalidRequest: more alternatives are asked for than the deployment gives.
    """
    asked = tensors.get("TOP_LOGPROBS")
    if asked is None:
        own = tensors.get("RETURN_GENERATION_LOGITS")
        return None if own is None else own.reshape(batch, 1)
    for count in asked.reshape(-1).tolist():
        if not 0 <= count <= at_most:
            raise out_of_range("top_logprobs", count, f"0 to {at_most} (outputs.top_logprobs of the spec)")
    return np.ones((batch, 1), np.bool_)


class LogprobsDeriver:
    """Makes the lists of one response after the other; with `stateful`, it counts the text of a stream along."""

    def __init__(self, tokenizer: Tokenizer, alternatives: int = DEFAULT_ALTERNATIVES, stateful: bool = False) -> None:
        self._table = TokenTable(tokenizer)
        self._alternatives = alternatives
        self._stateful = stateful
        self._streams: OrderedDict[Hashable, ContentWriter] = OrderedDict()

    def run(
        self, tensors: pb.Tensors, rows: list[list[int]], cuts: list[int], stream: tuple[Hashable, ...] | None
    ) -> list[str]:
        """One list for each row of tokens.

        Args:
            tensors: the inputs, GENERATION_LOGITS among them.
            rows: new tokens of each sequence.
            cuts: characters that each text loses at its end.
            stream: what tells the responses of one request from others; None: each is a whole answer.

        Raises:
            InvalidRequest: the logits do not fit the tokens.
        """
        logits, n = tensors["GENERATION_LOGITS"], self._count(tensors)
        beams = tensors["TOKENS_BATCH"].shape[1]
        texts = []
        for row, (ids, cut) in enumerate(zip(rows, cuts, strict=True)):
            own = _rows_of(logits, row // beams, row % beams, beams)
            answer = ids[max(0, len(ids) - len(own)) :]  # without the prompt in front, which has no logits
            writer = self._writer(None if stream is None else (*stream, row), final=not ids)
            texts.append(writer.write(answer, derive_scores(own[: len(answer)], answer, n), cut))
        return texts

    def _count(self, tensors: pb.Tensors) -> int:
        asked = pb.read_scalar(tensors, "TOP_LOGPROBS")
        if asked is None:
            return self._alternatives
        if not 0 <= asked <= MAX_ALTERNATIVES:
            raise out_of_range("TOP_LOGPROBS", asked, f"0 to {MAX_ALTERNATIVES}")
        return int(asked)

    def _writer(self, stream: Hashable, final: bool) -> ContentWriter:
        writer = self._streams.pop(stream, None) or ContentWriter(self._table)
        if self._stateful and stream is not None and not final:
            self._streams[stream] = writer  # now the newest
            if len(self._streams) > _MAX_STREAMS:
                self._streams.popitem(last=False)
        return writer


def _rows_of(logits: npt.NDArray[Any], batch: int, beam: int, beams: int) -> npt.NDArray[Any]:
    """Logits [tokens, vocab] of a sequence out of [B, beams, tokens, vocab] or, streamed, [B, tokens, beams, vocab]."""
    if logits.ndim != 4 or batch >= logits.shape[0] or beams not in logits.shape[1:3]:
        raise InvalidRequest(
            f"GENERATION_LOGITS has shape {list(logits.shape)}; [B, {beams}, tokens, vocabulary] or, streamed, "
            f"[B, tokens, {beams}, vocabulary] is needed."
        )
    found: npt.NDArray[Any] = logits[batch, beam] if logits.shape[1] == beams else logits[batch, :, beam]
    return found
