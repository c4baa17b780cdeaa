"""What the model thinks of the prompt itself: logits or log-probabilities of its places, read chunk by chunk.

Knows nothing of scheduling. Of a long prompt's logits those of one chunk exist at a time, unless they were asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from python_backend.engine.log_probs import TokenLogProbs
    from python_backend.engine.output import RequestOutput
    from python_backend.engine.sampler import Sampler
    from python_backend.engine.sequence import Sequence
    from python_backend.request import GenerationRequest

# Logits of so many places of prompts at most are computed in a step (a vocabulary of 49,152: 25 MB), so that reading a
# prompt holds nobody up for long. A further one gets FEW_ROWS of them, so that it does not block the queue.
MAX_ROWS = 128
FEW_ROWS = 8


class PromptReader:
    """Collects them for one request, from the first of its sequences."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._num_read = 0  # places of the prompt, from its start on; a preempted sequence comes by them again
        self._logits: list[np.ndarray] = []
        self._log_probs: list[TokenLogProbs] = []
        self._told = False

    @staticmethod
    def wanted(request: GenerationRequest) -> bool:
        """Whether the request asks for anything of its prompt."""
        return request.return_context_logits or request.top_prompt_logprobs is not None

    def read(self, sequence: Sequence, rows: np.ndarray, sampler: Sampler) -> None:
        """Take the logits of the sequence's last scheduled tokens, float32 [tokens, vocab]."""
        if not reads_prompt(sequence):
            return
        first = sequence.num_computed_tokens + sequence.num_scheduled_tokens - len(rows)
        rows = rows[max(0, self._num_read - first) :]
        if self._request.return_context_logits and len(rows):
            self._logits.append(rows.copy())
        if self._request.top_prompt_logprobs is not None:
            followers = self._request.prompt_ids[self._num_read + 1 : self._num_read + 1 + len(rows)]
            top = self._request.top_prompt_logprobs
            self._log_probs += sampler.score_prompt(rows[: len(followers)], followers, top)
        self._num_read += len(rows)

    def tell(self, event: RequestOutput) -> None:
        """Put what was read into the first event after the whole prompt was."""
        if self._told or self._num_read < len(self._request.prompt_ids):
            return
        self._told = True
        if self._logits:
            event.context_logits = np.concatenate(self._logits)
            self._logits.clear()
        if self._request.top_prompt_logprobs is not None:
            event.prompt_log_probs = self._log_probs


def reads_prompt(sequence: Sequence) -> bool:
    """Whether all logits of the sequence's prompt are needed now: of one sequence of a request, before its answer."""
    return sequence.index == 0 and sequence.num_output_tokens == 0 and PromptReader.wanted(sequence.request)
