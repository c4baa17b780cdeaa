"""From engines to the LLM API: the new spec is one, and what is lost is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from build_engines import cli
from build_engines.check import check_repository
from build_engines.spec import load_spec
from build_engines.trtllm.llmapi import llmapi_contract
from build_engines.trtllm.migrate import RENAMED, migrate_engine
from python_backend.contract import model_contract

SPECS = Path(__file__).parents[2] / "build_engines" / "specs"
SHAPE = Path(__file__).parents[2] / "build_engines" / "shapes" / "llama-3.1-8b"
ENGINE: dict[str, Any] = {
    "version": "1.2.1",
    "pretrained_config": {
        "mapping": {"world_size": 2, "tp_size": 2, "pp_size": 1, "moe_ep_size": 1},
        "quantization": {"quant_algo": "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN", "kv_cache_quant_algo": "INT8"},
    },
    "build_config": {
        "max_batch_size": 64, "max_num_tokens": 4096, "max_seq_len": 8192, "max_beam_width": 4,
        "speculative_decoding_mode": "MEDUSA", "plugin_config": {"lora_plugin": "auto"},
        "lora_config": {"max_lora_rank": 16},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ["llama-3.1-8b-h100", "llama-3.3-70b-h100-tp4", "mixtral-8x7b-h100-tp2"])
def test_a_migrated_spec_dry_runs_and_passes_the_check(name: str, tmp_path: Path) -> None:
    output = tmp_path / "new.yaml"
    assert cli.main(["migrate", str(SPECS / f"{name}.yaml"), str(output)]) == 0
    deployment = load_spec(output).deployment
    assert (deployment.target, deployment.name) == ("llmapi", f"{name}-llmapi")
    assert cli.main(["build", "--spec", str(output), "--engines-dir", str(tmp_path), "--dry-run"]) == 0
    model = tmp_path / deployment.name / "model_repo" / "tensorrt_llm" / "1" / "model.yaml"
    arguments = yaml.safe_load(model.read_text())
    assert arguments["model"] == f"/deployments/{deployment.name}/unified"
    assert arguments["tensor_parallel_size"] == load_spec(SPECS / f"{name}.yaml").deployment.parallel.tp
    assert arguments["kv_cache_config"]["dtype"] == "fp8"
    assert check_repository(model.parents[2], built=False) == []


def test_the_report_names_every_classic_input_that_is_lost(tmp_path: Path) -> None:
    output = tmp_path / "new.yaml"
    assert cli.main(["migrate", str(SPECS / "llama-3.1-8b-h100.yaml"), str(output)]) == 0
    report = output.with_suffix(".md").read_text()
    for name, tensor in model_contract("ensemble").inputs.items():
        if not tensor.ours:
            assert name in report or RENAMED[name] == name
    for lost in ("guided_decoding_guide", "bad_words", "output_log_probs", "adapters sent as tensors"):
        assert lost in report


def test_new_names_are_inputs_of_upstreams_model() -> None:
    assert set(RENAMED.values()) <= set(llmapi_contract().inputs)
    assert set(RENAMED) <= set(model_contract("ensemble").inputs)


def test_an_engine_becomes_a_spec_and_what_it_cannot_keep_is_said() -> None:
    found = migrate_engine(ENGINE, "chat", "meta-llama/Llama-3.1-8B", str(SHAPE), "h100-sxm")
    assert found.spec["parallel"] == {"tp": 2, "pp": 1, "ep": 1}
    assert found.spec["quantization"] == {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    assert found.spec["limits"] == {
        "max_batch_size": 64,
        "max_num_tokens": 4096,
        "max_seq_len": 8192,
        "max_beam_width": 1,
    }
    assert found.spec["lora"] == {"max_rank": 16}
    losses = "\n".join(found.losses)
    for lost in ("W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN", "INT8", "beam search of width 4", "MEDUSA", "adapters"):
        assert lost in losses


def test_an_engines_origin_has_to_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    origin = tmp_path / "chat" / "config.json"
    origin.parent.mkdir()
    origin.write_text(json.dumps(ENGINE))
    output = tmp_path / "new.yaml"
    assert cli.main(["migrate", str(origin), str(output)]) == 1
    assert "give --weights, --shape, --card" in capsys.readouterr().err
    given = ["--weights", "meta-llama/Llama-3.1-8B", "--shape", str(SHAPE), "--card", "h100-sxm"]
    assert cli.main(["migrate", str(origin), str(output), *given]) == 0
    assert load_spec(output).name == "chat-llmapi"


def test_a_config_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--weights", "x", "--shape", str(SHAPE), "--card", "h100-sxm"]
    assert cli.main(["migrate", str(SHAPE / "config.json"), str(tmp_path / "new.yaml"), *given]) == 1
    assert "no config.json of an engine" in capsys.readouterr().err


def test_a_draft_model_goes_along(tmp_path: Path) -> None:
    output = tmp_path / "elsewhere" / "new.yaml"
    output.parent.mkdir()
    assert cli.main(["migrate", str(SPECS / "llama-3.3-70b-h100-tp4-draft.yaml"), str(output)]) == 0
    draft = load_spec(output).deployment.speculative
    assert draft is not None
    assert draft.draft_model == "meta-llama/Llama-3.2-1B-Instruct"
    assert "tensorrt_llm_bls with num_draft_tokens" in output.with_suffix(".md").read_text()
