"""Names before an engine that knows task ids: what preprocessing sends for them, and what is refused when it loads."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path, PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from build_engines.plan.engine_plan import EnginePlan
from build_engines.plan.source_config import source_config
from build_engines.spec import load_spec
from build_engines.templates import from_text
from build_engines.trtllm.adapters import adapter_files, copy_adapters
from build_engines.trtllm.repository import render_trtllm
from python_backend.errors import BuildError, InvalidRequest, NotFound, Overloaded
from python_backend.lora.modules import ALL_MODULES, BaseModel
from python_backend.lora.peft import read_peft
from python_backend.lora.rows import from_rows
from tests.unit import fake_pb_utils
from tests.unit.engine_driver import FAMILIES
from tests.unit.fake_pb_utils import TritonModelException, texts
from tests.unit.test_preprocess import load, request, run
from tests.unit.tiny_adapters import base_of, random_tensors, write_peft

fake_pb_utils.install()

from python_backend.triton import bfloat16  # noqa: E402
from python_backend.triton.named_adapters import NamedAdapters  # noqa: E402

ROOT = Path(__file__).parents[2]
BASE = base_of(FAMILIES / "llama")
WIRE = {"output": [{"name": "OUT_LORA_WEIGHTS", "data_type": "TYPE_FP16"}]}


def write_engine(directory: Path, *, rank: int = 8, modules: tuple[str, ...] = ALL_MODULES, **changes: Any) -> Path:
    directory.mkdir(exist_ok=True)
    model = json.loads((FAMILIES / "llama" / "config.json").read_text()) | {"dtype": "float16"}
    build = {
        "max_input_len": 100, "plugin_config": {"lora_plugin": "float16"},
        "lora_config": {"max_lora_rank": rank, "lora_target_modules": list(modules)}, **changes,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps({"pretrained_config": model, "build_config": build}))
    return directory


def write_list(root: Path, names: tuple[str, ...] = ("a0", "a1"), **changes: Any) -> Path:
    """The file that says which adapters have names: two by name, and whatever comes into `more`."""
    section = {
        "max_rank": 8, "modules": list(ALL_MODULES), "host_cache_bytes": 1 << 20,
        "adapters": {name: str(root / name) for name in names}, "directory": str(root / "more"), **changes,
    }  # fmt: skip
    (root / "adapters.json").write_text(json.dumps(section))
    return root / "adapters.json"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number in range(2):
        write_peft(tmp_path / f"a{number}", random_tensors(BASE, seed=number))
    write_engine(tmp_path / "engine")
    return tmp_path


def named(root: Path, **changes: Any) -> NamedAdapters:
    return NamedAdapters(write_list(root, **changes), root / "engine", WIRE)


def by_name(*names: str) -> dict[str, Any]:
    return {"LORA_NAME": texts(*names)}


def test_a_name_becomes_the_three_tensors(root: Path) -> None:
    found = named(root).outputs(by_name("a1"), 1)
    weights, config = found["OUT_LORA_WEIGHTS"], found["OUT_LORA_CONFIG"]
    assert found["OUT_LORA_TASK_ID"].dtype == np.uint64
    assert (weights.dtype, config.dtype) == (np.float16, np.int32)
    assert weights.shape[:2] == config.shape[:2] == (1, BASE.num_layers * 7)
    sent, real = from_rows(weights[0], config[0], BASE, 1), read_peft(root / "a1", BASE, 1)
    for place, part in real.parts.items():
        np.testing.assert_allclose(sent.parts[place].b, part.b, rtol=1e-3, atol=1e-6)


def test_nothing_is_sent_for_a_request_without_an_adapter(root: Path) -> None:
    adapters = named(root)
    assert adapters.outputs({}, 1) == {}
    assert adapters.outputs(by_name(""), 1) == {}


def test_all_prompts_of_a_request_have_one_adapter(root: Path) -> None:
    adapters = named(root)
    found = adapters.outputs(by_name("a0", "a0"), 2)
    assert [len(array) for array in found.values()] == [2, 2, 2]
    for names in (("a0", "a1"), ("a0", "")):
        with pytest.raises(InvalidRequest, match="lora_name differs between the prompts of a request"):
            adapters.outputs(by_name(*names), 2)


def test_what_a_client_brings_goes_through_untouched_unless_the_id_is_the_deployments(root: Path) -> None:
    adapters = named(root)
    own = {
        "LORA_TASK_ID": np.array([[7]], np.uint64), "LORA_WEIGHTS": np.ones((1, 2, 3), np.float16),
        "LORA_CONFIG": np.ones((1, 2, 3), np.int32),
    }  # fmt: skip
    found = adapters.outputs(own, 1)
    assert all(found[f"OUT_{name}"] is array for name, array in own.items())
    assert list(adapters.outputs({"LORA_TASK_ID": own["LORA_TASK_ID"]}, 1)) == ["OUT_LORA_TASK_ID"]
    with pytest.raises(InvalidRequest, match="lora_name was sent with lora_task_id, lora_weights or lora_config"):
        adapters.outputs(own | by_name("a0"), 1)
    registered = adapters.outputs(by_name("a0"), 1)
    found = adapters.outputs(own | {"LORA_TASK_ID": registered["OUT_LORA_TASK_ID"]}, 1)
    assert all(np.array_equal(found[name], array) for name, array in registered.items())


def test_an_unknown_name_is_told_close_ones(root: Path) -> None:
    with pytest.raises(NotFound, match=r"lora_name 'a00' is not registered\. Did you mean a"):
        named(root).outputs(by_name("a00"), 1)


def test_adapters_come_change_and_go_while_it_runs(root: Path) -> None:
    adapters, place = named(root), root / "more" / "late"
    write_peft(place, random_tensors(BASE, seed=5))
    first = adapters.outputs(by_name("late"), 1)
    write_peft(place, random_tensors(BASE, seed=6, rank=3))
    second = adapters.outputs(by_name("late"), 1)
    # The engine ignores weights for an id that it knows: other weights need another id.
    assert first["OUT_LORA_TASK_ID"] != second["OUT_LORA_TASK_ID"]
    assert set(second["OUT_LORA_CONFIG"][0, :, 2].tolist()) == {3}
    (place / "adapter_config.json").unlink()
    with pytest.raises(NotFound):
        adapters.outputs(by_name("late"), 1)


def test_files_that_change_while_they_are_read_do_not_go_out_under_the_id_of_the_old(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = named(root)
    load = adapters._registry.load

    def late(entry: Any) -> Any:
        write_peft(root / "a0", random_tensors(BASE, seed=11, rank=2))
        return load(entry)

    monkeypatch.setattr(adapters._registry, "load", late)
    with pytest.raises(Overloaded, match="'a0' changed while it was read, please try again later"):
        adapters.outputs(by_name("a0"), 1)
    monkeypatch.undo()
    assert adapters.outputs(by_name("a0"), 1)["OUT_LORA_CONFIG"][0, 0, 2] == 2


def test_rows_are_kept_within_the_bound(root: Path) -> None:
    size = named(root).outputs(by_name("a0"), 1)["OUT_LORA_WEIGHTS"].nbytes
    for room, again in ((2, True), (1, False), (0, False)):
        adapters = named(root, host_cache_bytes=max(1, size * room))
        first, _ = (adapters.outputs(by_name(name), 1)["OUT_LORA_WEIGHTS"] for name in ("a0", "a1"))
        assert np.shares_memory(first, adapters.outputs(by_name("a0"), 1)["OUT_LORA_WEIGHTS"]) is again


def test_values_that_the_engines_type_does_not_hold_are_refused(root: Path) -> None:
    write_peft(root / "more" / "large", random_tensors(BASE, size=1e5))
    with pytest.raises(InvalidRequest, match=r"'large' cannot be served: .* values over the largest float16"):
        named(root).outputs(by_name("large"), 1)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"rank": 2}, r"a0.*has rank 4; allowed: 1 to 2"),
        ({"modules": ("attn_q", "attn_v")}, r"lora module \w+ not enabled for this model; enabled: attn_q, attn_v"),
        ({"plugin_config": {"lora_plugin": None}}, r"the engine was compiled without lora_plugin\. Build it again"),
        ({"lora_config": {}}, r"is no readable configuration of an engine"),
    ],
)
def test_what_the_engine_was_not_compiled_for_fails_the_load(root: Path, engine: Any, message: str) -> None:
    write_engine(root / "engine", **engine)
    with pytest.raises(BuildError, match=message):
        named(root)


def test_weights_of_another_type_than_the_engines_fail_the_load(root: Path) -> None:
    wire = {"output": [{"name": "OUT_LORA_WEIGHTS", "data_type": "TYPE_BF16"}]}
    with pytest.raises(BuildError, match="is TYPE_BF16; adapters have the engine's type, which is float16"):
        NamedAdapters(write_list(root), root / "engine", wire)


def test_preprocessing_sends_them_beside_the_prompt(root: Path) -> None:
    parameters = {"target": "trtllm", "gpt_model_path": str(root / "engine"), "lora_registry": str(write_list(root))}
    with pytest.raises(TritonModelException, match="OUT_LORA_WEIGHTS is None"):
        load(root / "t", **parameters)
    model = load(root / "t", model_config=WIRE, **parameters)
    response = run(model, request("x", **by_name("a0")))
    assert response["OUT_LORA_CONFIG"].shape[-1] == 4
    assert "OUT_LORA_TASK_ID" not in run(model, request("x"))
    assert "Did you mean" in run(model, request("x", **by_name("a"))).error.message()


def test_bfloat16_goes_out_and_comes_back_and_is_let_go() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3).astype(ml_dtypes.bfloat16)
    back = bfloat16.from_capsule(bfloat16.to_capsule(values[:, ::2]))
    assert back.dtype == ml_dtypes.bfloat16
    assert back.tolist() == [[0, 2], [3, 5]]
    assert len(bfloat16._lent) == 1
    del back
    gc.collect()
    assert bfloat16._lent == {}
    with pytest.raises(TypeError, match="type code 2"):
        bfloat16.from_capsule(np.zeros(3, np.float32).__dlpack__())


def test_the_bytes_of_a_request_are_those_that_the_page_states() -> None:
    page = (ROOT / "docs" / "lora.md").read_text()
    (stated,) = re.findall(
        r"is ([\d.]+) MB for SmolLM2-135M and (\d+) MB .*?q, k and v alone (\d+) MB", page, re.DOTALL
    )
    found = [rows_mb("smollm2-135m", 7), rows_mb("llama-3.1-8b", 7), rows_mb("llama-3.1-8b", 3)]
    assert [float(text) for text in stated] == [round(found[0], 1), round(found[1]), round(found[2])]


def rows_mb(shape: str, modules: int, rank: int = 8) -> float:
    """Megabytes of lora_weights [R, L] in 16 bit, of the first modules."""
    base = BaseModel.of(json.loads((ROOT / "build_engines" / "shapes" / shape / "config.json").read_text()))
    longest = max(rank * sum(sizes) for sizes in list(base.sizes.values())[:modules])
    return base.num_layers * modules * longest * 2 / 1e6


# --- the build ----------------------------------------------------------------------------------------------------


SPEC = """\
name: named
target: trtllm
source: {{shape: {shape}, weights: nowhere}}
hardware: {{card: h100-sxm}}
quantization: {{quant_algo: NO_QUANT}}
limits: {{max_batch_size: 8, max_num_tokens: 512, max_seq_len: 200, max_beam_width: 1}}
lora:
  modules: [attn_q]
  max_rank: 8
  adapters: {{a0: {{path: a0, owner: Ada}}}}
"""


def plan_of(root: Path, more: str = "") -> EnginePlan:
    (root / "spec.yaml").write_text(SPEC.format(shape=FAMILIES / "llama") + more)
    spec = load_spec(root / "spec.yaml")
    return EnginePlan.of(spec, *source_config(spec))


def test_a_build_takes_the_named_adapters_along(root: Path) -> None:
    write_peft(root / "a0", random_tensors(BASE, projections=("self_attn.q_proj",)))
    (root / "a0" / "README.md").write_text("not needed")
    plan = plan_of(root)
    (root / "out").mkdir()
    copy_adapters(plan, root / "out")
    assert {path.name for path in (root / "out" / "a0").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    before = adapter_files(plan.spec)
    write_peft(root / "a0", random_tensors(BASE, seed=9, projections=("self_attn.q_proj",)))
    assert adapter_files(plan.spec) != before  # so that the step runs again


def test_directories_are_those_of_the_container(root: Path) -> None:
    write_peft(root / "a0", random_tensors(BASE, projections=("self_attn.q_proj",)))
    more = "\n  directory: more\n  prefetch_directory: /mnt/converted\n"
    plan = plan_of(root, more)
    (root / "repo").mkdir()
    render_trtllm(plan, PurePosixPath("/deployments/named"), root / "repo")
    section = json.loads((root / "repo" / "preprocessing" / "1" / "adapters.json").read_text())
    assert section["adapters"] == {"a0": "/deployments/named/adapters/a0"}
    assert section["directory"] == "/deployments/named/more"
    assert section["owners"] == {"a0": "Ada"}
    config = from_text((root / "repo" / "tensorrt_llm" / "config.pbtxt").read_text())
    assert config.parameters["lora_prefetch_dir"].string_value == "/mnt/converted"


def test_an_adapter_that_does_not_fit_stops_the_build_at_its_line(root: Path) -> None:
    with pytest.raises(BuildError, match=r"spec\.yaml:\d+: lora\.adapters: .*lora module \w+ not enabled"):
        copy_adapters(plan_of(root), root)
    (root / "a0" / "adapter_config.json").unlink()
    with pytest.raises(BuildError, match=r"lora\.adapters\.a0: .*a0 has no adapter_config\.json; name a PEFT"):
        adapter_files(plan_of(root).spec)
