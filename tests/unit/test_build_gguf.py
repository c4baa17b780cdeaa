"""A GGUF file becomes the Hugging Face checkpoint that it was made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from build_engines.checkpoint import Checkpoint, end_ids
from build_engines.progress import Silent
from build_engines.sources.gguf import GGUFSource
from build_engines.sources.gguf_rope import llama3_factors
from python_backend.errors import BuildError
from tests.unit.tiny_models import tiny_config, tiny_tensors, tiny_tokenizer, write_gguf

Kind = gguf.GGMLQuantizationType


def convert(path: Path) -> Path:
    directory = path.with_suffix(".hf")
    directory.mkdir()
    GGUFSource(path).write(directory, Silent())
    Checkpoint(directory).verify(Silent())
    return directory


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_family_comes_back_bit_for_bit(tmp_path: Path, architecture: str, tied: bool) -> None:
    config = tiny_config(architecture, tie_word_embeddings=tied)
    tensors = tiny_tensors(config)
    directory = convert(write_gguf(tmp_path / "m.gguf", config, tensors))
    loaded = load_file(directory / "model.safetensors")
    assert set(loaded) == set(tensors)
    for name, values in tensors.items():
        np.testing.assert_array_equal(loaded[name].astype(np.float32), values, err_msg=name)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_block_formats_are_dequantised(tmp_path: Path, kind: Any) -> None:
    config = tiny_config("Qwen3ForCausalLM")
    tensors = tiny_tensors(config)
    loaded = load_file(convert(write_gguf(tmp_path / "m.gguf", config, tensors, kind)) / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    expected = gguf.quants.dequantize(gguf.quants.quantize(tensors[name], kind), kind).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(loaded[name], expected)


def test_k_quants_are_dequantised(tmp_path: Path) -> None:
    # The gguf package reads K-quants and does not write them: the blocks here are random bytes with sane scales.
    config = tiny_config("Qwen3ForCausalLM", hidden_size=256, intermediate_size=256, head_dim=64)
    path = write_gguf(tmp_path / "m.gguf", config, tiny_tensors(config), Kind.Q8_0)
    rng = np.random.default_rng(3)
    block, size = gguf.GGML_QUANT_SIZES[Kind.Q6_K]
    raw = rng.integers(0, 256, (256, 256 // block * size), dtype=np.uint8)
    raw[:, -2:] = np.array([0.01], np.float16).view(np.uint8)
    values = gguf.quants.dequantize(raw, Kind.Q6_K)
    source = GGUFSource(path)
    tensor = source._tensors["blk.0.ffn_up.weight"]
    source._tensors["blk.0.ffn_up.weight"] = tensor._replace(data=raw, tensor_type=Kind.Q6_K)
    (tmp_path / "hf").mkdir()
    source.write(tmp_path / "hf", Silent())
    loaded = load_file(tmp_path / "hf" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    np.testing.assert_array_equal(loaded, values.astype(ml_dtypes.bfloat16))


def test_config_says_what_the_metadata_says(tmp_path: Path) -> None:
    config = tiny_config("LlamaForCausalLM", rms_norm_eps=1e-6, rope_theta=500000.0)
    directory = convert(write_gguf(tmp_path / "m.gguf", config, tiny_tensors(config)))
    written = json.loads((directory / "config.json").read_text())
    assert {key: written[key] for key in config} == config
    assert written["rope_scaling"] is None


def test_tokenizer_end_ids_and_chat_template_come_along(tmp_path: Path) -> None:
    config = tiny_config()
    directory = convert(write_gguf(tmp_path / "m.gguf", config, tiny_tensors(config)))
    text = "def  f(x):\n\t你好 <|im_start|>naïve 🎉"
    ours = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert ours.encode(text).ids == tiny_tokenizer().encode(text).ids
    assert end_ids(directory) == [2, 0]
    assert json.loads((directory / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages[0].content }}"


def test_llama3_scaling_is_recognised_by_its_factors(tmp_path: Path) -> None:
    config = tiny_config(rope_theta=500000.0)
    factors = llama3_factors(config["head_dim"], 500000.0, 32.0)
    assert factors[0] == 1.0
    assert factors[-1] == 32.0
    tensors = tiny_tensors(config)
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", config, tensors))
    source._tensors["rope_freqs.weight"] = source._tensors["output_norm.weight"]._replace(data=factors)
    assert source._config()["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def broken(tmp_path: Path, change: str) -> Path:
    config = tiny_config()
    tensors = tiny_tensors(config)
    if change == "missing":
        del tensors["model.layers.1.mlp.up_proj.weight"]
    elif change == "shape":
        tensors["model.layers.0.self_attn.v_proj.weight"] = np.zeros((64, 64), np.float32)
    elif change == "nan":
        tensors["model.norm.weight"] = np.full(64, np.nan, np.float32)
    elif change == "extra":
        tensors["model.layers.0.self_attn.q_norm.weight"] = np.zeros(16, np.float32)
    return write_gguf(tmp_path / "m.gguf", config, tensors, **({"expert_count": 8} if change == "experts" else {}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("missing", r"m\.gguf: tensor blk\.1\.ffn_up\.weight is missing"),
        ("shape", r"m\.gguf: tensor blk\.0\.attn_v\.weight has shape \[64, 64\]; the metadata asks for \[32, 64\]"),
        ("nan", r"m\.gguf: tensor output_norm\.weight holds NaN"),
        ("extra", r"m\.gguf: tensor blk\.0\.attn_q_norm\.weight has no place in LlamaForCausalLM"),
        ("experts", r"m\.gguf: llama with experts is not supported"),
    ],
)
def test_a_broken_file_is_refused_with_file_tensor_and_reason(tmp_path: Path, change: str, reason: str) -> None:
    path = broken(tmp_path, change)
    with pytest.raises(BuildError, match=reason):
        convert(path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9])
def test_a_truncated_file_is_refused(tmp_path: Path, share: float) -> None:
    config = tiny_config()
    path = write_gguf(tmp_path / "m.gguf", config, tiny_tensors(config))
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(BuildError, match=r"m\.gguf: not a whole GGUF file"):
        GGUFSource(path)


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(BuildError, match=r"architecture mamba is not supported; supported: llama, qwen2, qwen3"):
        GGUFSource(tmp_path / "m.gguf")
