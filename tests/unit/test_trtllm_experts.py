"""Mixtures of experts beyond Mixtral, and how layers and heads are shared among ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from build_engines.checkpoint import Checkpoint
from build_engines.progress import Silent
from build_engines.trtllm.checkpoint_writer import write_trtllm_checkpoint
from build_engines.trtllm.mapping import Mapping
from python_backend.errors import BuildError
from tests.unit.test_trtllm_checkpoint import save
from tests.unit.trtllm_reader import Tensors, read_ranks

HIDDEN, INNER, SHARED, EXPERTS = 16, 12, 20, 4
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": 24, "vocab_size": 40,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": EXPERTS,
    "num_experts_per_tok": 2, "moe_intermediate_size": INNER, "shared_expert_intermediate_size": SHARED,
    "norm_topk_prob": False, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 64,
}  # fmt: skip


def qwen2_moe(place: Path) -> tuple[Path, Tensors]:
    random = np.random.default_rng(7)
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (40, HIDDEN), "lm_head.weight": (40, HIDDEN), "model.norm.weight": (HIDDEN,),
    }  # fmt: skip
    layer = "model.layers.0."
    for name in ("input_layernorm", "post_attention_layernorm"):
        sizes[f"{layer}{name}.weight"] = (HIDDEN,)
    for kind, rows in (("q", 16), ("k", 8), ("v", 8)):
        sizes |= {f"{layer}self_attn.{kind}_proj.weight": (rows, HIDDEN), f"{layer}self_attn.{kind}_proj.bias": (rows,)}
    sizes[f"{layer}self_attn.o_proj.weight"] = (HIDDEN, 16)
    sizes |= {f"{layer}mlp.gate.weight": (EXPERTS, HIDDEN), f"{layer}mlp.shared_expert_gate.weight": (1, HIDDEN)}
    for name, inner in [(f"experts.{e}", INNER) for e in range(EXPERTS)] + [("shared_expert", SHARED)]:
        for kind, shape in (("gate", (inner, HIDDEN)), ("up", (inner, HIDDEN)), ("down", (HIDDEN, inner))):
            sizes[f"{layer}mlp.{name}.{kind}_proj.weight"] = shape
    tensors = {name: random.normal(0, 1, shape).astype(np.float32) for name, shape in sizes.items()}
    return save(place, CONFIG, tensors), tensors


def test_shared_experts_are_fused_up_first_and_cut_like_a_plain_mlp(tmp_path: Path) -> None:
    source, plain = qwen2_moe(tmp_path / "hf")
    (tmp_path / "out").mkdir()
    write_trtllm_checkpoint(Checkpoint(source), Mapping(tp=2, moe_ep=2), tmp_path / "out", Silent())
    config, ranks = read_ranks(tmp_path / "out")
    assert config["qwen_type"] == "qwen2_moe"
    assert config["moe"]["normalization_mode"] == 0
    assert config["moe_intermediate_size"] == INNER
    assert config["moe"]["shared_expert_intermediate_size"] == SHARED
    ours, hf = "transformer.layers.0.mlp.", "model.layers.0.mlp."
    for number, rank in enumerate(ranks):
        half = slice(number * SHARED // 2, (number + 1) * SHARED // 2)
        up, gate, down = (plain[f"{hf}shared_expert.{kind}_proj.weight"] for kind in ("up", "gate", "down"))
        np.testing.assert_array_equal(rank[f"{ours}shared_expert.fc.weight"], np.concatenate([up[half], gate[half]]))
        np.testing.assert_array_equal(rank[f"{ours}shared_expert.proj.weight"], down[:, half])
        np.testing.assert_array_equal(rank[f"{ours}shared_expert_gate.weight"], plain[f"{hf}shared_expert_gate.weight"])
        np.testing.assert_array_equal(rank[f"{ours}router.weight"], plain[f"{hf}gate.weight"])
        assert rank[f"{ours}fc.weight"].shape == (2, 2 * INNER, HIDDEN)
        for local in range(2):
            expert = f"{hf}experts.{2 * number + local}."
            wanted = np.concatenate([plain[f"{expert}up_proj.weight"], plain[f"{expert}gate_proj.weight"]])
            np.testing.assert_array_equal(rank[f"{ours}fc.weight"][local], wanted)
            np.testing.assert_array_equal(rank[f"{ours}proj.weight"][local], plain[f"{expert}down_proj.weight"])


def test_layers_that_do_not_divide_go_to_the_first_ranks() -> None:
    ranks = Mapping(tp=2, pp=3).ranks()
    assert [list(rank.layers(8)) for rank in ranks[::2]] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [(rank.pp_rank, rank.tp_rank) for rank in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_ranks_with_fewer_heads_than_cards_share_the_nearest_head() -> None:
    heads = np.arange(2).repeat(3)[:, None]  # two heads of three rows
    held = [int(rank.kv_part(heads, 2)[0, 0]) for rank in Mapping(tp=8).ranks()]
    assert held == [0, 0, 0, 0, 1, 1, 1, 1]


def test_expert_parallelism_is_the_faster_index_within_tp() -> None:
    mapping = Mapping(tp=4, moe_ep=2)
    assert mapping.moe_tp == 2
    assert [list(rank.experts(8)) for rank in mapping.ranks()] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2
    rows = np.arange(4)[:, None]
    assert [rank.expert_part(rows, 0).ravel().tolist() for rank in mapping.ranks()] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_experts_that_cannot_be_spread_are_refused() -> None:
    with pytest.raises(BuildError, match="expert parallelism is 3; it must divide tensor parallelism, 4"):
        Mapping(tp=4, moe_ep=3)
