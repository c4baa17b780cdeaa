"""The model repository speaks the contract, before and after a deployment is written into it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2 as pb

from build_engines.check import check_repository
from build_engines.repository import TEMPLATES, Settings, render
from build_engines.templates import GENERATED, MODELS, from_text, template, to_text
from build_engines.wiring import ENSEMBLE_STEPS
from python_backend.contract import model_contract

# What model_config.proto of Triton 2.51 knows, of the messages that we write.
FIELDS_OF_2_51 = {
    "ModelConfig": {
        *("name", "platform", "backend", "max_batch_size", "input", "output", "instance_group", "dynamic_batching"),
        *("parameters", "model_transaction_policy", "ensemble_scheduling"),
    },
    "ModelInput": {"name", "data_type", "dims", "reshape", "allow_ragged_batch", "optional"},
    "ModelOutput": {"name", "data_type", "dims"},
    "ModelTensorReshape": {"shape"},
    "ModelInstanceGroup": {"count", "kind"},
    "ModelDynamicBatching": {
        *("preferred_batch_size", "max_queue_delay_microseconds", "preserve_ordering", "default_queue_policy"),
    },
    "ModelQueuePolicy": {"max_queue_size"},
    "ModelParameter": {"string_value"},
    "ModelTransactionPolicy": {"decoupled"},
    "ModelEnsembling": {"step"},
    "Step": {"model_name", "model_version", "input_map", "output_map"},
}


@pytest.fixture
def deployment(tmp_path: Path) -> Settings:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "config.json").write_text("{}")
    (tmp_path / "checkpoint").mkdir()
    return Settings(
        engine_dir=str(tmp_path / "engine"),
        tokenizer_dir=str(tmp_path / "checkpoint"),
        max_batch_size=16,
        max_beam_width=2,
        max_queue_size=7,
        kv_cache_tokens=4096,
        batching_strategy="inflight_fused_batching",
        batch_scheduler_policy="max_utilization",
        enable_kv_cache_reuse=True,
        enable_chunked_context=False,
        decoupled=True,
        exclude_input_in_output=True,
        add_special_tokens=False,
        skip_special_tokens=True,
        preprocessing_instance_count=3,
        max_queue_delay_microseconds=50,
        cancellation_check_period_ms=20,
        stats_check_period_ms=100,
    )


@pytest.fixture
def repository(deployment: Settings, tmp_path: Path) -> Path:
    place = tmp_path / "model_repo"
    render(deployment, place)
    return place


def read(repository: Path, name: str) -> Any:
    return from_text((repository / name / "config.pbtxt").read_text())


def change(repository: Path, name: str, edit: Any) -> None:
    config = read(repository, name)
    edit(config)
    (repository / name / "config.pbtxt").write_text(to_text(config))


# --- model_repo/ as it is kept ------------------------------------------------------------------------------------


def test_kept_templates_are_in_order() -> None:
    assert check_repository(TEMPLATES) == []


@pytest.mark.parametrize("name", GENERATED)
def test_kept_templates_are_those_that_the_contract_gives(name: str) -> None:
    kept = (TEMPLATES / name / "config.pbtxt").read_text()
    assert kept == to_text(template(name)), "run `python -m build_engines template`"


@pytest.mark.parametrize("name", [name for name in GENERATED if name != "ensemble"])
def test_every_python_model_has_a_shim_of_a_few_lines(name: str) -> None:
    lines = (TEMPLATES / name / "1" / "model.py").read_text().splitlines()
    assert len(lines) < 25
    assert any(line.startswith("from python_backend.triton.") for line in lines)


def test_upstreams_ensemble_maps_are_all_there() -> None:
    import json

    path = Path(__file__).parents[2] / "python_backend" / "contract" / "classic.json"
    upstream = json.loads(path.read_text())["classic"]["ensemble"]["ensemble_steps"]
    for step, ours in zip(upstream, ENSEMBLE_STEPS, strict=True):
        assert step["model_name"] == ours.model
        assert step["input_map"].items() <= ours.inputs.items()
        assert step["output_map"].items() <= ours.outputs.items()


def test_everything_a_client_may_send_or_receive_reaches_a_model() -> None:
    contract = model_contract("ensemble")
    taken = {tensor for step in ENSEMBLE_STEPS for tensor in step.inputs.values()}
    given = {tensor for step in ENSEMBLE_STEPS for tensor in step.outputs.values()}
    assert set(contract.inputs) <= taken
    assert set(contract.outputs) <= given


def test_our_own_inputs_are_optional_so_that_upstreams_clients_work_unchanged() -> None:
    for name in ("ensemble", "preprocessing", "tensorrt_llm", "postprocessing"):
        config = template(name)
        contract = model_contract(name)
        assert all(tensor.optional for tensor in config.input if contract.inputs[tensor.name].ours)


# --- a deployment -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_rendered_repository_is_in_order(deployment: Settings, tmp_path: Path, decoupled: bool) -> None:
    place = tmp_path / "model_repo"
    render(replace(deployment, decoupled=decoupled), place)
    assert check_repository(place) == []
    assert read(place, "tensorrt_llm").model_transaction_policy.decoupled is decoupled


def test_the_deployment_is_written_where_it_belongs(deployment: Settings, repository: Path) -> None:
    configs = {name: read(repository, name) for name in MODELS}
    assert {config.max_batch_size for config in configs.values()} == {16}
    parameters = {
        name: {key: entry.string_value for key, entry in config.parameters.items()} for name, config in configs.items()
    }
    assert parameters["tensorrt_llm"] == {
        "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
        "gpt_model_path": deployment.engine_dir,
        "gpt_model_type": "inflight_fused_batching",
        "tokenizer_dir": deployment.tokenizer_dir,
        "max_beam_width": "2",
        "max_tokens_in_paged_kv_cache": "4096",
        "batch_scheduler_policy": "max_utilization",
        "enable_kv_cache_reuse": "true",
        "enable_chunked_context": "false",
        "exclude_input_in_output": "true",
        "cancellation_check_period_ms": "20",
        "stats_check_period_ms": "100",
        "guided_decoding_backend": "llguidance",
    }
    assert parameters["preprocessing"] == {
        "tokenizer_dir": deployment.tokenizer_dir,
        "gpt_model_path": deployment.engine_dir,
        "add_special_tokens": "false",
    }
    assert parameters["postprocessing"] == {"tokenizer_dir": deployment.tokenizer_dir, "skip_special_tokens": "true"}
    assert configs["preprocessing"].instance_group[0].count == 3
    assert configs["tensorrt_llm"].dynamic_batching.default_queue_policy.max_queue_size == 7
    assert configs["tensorrt_llm"].dynamic_batching.preferred_batch_size == [16]


def test_the_chunks_of_a_stream_keep_their_order(repository: Path) -> None:
    config = read(repository, "postprocessing")
    assert [group.count for group in config.instance_group] == [1]
    assert config.dynamic_batching.preserve_ordering


def test_unary_front_is_not_decoupled_and_speaks_the_ensembles_contract(repository: Path) -> None:
    front, ensemble = read(repository, "ensemble_unary"), read(repository, "ensemble")
    assert not front.model_transaction_policy.decoupled
    assert list(front.input) == list(ensemble.input)
    assert list(front.output) == list(ensemble.output)


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_written_that_triton_2_51_does_not_know(repository: Path, name: str) -> None:
    unknown: list[str] = []

    def walk(message: Any) -> None:
        known = FIELDS_OF_2_51[message.DESCRIPTOR.name]
        for field, value in message.ListFields():
            if field.name not in known:
                unknown.append(f"{message.DESCRIPTOR.name}.{field.name}")
            is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
            values = (
                value.values() if is_map else value if hasattr(value, "append") or hasattr(value, "add") else [value]
            )
            for item in values:
                if hasattr(item, "DESCRIPTOR"):
                    walk(item)

    walk(read(repository, name))
    assert unknown == []


# --- what the check finds -----------------------------------------------------------------------------------------


def remove(tensors: Any, name: str) -> None:
    index = next(i for i, tensor in enumerate(tensors) if tensor.name == name)
    del tensors[index]


def step(config: Any, model: str) -> Any:
    return next(step for step in config.ensemble_scheduling.step if step.model_name == model)


FAULTS: list[tuple[str, Any, str]] = [
    ("tensorrt_llm", lambda c: remove(c.input, "end_ids"), "input end_ids of the contract is missing"),
    ("tensorrt_llm", lambda c: c.output.add(name="more", data_type=pb.TYPE_INT32, dims=[1]), "output more is not in"),
    (
        "tensorrt_llm",
        lambda c: setattr(c.input[0], "data_type", pb.TYPE_INT64),
        "input_ids is TYPE_INT64; the",
    ),
    ("postprocessing", lambda c: c.input[0].dims.append(3), r"TOKENS_BATCH has dims \[-1, -1, 3\]; the contract says"),
    ("preprocessing", lambda c: setattr(c.input[0], "optional", False), "input QUERY must be optional"),
    ("preprocessing", lambda c: c.output.add().CopyFrom(c.output[0]), "output INPUT_ID is declared twice"),
    ("preprocessing", lambda c: setattr(c, "name", "pre"), "name is 'pre'; it must be the directory's"),
    ("tensorrt_llm", lambda c: c.parameters.pop("gpt_model_path"), "parameter gpt_model_path is missing"),
    (
        "tensorrt_llm",
        lambda c: setattr(c.parameters["gpt_model_path"], "string_value", "/nowhere"),
        "parameter gpt_model_path: /nowhere does not exist",
    ),
    (
        "tensorrt_llm",
        lambda c: setattr(c.parameters["gpt_model_type"], "string_value", "V2"),
        "parameter gpt_model_type is 'V2'; allowed: V1",
    ),
    ("tensorrt_llm", lambda c: setattr(c.parameters["speed"], "string_value", "9"), "parameter speed is not in the"),
    (
        "tensorrt_llm",
        lambda c: setattr(c.parameters["max_beam_width"], "string_value", "${x}"),
        r"\$\{x\} was never",
    ),
    ("tensorrt_llm", lambda c: setattr(c, "max_batch_size", 4), "max_batch_size is 4, the ensemble's 16"),
    (
        "ensemble",
        lambda c: step(c, "postprocessing").input_map.pop("TOKENS_BATCH"),
        "required input TOKENS_BATCH is not mapped",
    ),
    (
        "ensemble",
        lambda c: step(c, "tensorrt_llm").input_map.update({"seed": "temperature"}),
        "seed is TYPE_UINT64, but temperature of ensemble is TYPE_FP32",
    ),
    (
        "ensemble",
        lambda c: step(c, "tensorrt_llm").input_map.update({"end_ids": "_STOP_WORDS_IDS"}),
        r"end_ids has dims \[-1\], but _STOP_WORDS_IDS of preprocessing has \[2, -1\]",
    ),
    (
        "ensemble",
        lambda c: step(c, "tensorrt_llm").input_map.update({"end_id": "_NOBODY"}),
        "end_id takes _NOBODY, which neither the ensemble nor a step gives",
    ),
    (
        "ensemble",
        lambda c: step(c, "postprocessing").input_map.update({"TEXT_CUT": "_PREPROCESSOR_END_ID"}),
        "TEXT_CUT takes _PREPROCESSOR_END_ID from preprocessing; after the decoupled tensorrt_llm",
    ),
    (
        "ensemble",
        lambda c: step(c, "postprocessing").output_map.update({"OUTPUT": "other"}),
        "output text_output is given by no step",
    ),
    ("ensemble", lambda c: step(c, "preprocessing").input_map.pop("MESSAGES"), "input messages goes nowhere"),
    ("ensemble", lambda c: step(c, "preprocessing").input_map.update({"NO": "messages"}), "the model has no input NO"),
    ("ensemble", lambda c: setattr(step(c, "postprocessing"), "model_name", "post"), "step post: no such model"),
]


@pytest.mark.parametrize(("name", "edit", "finding"), FAULTS, ids=[finding[:40] for *_, finding in FAULTS])
def test_every_kind_of_fault_is_found(repository: Path, name: str, edit: Any, finding: str) -> None:
    import re

    change(repository, name, edit)
    findings = check_repository(repository)
    assert any(re.search(finding, text) for text in findings), findings


def test_all_findings_come_at_once(repository: Path) -> None:
    change(repository, "tensorrt_llm", lambda c: remove(c.input, "end_ids"))
    (repository / "preprocessing" / "config.pbtxt").write_text('name: "preprocessing"\nbackend python\n')
    (repository / "postprocessing" / "1" / "model.py").unlink()
    (repository / "ensemble" / "1").rmdir()
    findings = "\n".join(check_repository(repository))
    for expected in (
        "tensorrt_llm/config.pbtxt: input end_ids of the contract is missing",
        "preprocessing/config.pbtxt:2: not a model configuration",
        "postprocessing/config.pbtxt: 1/model.py is missing",
        "ensemble/config.pbtxt: the model has no version directory",
    ):
        assert expected in findings
    assert "step " not in findings  # what follows from a file that cannot be read is no finding of its own


def test_a_users_own_model_may_stand_beside_ours(repository: Path) -> None:
    own = pb.ModelConfig(name="reranker", backend="python", max_batch_size=4)
    (repository / "reranker" / "1").mkdir(parents=True)
    (repository / "reranker" / "1" / "model.py").write_text("")
    (repository / "reranker" / "config.pbtxt").write_text(to_text(own))
    assert check_repository(repository) == []


def test_an_empty_directory_is_no_repository(tmp_path: Path) -> None:
    assert "no model in it" in check_repository(tmp_path)[0]
