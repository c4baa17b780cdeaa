"""Checkpoints are read without torch, written as a stream, and refused when anything is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from build_engines.architectures import FAMILIES
from build_engines.checkpoint import Checkpoint, end_ids
from build_engines.progress import Silent
from build_engines.safetensors_file import TensorPlan, read_entries, write_checkpoint
from build_engines.sources.hf import place_files
from python_backend.errors import BuildError, EnvironmentFault
from tests.unit.tiny_models import Tensors, tiny_config, tiny_tensors, write_hf


def verify(directory: Path) -> None:
    Checkpoint(directory).verify(Silent())


def nothing(_amount: int) -> None:
    pass


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
@pytest.mark.parametrize("shards", [1, 3])
def test_a_whole_checkpoint_passes(tmp_path: Path, architecture: str, shards: int) -> None:
    config = tiny_config(architecture, tie_word_embeddings=shards == 1)
    verify(write_hf(tmp_path, config, tiny_tensors(config), shards))


def test_links_point_at_the_source_and_copies_do_not(tmp_path: Path) -> None:
    config = tiny_config()
    source = write_hf(tmp_path / "source", config, tiny_tensors(config), shards=2)
    (source / "pytorch_model.bin").write_bytes(b"not ours")
    for name, copy in (("links", False), ("copies", True)):
        (tmp_path / name).mkdir()
        place_files(source, tmp_path / name, copy=copy)
        verify(tmp_path / name)
        assert not (tmp_path / name / "pytorch_model.bin").exists()
        assert all(path.is_symlink() is not copy for path in (tmp_path / name).iterdir())


def without(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def replaced(name: str, values: Any) -> Any:
    return lambda tensors: tensors.__setitem__(name, values)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without("model.layers.0.mlp.up_proj.weight"), r"tensor model\.layers\.0\.mlp\.up_proj\.weight is missing"),
        (
            replaced("model.norm.weight", np.ones(65, np.float32)),
            r"model\.safetensors: tensor model\.norm\.weight has shape \[65\]; config\.json asks for \[64\]",
        ),
        (
            replaced("model.norm.weight", np.array([1.0] * 63 + [np.nan], np.float32)),
            r"model\.safetensors: tensor model\.norm\.weight holds NaN or infinity \(element \[63\]\)",
        ),
        (
            replaced("model.norm.weight", np.array([np.inf] + [1.0] * 63, np.float32)),
            r"holds NaN or infinity \(element \[0\]\)",
        ),
        (
            replaced("model.layers.0.self_attn.q_proj.lora_A", np.ones((4, 4), np.float32)),
            r"tensor model\.layers\.0\.self_attn\.q_proj\.lora_A has no place in LlamaForCausalLM",
        ),
    ],
)
def test_wrong_tensors_are_refused_with_file_tensor_and_reason(tmp_path: Path, change: Any, reason: str) -> None:
    config = tiny_config()
    tensors = tiny_tensors(config)
    change(tensors)
    with pytest.raises(BuildError, match=reason):
        verify(write_hf(tmp_path, config, tensors))


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    config = tiny_config()
    directory = write_hf(tmp_path, config, tiny_tensors(config))
    tensors: Tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = np.ones(64, np.int8)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(BuildError, match=r"model\.norm\.weight is I8; supported: BF16, F16, F32"):
        verify(directory)


@pytest.mark.parametrize("kept", [0, 4, 100, -1000, -1])
def test_truncated_weights_are_refused(tmp_path: Path, kept: int) -> None:
    config = tiny_config()
    file = write_hf(tmp_path, config, tiny_tensors(config)) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(BuildError, match=r"model\.safetensors: .*(not a whole safetensors file|truncated)"):
        verify(tmp_path)


def test_a_header_that_is_no_json_is_refused(tmp_path: Path) -> None:
    config = tiny_config()
    file = write_hf(tmp_path, config, tiny_tensors(config)) / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[8:12] = b"\xff\xff\xff\xff"
    file.write_bytes(raw)
    with pytest.raises(BuildError, match="header is not JSON"):
        verify(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["BertModel"]}, "architecture BertModel is not supported; supported: LlamaForCausalLM"),
        ({"architectures": None}, "architecture nothing is not supported"),
        ({"hidden_size": None}, "hidden_size is None; it must be a whole number over 0"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads is 3; it must divide num_attention_heads \(4\)"),
        ({"vocab_size": 300}, r"token ids up to 319; model\.embed_tokens\.weight has 300 rows"),
    ],
)
def test_a_config_that_cannot_be_right_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    config = tiny_config()
    tensors = tiny_tensors(config)
    if "vocab_size" in changes:
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:300]
    with pytest.raises(BuildError, match=reason):
        verify(write_hf(tmp_path, config | changes, tensors))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("config.json", "config.json is missing"),
        ("tokenizer.json", "tokenizer.json is missing"),
        ("model.safetensors", "neither model.safetensors nor"),
    ],
)
def test_a_missing_file_is_named(tmp_path: Path, name: str, reason: str) -> None:
    config = tiny_config()
    source = write_hf(tmp_path / "source", config, tiny_tensors(config))
    (source / name).unlink()
    (tmp_path / "target").mkdir()
    with pytest.raises(BuildError, match=reason):
        place_files(source, tmp_path / "target", copy=False)


def test_a_missing_shard_and_an_index_that_leads_outside_are_refused(tmp_path: Path) -> None:
    config = tiny_config()
    source = write_hf(tmp_path, config, tiny_tensors(config), shards=3)
    (source / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(BuildError, match=r"index names model-00002-of-00003\.safetensors, which is missing"):
        verify(source)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    with pytest.raises(BuildError, match="must lie in the same directory"):
        verify(source)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    config = tiny_config()
    source = write_hf(tmp_path, config, tiny_tensors(config), shards=2)
    first = load_file(source / "model-00001-of-00002.safetensors")
    second = load_file(source / "model-00002-of-00002.safetensors")
    name = next(iter(first))
    save_file(second | {name: first[name]}, source / "model-00002-of-00002.safetensors")
    with pytest.raises(BuildError, match=f"tensor {name} is also in model-00001-of-00002"):
        verify(source)


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ({"eos_token_id": [2, 0]}, {}, {"eos_token": "<|im_end|>"}, [2, 0]),
        ({"eos_token_id": 0}, {"eos_token_id": 1}, {"eos_token": {"content": "<|im_end|>"}}, [2, 0]),
        (None, {"eos_token_id": 1}, {}, [1]),
        (None, {}, {}, []),
    ],
)
def test_end_ids_are_those_of_all_files(
    tmp_path: Path, generation: Any, config: dict[str, Any], tokenizer: dict[str, Any], expected: list[int]
) -> None:
    write_hf(tmp_path, tiny_config(**config), tiny_tensors(tiny_config()))
    (tmp_path / "generation_config.json").unlink()
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert end_ids(tmp_path) == expected


DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I64": np.int64, "U8": np.uint8}
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
SPECS = st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES), min_size=1, max_size=6)


@settings(max_examples=50, deadline=None)
@given(specs=SPECS, shard=st.integers(1, 200))
def test_written_files_read_back_equal_here_and_with_the_library(
    tmp_path_factory: pytest.TempPathFactory, specs: list[tuple[str, tuple[int, ...]]], shard: int
) -> None:
    rng = np.random.default_rng(0)
    directory = tmp_path_factory.mktemp("st")
    values = [(kind, rng.integers(0, 100, shape).astype(DTYPES[kind])) for kind, shape in specs]
    arrays = {f"t{i}": value for i, value in enumerate(values)}
    plans = [TensorPlan(n, kind, a.shape, lambda a=a: a) for n, (kind, a) in arrays.items()]  # type: ignore[misc]
    write_checkpoint(directory, plans, nothing, shard_bytes=shard)
    files = sorted(directory.glob("*.safetensors"))
    library = {name: value for file in files for name, value in load_file(file).items()}
    ours = {name: entry.read() for file in files for name, entry in read_entries(file).items()}
    assert set(library) == set(ours) == set(arrays)
    for name, (_, array) in arrays.items():
        np.testing.assert_array_equal(ours[name], array)
        np.testing.assert_array_equal(library[name], array)
        assert ours[name].dtype == library[name].dtype == array.dtype


def test_a_disk_without_room_is_told_before_writing(tmp_path: Path) -> None:
    plan = TensorPlan("t", "F32", (1 << 40, 1 << 10), lambda: np.zeros(()))
    with pytest.raises(EnvironmentFault, match=r"the weights need [\d,]+ bytes, the disk has [\d,]+ free"):
        write_checkpoint(tmp_path, [plan], nothing)
    assert not list(tmp_path.iterdir())
