"""FP8 checkpoints: the layout that TensorRT-LLM loads, scales that fit, and a gate on quality."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from build_engines.architectures import LINEAR_NAMES, linear_names
from build_engines.checkpoint import Checkpoint
from build_engines.progress import Silent
from build_engines.quality import CALIBRATION_TEXT, QUALITY_TEXT, Quality, token_batches, token_ids
from build_engines.quantize import E4M3_MAX, scale_of, to_e4m3, write_fp8_checkpoint
from build_engines.safetensors_file import TensorEntry, read_entries
from build_engines.targets.cpu import collect_amax, measure_quality
from python_backend.errors import BuildError
from tests.unit.tiny_models import tiny_config, tiny_tensors, write_hf


def amax_of(config: dict[str, Any], value: float = 3.0, kv: float = 900.0) -> dict[str, float]:
    linears = linear_names(config)
    outputs = [f"{name}.out" for name in linears if name.endswith(("k_proj", "v_proj"))]
    return dict.fromkeys(linears, value) | dict.fromkeys(outputs, kv)


def quantised(tmp_path: Path, architecture: str = "LlamaForCausalLM", **amax: float) -> tuple[Path, Path]:
    config = tiny_config(architecture)
    source = write_hf(tmp_path / "bf16", config, tiny_tensors(config))
    target = tmp_path / "fp8"
    target.mkdir()
    write_fp8_checkpoint(Checkpoint(source), amax_of(config, **amax), target, Silent())
    return source, target


def entries(directory: Path) -> dict[str, TensorEntry]:
    return read_entries(directory / "model.safetensors")


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_every_linear_has_fp8_weights_and_float32_scales_and_nothing_else_changed(
    tmp_path: Path, architecture: str
) -> None:
    source, target = quantised(tmp_path, architecture)
    before, after = entries(source), entries(target)
    linears = linear_names(tiny_config(architecture))
    assert len(linears) == 2 * len(LINEAR_NAMES)
    expected = set(before)
    for linear in linears:
        assert after[f"{linear}.weight"].dtype == "F8_E4M3"
        scales = {f"{linear}.weight_scale", f"{linear}.input_scale"}
        scales |= {f"{linear}.k_scale"} if linear.endswith("k_proj") else set()
        scales |= {f"{linear}.v_scale"} if linear.endswith("v_proj") else set()
        assert {(after[name].dtype, after[name].shape) for name in scales} == {("F32", ())}
        expected |= scales
    assert set(after) == expected
    for name in set(before) - {f"{linear}.weight" for linear in linears}:
        assert after[name].dtype == "BF16"
        np.testing.assert_array_equal(after[name].read(), before[name].read())


def test_scales_put_the_largest_value_on_the_largest_code(tmp_path: Path) -> None:
    source, target = quantised(tmp_path)
    before, after = entries(source), entries(target)
    name = "model.layers.1.mlp.down_proj"
    weights = before[f"{name}.weight"].read().astype(np.float32)
    scale = float(after[f"{name}.weight_scale"].read())
    assert scale == pytest.approx(np.abs(weights).max() / 448)
    codes = after[f"{name}.weight"].read().astype(np.float32)
    assert np.abs(codes).max() == E4M3_MAX
    np.testing.assert_allclose(codes * scale, weights, rtol=1 / 16, atol=scale * 2**-10)
    assert float(after[f"{name}.input_scale"].read()) == pytest.approx(3.0 / 448)


def test_matrices_that_a_gpu_fuses_share_their_scales(tmp_path: Path) -> None:
    _, target = quantised(tmp_path)
    after = entries(target)
    for group in (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["mlp.gate_proj", "mlp.up_proj"]):
        for kind in ("weight_scale", "input_scale"):
            assert len({float(after[f"model.layers.0.{name}.{kind}"].read()) for name in group}) == 1


@pytest.mark.parametrize(("kv", "expected"), [(900.0, 900 / 448), (20.0, 1.0), (0.0, 1.0)])
def test_cache_scales_are_never_under_one(tmp_path: Path, kv: float, expected: float) -> None:
    _, target = quantised(tmp_path, kv=kv)
    after = entries(target)
    assert float(after["model.layers.0.self_attn.k_proj.k_scale"].read()) == pytest.approx(expected)
    assert float(after["model.layers.1.self_attn.v_proj.v_scale"].read()) == pytest.approx(expected)


def test_both_configs_name_the_quantisation(tmp_path: Path) -> None:
    source, target = quantised(tmp_path)
    quantization = json.loads((target / "hf_quant_config.json").read_text())["quantization"]
    assert quantization == {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    config = json.loads((target / "config.json").read_text())
    stated = config.pop("quantization_config")
    assert stated["quant_method"] == "modelopt"
    assert stated.items() >= quantization.items()
    assert config == json.loads((source / "config.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (target / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_a_range_that_is_no_number_is_refused(tmp_path: Path, value: Any) -> None:
    config = tiny_config()
    source = write_hf(tmp_path, config, tiny_tensors(config))
    amax = amax_of(config) | {"model.layers.0.mlp.up_proj": value}
    (tmp_path / "fp8").mkdir()
    with pytest.raises(BuildError, match=r"range of model\.layers\.0\.mlp\.up_proj"):
        write_fp8_checkpoint(Checkpoint(source), amax, tmp_path / "fp8", Silent())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20))
def test_rounding_is_finite_and_within_half_a_step(values: list[float]) -> None:
    array = np.array(values, np.float32)
    assume(not 0 < np.abs(array).max() < 1e-30)  # no float32 scale is that small
    scale = scale_of(float(np.abs(array).max()))
    codes = to_e4m3(array, scale)
    assert codes.dtype == ml_dtypes.float8_e4m3fn
    back = codes.astype(np.float32) * np.float32(scale)
    assert np.isfinite(back).all()
    # Three bits of mantissa: half a step is 1/16 of the value, or of the smallest normal number below it.
    limit = np.maximum(np.abs(array), 2**-6 * scale) / 16 * 1.001
    assert (np.abs(back - array) <= limit).all()


def test_values_outside_the_range_become_the_largest_and_never_nan() -> None:
    np.testing.assert_array_equal(
        to_e4m3(np.array([1e6, -1e6, 449.0], np.float32), 1.0).astype(np.float32), [448.0, -448.0, 448.0]
    )


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("scale", [0.00037, 1.0, 3.0])
def test_many_values_are_rounded_as_few_are(dtype: type, scale: float) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    many = np.random.default_rng(1).permutation(np.tile(every, 4)).reshape(512, 512)
    with np.errstate(all="ignore"):  # NaN and infinity are among them
        one_by_one = np.concatenate([to_e4m3(part, scale) for part in many])
    found = to_e4m3(many, scale)
    assert found.shape == many.shape
    np.testing.assert_array_equal(found.view(np.uint8), one_by_one.reshape(many.shape).view(np.uint8))


def test_the_gate_passes_under_the_limit_and_stops_over_it() -> None:
    Quality("t", 100, 20.0, 20.2, 20.9, max_increase=0.05).check()
    Quality("t", 100, 20.0, 19.0, 19.5, max_increase=0.05).check()
    for weights, both in ((20.2, 21.1), (21.1, 20.2), (20.0, float("nan"))):
        with pytest.raises(BuildError, match=r"FP8 costs too much quality: perplexity on t .*allowed \+5\.0%"):
            Quality("t", 100, 20.0, weights, both, max_increase=0.05).check()


def test_shipped_texts_are_long_enough_and_share_no_sentence() -> None:
    calibration, quality = CALIBRATION_TEXT.read_text(), QUALITY_TEXT.read_text()
    assert len(quality) > 5000
    sentences = [sentence.strip() for sentence in quality.split(".") if len(sentence) > 20]
    assert not [sentence for sentence in sentences if sentence in calibration]


def test_calibration_runs_windows_up_to_the_limit(tmp_path: Path) -> None:
    config = tiny_config()
    tokenizer = write_hf(tmp_path, config, tiny_tensors(config)) / "tokenizer.json"
    batches = token_batches(CALIBRATION_TEXT, tokenizer, 1100)
    assert [len(batch) for batch in batches] == [512, 512, 76]
    assert [token for batch in batches for token in batch] == token_ids(CALIBRATION_TEXT, tokenizer, 1100)
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(BuildError, match=r"short\.txt: \d+ tokens of text are too few"):
        token_ids(tmp_path / "short.txt", tokenizer, 100)


def test_a_tiny_model_is_calibrated_and_scored_by_running_it(tmp_path: Path) -> None:
    config = tiny_config(num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    source = write_hf(tmp_path / "bf16", config, tiny_tensors(config))
    ids = token_ids(QUALITY_TEXT, source / "tokenizer.json", 128)
    amax = collect_amax(source, [ids[:64], ids[64:]], Silent())
    assert set(amax) == set(amax_of(config))
    assert all(value > 0 for value in amax.values())
    (tmp_path / "fp8").mkdir()
    write_fp8_checkpoint(Checkpoint(source), amax, tmp_path / "fp8", Silent())
    found = measure_quality(source, tmp_path / "fp8", ids, Silent())
    assert set(found) == {"bf16", "fp8_weights", "fp8"}
    # Random weights know nothing: the perplexity is about the size of the vocabulary, in every precision.
    for value in found.values():
        assert value == pytest.approx(config["vocab_size"], rel=0.3)
    assert found["fp8_weights"] != found["bf16"]
    assert found["fp8"] != found["fp8_weights"]
