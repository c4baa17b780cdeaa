"""The arithmetic of plans: answers known from elsewhere, published totals, and the engine's own count."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from build_engines.plan.adapters import adapter_bytes
from build_engines.plan.engine_plan import EnginePlan
from build_engines.plan.formats import WEIGHT_FORMATS
from build_engines.plan.hardware import CARDS
from build_engines.plan.kv_cache import kv_bytes_of_twin, kv_bytes_per_token
from build_engines.plan.memory import CardMemory
from build_engines.plan.model_shape import ModelShape
from build_engines.plan.picture import memory_picture
from build_engines.plan.report import report
from build_engines.plan.roofline import Roofline
from build_engines.plan.source_config import source_config
from build_engines.plan.suggestion import Demand, Refusal, Suggestion, suggest
from build_engines.plan.transfer import ColdStart, HandOver
from build_engines.plan.weights import quantize_peak_bytes, weight_bytes, weights_by_kind, weights_on_card
from build_engines.spec import load_spec
from python_backend.errors import BuildError

ROOT = Path(__file__).parents[2]
SPECS = ROOT / "build_engines" / "specs"
SHAPES = ROOT / "build_engines" / "shapes"
FAMILIES = ROOT / "tests" / "data" / "families"


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((SHAPES / name / "config.json").read_text())
    return config


def shape_of(name: str, **changes: Any) -> ModelShape:
    return ModelShape.of(config_of(name) | changes, name)


def plan_of(spec: Path) -> EnginePlan:
    loaded = load_spec(spec)
    return EnginePlan.of(loaded, *source_config(loaded))


def changed_spec(directory: Path, name: str, *replacements: tuple[str, str]) -> Path:
    text = (SPECS / f"{name}.yaml").read_text().replace("../shapes", str(SHAPES))
    for old, new in replacements:
        assert old in text, old
        text = text.replace(old, new)
    path = directory / "changed.yaml"
    path.write_text(text)
    return path


def test_kv_bytes_per_token_of_a_70b_and_its_twins() -> None:
    llama = shape_of("llama-3.3-70b")
    assert kv_bytes_per_token(llama, 16) == 327_680
    assert kv_bytes_per_token(llama, 8) == 163_840
    assert kv_bytes_per_token(shape_of("llama-3.3-70b", num_key_value_heads=64), 16) == 2_621_440
    assert kv_bytes_per_token(shape_of("llama-3.3-70b", num_key_value_heads=1), 16) == 40_960
    assert kv_bytes_of_twin(llama, 16, 64) == 2_621_440
    assert round(100_000 * 327_680 / 1e9, 1) == 32.8
    assert 131_072 * kv_bytes_per_token(llama, 16) == 40 << 30


def test_attention_is_named_by_its_heads() -> None:
    assert shape_of("llama-3.3-70b").attention == "GQA"
    assert shape_of("llama-3.3-70b", num_key_value_heads=64).attention == "MHA"
    assert shape_of("llama-3.3-70b", num_key_value_heads=1).attention == "MQA"
    assert shape_of("deepseek-v3").attention == "MLA"


def test_latent_attention_is_a_ratio_to_its_own_twins() -> None:
    deepseek = shape_of("deepseek-v3")
    assert kv_bytes_per_token(deepseek, 16) == 61 * (512 + 64) * 2 == 70_272
    assert kv_bytes_of_twin(deepseek, 16, 128) == 4_997_120
    assert round(4_997_120 / 70_272) == 71
    assert round(kv_bytes_of_twin(deepseek, 16, 8) / 70_272, 1) == 4.4
    # The latent is not cut by tensor parallelism.
    assert kv_bytes_per_token(deepseek, 16, tp=8) == 70_272


def test_kv_heads_are_cut_by_tp_until_there_is_one_a_card() -> None:
    llama = shape_of("llama-3.3-70b")
    assert kv_bytes_per_token(llama, 16, tp=4) == 327_680 // 4
    assert kv_bytes_per_token(llama, 16, tp=8) == kv_bytes_per_token(llama, 16, tp=16) == 327_680 // 8
    assert kv_bytes_per_token(llama, 16, tp=1, pp=3) == 27 * 2 * 8 * 128 * 2  # 27 + 27 + 26 layers


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("llama-3.1-8b", 8_030_261_248, 8_030_261_248),
        ("llama-3.3-70b", 70_553_706_496, 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800, 405_853_388_800),
        ("llama-3.2-1b", 1_235_814_400, 1_235_814_400),
        ("qwen2.5-7b", 7_615_616_512, 7_615_616_512),
        ("qwen2.5-32b", 32_763_876_352, 32_763_876_352),
        ("mixtral-8x7b", 46_702_792_704, 12_879_925_248),
    ],
)
def test_parameters_are_those_of_the_published_weights(name: str, total: int, active: int) -> None:
    parameters = shape_of(name).parameters
    assert (parameters.total, parameters.active) == (total, active)


def test_a_model_of_256_experts_has_671_billion_parameters_and_37_active() -> None:
    parameters = shape_of("deepseek-v3").parameters
    assert round(parameters.total / 1e9) == 671
    assert int(parameters.active / 1e9) == 37
    assert round(100 * 49e9 / 1.6e12, 1) == 3.1  # the share as the report rounds it


def test_a_draft_model_takes_memory_of_its_own(tmp_path: Path) -> None:
    name = "llama-3.3-70b-h100-tp4-draft"
    plan = plan_of(SPECS / f"{name}.yaml")
    memory, alone = plan.memory(), EnginePlan(plan.spec, plan.shape).memory()
    weights = memory.weights - alone.weights
    assert weights == weights_on_card(shape_of("llama-3.2-1b"), WEIGHT_FORMATS["FP8"], tp=4)
    assert memory.kv_bytes_per_token - alone.kv_bytes_per_token == 2 * 16 * 2 * 64 * 2  # of 8 heads, 2
    assert memory.max_tokens < alone.max_tokens
    assert report(plan)["weights"]["draft_model_bytes"] > 1.2e9
    other = changed_spec(tmp_path, name, (f"{SHAPES}/llama-3.2-1b", f"{SHAPES}/smollm2-135m"))
    with pytest.raises(BuildError, match=r"draft_shape: has a vocabulary of 49152 tokens, the model one of 128256"):
        plan_of(other)


def test_what_was_seen_to_go_wrong_is_said(tmp_path: Path) -> None:
    (text,) = report(plan_of(SPECS / "llama-3.1-8b-h100.yaml"))["warnings"]
    assert "reuse of prefixes" in text
    assert "issue 2699" in text
    limits = ("max_beam_width: 1", "max_beam_width: 1\n  enable_kv_cache_reuse: false")
    assert report(plan_of(changed_spec(tmp_path, "llama-3.1-8b-h100", limits)))["warnings"] == []
    cache = ("kv_cache_quant_algo: null", "kv_cache_quant_algo: FP8")
    assert "Qwen2.5" in report(plan_of(changed_spec(tmp_path, "qwen2.5-7b-h100", cache, limits)))["warnings"][0]
    assert report(plan_of(SPECS / "smollm2-135m.yaml"))["warnings"] == []
    named = ("  max_rank: 32", "  max_rank: 32\n  adapters: {style: /adapters/style}")
    assert report(plan_of(changed_spec(tmp_path, "llama-3.1-8b-h100", named, limits)))["warnings"] == []
    llmapi = ("target: trtllm", "target: llmapi")
    (text,) = report(plan_of(changed_spec(tmp_path, "llama-3.1-8b-h100", named, limits, llmapi)))["warnings"]
    assert text.startswith("adapters are not known by name on target llmapi")


def test_weights_at_16_and_8_bit() -> None:
    assert weight_bytes(70 * 10**9, 16) == 140 * 10**9
    assert weight_bytes(70 * 10**9, 8) == 70 * 10**9
    llama = shape_of("llama-3.3-70b")
    whole = sum(weights_by_kind(llama, WEIGHT_FORMATS["NO_QUANT"]).values())
    assert whole == 2 * llama.parameters.total
    quantised = weights_by_kind(llama, WEIGHT_FORMATS["FP8"])
    assert quantised["embedding"] == quantised["lm_head"] == 2 * 128_256 * 8192  # both stay in 16 bit
    assert quantised["mlp"] == 80 * 3 * 8192 * 28672
    assert quantize_peak_bytes(llama) > 210e9


def test_a_card_holds_its_share_and_what_is_not_cut() -> None:
    llama, fp8 = shape_of("llama-3.3-70b"), WEIGHT_FORMATS["FP8"]
    whole, quarter = weights_on_card(llama, fp8), weights_on_card(llama, fp8, tp=4)
    replicated = 2 * 128_256 * 8192 + 2 * llama.parameters.other
    assert quarter == pytest.approx((whole - replicated) / 4 + replicated, abs=2)
    assert weights_on_card(llama, fp8, pp=2) == whole // 2  # embedding and head are of one size


def test_adapters_count_every_module_of_every_layer() -> None:
    llama = shape_of("llama-3.1-8b")
    assert adapter_bytes(llama, ("attn_q",), 8) == 2 * 32 * 8 * (4096 + 4096)
    assert adapter_bytes(llama, ("attn_q", "attn_k"), 8) == 2 * 32 * 8 * (4096 + 4096 + 4096 + 1024)
    mixtral = shape_of("mixtral-8x7b")
    assert adapter_bytes(mixtral, ("moe_gate",), 4) == 2 * 32 * 8 * 4 * (4096 + 14336)


def test_the_kv_cache_holds_whole_blocks() -> None:
    memory = CardMemory(1000, 0, 0, 0, 0, kv_cache=999, kv_bytes_per_token=10, tokens_per_block=32)
    assert memory.max_tokens == 96
    assert memory.sequences_of(32) == 3
    assert memory.sequences_of(33) == 1
    assert memory.sequences_of(97) == 0


def test_uses_of_a_card_add_up_to_its_memory() -> None:
    memory = plan_of(SPECS / "llama-3.1-8b-h100.yaml").memory()
    used = memory.weights + memory.activations + memory.runtime + memory.adapters + memory.kv_cache + memory.unused
    assert used == memory.capacity
    assert memory.unused >= 0


def test_decode_of_one_sequence_is_the_time_to_read_the_weights() -> None:
    roofline = Roofline(shape_of("llama-3.1-8b"), CARDS["h100-sxm"], WEIGHT_FORMATS["NO_QUANT"], 16)
    read = 2 * (8_030_261_248 - 128_256 * 4096)  # of the embedding one row only
    assert roofline.decode_s(1, 0) == pytest.approx(read / 3350e9, rel=1e-4)
    assert roofline.decode_s(1, 8192) == pytest.approx((read + 8192 * 131_072) / 3350e9, rel=1e-4)


def test_prefill_is_bound_by_operations_and_tp_divides_them() -> None:
    llama, fp8 = shape_of("llama-3.3-70b"), WEIGHT_FORMATS["FP8"]
    one = Roofline(llama, CARDS["h100-sxm"], fp8, 8)
    linear = llama.parameters.linear
    assert one.prefill_s(8192) > 2 * linear * 8192 / 1979e12
    assert one.prefill_s(8192) < 1.3 * 2 * linear * 8192 / 1979e12
    four = Roofline(llama, CARDS["h100-sxm"], fp8, 8, tp=4)
    assert one.prefill_s(8192) / 4 < four.prefill_s(8192) < one.prefill_s(8192)


def test_few_tokens_touch_few_experts_and_many_touch_all() -> None:
    mixtral = shape_of("mixtral-8x7b")
    roofline = Roofline(mixtral, CARDS["h100-sxm"], WEIGHT_FORMATS["NO_QUANT"], 16)
    experts = 2 * mixtral.parameters.experts
    rest = 2 * (mixtral.parameters.total - mixtral.parameters.experts - mixtral.parameters.embedding)
    assert roofline.weight_bytes_read(1) == pytest.approx(experts / 4 + rest, rel=0.01)
    assert roofline.weight_bytes_read(64) == pytest.approx(experts + rest, rel=0.01)


def test_no_published_throughput_is_over_the_roofline() -> None:
    # NVIDIA's figure for this model, 1000 tokens in and 1000 out, one H100: 15,220 output tokens a second.
    roofline = Roofline(shape_of("llama-3.1-8b"), CARDS["h100-sxm"], WEIGHT_FORMATS["FP8"], 8)
    batch, context = 512, 1500
    step_s = roofline.mixed_s(batch, context, batch)  # as many prompt tokens arrive as answers' tokens leave
    assert 15_220 < batch / step_s < 4 * 15_220


def test_hand_over_and_cold_start_take_bytes_over_speed() -> None:
    payload = 8192 * kv_bytes_per_token(shape_of("llama-3.3-70b"), 16)
    assert round(payload / 1e9, 2) == 2.68
    assert round(HandOver(8192, payload, 100).seconds, 2) == 0.21
    assert round(HandOver(8192, payload, 400).seconds, 2) == 0.05
    assert round(ColdStart(140 * 10**9, 0, 3e9, 64e9).seconds) == 47
    assert round(ColdStart(140 * 10**9, 0, 0.5e9, 64e9).seconds) == 280


DEMAND = Demand(input_tokens=1000, output_tokens=300, requests_per_s=20, ttft_s=0.5, itl_s=0.02)


def suggestion_for(demand: Demand) -> Suggestion | Refusal:
    plan = plan_of(SPECS / "llama-3.1-8b-h100.yaml")
    return suggest(demand, plan.roofline(), plan.memory(), 131_072)


def test_suggested_limits_carry_the_traffic_they_are_for() -> None:
    found = suggestion_for(DEMAND)
    assert isinstance(found, Suggestion)
    assert found.expected_itl_s <= DEMAND.itl_s
    assert found.expected_ttft_s <= DEMAND.ttft_s
    # Little's law at the step that was found.
    assert found.running_sequences == pytest.approx(20 * 300 * found.expected_itl_s, rel=0.01)
    assert found.max_batch_size >= found.running_sequences
    assert found.max_num_tokens >= found.max_batch_size
    assert found.max_num_tokens % 32 == 0
    assert found.max_seq_len >= DEMAND.sequence_tokens


def test_more_traffic_takes_more_instances_and_an_impossible_promise_none() -> None:
    busy = suggestion_for(Demand(1000, 300, 2000, 0.5, 0.02))
    assert isinstance(busy, Suggestion)
    assert busy.instances > 1
    refused = suggestion_for(Demand(1000, 300, 1, 0.5, 0.0001))
    assert isinstance(refused, Refusal)
    assert "a token" in refused.reason
    refused = suggestion_for(Demand(100_000, 300, 1, 0.001, 0.02))
    assert isinstance(refused, Refusal)
    assert "the prompt alone" in refused.reason


@pytest.mark.parametrize("spec", sorted(SPECS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_spec_plans_and_fits(spec: Path) -> None:
    plan = plan_of(spec)
    plan.require_fit()
    found = report(plan)
    assert found["memory_per_card"]["fits"]
    assert found["hardware"]["cards_needed"]["cards"] <= plan.cards_per_instance
    assert found["suggestion"]["possible"], found["suggestion"]
    assert json.loads(json.dumps(found)) == found


def test_a_deployment_that_does_not_fit_says_what_does(tmp_path: Path) -> None:
    spec = changed_spec(tmp_path, "llama-3.3-70b-h100-tp4", ("tp: 4", "tp: 1"), ("card: h100-sxm", "card: l40s"))
    with pytest.raises(BuildError, match=r"room for 0 tokens.*needs 32768.*tp 2, pp 1 does"):
        plan_of(spec).require_fit()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("tp: 4", "tp: 3", r"changed.yaml:12: parallel.tp: is 3; it must divide the 64 heads"),
        ("ep: 1", "ep: 2", r"parallel.ep: is 2; it must divide the 0 experts"),
        ("max_seq_len: 32768", "max_seq_len: 262144", r"limits.max_seq_len: is 262144; .*131072"),
    ],
)
def test_what_the_model_rules_out_is_refused_with_its_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        plan_of(changed_spec(tmp_path, "llama-3.3-70b-h100-tp4", (old, new)))


def test_a_card_without_fp8_is_refused_with_alternatives(tmp_path: Path) -> None:
    spec = changed_spec(tmp_path, "llama-3.3-70b-h100-tp4", ("h100-sxm", "a100-80gb"))
    with pytest.raises(BuildError) as error:
        load_spec(spec)
    first, second = str(error.value).splitlines()
    assert "quantization.quant_algo: is FP8, which a100-80gb cannot compute" in first
    assert "W4A16_AWQ" in first
    assert "hardware.card l40s or h100-sxm" in first
    assert "quantization.kv_cache_quant_algo: is FP8" in second


def test_four_bit_floats_need_blackwell(tmp_path: Path) -> None:
    spec = changed_spec(tmp_path, "llama-3.3-70b-h100-tp4", ("quant_algo: FP8\n  kv", "quant_algo: NVFP4\n  kv"))
    with pytest.raises(BuildError, match=r"is NVFP4, which h100-sxm cannot compute. Use hardware.card b200, or FP8"):
        load_spec(spec)
    text = spec.read_text().replace("h100-sxm", "b200")
    spec.write_text(text)
    assert load_spec(spec).deployment.quantization.quant_algo == "NVFP4"


def test_a_cpu_is_no_card_for_an_engine(tmp_path: Path) -> None:
    spec = changed_spec(tmp_path, "qwen2.5-7b-h100", ("card: h100-sxm", "card: cpu"))
    with pytest.raises(BuildError, match=r"hardware\.card: is cpu; target trtllm needs a GPU"):
        load_spec(spec)


def test_the_demo_model_has_the_shape_that_is_shipped(tmp_path: Path) -> None:
    spec = load_spec(SPECS / "smollm2-135m.yaml")
    without = tmp_path / "spec.yaml"
    source = spec.deployment.source
    without.write_text(f"name: demo\nsource: {{package: {source.package}, file: {source.file}}}\n")
    own, where = source_config(load_spec(without))
    assert where.endswith(".gguf")
    assert ModelShape.of(own, where) == shape_of("smollm2-135m")


@pytest.mark.parametrize("precision", ["fast", "exact"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_engine_counts_the_bytes_of_its_kv_cache_as_the_plan_does(
    family: str, precision: str, tmp_path: Path
) -> None:
    from python_backend.engine.config import EngineConfig
    from python_backend.engine.runner import ModelRunner

    checkpoint = tmp_path / "model"
    shutil.copytree(FAMILIES / family, checkpoint)
    (checkpoint / "tokenizer.json").write_text("{}")
    spec = tmp_path / "spec.yaml"
    limits = "limits: {max_seq_len: 64, kv_cache_tokens: 256, max_num_tokens: 64}"
    spec.write_text(f"name: tiny\nsource: {{hf: model}}\nprecision: {precision}\n{limits}\n")
    plan = plan_of(spec)
    config = EngineConfig(precision=precision, max_seq_len=64, max_input_len=63, max_num_tokens=64, kv_cache_tokens=256)  # type: ignore[arg-type]
    runner = ModelRunner(checkpoint, config)
    assert runner.kv_bytes == 256 * plan.memory().kv_bytes_per_token
    assert runner.kv_bytes == plan.memory().kv_cache


def test_the_page_about_plans_has_the_figures_of_the_code() -> None:
    page = (ROOT / "docs" / "plan.md").read_text()
    for name in ("llama-3.1-8b", "llama-3.3-70b", "mixtral-8x7b", "deepseek-v3"):
        parameters = shape_of(name).parameters
        assert f"{parameters.total:,}" in page
        assert parameters.active == parameters.total or f"{parameters.active:,}" in page
    for name, card in CARDS.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
        figures = [
            float(text.replace(",", "")) for text in re.findall(r"[\d,]*\.?\d+", row.removeprefix(f"| {name} |"))
        ]
        assert figures[0] == card.memory_bytes / 1e9
        assert figures[1] == pytest.approx(card.memory_bytes_per_s / (1e9 if name == "cpu" else 1e12), rel=0.01)
        assert figures[2] == card.flops_16bit / 1e12
        if card.flops_8bit is not None:
            assert figures[3] == card.flops_8bit / 1e12


def test_json_is_all_that_stands_on_stdout() -> None:
    command = [sys.executable, "-m", "build_engines", "plan", "--spec", str(SPECS / "mixtral-8x7b-h100-tp2.yaml")]
    done = subprocess.run([*command, "--format", "json"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["model"]["parameters"]["active_percent"] == 27.6
    assert found["kv_cache"]["bytes_per_token"] == 65_536


def test_the_table_names_what_a_reader_looks_for() -> None:
    command = [sys.executable, "-m", "build_engines", "plan", "--spec", str(SPECS / "llama-3.3-70b-h100-tp4.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for text in ("163,840 bytes at 8 bit", "4 x h100-sxm", "max_batch_size", "cold start", "sequences at once"):
        assert text in done.stdout


def test_the_picture_is_svg_with_a_bar_for_every_use() -> None:
    found = report(plan_of(SPECS / "llama-3.1-8b-h100.yaml"))
    root = ElementTree.fromstring(memory_picture(found))
    space = "{http://www.w3.org/2000/svg}"
    bars = [element for element in root.iter(f"{space}rect") if element.get("height") == "36"]
    assert len(bars) == 6
    assert sum(float(bar.get("width", "0")) for bar in bars) == pytest.approx(600, abs=1)
    assert "adapters: 0.87 GB" in "".join(root.itertext())
