"""Deployments for GPUs without one: command lines against the tools' own flags, scripts, repositories, versions."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from build_engines import cli
from build_engines.build import Build
from build_engines.check import check_repository
from build_engines.plan.engine_plan import EnginePlan
from build_engines.plan.source_config import source_config
from build_engines.progress import Silent
from build_engines.spec import load_spec
from build_engines.templates import from_text
from build_engines.trtllm.pipeline import build_command, stages
from build_engines.trtllm.tool import Command, flag_table
from python_backend.contract import model_contract
from python_backend.errors import BuildError
from tests.tools.make_golden import GOLDEN, GOLDEN_SPECS, golden_files

ROOT = Path(__file__).parents[2]
SPECS = ROOT / "build_engines" / "specs"
GPU_SPECS = sorted(path for path in SPECS.glob("*.yaml") if "target: cpu" not in path.read_text())


def spec_file(directory: Path, name: str, *replacements: tuple[str, str]) -> Path:
    text = (SPECS / f"{name}.yaml").read_text().replace("../shapes", str(ROOT / "build_engines" / "shapes"))
    for old, new in replacements:
        assert old in text, old
        text = text.replace(old, new)
    path = directory / f"{name}-changed.yaml"
    path.write_text(text)
    return path


def plan_of(path: Path) -> EnginePlan:
    spec = load_spec(path)
    return EnginePlan.of(spec, *source_config(spec))


def dry_run(spec: Path, place: Path) -> Path:
    assert cli.main(["build", "--spec", str(spec), "--engines-dir", str(place), "--dry-run"]) == 0
    return place / load_spec(spec).name


def words_of(command: Command) -> list[str]:
    return shlex.split(command.shell().replace("\\\n", " "))


# --- every shipped spec -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [path for path in GPU_SPECS if "smollm" not in path.stem], ids=lambda path: path.stem)
def test_every_gpu_spec_dry_runs_renders_and_passes_the_check(
    spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = dry_run(spec, tmp_path)
    assert "DRY RUN (as asked): there is no engine yet" in capsys.readouterr().out
    assert check_repository(place / "model_repo", built=False) == []
    assert not (place / "engine").exists()
    for name in ("build.sh", "launch.sh"):
        assert subprocess.run(["bash", "-n", str(place / name)]).returncode == 0
    json.loads((place / "plan" / "plan.json").read_text())
    assert len(list(yaml.safe_load_all((place / "kubernetes.yaml").read_text()))) == 3
    assert (place / "compose.yaml").exists() != (place / "kubernetes-statefulset.yaml").exists()


@pytest.mark.parametrize("name", GOLDEN_SPECS)
def test_a_deployment_is_the_one_that_was_reviewed(name: str, tmp_path: Path) -> None:
    made = golden_files(name, tmp_path)
    kept = {path.relative_to(GOLDEN / name).as_posix() for path in (GOLDEN / name).rglob("*") if path.is_file()}
    assert set(made) == kept
    for file, text in made.items():
        assert text == (GOLDEN / name / file).read_text(), (
            f"{file}: read the difference, then tests/tools/make_golden.py"
        )


def test_a_second_run_makes_nothing_and_a_changed_limit_makes_it_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec_file(tmp_path, "qwen2.5-7b-h100")
    place = dry_run(spec, tmp_path)
    script = (place / "build.sh").read_text()
    capsys.readouterr()
    dry_run(spec, tmp_path)
    assert "is up to date" in capsys.readouterr().out
    spec.write_text(spec.read_text().replace("max_batch_size: 256", "max_batch_size: 64"))
    dry_run(spec, tmp_path)
    assert "made plan, model_repo" in capsys.readouterr().out
    stamps = [re.findall(r'" != (\w{16}) \]', text) for text in (script, (place / "build.sh").read_text())]
    assert stamps[0][0] == stamps[1][0]  # the checkpoint is kept
    assert stamps[0][1] != stamps[1][1]  # the engine is not


def test_without_a_gpu_a_build_is_a_dry_run_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = SPECS / "qwen2.5-7b-h100.yaml"
    assert cli.main(["build", "--spec", str(spec), "--engines-dir", str(tmp_path)]) == 0
    assert re.search(r"DRY RUN \(.*(not installed|no NVIDIA GPU)", capsys.readouterr().out)


def test_a_server_on_this_machine_does_not_take_a_gpus_deployment_for_its_own(tmp_path: Path) -> None:
    build = Build(load_spec(SPECS / "smollm2-135m-l40s.yaml"), tmp_path, Silent())
    with pytest.raises(BuildError, match=r"yaml:3: target: is trtllm; here it is cpu"):
        build.run()


# --- command lines ------------------------------------------------------------------------------------------------


def test_an_engine_has_paged_kv_packed_input_and_what_chunked_context_needs() -> None:
    words = words_of(build_command(plan_of(SPECS / "llama-3.3-70b-h100-tp4.yaml")))
    pairs = dict(zip(words[1::2], words[2::2], strict=True))
    assert words[0] == "trtllm-build"
    assert pairs["--kv_cache_type"] == "paged"
    assert pairs["--remove_input_padding"] == pairs["--use_paged_context_fmha"] == "enable"
    assert pairs["--use_fp8_context_fmha"] == "enable"
    assert (pairs["--max_input_len"], pairs["--max_seq_len"]) == ("32767", "32768")
    assert pairs["--workers"] == "4"
    assert "--gather_generation_logits" not in words  # nobody asked for log-probs
    assert "--lora_plugin" not in words


def test_adapters_and_log_probs_are_compiled_in_when_the_spec_wants_them() -> None:
    words = words_of(build_command(plan_of(SPECS / "llama-3.1-8b-h100.yaml")))
    assert "--gather_generation_logits" in words
    at = words.index("--lora_target_modules")
    assert words[at + 1 : at + 5] == ["attn_q", "attn_k", "attn_v", "attn_dense"]
    assert words[words.index("--max_lora_rank") + 1] == "32"


def test_fp8_attention_needs_an_fp8_cache() -> None:
    words = words_of(build_command(plan_of(SPECS / "qwen2.5-7b-h100.yaml")))
    assert words[words.index("--use_fp8_context_fmha") + 1] == "disable"


@pytest.mark.parametrize(
    ("algo", "kv", "card", "expected"),
    [
        ("FP8", "FP8", "h100-sxm", "quantize.py --qformat fp8 --kv_cache_dtype fp8"),
        ("W4A16_AWQ", "null", "a100-80gb", "quantize.py --qformat int4_awq"),
        ("NVFP4", "FP8", "b200", "quantize.py --qformat nvfp4"),
        ("W4A8_AWQ", "FP8", "h100-sxm", "quantize.py --qformat w4a8_awq --kv_cache_dtype fp8"),
        ("FP8_PER_CHANNEL_PER_TOKEN", "FP8", "h100-sxm", "quantize.py --qformat fp8_pc_pt"),
        ("W4A16", "null", "l40s", "llama/convert_checkpoint.py --use_weight_only --weight_only_precision int4"),
        ("NO_QUANT", "null", "a100-80gb", "llama/convert_checkpoint.py --dtype auto"),
        ("W8A16", "INT8", "a100-80gb", "llama/convert_checkpoint.py --use_weight_only --int8_kv_cache"),
        (
            "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN", "null", "a100-80gb",
            "llama/convert_checkpoint.py --smoothquant 0.5 --per_channel --per_token",
        ),
    ],
)  # fmt: skip
def test_each_quantisation_has_its_tool(algo: str, kv: str, card: str, expected: str, tmp_path: Path) -> None:
    spec = spec_file(
        tmp_path, "llama-3.3-70b-h100-tp4",
        ("  quant_algo: FP8", f"  quant_algo: {algo}"), ("kv_cache_quant_algo: FP8", f"kv_cache_quant_algo: {kv}"),
        ("h100-sxm", card),
    )  # fmt: skip
    command = stages(plan_of(spec))[0].command
    assert isinstance(command, Command)
    text = command.shell().replace('"', "")
    program, *flags = re.split(r" (?=--)", expected)
    assert program in text
    assert all(flag in text for flag in flags), text


def test_spread_experts_go_through_our_own_checkpoint_writer() -> None:
    first, second, third, _ = stages(plan_of(SPECS / "mixtral-8x7b-h100-tp2.yaml"))
    assert isinstance(first.command, Command)
    assert first.command.tool == "hf_ptq"
    assert isinstance(second.command, str)
    assert second.command.endswith("--tp 2 --pp 1 --ep 2")
    assert isinstance(third.command, Command)
    assert third.command.flags["--moe_plugin"] == "auto"


MEDUSA = "{mode: medusa, max_draft_len: 63, num_medusa_heads: 4, draft_model: /models/heads}"
EAGLE = "{mode: eagle, max_draft_len: 63, draft_model: /models/eagle-checkpoint}"
LOOKAHEAD = (
    "{mode: lookahead_decoding, max_draft_len: 83, lookahead_window_size: 7, lookahead_ngram_size: 7, "
    "lookahead_verification_set_size: 7}"
)


@pytest.mark.parametrize(
    ("section", "build", "first", "parameters"),
    [
        (MEDUSA, "medusa 63", "--medusa_model_dir /models/heads --num_medusa_heads 4", {"decoding_mode": "medusa"}),
        (EAGLE, "eagle 63", "cp -r /models/eagle-checkpoint", {"decoding_mode": "eagle"}),
        (LOOKAHEAD, "lookahead_decoding 83", "quantize.py", {
            "decoding_mode": "lookahead", "lookahead_window_size": "7", "lookahead_ngram_size": "7",
            "lookahead_verification_set_size": "7",
        }),
    ],
    ids=["medusa", "eagle", "lookahead"],
)  # fmt: skip
def test_a_speculative_mode_is_in_checkpoint_engine_and_repository(
    section: str, build: str, first: str, parameters: dict[str, str], tmp_path: Path
) -> None:
    changes = ("\ntraffic:", f"\nspeculative: {section}\n\ntraffic:")
    spec = spec_file(tmp_path, "llama-3.3-70b-h100-tp4", changes)
    made, compiled = stages(plan_of(spec))[:2]
    text = made.command if isinstance(made.command, str) else " ".join(words_of(made.command))
    assert first in text
    assert isinstance(compiled.command, Command)
    mode, length = build.split()
    assert compiled.command.flags["--speculative_decoding_mode"] == mode
    assert compiled.command.flags["--max_draft_len"] == int(length)
    config = configs_of(dry_run(spec, tmp_path))["tensorrt_llm"]
    assert {key: config.parameters[key].string_value for key in parameters} == parameters


def test_medusa_heads_are_not_lost_on_the_way(tmp_path: Path) -> None:
    section = ("\ntraffic:", f"\nspeculative: {MEDUSA}\n\ntraffic:")
    plain = ("  quant_algo: FP8", "  quant_algo: NO_QUANT")
    spec = spec_file(tmp_path, "llama-3.3-70b-h100-tp4", section, plain)
    with pytest.raises(BuildError, match=r"speculative.mode: is medusa; its heads are added when"):
        stages(plan_of(spec))


def test_latent_attention_is_sent_to_the_llm_api(tmp_path: Path) -> None:
    algo = ("quant_algo: FP8_BLOCK_SCALES", "quant_algo: FP8")
    spec = spec_file(tmp_path, "deepseek-v3-h200-tp8", algo, ("target: llmapi", "target: trtllm"))
    with pytest.raises(
        BuildError, match=r"DeepseekV3ForCausalLM has no TensorRT-LLM checkpoint of ours.*Target llmapi"
    ):
        stages(plan_of(spec))


def test_a_draft_model_gets_an_engine_of_its_own() -> None:
    plan = plan_of(SPECS / "llama-3.3-70b-h100-tp4-draft.yaml")
    commands = [stage.command for stage in stages(plan) if isinstance(stage.command, Command)]
    builds = [command for command in commands if command.tool == "trtllm-build"]
    assert [command.flags.get("--max_draft_len") for command in builds] == [5, None]
    assert builds[0].flags["--speculative_decoding_mode"] == "draft_tokens_external"
    assert builds[1].flags["--checkpoint_dir"] == "$HERE/draft-checkpoint"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("speculative: {mode: medusa, max_draft_len: 63}", "speculative.num_medusa_heads: is missing"),
        ("speculative: {mode: lookahead_decoding, max_draft_len: 8}", "needs lookahead_window_size"),
        (
            "speculative: {mode: draft_tokens_external, max_draft_len: 4, draft_model: x}",
            "speculative.draft_shape: is missing; the plan needs",
        ),
        (
            "speculative: {mode: draft_tokens_external, max_draft_len: 4, draft_model: x, draft_shape: .}",
            "parallel.mpi: is leader, under which ranks load one engine",
        ),
        ("speculative: {mode: ngram, max_draft_len: 8}", "speculative.mode: is 'ngram'"),
        ("lora: {modules: [q_proj]}", r"lora.modules.0: is 'q_proj'"),
        ("reserve: {runtime_gb: -1}", "reserve.runtime_gb: is -1"),
    ],
)
def test_what_a_section_lacks_is_named_with_its_line(section: str, message: str, tmp_path: Path) -> None:
    spec = spec_file(tmp_path, "llama-3.3-70b-h100-tp4", ("\ntraffic:", f"\n{section}\n\ntraffic:"))
    with pytest.raises(BuildError, match=rf"changed\.yaml:\d+: .*{message}|{message}"):
        load_spec(spec)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"--max_output_len": 128}, "has no flag --max_output_len. Write --max_seq_len, the sum"),
        ({"--paged_kv_cache_x": "enable"}, "has no flag --paged_kv_cache_x"),
        ({"--kv_cache_type": "block"}, "--kv_cache_type is 'block'; allowed: continuous, paged, disabled"),
        ({"--gemm_plugin": "bf16"}, "--gemm_plugin is 'bf16'; allowed: auto, float16"),
        ({"--max_batch_size": "8"}, "--max_batch_size is '8'; it takes int"),
        ({"--max_batch_size": True}, "--max_batch_size is True; it takes int"),
        ({"--max_batch_size": -1}, "--max_batch_size is -1; it must not be negative"),
        ({"--gather_context_logits": 1}, "--gather_context_logits is 1; it takes flag"),
        ({"--max_lora_rank": ("a", "b")}, "--max_lora_rank takes one value"),
        ({"--lora_target_modules": ("attn_q", "q_proj")}, "--lora_target_modules is 'q_proj'"),
    ],
)
def test_what_the_tool_would_refuse_is_refused_here(flags: dict[str, Any], message: str) -> None:
    (finding,) = Command("trtllm-build", flags).findings()
    assert message in finding


def test_a_required_flag_that_is_left_out_is_named() -> None:
    assert Command("hf_ptq", {}).findings() == ["hf_ptq: --pyt_ckpt_path is missing."]


def test_every_flag_of_every_tool_has_a_known_type() -> None:
    for tool in flag_table()["tools"].values():
        assert {flag["type"] for flag in tool["flags"].values()} <= {"str", "int", "float", "flag", "switch"}


# --- the repository -----------------------------------------------------------------------------------------------


def configs_of(place: Path) -> dict[str, Any]:
    return {path.parent.name: from_text(path.read_text()) for path in (place / "model_repo").glob("*/config.pbtxt")}


def test_the_cpp_backend_gets_upstreams_tensors_and_nothing_of_ours(tmp_path: Path) -> None:
    configs = configs_of(dry_run(SPECS / "llama-3.1-8b-h100.yaml", tmp_path))
    config, contract = configs["tensorrt_llm"], model_contract("tensorrt_llm")
    assert config.backend == "tensorrtllm"
    ours = {name for name, tensor in contract.inputs.items() if tensor.ours}
    assert {tensor.name for tensor in config.input} & ours == {"no_repeat_ngram_size"}
    assert {tensor.name for tensor in config.output} == {n for n, t in contract.outputs.items() if not t.ours}
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    assert parameters["gpt_model_path"] == "/deployments/llama-3.1-8b-h100/engine"
    assert parameters["kv_cache_free_gpu_mem_fraction"] == "0.9"
    assert parameters["lora_cache_max_adapter_size"] == "32"
    assert "max_tokens_in_paged_kv_cache" not in parameters  # the card decides
    types = {tensor.name: tensor.data_type for tensor in config.input}
    assert types["lora_weights"] == 14  # TYPE_BF16, as the engine


def test_a_draft_model_brings_its_engine_and_the_loop(tmp_path: Path) -> None:
    configs = configs_of(dry_run(SPECS / "llama-3.3-70b-h100-tp4-draft.yaml", tmp_path))
    values = {
        name: {key: entry.string_value for key, entry in config.parameters.items()} for name, config in configs.items()
    }
    place = "/deployments/llama-3.3-70b-h100-tp4-draft"
    target, draft, loop = (values[name] for name in ("tensorrt_llm", "tensorrt_llm_draft", "tensorrt_llm_bls"))
    assert (target["gpt_model_path"], draft["gpt_model_path"]) == (f"{place}/engine", f"{place}/draft-engine")
    plan = plan_of(SPECS / "llama-3.3-70b-h100-tp4-draft.yaml")
    for engine in (target, draft):
        assert engine["max_tokens_in_paged_kv_cache"] == str(plan.memory().max_tokens)
        assert "guided_decoding_backend" not in engine  # not together with drafts
    assert loop["tensorrt_llm_draft_model_name"] == "tensorrt_llm_draft"
    assert loop["num_draft_tokens"] == "5"
    assert configs["tensorrt_llm_bls"].model_transaction_policy.decoupled


def test_guides_and_adapters_of_a_spec_reach_the_backend(tmp_path: Path) -> None:
    config = configs_of(dry_run(SPECS / "llama-3.1-8b-h100.yaml", tmp_path))["tensorrt_llm"]
    assert config.parameters["guided_decoding_backend"].string_value == "xgrammar"
    assert config.parameters["xgrammar_tokenizer_info_path"].string_value.endswith("/xgrammar_tokenizer_info.json")
    spec = spec_file(tmp_path, "qwen2.5-7b-h100", ("\ntraffic:", "\nguided: {backend: none}\n\ntraffic:"))
    place = dry_run(spec, tmp_path)
    assert "guided_decoding_backend" not in configs_of(place)["tensorrt_llm"].parameters
    assert "xgrammar" not in (place / "build.sh").read_text()


def test_no_wire_of_the_ensemble_has_a_loose_end(tmp_path: Path) -> None:
    configs = configs_of(dry_run(SPECS / "llama-3.1-8b-h100.yaml", tmp_path))
    steps = configs["ensemble"].ensemble_scheduling.step
    taken = {name for step in steps for name in step.input_map.values()}
    given = {name for step in steps for name in step.output_map.values()}
    inputs, outputs = ({t.name for t in getattr(configs["ensemble"], kind)} for kind in ("input", "output"))
    assert taken <= given | inputs
    assert given <= taken | outputs
    assert inputs <= taken
    post = next(step for step in steps if step.model_name == "postprocessing")
    assert "DETOKENIZE_CONTEXT" not in post.input_map  # which only our engine gives
    assert {"TOKENS_BATCH", "SEQUENCE_LENGTH", "BATCH_INDEX", "SEQUENCE_INDEX"} <= set(post.input_map)
    assert {"text_output", "output_log_probs"} <= outputs
    assert "finish_reason" not in outputs  # this backend has none


def test_text_models_know_that_another_backend_serves(tmp_path: Path) -> None:
    configs = configs_of(dry_run(SPECS / "llama-3.1-8b-h100.yaml", tmp_path))
    for name in ("preprocessing", "postprocessing"):
        assert configs[name].parameters["target"].string_value == "trtllm"


# --- versions -----------------------------------------------------------------------------------------------------


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """A deployment as build.sh leaves it."""
    place = dry_run(spec_file(tmp_path, "qwen2.5-7b-h100"), tmp_path)
    for name, file, text in (("engine", "config.json", '{"version": "1.2.1"}'), ("weights", "tokenizer.json", "{}")):
        (place / name).mkdir()
        (place / name / file).write_text(text)
    assert cli.main(["record", str(place)]) == 0
    return place


def change_record(place: Path, **values: str) -> None:
    path = place / "versions.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def compile_with_another(place: Path) -> None:
    (place / "engine" / "config.json").write_text('{"version": "1.0.0"}')


def replace_the_tokenizer(place: Path) -> None:
    (place / "weights" / "tokenizer.json").write_text("[]")


def change_the_spec(place: Path) -> None:
    spec = place.parent / "qwen2.5-7b-h100-changed.yaml"
    spec.write_text(spec.read_text().replace("max_batch_size: 256", "max_batch_size: 64"))
    dry_run(spec, place.parent)


SKEWS: list[tuple[Any, str]] = [
    (replace_the_tokenizer, r"weights: the tokenizer was \w+ when this was built and is \w+ now: build it again\.$"),
    (change_the_spec, r"engine: compiled from another spec \(\w{12}\) than model_repo .*: run \S+/build\.sh again\.$"),
    (lambda place: change_record(place, stack="0.0.1"), r"model_repo: the version of this package was 0\.0\.1 when"),
]


@pytest.mark.parametrize(("skew", "message"), SKEWS, ids=["tokenizer", "spec", "package"])
def test_each_skew_is_one_clear_sentence(
    built: Path, skew: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", str(built), "--runtime", "1.2.1"]) == 0
    skew(built)
    capsys.readouterr()
    assert cli.main(["verify", str(built), "--runtime", "1.2.1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line


def test_an_engine_of_another_release_names_the_container(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert cli.main(["verify", str(built), "--runtime", "1.0.0"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "compiled with TensorRT-LLM 1.2.1, this container has 1.0.0" in line
    assert "tritonserver:26.07-trtllm-python-py3" in line
    compile_with_another(built)
    assert cli.main(["verify", str(built), "--runtime", "1.0.0"]) == 1
    assert "the engine version was 1.2.1 when this was built and is 1.0.0 now" in capsys.readouterr().err


def test_a_record_of_an_older_release_is_no_traceback(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (built / "versions.json").write_text('{"spec": "1"}')
    assert cli.main(["verify", str(built), "--runtime", "1.2.1"]) == 1
    assert "versions.json: stack, container, built, tokenizer, engine missing; make" in capsys.readouterr().err
    change_the_spec(built)  # and a build mends it
    assert cli.main(["record", str(built)]) == 0
    assert cli.main(["verify", str(built), "--runtime", "1.2.1"]) == 0


def test_without_tensorrt_llm_the_version_has_to_be_given(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", str(built)]) == 3
    assert "TensorRT-LLM is not installed here; give --runtime" in capsys.readouterr().err
