"""The demo model as a TensorRT-LLM checkpoint in FP8, read back by a reader of its own: its answers stay the same.

Here, not among the unit tests, because it reads a model of 135 million parameters.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from build_engines.build import Build
from build_engines.checkpoint import Checkpoint
from build_engines.progress import Silent
from build_engines.quantize import write_fp8_checkpoint
from build_engines.spec import load_spec
from build_engines.trtllm.checkpoint_writer import write_trtllm_checkpoint
from build_engines.trtllm.mapping import Mapping
from tests.server.launched import ROOT
from tests.unit.test_trtllm_checkpoint import save
from tests.unit.trtllm_reader import logits, merge, read_file

SPEC = ROOT / "build_engines" / "specs" / "smollm2-135m.yaml"
TEXT = "Water boils at one hundred degrees, and it freezes at"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model in Hugging Face's layout and, beside it, in FP8."""
    place = tmp_path_factory.mktemp("demo")
    (place / "hf").symlink_to(Build(load_spec(SPEC), ROOT / "engines", Silent()).run().root / "checkpoint")
    quantized(place / "hf", place / "fp8")
    return place


def quantized(plain: Path, place: Path) -> Path:
    """The checkpoint in FP8; the ranges of activations are not used here."""
    place.mkdir()
    source = Checkpoint(plain)
    linears = [name.removesuffix(".weight") for name in source.tensors if name.endswith("_proj.weight")]
    ranges = dict.fromkeys(linears, 8.0) | {f"{name}.out": 8.0 for name in linears}
    write_fp8_checkpoint(source, ranges, place, Silent())
    return place


@pytest.fixture(scope="module")
def reference(demo: Path) -> tuple[list[int], np.ndarray]:
    """Token ids of TEXT, and the logits that the 16-bit checkpoint gives."""
    ids: list[int] = Tokenizer.from_file(str(demo / "hf" / "tokenizer.json")).encode(TEXT).ids
    place = demo / "plain"
    place.mkdir()
    write_trtllm_checkpoint(Checkpoint(demo / "hf"), Mapping(), place, Silent())
    config, tensors = merge(place)
    plain = read_file(demo / "hf" / "model.safetensors")
    for name, values in plain.items():
        np.testing.assert_array_equal(tensors[name], values.astype(np.float32), err_msg=name)
    return ids, logits(config, tensors, ids)


# Its 9 heads and 3 heads of keys and values cannot be cut in two: three is its tensor parallelism.
@pytest.mark.parametrize("mapping", [Mapping(), Mapping(tp=3), Mapping(pp=2)], ids=str)
def test_the_merged_fp8_ranks_answer_as_the_model_does(
    mapping: Mapping, demo: Path, reference: tuple[list[int], np.ndarray], tmp_path: Path
) -> None:
    answers_alike(demo / "fp8", mapping, reference, tmp_path)


@pytest.fixture(scope="module")
def widened(demo: Path) -> Path:
    """The demo model in FP8 with 12 and 4 heads in place of 9 and 3: what the new ones see, `o_proj` throws away."""
    plain = read_file(demo / "hf" / "model.safetensors")
    random = np.random.default_rng(3)
    for name, values in plain.items():
        kind = name.split(".")[-2]
        if kind in ("q_proj", "k_proj", "v_proj"):
            more = random.normal(0, 0.02, (len(values) // 3, values.shape[1])).astype(values.dtype)
            plain[name] = np.concatenate([values, more])
        elif kind == "o_proj":
            plain[name] = np.concatenate([values, np.zeros_like(values[:, :192])], 1)
    config = json.loads((demo / "hf" / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    save(demo / "wide", config | {"num_attention_heads": 12, "num_key_value_heads": 4}, plain)
    return quantized(demo / "wide", demo / "wide-fp8")


def test_a_demo_model_with_more_heads_answers_alike_when_they_are_cut_in_two(
    widened: Path, reference: tuple[list[int], np.ndarray], tmp_path: Path
) -> None:
    answers_alike(widened, Mapping(tp=2), reference, tmp_path)


def answers_alike(source: Path, mapping: Mapping, reference: tuple[list[int], np.ndarray], place: Path) -> None:
    ids, wanted = reference
    write_trtllm_checkpoint(Checkpoint(source), mapping, place, Silent())
    stated = json.loads((place / "config.json").read_text())
    assert stated["mapping"]["world_size"] == mapping.world_size
    config, tensors = merge(place)
    found = logits(config, tensors, ids)
    cosine = (found * wanted).sum(-1) / np.linalg.norm(found, axis=-1) / np.linalg.norm(wanted, axis=-1)
    assert cosine.min() > 0.98
    agree = (found.argmax(-1) == wanted.argmax(-1)).mean()
    assert agree >= 0.75, agree
