"""One token sequence on its way through the engine; the object that scheduler, runner and sampler pass on.

Each field has one writer, named beside it. Knows nothing of tensors or Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from python_backend.engine.log_probs import TokenLogProbs
    from python_backend.engine.protocols import BudgetMask, TextStop, TokenMask
    from python_backend.engine.stopping import StopDecision
    from python_backend.request import FinishReason, GenerationRequest


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and generated tokens of one sequence (one sample or one beam) of a request."""

    request: GenerationRequest
    index: int = 0  # sample number or beam of the request
    token_ids: list[int] = field(default_factory=list)  # prompt + generated; engine
    block_table: list[int] = field(default_factory=list)  # block manager
    num_computed_tokens: int = 0  # tokens whose keys and values are in the cache; scheduler
    num_scheduled_tokens: int = 0  # tokens of the step under way; scheduler
    num_cached_tokens: int = 0  # of them found in the prefix cache at first admission; block manager
    num_output_tokens_sent: int = 0  # engine
    finish_reason: FinishReason | None = None  # engine
    text_cut: int = 0  # characters behind the end of a stop text; stopping
    cum_log_prob: float = 0.0  # sampler or beam search
    log_probs: list[float] = field(default_factory=list)  # one per generated token, natural log; sampler
    top_log_probs: list[TokenLogProbs] = field(default_factory=list)  # when asked for; sampler
    generation_logits: list[np.ndarray] = field(default_factory=list)  # when asked for; engine
    sampler_state: Any = None  # sampler
    unscored_bitmasks: list[np.ndarray] = field(default_factory=list)  # what was allowed in their places; engine
    num_unscored_tokens: int = 0  # forced tokens at the end whose log-probs the next step gives; engine
    pending_end: StopDecision | None = None  # how it ends once its forced tokens are scored; engine
    text_stop: TextStop | None = None
    mask: TokenMask | None = None
    budget: BudgetMask | None = None  # the mask, where it watches max_tokens
    cut_short: bool = False  # whether the budget overruled a choice; sampler

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.request.prompt_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        """Generated tokens, without the prompt."""
        return self.token_ids[len(self.request.prompt_ids) :]

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose keys and values are not in the cache yet."""
        return len(self.token_ids) - self.num_computed_tokens
