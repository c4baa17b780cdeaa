"""The answer of one request of `tensorrt_llm_bls` as it grows: text, stop words, log-probs, counts.

Knows nothing of the models that make the tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from python_backend.text.detokenize import Detokenizer
from python_backend.text.stop import StopText
from python_backend.triton import pb

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from python_backend.text.tokenizer import Tokenizer
    from python_backend.triton.draft_target import Round


class Answer:
    """Takes rounds, gives output tensors; each of them with what came since the last."""

    def __init__(
        self, tokenizer: Tokenizer, tensors: pb.Tensors, prompt: Sequence[int], skip_special_tokens: bool
    ) -> None:
        words = [word for row in pb.read_texts(tensors, "stop_words") or [] for word in row if word]
        self._stop = StopText(tokenizer, words, skip_special_tokens=skip_special_tokens) if words else None
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens)
        self._wants = {name for name in _WANTS if pb.read_scalar(tensors, name)}
        self._num_prompt = len(prompt)
        self._text = ""
        if pb.read_scalar(tensors, "exclude_input_in_output") is False and not pb.read_scalar(tensors, "stream"):
            self._text = tokenizer.decode(prompt, skip_special_tokens)
        self._new: list[int] = []  # tokens whose text was not sent yet
        self._log_probs: list[float] = []
        self._cut = 0
        self._proposed = self._accepted = 0
        self.stopped = False

    @property
    def has_news(self) -> bool:
        """Whether there are tokens to send."""
        return bool(self._new)

    def push(self, found: Round) -> None:
        """Take a round; what lies behind a stop word is dropped and `stopped` is set."""
        self._proposed += found.num_proposed
        self._accepted += found.num_accepted
        count = len(found.ids)
        for index, token_id in enumerate(found.ids):
            cut = self._stop.push(token_id) if self._stop else None
            if cut is not None:
                self._cut, self.stopped, count = cut, True, index + 1
                break
        self._new += found.ids[:count]
        self._log_probs += found.log_probs[:count]

    def outputs(self, wanted: Collection[str], *, final: bool) -> list[Any]:
        """Tensors of the next response; only those in `wanted`, all when it is empty."""
        text = self._text + self._detokenizer.push(self._new, final)
        self._text = ""
        if final and self._cut:
            text = text[: -self._cut]
        found: dict[str, Any] = {"text_output": pb.text_tensor("text_output", [text])}
        if "return_log_probs" in self._wants:
            found["cum_log_probs"] = _number("cum_log_probs", sum(self._log_probs), np.float32)
            log_probs = np.array([[self._log_probs]], np.float32)  # of all tokens so far, as our engine sends them
            found["output_log_probs"] = pb.tensor("output_log_probs", log_probs)
        if "return_num_input_tokens" in self._wants:
            found["num_input_tokens"] = _number("num_input_tokens", self._num_prompt)
        if "return_num_output_tokens" in self._wants:
            found["num_output_tokens"] = _number("num_output_tokens", len(self._new))
        if "return_perf_metrics" in self._wants and final:
            rate = self._accepted / self._proposed if self._proposed else 0.0
            found["acceptance_rate"] = _number("acceptance_rate", rate, np.float32)
            found["total_accepted_draft_tokens"] = _number("total_accepted_draft_tokens", self._accepted)
            found["total_draft_tokens"] = _number("total_draft_tokens", self._proposed)
        self._new = []
        return [tensor for name, tensor in found.items() if not wanted or name in wanted]


_WANTS = ("return_log_probs", "return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens")


def _number(name: str, value: float, dtype: Any = np.int32) -> Any:
    return pb.tensor(name, np.array([[value]], dtype))
