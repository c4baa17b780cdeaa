"""Reads TensorRT-LLM checkpoints without any of our code: rank files merged, scales applied, names turned back.

And a plain numpy decoder that takes its settings from the checkpoint's config.json, so that those are tested as well.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

Tensors = dict[str, np.ndarray]
_TYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn}


def read_file(path: Path) -> Tensors:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, meta in header.items():
        begin, end = (8 + length + offset for offset in meta["data_offsets"])
        tensors[name] = np.frombuffer(raw[begin:end], _TYPES[meta["dtype"]]).reshape(meta["shape"])
    return tensors


def read_ranks(directory: Path) -> tuple[dict[str, Any], list[Tensors]]:
    config = json.loads((directory / "config.json").read_text())
    world = config["mapping"]["world_size"]
    assert sorted(path.name for path in directory.glob("*.safetensors")) == sorted(
        f"rank{i}.safetensors" for i in range(world)
    )
    return config, [read_file(directory / f"rank{i}.safetensors") for i in range(world)]


def merge(directory: Path) -> tuple[dict[str, Any], Tensors]:
    """config.json, and the tensors of the whole model in float32 by Hugging Face name."""
    config, ranks = read_ranks(directory)
    tp, pp = config["mapping"]["tp_size"], config["mapping"]["pp_size"]
    whole: Tensors = {}
    layer = 0
    for stage in range(pp):
        group = ranks[stage * tp : (stage + 1) * tp]
        count = len({name.split(".")[2] for name in group[0] if ".layers." in name})
        for local in range(count):
            whole |= _layer(config, group, f"transformer.layers.{local}.", f"model.layers.{layer}.")
            layer += 1
    assert layer == config["num_hidden_layers"]
    last = ranks[-tp:]
    whole["model.embed_tokens.weight"] = ranks[0]["transformer.vocab_embedding.weight"].astype(np.float32)
    whole["model.norm.weight"] = last[0]["transformer.ln_f.weight"].astype(np.float32)
    head = np.concatenate([rank["lm_head.weight"] for rank in last]).astype(np.float32)
    assert not head[config["vocab_size"] :].any()
    whole["lm_head.weight"] = head[: config["vocab_size"]]
    return config, whole


def _values(rank: Tensors, name: str) -> np.ndarray:
    values = rank[f"{name}.weight"]
    assert (values.dtype == ml_dtypes.float8_e4m3fn) == (f"{name}.weights_scaling_factor" in rank)
    if f"{name}.weights_scaling_factor" in rank:
        scale = rank[f"{name}.weights_scaling_factor"]
        assert scale.dtype == np.float32
        assert rank[f"{name}.activation_scaling_factor"].shape == (1,)
        return values.astype(np.float32) * (scale[..., None] if values.ndim == 3 else scale)
    return values.astype(np.float32)


def _layer(config: dict[str, Any], group: list[Tensors], origin: str, to: str) -> Tensors:
    tp, head = len(group), config["head_size"]
    heads, kv_heads = config["num_attention_heads"] // tp, max(1, config["num_key_value_heads"] // tp)
    sizes = [heads * head, kv_heads * head, kv_heads * head]
    found: Tensors = {}
    parts: dict[str, list[list[np.ndarray]]] = {"weight": [], "bias": []}
    for rank in group:
        parts["weight"].append(np.split(_values(rank, f"{origin}attention.qkv"), np.cumsum(sizes)[:-1]))
        if f"{origin}attention.qkv.bias" in rank:
            parts["bias"].append(
                np.split(rank[f"{origin}attention.qkv.bias"].astype(np.float32), np.cumsum(sizes)[:-1])
            )
    copies = max(1, tp // config["num_key_value_heads"])
    for kind, split in parts.items():
        for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
            if split:
                step = 1 if name == "q_proj" else copies
                found[f"{to}self_attn.{name}.{kind}"] = np.concatenate([part[i] for part in split[::step]])
    found[f"{to}self_attn.o_proj.weight"] = np.concatenate([_values(r, f"{origin}attention.dense") for r in group], 1)
    for name, hf in (
        ("input_layernorm", "input_layernorm"),
        ("post_layernorm", "post_attention_layernorm"),
        ("attention.q_layernorm", "self_attn.q_norm"),
        ("attention.k_layernorm", "self_attn.k_norm"),
    ):
        if f"{origin}{name}.weight" in group[0]:
            found[f"{to}{hf}.weight"] = group[0][f"{origin}{name}.weight"].astype(np.float32)
    if "moe" in config:
        return found | _experts(config, group, origin, to)
    for name, hf, axis in (("fc", "gate_proj", 0), ("gate", "up_proj", 0), ("proj", "down_proj", 1)):
        found[f"{to}mlp.{hf}.weight"] = np.concatenate([_values(rank, f"{origin}mlp.{name}") for rank in group], axis)
    return found


def _experts(config: dict[str, Any], group: list[Tensors], origin: str, to: str) -> Tensors:
    ep, experts = config["mapping"]["moe_ep_size"], config["moe"]["num_experts"]
    found = {f"{to}block_sparse_moe.gate.weight": group[0][f"{origin}mlp.router.weight"]}
    assert found[f"{to}block_sparse_moe.gate.weight"].dtype == np.float32
    each = experts // ep
    for expert in range(experts):
        holders = [rank for number, rank in enumerate(group) if number % ep == expert // each]
        up_gate = [np.split(_values(rank, f"{origin}mlp.fc")[expert % each], 2) for rank in holders]
        name = f"{to}block_sparse_moe.experts.{expert}."
        found[f"{name}w3.weight"] = np.concatenate([up for up, _ in up_gate])
        found[f"{name}w1.weight"] = np.concatenate([gate for _, gate in up_gate])
        found[f"{name}w2.weight"] = np.concatenate([_values(r, f"{origin}mlp.proj")[expert % each] for r in holders], 1)
    return found


def logits(config: dict[str, Any], tensors: Tensors, ids: list[int]) -> np.ndarray:
    """Logits of every position in float32."""
    x = tensors["model.embed_tokens.weight"][ids]
    turns = _rotary(config, len(ids))
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        y = _norm(config, x, tensors[f"{name}input_layernorm.weight"])
        x = x + _attention(config, tensors, f"{name}self_attn.", y, turns)
        y = _norm(config, x, tensors[f"{name}post_attention_layernorm.weight"])
        x = x + _mlp(config, tensors, name, y)
    return _norm(config, x, tensors["model.norm.weight"]) @ tensors["lm_head.weight"].T


def _norm(config: dict[str, Any], x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["norm_epsilon"]) * weight


def _rotary(config: dict[str, Any], length: int) -> tuple[np.ndarray, np.ndarray]:
    assert config["position_embedding_type"] == "rope_gpt_neox"
    head = config["head_size"]
    frequencies = config["rotary_base"] ** -(np.arange(0, head, 2) / head)
    scaling = config["rotary_scaling"]
    if scaling:
        assert scaling["type"] == "llama3"
        low, high, old = (
            scaling["low_freq_factor"],
            scaling["high_freq_factor"],
            scaling["original_max_position_embeddings"],
        )
        waves = old * frequencies / (2 * math.pi)
        smooth = np.clip((waves - low) / (high - low), 0, 1)
        frequencies = frequencies * (smooth + (1 - smooth) / scaling["factor"])
    angles = np.arange(length)[:, None] * np.concatenate([frequencies, frequencies])
    return np.cos(angles), np.sin(angles)


def _attention(
    config: dict[str, Any], tensors: Tensors, name: str, x: np.ndarray, turns: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    head, length = config["head_size"], len(x)
    q, k, v = (
        (x @ tensors[f"{name}{kind}_proj.weight"].T + tensors.get(f"{name}{kind}_proj.bias", 0)).reshape(
            length, -1, head
        )
        for kind in "qkv"
    )
    if config["qk_layernorm"]:
        q, k = _norm(config, q, tensors[f"{name}q_norm.weight"]), _norm(config, k, tensors[f"{name}k_norm.weight"])
    q, k = (_turn(values, *turns) for values in (q, k))
    repeats = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, repeats, 1), np.repeat(v, repeats, 1)
    scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(head)
    scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)
    return mixed.reshape(length, -1) @ tensors[f"{name}o_proj.weight"].T


def _turn(values: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    first, second = np.split(values, 2, -1)
    return values * cos[:, None] + np.concatenate([-second, first], -1) * sin[:, None]


def _mlp(config: dict[str, Any], tensors: Tensors, name: str, x: np.ndarray) -> np.ndarray:
    if "moe" not in config:
        gate, up, down = (tensors[f"{name}mlp.{kind}_proj.weight"] for kind in ("gate", "up", "down"))
        return _gated(x, gate, up, down)
    scores = np.exp(x @ tensors[f"{name}block_sparse_moe.gate.weight"].T)
    scores /= scores.sum(-1, keepdims=True)
    chosen = np.argsort(-scores, -1)[:, : config["moe"]["top_k"]]
    result = np.zeros_like(x)
    for row, experts in enumerate(chosen):
        share = scores[row, experts]
        if config["moe"]["normalization_mode"] == 1:
            share = share / share.sum()
        for part, expert in zip(share, experts, strict=True):
            w1, w2, w3 = (tensors[f"{name}block_sparse_moe.experts.{expert}.w{i}.weight"] for i in (1, 2, 3))
            result[row] += part * _gated(x[row], w1, w3, w2)
    return result


def _gated(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    y = x @ gate.T
    return (y / (1 + np.exp(-y)) * (x @ up.T)) @ down.T
