"""The tensors of one rank's file, by TensorRT-LLM's names. Knows nothing of config.json.

The reverse of what one expects: `mlp.fc` is gate_proj, `mlp.gate` is up_proj; layer numbers start anew on every
pipeline rank; qkv is [q; k; v] of the rank's own heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from build_engines.safetensors_file import TensorPlan
from build_engines.trtllm.checkpoint_config import num_experts
from build_engines.trtllm.linear import (
    Cut,
    Linear,
    cut_shape,
    fused,
    fused_input_scale,
    fused_scale,
    fused_shape,
    scalar,
    tensor,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from build_engines.checkpoint import Checkpoint
    from build_engines.trtllm.mapping import Rank

_QKV = ("q_proj", "k_proj", "v_proj")
# Names of an expert's matrices: gate, up, down.
_MIXTRAL = ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3", "block_sparse_moe.experts.{}.w2")
_QWEN_MOE = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")


class RankFile:
    """What one rank holds of a checkpoint; nothing is read before its turn to be written."""

    def __init__(self, source: Checkpoint, rank: Rank) -> None:
        self._source = source
        self._rank = rank
        self._config = source.config
        self._experts = num_experts(source.config)
        self._kv_heads = source.config.get("num_key_value_heads") or source.config["num_attention_heads"]
        self._plans: list[TensorPlan] = []

    def plans(self) -> list[TensorPlan]:
        """The tensors to write.

        Raises:
            BuildError: the source lacks a tensor or a scale.
        """
        rank, config = self._rank, self._config
        if rank.is_first:
            self._copy("transformer.vocab_embedding.weight", "model.embed_tokens.weight")
        for local, layer in enumerate(rank.layers(config["num_hidden_layers"])):
            self._layer(f"transformer.layers.{local}.", f"model.layers.{layer}.")
        if rank.is_last:
            self._copy("transformer.ln_f.weight", "model.norm.weight")
            tied = "lm_head.weight" not in self._source.tensors
            self._copy("lm_head.weight", "model.embed_tokens.weight" if tied else "lm_head.weight", self._vocab_part)
        return self._plans

    def _layer(self, to: str, origin: str) -> None:
        self._copy(f"{to}input_layernorm.weight", f"{origin}input_layernorm.weight")
        self._copy(f"{to}post_layernorm.weight", f"{origin}post_attention_layernorm.weight")
        self._attention(f"{to}attention.", f"{origin}self_attn.")
        if self._experts:
            self._mixture(f"{to}mlp.", origin)
        else:
            self._mlp(f"{to}mlp.", f"{origin}mlp.")

    def _attention(self, to: str, origin: str) -> None:
        cuts: list[Cut] = [self._rows, self._kv_rows, self._kv_rows]
        linears = [Linear.of(self._source, origin + name) for name in _QKV]
        self._fused(f"{to}qkv", list(zip(linears, cuts, strict=True)))
        self._fused(f"{to}dense", [(Linear.of(self._source, f"{origin}o_proj"), self._columns)])
        if f"{origin}q_proj.bias" in self._source.tensors:
            biases = [tensor(self._source, f"{origin}{name}.bias") for name in _QKV]
            width = sum(cut_shape(bias, cut)[0] for bias, cut in zip(biases, cuts, strict=True))
            self._add(
                f"{to}qkv.bias",
                biases[0].dtype,
                (width,),
                lambda: np.concatenate([cut(bias.read()) for bias, cut in zip(biases, cuts, strict=True)]),
            )
        if f"{origin}o_proj.bias" in self._source.tensors:
            self._copy(f"{to}dense.bias", f"{origin}o_proj.bias")
        if f"{origin}q_norm.weight" in self._source.tensors:
            self._copy(f"{to}q_layernorm.weight", f"{origin}q_norm.weight")
            self._copy(f"{to}k_layernorm.weight", f"{origin}k_norm.weight")
        if f"{origin}k_proj.k_scale" in self._source.tensors:
            scales = [scalar(self._source, f"{origin}{kind}_proj.{kind}_scale") for kind in "kv"]
            self._number(f"{to}kv_cache_scaling_factor", max(1.0, *scales))

    def _mlp(self, to: str, origin: str) -> None:
        gate, up = (Linear.of(self._source, f"{origin}{name}_proj") for name in ("gate", "up"))
        self._fused(f"{to}fc", [(gate, self._rows)])
        self._fused(f"{to}gate", [(up, self._rows)])
        self._fused(f"{to}proj", [(Linear.of(self._source, f"{origin}down_proj"), self._columns)])
        for name, bias, cut in (("fc", "gate", self._rows), ("gate", "up", self._rows), ("proj", "down", _whole)):
            if f"{origin}{bias}_proj.bias" in self._source.tensors:
                self._copy(f"{to}{name}.bias", f"{origin}{bias}_proj.bias", cut)

    def _mixture(self, to: str, origin: str) -> None:
        mixtral = f"{origin}block_sparse_moe.gate.weight" in self._source.tensors
        names = _MIXTRAL if mixtral else _QWEN_MOE
        router = tensor(self._source, origin + ("block_sparse_moe.gate.weight" if mixtral else "mlp.gate.weight"))
        self._add(f"{to}router.weight", "F32", router.shape, lambda: router.read().astype(np.float32))
        gate, up, down = (
            [Linear.of(self._source, origin + name.format(i)) for i in self._rank.experts(self._experts)]
            for name in names
        )
        pairs = list(zip(up, gate, strict=True))  # up comes first
        self._stacked(f"{to}fc", [[(one, self._expert_rows) for one in pair] for pair in pairs])
        self._stacked(f"{to}proj", [[(one, self._expert_columns)] for one in down])
        if f"{origin}mlp.shared_expert_gate.weight" in self._source.tensors:
            shared = f"{origin}mlp.shared_expert."
            rows: Cut = self._rows
            parts = [(Linear.of(self._source, f"{shared}{name}_proj"), rows) for name in ("up", "gate")]
            self._fused(f"{to}shared_expert.fc", parts)
            down_proj = Linear.of(self._source, f"{shared}down_proj")
            self._fused(f"{to}shared_expert.proj", [(down_proj, self._columns)])
            self._copy(f"{to}shared_expert_gate.weight", f"{origin}mlp.shared_expert_gate.weight")

    def _fused(self, to: str, parts: list[tuple[Linear, Cut]]) -> None:
        linears = [linear for linear, _ in parts]
        self._add(f"{to}.weight", linears[0].weight.dtype, fused_shape(parts), lambda: fused(parts))
        scale = fused_scale(linears)
        if scale is not None:
            self._number(f"{to}.weights_scaling_factor", scale)
            self._number(f"{to}.activation_scaling_factor", fused_input_scale(linears))

    def _stacked(self, to: str, experts: list[list[tuple[Linear, Cut]]]) -> None:
        shape = (len(experts), *fused_shape(experts[0]))
        dtype = experts[0][0][0].weight.dtype
        self._add(f"{to}.weight", dtype, shape, lambda: np.stack([fused(parts) for parts in experts]))
        scales = [fused_scale([linear for linear, _ in parts]) for parts in experts]
        if scales[0] is not None:
            values = np.array(scales, np.float32).reshape(-1, 1)
            self._add(f"{to}.weights_scaling_factor", "F32", values.shape, lambda: values)
            linears = [linear for parts in experts for linear, _ in parts]
            self._number(f"{to}.activation_scaling_factor", fused_input_scale(linears))

    def _rows(self, values: NDArray) -> NDArray:
        return self._rank.part(values, 0)

    def _columns(self, values: NDArray) -> NDArray:
        return self._rank.part(values, 1)

    def _expert_rows(self, values: NDArray) -> NDArray:
        return self._rank.expert_part(values, 0)

    def _expert_columns(self, values: NDArray) -> NDArray:
        return self._rank.expert_part(values, 1)

    def _kv_rows(self, values: NDArray) -> NDArray:
        return self._rank.kv_part(values, self._kv_heads)

    def _vocab_part(self, values: NDArray) -> NDArray:
        missing = -values.shape[0] % self._rank.mapping.tp
        return self._rows(np.pad(values, ((0, missing), (0, 0))) if missing else values)

    def _copy(self, to: str, origin: str, cut: Cut | None = None) -> None:
        entry, keep = tensor(self._source, origin), cut or _whole
        self._add(to, entry.dtype, cut_shape(entry, keep), lambda: keep(entry.read()))

    def _number(self, to: str, value: float) -> None:
        self._add(to, "F32", (1,), lambda: np.array([value], np.float32))

    def _add(self, to: str, dtype: str, shape: tuple[int, ...], make: Callable[[], NDArray]) -> None:
        self._plans.append(TensorPlan(to, dtype, shape, make))


def _whole(values: NDArray) -> NDArray:
    return values
