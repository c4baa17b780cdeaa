"""Limits and copies that carry a traffic within a promise. Knows nothing of spec files.

In a steady state an instance holds as many sequences as arrive while one is answered (Little's law), and every step
takes in, besides one token for each, the prompts that arrived during the step before. Both depend on the step's
length, which depends on them: the fixed point is found by iterating.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from build_engines.plan.memory import CardMemory
    from build_engines.plan.roofline import Roofline

_MAX_INSTANCES = 1024
_CHUNK_STEP = 256
_MAX_NUM_TOKENS = 8192
_HEADROOM = 1.5  # over the mean number of sequences: arrivals come in bursts


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked and what is promised; lengths in tokens, times in seconds."""

    input_tokens: int
    output_tokens: int
    requests_per_s: float
    ttft_s: float
    itl_s: float

    @property
    def sequence_tokens(self) -> int:
        """KV cache of one sequence at its end."""
        return self.input_tokens + self.output_tokens

    @property
    def mean_context(self) -> int:
        """KV cache of one sequence on average while it is being answered."""
        return self.input_tokens + self.output_tokens // 2


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Limits of each instance, the number of instances, and what to expect of them."""

    instances: int
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    running_sequences: float
    expected_ttft_s: float
    expected_itl_s: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why no number of instances keeps the promise."""

    reason: str


def suggest(demand: Demand, roofline: Roofline, memory: CardMemory, max_positions: int) -> Suggestion | Refusal:
    """The smallest number of instances that keeps the promise at the efficiency `roofline` counts on."""
    room = memory.sequences_of(demand.sequence_tokens)
    if room < 1:
        text = f"the KV cache holds {memory.max_tokens} tokens, one sequence needs {demand.sequence_tokens}"
        return Refusal(f"{text}: more cards, a smaller format, or shorter sequences")
    floor = roofline.decode_s(1, demand.mean_context)
    if floor > demand.itl_s:
        return Refusal(
            f"one sequence alone takes {floor * 1e3:.1f} ms a token: more tp, a faster card, or a longer itl"
        )
    floor = roofline.prefill_s(demand.input_tokens)
    if floor > demand.ttft_s:
        return Refusal(f"the prompt alone takes {floor * 1e3:.0f} ms: more tp, a faster card, or a longer ttft")
    for instances in range(1, _MAX_INSTANCES + 1):
        state = _steady_state(demand, roofline, demand.requests_per_s / instances, room)
        if state is not None:
            sequences, step_s = state
            batch = min(_power_of_two(math.ceil(sequences * _HEADROOM)), room)
            chunk = _chunk(demand, roofline, math.ceil(sequences))
            ttft_s = _ttft_s(demand, roofline, math.ceil(sequences), chunk, step_s)
            if ttft_s <= demand.ttft_s:
                tokens = max(chunk, _round_up(batch, _CHUNK_STEP))
                longest = min(_round_up(2 * demand.sequence_tokens, 1024), max_positions)
                return Suggestion(instances, batch, tokens, longest, sequences, ttft_s, step_s)
    return Refusal(f"{_MAX_INSTANCES} instances are not enough")


def _steady_state(demand: Demand, roofline: Roofline, rate: float, room: int) -> tuple[float, float] | None:
    """Mean running sequences and seconds of a step; None when the load grows without end or over a limit."""
    step_s = roofline.decode_s(1, demand.mean_context)
    for _ in range(200):
        sequences = max(1.0, rate * demand.output_tokens * step_s)
        arriving = rate * step_s * demand.input_tokens
        following = roofline.mixed_s(math.ceil(sequences), demand.mean_context, math.ceil(arriving))
        if following > demand.itl_s or sequences > room:
            return None
        if abs(following - step_s) < 1e-6:
            break
        step_s = following
    return sequences, step_s


def _chunk(demand: Demand, roofline: Roofline, running: int) -> int:
    """Tokens of prompts in a step that still keeps the promise to those who are being answered."""
    chunk = _CHUNK_STEP
    while chunk < _MAX_NUM_TOKENS and roofline.mixed_s(running, demand.mean_context, 2 * chunk) <= demand.itl_s:
        chunk *= 2
    return chunk


def _ttft_s(demand: Demand, roofline: Roofline, running: int, chunk: int, step_s: float) -> float:
    whole, rest = divmod(demand.input_tokens, chunk)
    ttft = step_s / 2 + whole * roofline.mixed_s(running, demand.mean_context, chunk)  # half a step until it starts
    return ttft + (roofline.mixed_s(running, demand.mean_context, rest) if rest else 0.0)


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
