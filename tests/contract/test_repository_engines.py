"""The repository check beyond tensors: lines, engines, tokenizers, limits, cards, and upstream's own repository."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2 as pb

from build_engines.check import check_repository
from build_engines.files import sha256_file
from build_engines.pbtxt_lines import lines_of
from build_engines.plan.engine_plan import EnginePlan
from build_engines.plan.source_config import source_config
from build_engines.repository import Settings, render
from build_engines.spec import load_spec
from build_engines.templates import MODELS, from_text, to_text
from build_engines.trtllm.repository import render_trtllm
from python_backend.contract import model_contract

SPECS = Path(__file__).parents[2] / "build_engines" / "specs"
TOKENIZER = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 7, "content": "<end>"}]}
CPU_ENGINE: dict[str, Any] = {
    "version": "0.1.0",
    "pretrained_config": {"vocab_size": 8},
    "build_config": {"max_batch_size": 16, "max_beam_width": 2, "max_seq_len": 1024, "max_input_len": 1023},
}
GPU_ENGINE: dict[str, Any] = {
    "version": "1.2.1",
    "pretrained_config": {"vocab_size": 8, "mapping": {"world_size": 2}},
    "build_config": {
        "max_batch_size": 128, "max_beam_width": 1, "max_seq_len": 16384, "max_input_len": 16383,
        "plugin_config": {"use_paged_context_fmha": True, "lora_plugin": "auto"}, "lora_config": {"max_lora_rank": 32},
    },
}  # fmt: skip


def changed(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    copy = json.loads(json.dumps(base))
    *keys, last = path.split(".")
    place = copy
    for key in keys:
        place = place[key]
    place[last] = value
    return dict(copy)


def write_tokenizer(directory: Path, tokenizer: dict[str, Any] = TOKENIZER) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


def edit(repository: Path, name: str, change: Any) -> None:
    path = repository / name / "config.pbtxt"
    config = from_text(path.read_text())
    change(config)
    path.write_text(to_text(config))


def set_parameter(key: str, value: str) -> Any:
    return lambda config: setattr(config.parameters[key], "string_value", value)


@pytest.fixture
def cpu(tmp_path: Path) -> Path:
    """A deployment of our own engine in tmp_path/{engine, checkpoint, model_repo}."""
    (tmp_path / "engine").mkdir()
    checkpoint = write_tokenizer(tmp_path / "checkpoint")
    engine = CPU_ENGINE | {"hashes": {"tokenizer": sha256_file(checkpoint / "tokenizer.json")}}
    (tmp_path / "engine" / "config.json").write_text(json.dumps(engine))
    spec = load_spec(SPECS / "smollm2-135m.yaml")
    settings = replace(Settings.of(spec, tmp_path), max_batch_size=16, max_beam_width=2)
    render(settings, tmp_path / "model_repo")
    return tmp_path / "model_repo"


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    """A deployment of a compiled engine of two ranks."""
    directory = tmp_path / "engine"
    directory.mkdir()
    write_tokenizer(tmp_path / "weights")
    (tmp_path / "xgrammar").mkdir()
    (tmp_path / "xgrammar" / "xgrammar_tokenizer_info.json").write_text("{}")
    (directory / "config.json").write_text(json.dumps(GPU_ENGINE))
    for rank in range(2):
        (directory / f"rank{rank}.engine").touch()
    spec = load_spec(SPECS / "llama-3.1-8b-h100.yaml")
    parallel, limits = spec.deployment.parallel.model_copy(update={"tp": 2}), spec.deployment.limits
    limits = limits.model_copy(update={"max_batch_size": 128})
    spec = replace(spec, deployment=spec.deployment.model_copy(update={"parallel": parallel, "limits": limits}))
    place = tmp_path / "model_repo"
    place.mkdir()
    render_trtllm(EnginePlan.of(spec, *source_config(spec)), PurePosixPath(tmp_path), place)
    return place


def findings(repository: Path, pattern: str) -> list[str]:
    return [text for text in check_repository(repository) if re.search(pattern, text)]


def test_both_deployments_are_in_order(cpu: Path) -> None:
    assert check_repository(cpu) == []


def test_a_compiled_engine_is_in_order(gpu: Path) -> None:
    assert check_repository(gpu) == []


def test_log_probs_of_a_compiled_engine_are_made_of_its_logits(gpu: Path) -> None:
    configs = {name: from_text((gpu / name / "config.pbtxt").read_text()) for name in MODELS}
    steps = {step.model_name: step for step in configs["ensemble"].ensemble_scheduling.step}
    asking, engine, making = (steps[name] for name in ("preprocessing", "tensorrt_llm", "postprocessing"))
    assert asking.input_map["TOP_LOGPROBS"] == "top_logprobs"
    assert engine.input_map["return_generation_logits"] == asking.output_map["OUT_RETURN_GENERATION_LOGITS"]
    assert making.input_map["GENERATION_LOGITS"] == engine.output_map["generation_logits"]
    assert making.output_map["LOGPROBS"] == "logprobs"
    assert {"top_logprobs", "return_generation_logits"} <= {tensor.name for tensor in configs["ensemble"].input}
    assert "logprobs_mode" not in {tensor.name for tensor in configs["ensemble"].input}
    for name in ("preprocessing", "postprocessing"):
        assert configs[name].parameters["top_logprobs"].string_value == "5"


CPU_FAULTS = [
    ("build_config.max_batch_size", 8, r"tensorrt_llm/config.pbtxt: max_batch_size is 16; the engine takes 8"),
    ("build_config.max_beam_width", 1, r":\d+: parameter max_beam_width is 2; the engine takes 1"),
    ("build_config.max_seq_len", 65536, r"max_tokens_in_paged_kv_cache is 32768; .*65536.* needs 65536"),
    ("build_config.max_input_len", 1, r"the engine takes 1 prompt tokens; build it with a larger max_input_len"),
    ("pretrained_config.vocab_size", 7, r"has token 7; the engine's model has 7"),
    ("hashes", {"tokenizer": "0" * 64}, r"is not the tokenizer that the engine was built with"),
]


@pytest.mark.parametrize(("key", "value", "pattern"), CPU_FAULTS, ids=[key for key, *_ in CPU_FAULTS])
def test_what_the_engine_does_not_have_is_found(cpu: Path, key: str, value: Any, pattern: str) -> None:
    path = cpu.parent / "engine" / "config.json"
    path.write_text(json.dumps(changed(json.loads(path.read_text()), key, value)))
    assert len(findings(cpu, pattern)) == 1, check_repository(cpu)


GPU_FAULTS = [
    ("version", "0.9.0", r":\d+: parameter gpt_model_path: the engine was compiled with TensorRT-LLM 0.9.0, .*26.07"),
    ("pretrained_config.mapping.world_size", 3, r"lacks rank2.engine"),
    ("pretrained_config.mapping.world_size", 4, r"gpu_device_ids is '0,1'; 1 instances of 4 ranks"),
    ("build_config.plugin_config.use_paged_context_fmha", False, r"enable_chunked_context is true; .*without"),
    ("build_config.plugin_config.use_paged_context_fmha", False, r"enable_kv_cache_reuse is true; .*without"),
    ("build_config.plugin_config.lora_plugin", None, r"lora_cache_max_adapter_size is set; .*without lora_plugin"),
    ("build_config.lora_config.max_lora_rank", 64, r"lora_cache_max_adapter_size is 32; .*rank 64"),
]


@pytest.mark.parametrize(("key", "value", "pattern"), GPU_FAULTS, ids=[pattern[:30] for *_, pattern in GPU_FAULTS])
def test_what_a_compiled_engine_does_not_have_is_found(gpu: Path, key: str, value: Any, pattern: str) -> None:
    (gpu.parent / "engine" / "config.json").write_text(json.dumps(changed(GPU_ENGINE, key, value)))
    assert len(findings(gpu, pattern)) == 1, check_repository(gpu)


PARAMETER_FAULTS = [
    ("max_beam_width", "two", "'two'; it must be a whole number"),
    ("max_beam_width", "-1", "'-1'; it must be a whole number"),
    ("kv_cache_free_gpu_mem_fraction", "90", "'90'; it must lie between 0 and 1"),
    ("kv_cache_free_gpu_mem_fraction", "most", "'most'; it must be a number"),
    ("enable_chunked_context", "yes", "'yes'; it must be true or false"),
    ("decoding_mode", "greedy", "'greedy'; allowed: top_k"),
    ("gpu_device_ids", "0;1", "need 1 groups of 2 cards"),
]


@pytest.mark.parametrize(("key", "value", "pattern"), PARAMETER_FAULTS)
def test_a_parameter_out_of_range_is_found_on_its_line(gpu: Path, key: str, value: str, pattern: str) -> None:
    edit(gpu, "tensorrt_llm", set_parameter(key, value))
    (found,) = findings(gpu, re.escape(pattern))
    match = re.match(r"(.*config\.pbtxt):(\d+): parameter", found)
    assert match is not None, found
    lines = Path(match[1]).read_text().splitlines()
    assert f'key: "{key}"' in lines[int(match[2])]  # the block begins on the line before


def test_a_mistyped_input_is_found_on_its_line(gpu: Path) -> None:
    edit(gpu, "tensorrt_llm", lambda c: setattr(c.input[5], "data_type", pb.TYPE_STRING))
    name = from_text((gpu / "tensorrt_llm" / "config.pbtxt").read_text()).input[5].name
    found = findings(gpu, rf"tensorrt_llm/config\.pbtxt:\d+: input {name} is TYPE_STRING")
    lines = (gpu / "tensorrt_llm" / "config.pbtxt").read_text().splitlines()
    number = int(found[0].split(":")[1])
    assert lines[number - 1].startswith("input")
    assert f'name: "{name}"' in lines[number]


def test_two_tokenizers_in_one_repository_are_found(cpu: Path) -> None:
    other = write_tokenizer(cpu.parent / "other")
    edit(cpu, "postprocessing", set_parameter("tokenizer_dir", str(other)))
    assert len(findings(cpu, "answers would be garbled")) == 1


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_an_engine_without_a_readable_config_is_named(cpu: Path, content: str | None) -> None:
    path = cpu.parent / "engine" / "config.json"
    path.unlink() if content is None else path.write_text(content)
    assert len(findings(cpu, rf"parameter gpt_model_path: {path}")) == 1


def test_lora_config_of_three_columns_is_found(gpu: Path) -> None:
    def narrow(config: Any) -> None:
        (tensor,) = (t for t in config.input if t.name == "lora_config")
        tensor.dims[:] = [-1, 3]

    edit(gpu, "tensorrt_llm", narrow)
    assert len(findings(gpu, r"input lora_config has dims \[-1, 3\]; .*Write \[-1, -1\]")) == 1


def upstreams(name: str) -> Any:
    """A model of upstream's repository as its table says, filled in, without anything of ours."""
    contract = model_contract(name)
    config = pb.ModelConfig(name=name, max_batch_size=8)
    for tensor in contract.inputs.values():
        if not tensor.ours:
            relaxed = ("text_input", "QUERY", "max_tokens", "REQUEST_OUTPUT_LEN")
            optional = tensor.optional and tensor.name not in relaxed
            data_type = pb.DataType.Value(tensor.data_type)
            config.input.add(name=tensor.name, data_type=data_type, dims=tensor.dims, optional=optional)
    for tensor in contract.outputs.values():
        if not tensor.ours:
            config.output.add(name=tensor.name, data_type=pb.DataType.Value(tensor.data_type), dims=tensor.dims)
    return config


def test_upstreams_own_repository_is_judged_by_upstreams_contract(tmp_path: Path) -> None:
    directories = {"gpt_model_path": tmp_path / "engine", "tokenizer_dir": write_tokenizer(tmp_path / "weights")}
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "config.json").write_text(json.dumps(GPU_ENGINE))
    for rank in range(2):
        (tmp_path / "engine" / f"rank{rank}.engine").touch()
    repository = tmp_path / "repository"
    for name in ("preprocessing", "tensorrt_llm", "postprocessing"):
        config = upstreams(name)
        config.backend = "tensorrtllm" if name == "tensorrt_llm" else "python"
        known = model_contract(name).parameters
        for key, path in directories.items():
            if key in known:
                config.parameters[key].string_value = str(path)
        if name == "tensorrt_llm":
            config.parameters["gpt_model_type"].string_value = "inflight_fused_batching"
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.py").write_text("import numpy\n")
        (repository / name / "config.pbtxt").write_text(to_text(config))
    assert check_repository(repository) == []
    text = (repository / "tensorrt_llm" / "config.pbtxt").read_text()
    (repository / "tensorrt_llm" / "config.pbtxt").write_text(text.replace("inflight_fused_batching", "${strategy}"))
    assert len(findings(repository, r"tensorrt_llm/config\.pbtxt:\d+: \$\{strategy\} was never filled in")) == 1


def test_a_repository_that_nobody_filled_in_is_read_all_the_same(gpu: Path) -> None:
    path = gpu / "tensorrt_llm" / "config.pbtxt"
    text = path.read_text()
    text = re.sub(r"max_batch_size: \d+", "max_batch_size: ${triton_max_batch_size}", text)
    text = re.sub(r"preferred_batch_size: \d+", "preferred_batch_size: [ ${triton_max_batch_size} ]", text)
    text = re.sub(r"decoupled: \w+", "decoupled: ${decoupled_mode}", text)
    path.write_text(text.replace("data_type: TYPE_INT32", "data_type: ${some_type}", 1))
    other = gpu / "postprocessing" / "config.pbtxt"
    other.write_text(other.read_text().replace("TYPE_STRING", "TYPE_INT32", 1))
    found = check_repository(gpu)
    unfilled = [one for one in found if "was never filled in: Triton cannot read the file. Write a value." in one]
    assert len(unfilled) == 4
    rest = [one for one in found if one not in unfilled]
    assert rest
    # Nothing is said to follow from a value that is missing.
    assert all("postprocessing" in one or "text_output" in one for one in rest), rest


def test_a_value_in_quotes_that_nobody_filled_in_is_found_once(gpu: Path) -> None:
    edit(gpu, "tensorrt_llm", set_parameter("batch_scheduler_policy", "${batch_scheduler_policy}"))
    (found,) = check_repository(gpu)
    assert "${batch_scheduler_policy} was never filled in: it counts as not set" in found


def test_a_decoding_mode_that_the_engine_was_not_built_for_is_found(gpu: Path) -> None:
    edit(gpu, "tensorrt_llm", set_parameter("decoding_mode", "medusa"))
    (found,) = check_repository(gpu)
    assert "decoding_mode is medusa; the engine was built for NONE. Build it " in found
    engine = changed(GPU_ENGINE, "build_config.speculative_decoding_mode", "SpeculativeDecodingMode.MEDUSA")
    (gpu.parent / "engine" / "config.json").write_text(json.dumps(engine))
    assert check_repository(gpu) == []


def test_a_loop_over_drafts_fits_its_engines(tmp_path: Path) -> None:
    place, spec = tmp_path / "model_repo", load_spec(SPECS / "llama-3.3-70b-h100-tp4-draft.yaml")
    place.mkdir()
    render_trtllm(EnginePlan.of(spec, *source_config(spec)), PurePosixPath(tmp_path), place)
    write_tokenizer(tmp_path / "weights")
    limits = {"max_batch_size": 32, "max_draft_len": 5}
    for name in ("engine", "draft-engine"):
        (tmp_path / name).mkdir()
        engine = {"version": "1.2.1", "pretrained_config": {"mapping": {"world_size": 4}}, "build_config": limits}
        (tmp_path / name / "config.json").write_text(json.dumps(engine))
        for rank in range(4):
            (tmp_path / name / f"rank{rank}.engine").touch()
    assert check_repository(place) == []
    edit(place, "tensorrt_llm_bls", set_parameter("num_draft_tokens", "6"))
    edit(place, "tensorrt_llm_draft", lambda c: setattr(c, "max_batch_size", 64))
    edit(place, "tensorrt_llm_bls", set_parameter("tensorrt_llm_draft_model_name", "small"))
    found = check_repository(place)
    for pattern in (
        "num_draft_tokens is 6; the engine takes 5",
        "tensorrt_llm_draft/config.pbtxt: max_batch_size is 64; the engine takes 32",
        "parameter tensorrt_llm_draft_model_name.* no such model|no model small in the repository",
    ):
        assert len([one for one in found if re.search(pattern, one)]) == 1, found
    assert len(found) == 3


def test_lines_are_found_in_either_way_of_writing_lists() -> None:
    text = """
# a comment with a brace {
input [
  {
    name: "a"  # "b" {
  },
  { name: "b" dims: [ 1, -1 ] }
]
output { name: 'o' }
ensemble_scheduling {
  step [
    {
      model_name: "m"
      input_map { key: "QUERY" value: "q" }
    }
  ]
}
parameters: {
  key: "p"
  value: { string_value: "name: x }" }
}
"""
    assert lines_of(text) == {
        ("input", "a"): 4,
        ("input", "b"): 7,
        ("output", "o"): 9,
        ("step", "m"): 12,
        ("step", "m", "QUERY"): 14,
        ("parameter", "p"): 18,
    }
