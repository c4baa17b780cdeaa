"""TensorRT-LLM checkpoints, read back by a reader that shares no code with the writer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from build_engines.checkpoint import Checkpoint
from build_engines.progress import Silent
from build_engines.quantize import write_fp8_checkpoint
from build_engines.safetensors_file import TensorPlan, write_checkpoint
from build_engines.trtllm.checkpoint_writer import write_trtllm_checkpoint
from build_engines.trtllm.mapping import Mapping
from python_backend.errors import BuildError
from tests.unit.trtllm_reader import Tensors, logits, merge, read_file, read_ranks

FAMILIES = Path(__file__).parents[1] / "data" / "families"
MAPPINGS = [Mapping(), Mapping(tp=2), Mapping(pp=2), Mapping(tp=2, pp=2)]
NAMES = {
    np.dtype(np.float32): "F32",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(ml_dtypes.bfloat16): "BF16",
}


def written(source: Path, mapping: Mapping, place: Path) -> Path:
    place.mkdir()
    write_trtllm_checkpoint(Checkpoint(source), mapping, place, Silent())
    return place


def fp8_of(family: str, place: Path) -> Path:
    source = Checkpoint(FAMILIES / family)
    linears = [name.removesuffix(".weight") for name in source.tensors if name.endswith("_proj.weight")]
    amax = {name: 2.0 + i / 8 for i, name in enumerate(linears)}
    amax |= {f"{name}.out": 500.0 + i for i, name in enumerate(linears)}
    place.mkdir()
    write_fp8_checkpoint(source, amax, place, Silent())
    return place


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def save(place: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    plans = [TensorPlan(n, NAMES[t.dtype], t.shape, lambda t=t: t) for n, t in tensors.items()]  # type: ignore[misc]
    write_checkpoint(place, plans, lambda _size: None)
    return place


@pytest.mark.parametrize("mapping", MAPPINGS, ids=str)
@pytest.mark.parametrize("family", sorted(path.name for path in FAMILIES.iterdir()))
def test_merged_ranks_give_the_logits_of_the_hugging_face_model(family: str, mapping: Mapping, tmp_path: Path) -> None:
    config, tensors = merge(written(FAMILIES / family, mapping, tmp_path / "out"))
    reference = np.load(FAMILIES / family / "reference.npz")
    found = logits(config, tensors, reference["prompt_ids"].tolist())[reference["positions"]]
    np.testing.assert_allclose(found, reference["logits"], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("mapping", MAPPINGS, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_fp8_ranks_give_the_logits_of_the_fp8_model(family: str, mapping: Mapping, tmp_path: Path) -> None:
    source = fp8_of(family, tmp_path / "fp8")
    config, tensors = merge(written(source, mapping, tmp_path / "out"))
    assert config["quantization"] == {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    plain = read_file(source / "model.safetensors")
    for name, values in plain.items():
        if name.endswith(".weight"):
            scale = plain.get(f"{name.removesuffix('.weight')}.weight_scale", np.float32(1))
            np.testing.assert_array_equal(tensors[name], values.astype(np.float32) * scale, err_msg=name)
    reference = np.load(FAMILIES / family / "reference.npz")
    found = logits(config, tensors, reference["prompt_ids"].tolist())[reference["positions"]]
    # Rounding moves a weight by up to 1/16. Random weights are the worst case: nothing averages out.
    assert 0 < distance(found, reference["logits"]) < 0.2
    for name in [
        name for name in tensors if name.endswith("gate_proj.weight")
    ]:  # what a swapped fc and gate would give
        up = name.replace("gate_proj", "up_proj")
        tensors[name], tensors[up] = tensors[up], tensors[name]
    swapped = logits(config, tensors, reference["prompt_ids"].tolist())[reference["positions"]]
    assert distance(swapped, reference["logits"]) > 0.3


def test_every_scale_is_in_the_file_and_the_activation_scale_is_the_largest_of_the_parts(tmp_path: Path) -> None:
    source = fp8_of("llama", tmp_path / "fp8")
    _, ranks = read_ranks(written(source, Mapping(tp=2), tmp_path / "out"))
    plain = read_file(source / "model.safetensors")
    for rank in ranks:
        for layer in range(2):
            ours, hf = f"transformer.layers.{layer}.", f"model.layers.{layer}."
            inputs = [plain[f"{hf}self_attn.{kind}_proj.input_scale"] for kind in "qkv"]
            assert rank[f"{ours}attention.qkv.activation_scaling_factor"] == max(inputs)
            assert rank[f"{ours}mlp.proj.activation_scaling_factor"] == plain[f"{hf}mlp.down_proj.input_scale"]
            kv = max(plain[f"{hf}self_attn.{kind}_proj.{kind}_scale"] for kind in "kv")
            assert kv > 1
            factor = rank[f"{ours}attention.kv_cache_scaling_factor"]
            assert factor == kv
            assert (factor.shape, factor.dtype) == ((1,), np.float32)
        assert rank["transformer.layers.0.attention.qkv.weight"].dtype == ml_dtypes.float8_e4m3fn


def test_parts_with_scales_of_their_own_are_rounded_anew_to_the_largest(tmp_path: Path) -> None:
    source = fp8_of("qwen3", tmp_path / "fp8")
    tensors = read_file(source / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight_scale"
    tensors[name] = np.float32(tensors[name] / 4) * np.ones_like(tensors[name])  # now the smallest of the three
    config = json.loads((source / "config.json").read_text())
    changed = save(tmp_path / "changed", config, tensors)
    _, found = merge(written(changed, Mapping(), tmp_path / "out"))
    for kind in "qkv":
        weight = f"model.layers.0.self_attn.{kind}_proj.weight"
        wanted = tensors[weight].astype(np.float32) * tensors[f"model.layers.0.self_attn.{kind}_proj.weight_scale"]
        largest = tensors["model.layers.0.self_attn.q_proj.weight_scale"]
        tolerance = {"atol": float(largest) * 2**-10, "rtol": 0 if kind != "k" else 1 / 16}
        np.testing.assert_allclose(found[weight], wanted, **tolerance)  # type: ignore[arg-type]
    _, ranks = read_ranks(tmp_path / "out")
    assert ranks[0]["transformer.layers.0.attention.qkv.weights_scaling_factor"] == largest


def test_qkv_of_a_rank_is_its_own_heads_one_kind_after_the_other(tmp_path: Path) -> None:
    source = read_file(FAMILIES / "qwen2" / "model.safetensors")
    config = json.loads((FAMILIES / "qwen2" / "config.json").read_text())
    _, ranks = read_ranks(written(FAMILIES / "qwen2", Mapping(tp=2), tmp_path / "out"))
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    q, k, v = (source[f"model.layers.0.self_attn.{kind}_proj.weight"] for kind in "qkv")
    half, kv = len(q) // 2, config["num_key_value_heads"] * head
    second = [part[kv // 2 :] if config["num_key_value_heads"] > 1 else part for part in (k, v)]
    wanted = np.concatenate([q[half:], *second])
    np.testing.assert_array_equal(ranks[1]["transformer.layers.0.attention.qkv.weight"], wanted)


def test_fc_is_the_gate_and_gate_is_the_up_projection(tmp_path: Path) -> None:
    source = read_file(FAMILIES / "llama" / "model.safetensors")
    _, (rank,) = read_ranks(written(FAMILIES / "llama", Mapping(), tmp_path / "out"))
    np.testing.assert_array_equal(
        rank["transformer.layers.1.mlp.fc.weight"], source["model.layers.1.mlp.gate_proj.weight"]
    )
    np.testing.assert_array_equal(
        rank["transformer.layers.1.mlp.gate.weight"], source["model.layers.1.mlp.up_proj.weight"]
    )


def test_each_pipeline_rank_counts_its_layers_from_zero_and_holds_only_its_end(tmp_path: Path) -> None:
    _, (first, last) = read_ranks(written(FAMILIES / "llama", Mapping(pp=2), tmp_path / "out"))
    assert {name.split(".")[2] for name in first if ".layers." in name} == {"0"}
    assert {name.split(".")[2] for name in last if ".layers." in name} == {"0"}
    assert "transformer.vocab_embedding.weight" in first
    assert "transformer.vocab_embedding.weight" not in last
    assert "lm_head.weight" in last  # tied to the embedding, written all the same
    assert not {"lm_head.weight", "transformer.ln_f.weight"} & set(first)


def test_an_odd_vocabulary_is_padded_with_zeros(tmp_path: Path) -> None:
    tensors = read_file(FAMILIES / "mistral" / "model.safetensors")
    config = json.loads((FAMILIES / "mistral" / "config.json").read_text())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:-1]
    source = save(tmp_path / "odd", config | {"vocab_size": config["vocab_size"] - 1}, tensors)
    found, ranks = read_ranks(written(source, Mapping(tp=2), tmp_path / "out"))
    assert found["vocab_size"] == config["vocab_size"] - 1
    assert sum(len(rank["lm_head.weight"]) for rank in ranks) == config["vocab_size"]
    np.testing.assert_array_equal(merge(tmp_path / "out")[1]["lm_head.weight"], tensors["lm_head.weight"])


def mixtral(place: Path, *, fp8: bool) -> Path:
    random = np.random.default_rng(5)
    hidden, inner, experts, vocab = 16, 24, 4, 40
    config = {
        "architectures": ["MixtralForCausalLM"], "hidden_size": hidden, "intermediate_size": inner, "vocab_size": vocab,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": experts,
        "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 64,
    }  # fmt: skip
    tensors: Tensors = {}

    def matrix(name: str, *shape: int, linear: bool = True) -> None:
        values = random.normal(0, 0.3, shape).astype(np.float32)
        if fp8 and linear:
            scale = np.float32(np.abs(values).max() / 448)
            tensors[f"{name}.weight_scale"], tensors[f"{name}.input_scale"] = (
                scale.reshape(()),
                np.float32(0.1).reshape(()),
            )
            values = (values / scale).astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{name}.weight"] = values

    matrix("model.embed_tokens", vocab, hidden, linear=False)
    matrix("lm_head", vocab, hidden, linear=False)
    tensors["model.norm.weight"] = np.ones(hidden, np.float32)
    for layer in range(2):
        name = f"model.layers.{layer}."
        for kind in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}{kind}.weight"] = np.ones(hidden, np.float32)
        for kind, rows in (("q", hidden), ("k", hidden // 2), ("v", hidden // 2), ("o", hidden)):
            matrix(f"{name}self_attn.{kind}_proj", rows, hidden)
        matrix(f"{name}block_sparse_moe.gate", experts, hidden, linear=False)
        for expert in range(experts):
            for kind, shape in (("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden))):
                matrix(f"{name}block_sparse_moe.experts.{expert}.{kind}", *shape)
    if fp8:
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": None}
    return save(place, config, tensors)


@pytest.mark.parametrize("mapping", [*MAPPINGS, Mapping(tp=2, moe_ep=2), Mapping(tp=2, pp=2, moe_ep=2)], ids=str)
def test_experts_come_back_whole_however_they_are_spread(mapping: Mapping, tmp_path: Path) -> None:
    source = mixtral(tmp_path / "hf", fp8=False)
    config, found = merge(written(source, mapping, tmp_path / "out"))
    assert config["moe"] == {
        "num_experts": 4, "shared_expert_intermediate_size": 0, "top_k": 2, "normalization_mode": 1,
    }  # fmt: skip
    assert config["hidden_act"] == "swiglu"
    plain = read_file(source / "model.safetensors")
    assert set(found) == set(plain)
    for name, values in plain.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


@pytest.mark.parametrize("mapping", [Mapping(), Mapping(tp=2), Mapping(tp=2, moe_ep=2)], ids=str)
def test_fp8_experts_have_a_scale_each(mapping: Mapping, tmp_path: Path) -> None:
    source = mixtral(tmp_path / "hf", fp8=True)
    config, found = merge(written(source, mapping, tmp_path / "out"))
    _, ranks = read_ranks(tmp_path / "out")
    local = 4 // mapping.moe_ep
    assert ranks[0]["transformer.layers.0.mlp.fc.weights_scaling_factor"].shape == (local, 1)
    plain = read_file(source / "model.safetensors")
    wanted = {
        name: values.astype(np.float32) * plain.get(f"{name.removesuffix('weight')}weight_scale", np.float32(1))
        for name, values in plain.items()
        if name.endswith(".weight")
    }
    ids = [1, 7, 30, 12, 5, 39]
    # gate and up of an expert have scales of their own in the source: one of them was rounded again.
    assert distance(logits(config, found, ids), logits(config, wanted, ids)) < 0.1
    down = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    np.testing.assert_array_equal(found[down], wanted[down])


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (Mapping(tp=3), "num_attention_heads is 2; tensor parallelism 3"),
        (Mapping(pp=3), "pipeline parallelism is 3; the model has 2 layers"),
        (Mapping(tp=2, moe_ep=2), "expert parallelism is 2; it must divide the 0 experts"),
    ],
)
def test_a_mapping_that_cuts_through_something_is_refused(mapping: Mapping, message: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=message):
        written(FAMILIES / "llama", mapping, tmp_path / "out")


def test_latent_attention_is_sent_to_the_other_target(tmp_path: Path) -> None:
    shutil.copytree(FAMILIES / "llama", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"architectures": ["DeepseekV3ForCausalLM"]}))
    with pytest.raises(BuildError, match=r"DeepseekV3ForCausalLM has no TensorRT-LLM checkpoint.*Target llmapi"):
        written(tmp_path / "hf", Mapping(), tmp_path / "out")


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    source = fp8_of("llama", tmp_path / "fp8")
    tensors = read_file(source / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.input_scale"]
    broken = save(tmp_path / "broken", json.loads((source / "config.json").read_text()), tensors)
    with pytest.raises(BuildError, match=r"model\.layers\.1\.mlp\.up_proj\.input_scale is missing"):
        written(broken, Mapping(), tmp_path / "out")
