"""How ranks share a model: which layers, heads, columns and experts each of them holds. Knows nothing of files."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from python_backend.errors import BuildError


@dataclass(frozen=True, slots=True)
class Mapping:
    """Tensor, pipeline and expert parallelism of one instance; world_size = tp * pp, tp being the faster index."""

    tp: int = 1
    pp: int = 1
    moe_ep: int = 1  # of the tp ranks, how many hold different experts

    def __post_init__(self) -> None:
        if self.tp % self.moe_ep:
            raise BuildError(f"expert parallelism is {self.moe_ep}; it must divide tensor parallelism, {self.tp}.")

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.tp * self.pp

    @property
    def moe_tp(self) -> int:
        """Ranks that share one expert's matrices."""
        return self.tp // self.moe_ep

    def ranks(self) -> list[Rank]:
        """All ranks in the order of their files."""
        return [Rank(self, number) for number in range(self.world_size)]


@dataclass(frozen=True, slots=True)
class Rank:
    """One process, one card, one file."""

    mapping: Mapping
    number: int

    @property
    def tp_rank(self) -> int:
        """Which part of every matrix."""
        return self.number % self.mapping.tp

    @property
    def pp_rank(self) -> int:
        """Which part of the layers."""
        return self.number // self.mapping.tp

    @property
    def is_first(self) -> bool:
        """Whether it holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether it holds the last norm and lm_head."""
        return self.pp_rank == self.mapping.pp - 1

    def layers(self, num_layers: int) -> range:
        """Its layers, contiguous; when they do not divide evenly the first ranks hold one more."""
        each, more = divmod(num_layers, self.mapping.pp)
        start = self.pp_rank * each + min(self.pp_rank, more)
        return range(start, start + each + (self.pp_rank < more))

    def experts(self, num_experts: int) -> range:
        """Its experts, contiguous."""
        each = num_experts // self.mapping.moe_ep
        start = (self.tp_rank % self.mapping.moe_ep) * each
        return range(start, start + each)

    def part(self, values: NDArray, axis: int) -> NDArray:
        """Its share of a dimension that all tp ranks cut."""
        return _cut(values, axis, self.mapping.tp, self.tp_rank)

    def expert_part(self, values: NDArray, axis: int) -> NDArray:
        """Its share of a dimension of an expert's matrix."""
        return _cut(values, axis, self.mapping.moe_tp, self.tp_rank // self.mapping.moe_ep)

    def kv_part(self, values: NDArray, num_kv_heads: int) -> NDArray:
        """Its rows of k_proj or v_proj; with fewer heads than ranks, neighbours hold the same head."""
        tp = self.mapping.tp
        if num_kv_heads >= tp:
            return self.part(values, 0)
        return _cut(values, 0, num_kv_heads, self.tp_rank * num_kv_heads // tp)


def check_divisible(mapping: Mapping, config: dict[str, int], num_experts: int) -> None:
    """Refuse a mapping that cuts through a head, a column or an expert.

    Raises:
        BuildError: the first size that does not divide.
    """
    tp, kv_heads = mapping.tp, config["num_key_value_heads"]
    sizes = {"num_attention_heads": config["num_attention_heads"], "intermediate_size": config["intermediate_size"]}
    for name, size in sizes.items():
        if size % tp:
            raise BuildError(f"{name} is {size}; tensor parallelism {tp} does not divide it.")
    if kv_heads % tp and tp % kv_heads:
        raise BuildError(
            f"num_key_value_heads is {kv_heads}; neither it nor tensor parallelism {tp} divides the other."
        )
    if mapping.pp > config["num_hidden_layers"]:
        raise BuildError(f"pipeline parallelism is {mapping.pp}; the model has {config['num_hidden_layers']} layers.")
    if mapping.moe_ep > 1 and (num_experts == 0 or num_experts % mapping.moe_ep):
        raise BuildError(f"expert parallelism is {mapping.moe_ep}; it must divide the {num_experts} experts.")


def _cut(values: NDArray, axis: int, parts: int, index: int) -> NDArray:
    return np.split(values, parts, axis)[index]
