"""The decoder as an OpenVINO graph with paged attention, built from config and weights. Knows nothing of requests.

One `infer` takes the tokens of many sequences in a row, each sequence reading its own cache blocks.
Inputs, all int32 unless noted (T = tokens in the step, S = sequences, B = blocks of all block tables together):
`input_ids` int64 [T], `position_ids` int64 [T], `past_lens` [S], `subsequence_begins` [S + 1], `block_indices` [B],
`block_indices_begins` [S + 1], `max_context_len` [], `sampled_tokens_indices` int64 [R], and per layer
`key_cache.i` and `value_cache.i`. Output: logits, float32 [R, vocab].

With `adapters`, linears of the layers have products of low rank beside them. `lora_a.<linear>` [n * N, in] holds the
first matrices of many adapters below each other, for the n linears that have the same input;
`lora_b.<layer>.<projection>` [out, N] the second ones beside each other; `lora_mask.<n>` bool [T, n * N] says which
rows are a token's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import openvino as ov
import openvino.op as ov_op
import openvino.opset15 as ops
from openvino import PartialShape, Type

from python_backend.engine.adapter_rows import AdaptedLinears
from python_backend.engine.weights import Weight

if TYPE_CHECKING:
    from python_backend.engine.adapter_rows import Adaptable
    from python_backend.engine.model_config import ModelConfig
    from python_backend.engine.weights import Weights

Storage = Literal["f32", "bf16", "int8", "fp8", "fp8_activations"]
CONTROL_INPUTS: tuple[tuple[str, Type, list[int]], ...] = (
    ("input_ids", Type.i64, [-1]),
    ("position_ids", Type.i64, [-1]),
    ("past_lens", Type.i32, [-1]),
    ("subsequence_begins", Type.i32, [-1]),
    ("block_indices", Type.i32, [-1]),
    ("block_indices_begins", Type.i32, [-1]),
    ("max_context_len", Type.i32, []),
    ("sampled_tokens_indices", Type.i64, [-1]),
)


def _const(value: Any, dtype: Any = np.float32) -> Any:
    return ops.constant(np.array(value, dtype=dtype))


def _empty(dtype: Any) -> Any:
    return ops.constant(np.zeros([0], dtype=dtype))


class DecoderGraph:
    """Builds the ov.Model of one checkpoint.

    `buffers` owns the memory that bf16 and FP8 constants point into: OpenVINO does not copy it, so it has to live
    as long as the compiled model.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, storage: Storage, adapters: Adaptable | None = None
    ) -> None:
        self.config, self.weights, self.storage, self._adapters = config, weights, storage, adapters
        self.buffers: list[Any] = []
        self.probes: dict[str, Any] = {}  # linear name -> node that feeds it; calibration reads them
        self.kv_probes: dict[str, Any] = {}
        self._inputs = {name: self._parameter(name, kind, shape) for name, kind, shape in CONTROL_INPUTS}
        self._caches: list[Any] = []
        self._lora_inputs: dict[str, Any] = {}
        self.lora_linears: dict[str, AdaptedLinears] = {}  # by the first one's name

    def build(self) -> ov.Model:
        """The whole graph: embedding, layers, final norm and logits of the sampled positions."""
        table = self.weights.linear("model.embed_tokens")
        x = ops.gather(self._weight(table), self._inputs["input_ids"], _const(0, np.int64))
        self._rotary = self._rotary_tables()
        for i in range(self.config.num_hidden_layers):
            x = self._layer(x, f"model.layers.{i}")
        x = ops.gather(x, self._inputs["sampled_tokens_indices"], _const(0, np.int64))
        x = self._rms_norm(x, "model.norm.weight")
        tied = self.config.tie_word_embeddings or "lm_head.weight" not in self.weights
        logits = self._matmul(x, table if tied else self.weights.linear("lm_head"))
        parameters = [*self._inputs.values(), *self._caches, *self._lora_inputs.values()]
        return ov.Model([ops.result(logits)], parameters, self.config.architecture)

    def _layer(self, x: Any, name: str) -> Any:
        c = self.config
        h = self._rms_norm(x, f"{name}.input_layernorm.weight")
        sizes = [n * c.head_dim for n in (c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads)]
        q, k, v = self._fused(h, [f"{name}.self_attn.{p}_proj" for p in "qkv"], sizes)
        v = ops.reshape(v, _const([-1, sizes[2]], np.int64), False)
        q = self._heads(q, c.num_attention_heads, f"{name}.self_attn.q_norm.weight")
        k = self._heads(k, c.num_key_value_heads, f"{name}.self_attn.k_norm.weight")
        x = ops.add(x, self._linear(self._attention(q, k, v), f"{name}.self_attn.o_proj"))
        h = self._rms_norm(x, f"{name}.post_attention_layernorm.weight")
        gate, up = self._fused(h, [f"{name}.mlp.{p}_proj" for p in ("gate", "up")], [c.intermediate_size] * 2)
        return ops.add(x, self._linear(ops.multiply(ops.swish(gate), up), f"{name}.mlp.down_proj"))

    def _parameter(self, name: str, kind: Any, shape: list[int]) -> Any:
        node = ops.parameter(PartialShape(shape), kind, name=name)
        node.output(0).get_tensor().set_names({name})
        return node

    def _cache(self, name: str) -> Any:
        # Shape and type are the plugin's choice: the compiled model tells them.
        node = self._parameter(name, Type.dynamic, [-1, -1, -1, -1])
        self._caches.append(node)
        return node

    def _weight(self, weight: Weight) -> Any:
        if weight.is_fp8 and self.storage in ("fp8", "fp8_activations"):
            tensor = self._shared(weight.values.view(np.uint8), Type.f8e4m3)
            return ops.multiply(ops.convert(ops.constant(tensor), "f32"), ops.constant(weight.scale))
        if self.storage == "f32":
            return ops.constant(weight.float32())
        if self.storage == "int8":
            return ops.multiply(ops.convert(ops.constant(weight.values), "f32"), ops.constant(weight.scale))
        return ops.convert(ops.constant(self._shared(weight.bfloat16().view(np.uint16), Type.bf16)), "f32")

    def _shared(self, values: np.ndarray, kind: Any) -> ov.Tensor:
        raw = np.ascontiguousarray(values)
        tensor = ov.Tensor(raw, ov.Shape(raw.shape), kind)
        self.buffers.append((raw, tensor))
        return tensor

    def _fused(self, x: Any, names: list[str], sizes: list[int]) -> list[Any]:
        """Several linears of the same input as one product: fewer, larger kernels."""
        y = ops.variadic_split(self._product(x, names), _const(1, np.int64), _const(sizes, np.int64))
        parts = {name: y.output(i) for i, name in enumerate(names)}
        for name, change in self._low_rank(x, names).items():
            parts[name] = ops.add(parts[name], change)
        return list(parts.values())

    def _linear(self, x: Any, name: str) -> Any:
        y = self._product(x, [name])
        return ops.add(y, *changes) if (changes := self._low_rank(x, [name]).values()) else y

    def _product(self, x: Any, names: list[str]) -> Any:
        self.probes |= dict.fromkeys(names, x)
        y = self._matmul(x, Weight.stack([self.weights.linear(n) for n in names]))
        biases = [self.weights.vector(f"{n}.bias") for n in names if f"{n}.bias" in self.weights]
        return ops.add(y, ops.constant(np.concatenate(biases).reshape(1, -1))) if biases else y

    def _low_rank(self, x: Any, names: list[str]) -> dict[str, Any]:
        """What adapters add to each linear: every token through all rows of A, then only its own ones through B."""
        adapters = self._adapters
        names = [name for name in names if adapters is not None and name.split(".", 3)[3] in adapters.projections]
        if adapters is None or not names:
            return {}
        outs, size_in = zip(*(self.weights.linear(name).values.shape for name in names), strict=True)
        linears = self.lora_linears[names[0]] = AdaptedLinears.of(names, size_in[0], outs)
        a = self._lora_input(f"lora_a.{names[0]}", adapters.kind, [-1, size_in[0]])
        mask = self._lora_input(f"lora_mask.{len(names)}", Type.boolean, [-1, -1])
        # Selected, not multiplied: whatever another adapter makes of this token must not reach it, not even as NaN.
        own = ops.select(mask, ops.matmul(x, a, False, True), _const(0.0))
        parts = ops.split(own, _const(1, np.int64), len(names)).outputs() if len(names) > 1 else [own]
        found = {}
        for name, projection, out, part in zip(names, linears.projections, outs, parts, strict=True):
            b = self._lora_input(f"lora_b.{linears.layer}.{projection}", adapters.kind, [out, -1])
            found[name] = ops.matmul(part, b, False, True)
        return found

    def _lora_input(self, name: str, kind: Any, shape: list[int]) -> Any:
        if name not in self._lora_inputs:
            self._lora_inputs[name] = self._parameter(name, kind, shape)
        node = self._lora_inputs[name]
        return ops.convert(node, "f32") if kind == Type.bf16 else node

    def _matmul(self, x: Any, weight: Weight) -> Any:
        if self.storage == "fp8_activations" and weight.input_scale is not None:
            x = _fake_fp8(x, weight.input_scale)
        return ops.matmul(x, self._weight(weight), False, True)

    def _rms_norm(self, x: Any, name: str) -> Any:
        mean = ops.reduce_mean(ops.power(x, _const(2.0)), _const([-1], np.int64), True)
        scale = ops.divide(_const(1.0), ops.sqrt(ops.add(mean, _const(self.config.rms_norm_eps))))
        return ops.multiply(ops.multiply(x, scale), ops.constant(self.weights.vector(name).reshape(1, -1)))

    def _rotary_tables(self) -> tuple[Any, Any]:
        positions = ops.unsqueeze(ops.convert(self._inputs["position_ids"], "f32"), _const(1, np.int64))
        angle = ops.multiply(positions, ops.constant(self.config.inverse_frequencies().reshape(1, -1)))
        angle = ops.concat([angle, angle], -1)
        axis = _const(1, np.int64)
        return ops.unsqueeze(ops.cos(angle), axis), ops.unsqueeze(ops.sin(angle), axis)

    def _heads(self, x: Any, count: int, norm: str) -> Any:
        """Split into heads, norm them where the family does (Qwen3), and rotate by position."""
        head, half = self.config.head_dim, self.config.head_dim // 2
        x = ops.reshape(x, _const([-1, count, head], np.int64), False)
        if self.config.qk_norm:
            x = self._rms_norm(x, norm)
        cos, sin = self._rotary

        def cut(start: int, stop: int) -> Any:
            bounds = (_const([b], np.int64) for b in (start, stop, 1, 2))
            return ops.slice(x, *bounds)

        turned = ops.concat([ops.multiply(cut(half, head), _const(-1.0)), cut(0, half)], -1)
        rotated = ops.add(ops.multiply(x, cos), ops.multiply(turned, sin))
        return ops.reshape(rotated, _const([-1, count * head], np.int64), False)

    def _attention(self, q: Any, k: Any, v: Any) -> Any:
        c, i = self.config, len(self._caches) // 2
        self.kv_probes |= {f"model.layers.{i}.self_attn.k_proj.out": k, f"model.layers.{i}.self_attn.v_proj.out": v}
        key_cache, value_cache = self._cache(f"key_cache.{i}"), self._cache(f"value_cache.{i}")
        control = self._inputs
        i32 = np.int32
        # The order is that of OpenVINO's PagedAttentionExtension; what we do not use is empty or zero.
        inputs = [
            *(q, k, v, key_cache, value_cache),
            *(control[n] for n in ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")),
            *(_const(c.head_dim**-0.5), _const(c.sliding_window, i32), _empty(np.float32), control["max_context_len"]),
            *(_empty(i32), _empty(i32), _empty(i32), _empty(np.float32), _empty(np.float32)),
            *(_const(0, i32), _const(0, i32), ops.constant(np.zeros([0, 0, 0, 0], np.float32)), _const(0, i32)),
            *(_empty(i32), _empty(i32), _empty(i32), _empty(i32), _empty(np.uint8), _empty(i32)),
        ]
        node = ov_op._PagedAttentionExtension([n.output(0) if hasattr(n, "output") else n for n in inputs])
        info = node.get_rt_info()  # compile_model refuses the node without these
        info["num_k_heads"], info["k_head_size"] = c.num_key_value_heads, c.head_dim
        info["num_v_heads"], info["v_head_size"] = c.num_key_value_heads, c.head_dim
        return node.output(0)


def _fake_fp8(x: Any, step: float) -> Any:
    """Round to E4M3 multiples of `step`, as a GPU's FP8 product would see the activations."""
    scaled = ops.clamp(ops.multiply(x, _const(1.0 / step)), -448.0, 448.0)
    return ops.multiply(ops.convert(ops.convert(scaled, "f8e4m3"), "f32"), _const(step))
