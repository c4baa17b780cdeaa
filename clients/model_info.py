"""What the served model declares, so that a request holds only what this server understands.

A server of upstream's own templates lacks our additions (finish_reason, timeout_ms, …); the clients ask once and adapt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from clients.types import DATATYPES, GenerateRequest

GRACE_S = 1.0
"""How long after the server's own time limit a client waits for the answer that the limit produces."""

_PERF_METRICS = (
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "acceptance_rate",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
)
_WANTED_WITH: dict[str, tuple[str, ...]] = {
    "tools": ("tool_calls",),
    "top_logprobs": ("logprobs", "logprobs_distribution"),
    "top_prompt_logprobs": ("prompt_logprobs",),
    "return_log_probs": ("cum_log_probs", "output_log_probs"),
    "return_context_logits": ("context_logits",),
    "return_generation_logits": ("generation_logits",),
    "return_perf_metrics": _PERF_METRICS,
    "return_num_input_tokens": ("num_input_tokens",),
    "return_num_output_tokens": ("num_output_tokens",),
}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Names of the inputs and outputs of the model that is asked for text."""

    inputs: frozenset[str]
    outputs: frozenset[str]

    @classmethod
    def parse(cls, metadata: Mapping[str, Any]) -> ModelInfo:
        """From KServe's model metadata, as JSON."""
        inputs, outputs = ({tensor["name"] for tensor in metadata[side]} for side in ("inputs", "outputs"))
        return cls(frozenset(inputs), frozenset(outputs))

    @property
    def keeps_time(self) -> bool:
        """Whether the server itself ends a request whose time is over."""
        return "timeout_ms" in self.inputs

    def with_usage(self, request: GenerateRequest) -> GenerateRequest:
        """The request, asking for token counts as well unless it says something about them itself."""
        counts = ("return_num_input_tokens", "return_num_output_tokens")
        asked: dict[str, Any] = {
            name: True for name in counts if name in self.inputs and getattr(request, name) is None
        }
        return replace(request, **asked) if asked else request

    def tensors(self, request: GenerateRequest, timeout: float | None) -> list[tuple[str, str, Any]]:
        """Name, datatype and value of what to send; `timeout` in seconds becomes timeout_ms where that exists."""
        values = request.tensors()
        if timeout is not None and self.keeps_time:
            values.setdefault("timeout_ms", max(1, round(timeout * 1000)))
        return [(name, DATATYPES[name], value) for name, value in values.items()]

    def wanted_outputs(self, request: GenerateRequest) -> list[str]:
        """The outputs worth asking for; what nobody asks for is neither computed nor sent."""
        wanted = ["text_output", "finish_reason", "warnings"]
        for name, outputs in _WANTED_WITH.items():
            # top_logprobs=0 asks for the chosen token's; a switch that is False asks for nothing.
            value = getattr(request, name)
            if value is not None and value is not False:
                wanted += outputs
        if request.num_sequences > 1:
            wanted.append("sequence_index")
        return [name for name in wanted if name in self.outputs]

    def patience(self, timeout: float | None) -> float | None:
        """How many seconds the call may take at most, so that the server's own answer to a timeout still arrives."""
        if timeout is None:
            return None
        return timeout + GRACE_S if self.keeps_time else timeout
