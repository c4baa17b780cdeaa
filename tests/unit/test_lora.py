"""Adapters before they reach the engine: read from PEFT, sent as rows, kept in the cache, found by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from python_backend.errors import BuildError, InvalidRequest, LimitExceeded, NotFound, Overloaded, Unsupported
from python_backend.lora.adapter import Adapter, LowRank
from python_backend.lora.cache import AdapterCache
from python_backend.lora.modules import ALL_MODULES
from python_backend.lora.peft import read_peft
from python_backend.lora.prefetch import read_prefetched
from python_backend.lora.registry import AdapterRegistry, task_id_of
from python_backend.lora.rows import from_rows, to_rows
from tests.unit.engine_driver import FAMILIES
from tests.unit.tiny_adapters import base_of, random_tensors, write_peft

BASE = base_of(FAMILIES / "llama")
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 8 / 4),
        ({"use_rslora": True}, 8 / 2),
        ({"alpha_pattern": {"q_proj": 20}}, 20 / 4),
        ({"alpha_pattern": {"model.layers.0.self_attn.q_proj": 2}}, 2 / 4),
        ({"alpha_pattern": {"layers.1.self_attn.q_proj": 2}}, 8 / 4),
    ],
)
def test_the_scale_is_folded_into_b(tmp_path, config, scale):
    tensors = random_tensors(BASE)
    a, b = read_peft(write_peft(tmp_path, tensors, **config), BASE, 1).low_rank(0, "self_attn.q_proj")
    np.testing.assert_array_equal(a, tensors[f"{Q0}.lora_A.weight"])
    np.testing.assert_allclose(b, tensors[f"{Q0}.lora_B.weight"] * scale, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_files_are_read_as_what_they_hold(tmp_path, dtype):
    tensors = random_tensors(BASE)
    adapter = read_peft(write_peft(tmp_path, tensors, dtype), BASE, 1)
    stored = tensors[f"{Q0}.lora_A.weight"].astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(adapter.low_rank(0, "self_attn.q_proj")[0], stored)


def test_ranks_are_those_of_the_tensors_whatever_r_says(tmp_path):
    tensors = random_tensors(BASE, ranks={"mlp.down_proj": 2})
    adapter = read_peft(write_peft(tmp_path, tensors, rank_pattern={"down_proj": 2}), BASE, 1)
    a, b = adapter.low_rank(1, "mlp.down_proj")
    assert (len(a), adapter.rank) == (2, 4)
    np.testing.assert_allclose(b, tensors["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"] * 4, rtol=1e-6)


def changed(name: str, values: np.ndarray | None):
    def change(tensors: dict) -> None:
        tensors.pop(name)
        if values is not None:
            tensors[name] = values

    return change


def added(name: str):
    return lambda tensors: tensors.update({name: np.zeros((4, 4), np.float32)})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (changed(f"{Q0}.lora_B.weight", None), "lora_B of model.layers.0.self_attn.q_proj is missing"),
        (changed(f"{Q0}.lora_A.weight", np.full((4, 64), np.nan, np.float32)), "256 values that are NaN"),
        (changed(f"{Q0}.lora_A.weight", np.zeros((4, 63), np.float32)), "trained for another base model"),
        (changed(f"{Q0}.lora_B.weight", np.zeros((64, 5), np.float32)), "trained for another base model"),
        (added("base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"), "is of layer 9; the model has 2"),
        (added("base_model.model.model.layers.0.self_attn.x_proj.lora_A.weight"), "self_attn.x_proj is not served"),
        (added(f"{Q0}.lora_magnitude_vector"), "DoRA is not served"),
        (added("base_model.model.lm_head.lora_A.weight"), "has no place here"),
        (changed(f"{Q0}.lora_A.weight", np.zeros((4, 64), np.int8)), "data type I8"),
    ],
)
def test_a_wrong_tensor_is_refused_with_file_tensor_and_reason(tmp_path, change, reason):
    tensors = random_tensors(BASE)
    change(tensors)
    place = write_peft(tmp_path, tensors)
    if tensors.get(f"{Q0}.lora_A.weight", np.zeros(0)).dtype == np.int8:
        kinds = {name: values.astype(np.int8 if name.endswith("0.self_attn.q_proj.lora_A.weight") else np.float32)
                 for name, values in tensors.items()}  # fmt: skip
        from safetensors.numpy import save_file

        save_file(kinds, place / "adapter_model.safetensors")
    with pytest.raises(BuildError, match=reason) as error:
        read_peft(place, BASE, 1)
    assert "adapter_model.safetensors" in str(error.value)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "use_dora is True; DoRA is not served"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; served: LORA"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"r": 0}, "r is 0"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
)
def test_a_configuration_that_is_not_served_is_refused_by_name(tmp_path, config, reason):
    with pytest.raises(BuildError, match=reason):
        read_peft(write_peft(tmp_path, random_tensors(BASE), **config), BASE, 1)


def test_files_that_are_missing_cut_or_over_a_limit_are_refused(tmp_path):
    place = write_peft(tmp_path / "x", random_tensors(BASE))
    with pytest.raises(BuildError, match=r"has rank 4; allowed: 1 to 3"):
        read_peft(place, base_of(FAMILIES / "llama", max_rank=3), 1)
    with pytest.raises(BuildError, match="lora module mlp_gate not enabled"):
        read_peft(place, base_of(FAMILIES / "llama", modules=tuple(m for m in ALL_MODULES if m != "mlp_gate")), 1)
    weights = place / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-10])
    with pytest.raises(BuildError, match="truncated"):
        read_peft(place, BASE, 1)
    weights.write_bytes(whole[:100])
    with pytest.raises(BuildError, match="not a whole safetensors file"):
        read_peft(place, BASE, 1)
    weights.unlink()
    with pytest.raises(BuildError, match="No such file"):
        read_peft(place, BASE, 1)


@pytest.mark.parametrize("columns", [3, 4])
def test_rows_give_back_the_adapter_they_were_made_from(tmp_path, columns):
    adapter = read_peft(write_peft(tmp_path, random_tensors(BASE, ranks={"mlp.up_proj": 1})), BASE, 5)
    weights, config = to_rows(adapter, np.float32)
    assert config.shape == (14, 4)
    assert from_rows(weights, config[:, :columns], BASE, 5).version == adapter.version


def test_the_gate_is_module_5_and_the_up_projection_7(tmp_path):
    for projection, module in (("mlp.gate_proj", 5), ("mlp.up_proj", 7), ("self_attn.o_proj", 4)):
        adapter = read_peft(write_peft(tmp_path, random_tensors(BASE, projections=(projection,))), BASE, 1)
        assert to_rows(adapter)[1][:, 0].tolist() == [module, module]


@pytest.mark.parametrize(
    ("key", "width", "kind", "text"),
    [
        ([1, 0, 4], 511, InvalidRequest, "lora_weights has to few values for attn_q"),
        ([1, 0, 65], 512, InvalidRequest, r"Invalid low_rank \(65\). low_rank must be smaller than mMaxLowRank \(64\)"),
        ([0, 0, 4], 512, InvalidRequest, "lora_weights has to few values for attn_qkv: .* needs 768, got 512"),
        ([13, 0, 4], 512, InvalidRequest, "lora module moe_h_to_4h not enabled for this model"),
        ([99, 0, 4], 512, InvalidRequest, "lora module 99 not enabled for this model"),
        ([1, 2, 4], 512, InvalidRequest, "names layer 2; allowed: 0 to 1"),
        ([1, 0, 4, 1], 512, Unsupported, "DoRA"),
        ([1, 0], 512, InvalidRequest, r"Expected dim2 of lora_keys to have a size in \[3, 4\]"),
    ],
)
def test_rows_that_do_not_fit_are_refused_in_upstreams_words(key, width, kind, text):
    with pytest.raises(kind, match=text):
        from_rows(np.zeros((1, width), np.float16), np.array([key], np.int32), BASE, 1)


def test_a_row_of_fused_linears_is_taken_apart_as_upstream_lays_it_out():
    a, q, k, v = (np.random.default_rng(n).normal(size=size).astype(np.float32) for n, size in
                  enumerate(((2, 64), (64, 2), (32, 2), (32, 2))))  # fmt: skip
    gate, up = (np.random.default_rng(n).normal(size=(64, 2)).astype(np.float32) for n in (5, 6))
    qkv = np.concatenate([values.ravel() for values in (a, q, k, v)])
    gate_up = np.concatenate([values.ravel() for values in (a, up, gate)])
    rows = np.zeros((2, max(len(qkv), len(gate_up))), np.float32)
    for row, values in zip(rows, (qkv, gate_up), strict=True):
        row[: len(values)] = values
    parts = from_rows(rows, np.array([[0, 1, 2], [18, 0, 2]], np.int32), BASE, 1).parts
    expected = {(1, "self_attn.q_proj"): q, (1, "self_attn.k_proj"): k, (1, "self_attn.v_proj"): v}
    expected |= {(0, "mlp.gate_proj"): gate, (0, "mlp.up_proj"): up}
    assert parts.keys() == expected.keys()
    for place, b in expected.items():
        np.testing.assert_array_equal(parts[place].a, a)
        np.testing.assert_array_equal(parts[place].b, b)
    with pytest.raises(InvalidRequest, match="lora_config names module 1 of layer 1 twice"):
        from_rows(rows, np.array([[0, 1, 2], [1, 1, 2]], np.int32), BASE, 1)
    without_v = base_of(FAMILIES / "llama", modules=("attn_q", "attn_k"))
    with pytest.raises(InvalidRequest, match="lora module attn_qkv not enabled for this model"):
        from_rows(rows[:1], np.array([[0, 1, 2]], np.int32), without_v, 1)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e31])
def test_values_that_no_step_can_compute_with_are_refused(tmp_path, value):
    with pytest.raises(InvalidRequest, match="attn_q, layer 0, has values that are NaN, infinite or over"):
        from_rows(np.full((1, 512), value, np.float32), np.array([[1, 0, 4]], np.int32), BASE, 1)
    tensors = {name: np.full_like(values, value) for name, values in random_tensors(BASE).items()}
    place = write_peft(tmp_path, tensors)
    with pytest.raises(BuildError, match="values"):
        read_peft(place, BASE, 1)


def test_rows_and_keys_must_be_as_many():
    with pytest.raises(InvalidRequest, match="Expected dim1 lora_weights and lora_keys to have the same size"):
        from_rows(np.zeros((2, 512), np.float16), np.array([[1, 0, 4]], np.int32), BASE, 1)


def small(task_id: int, rows: int = 1) -> Adapter:
    """An adapter of 1000 bytes for each row."""
    a, b = np.ones((rows, 125), np.float32), np.ones((125, rows), np.float32)
    return Adapter(task_id, {(0, "self_attn.q_proj"): LowRank(a, b)})


def test_the_least_recently_used_adapter_makes_room_and_one_in_use_never_does():
    cache = AdapterCache(2000)
    cache.put(small(1))
    cache.put(small(2))
    used = cache.acquire(1)
    cache.put(small(3))  # 2 goes, although 1 is older
    assert 1 in cache
    assert 2 not in cache
    with pytest.raises(NotFound, match=r"LoRA task 2 not found in cache. Please send LoRA weights with request"):
        cache.acquire(2)
    cache.acquire(3)
    with pytest.raises(Overloaded, match=r"PEFT Cache is full. Could not store taskId=4 \(Cache is full. There are no"):
        cache.put(small(4))
    cache.release(used)
    cache.put(small(4))
    assert 1 not in cache
    stats = cache.stats()
    assert (stats.adapters, stats.nbytes, stats.evictions, stats.misses) == (2, 2000, 2, 1)


def test_a_cache_of_exactly_one_adapter_holds_one():
    cache = AdapterCache(1000)
    cache.put(small(1))
    cache.put(small(2))
    assert 2 in cache
    with pytest.raises(LimitExceeded, match="it takes 2000 bytes, the cache 1000"):
        cache.put(small(3, rows=2))


def test_an_adapter_replaced_while_in_use_does_not_lose_the_new_ones_uses():
    cache = AdapterCache(2000)
    cache.put(small(1))
    old = cache.acquire(1)
    cache.put(small(1))
    new = cache.acquire(1)
    cache.release(old)
    with pytest.raises(Overloaded):
        cache.put(small(2, rows=2))
    cache.release(new)
    cache.put(small(2, rows=2))


def test_an_adapter_is_found_by_its_name_and_its_id_never_changes(tmp_path):
    place = write_peft(tmp_path / "pirate", random_tensors(BASE), base_model_name_or_path="tiny")
    registry = AdapterRegistry(BASE, {"pirate": place})
    entry = registry.find("pirate")
    assert (entry.task_id, entry.rank, entry.base_model) == (task_id_of("pirate"), 4, "tiny")
    assert entry.task_id == 56499564449029
    assert set(entry.modules) == set(ALL_MODULES)
    assert registry.load(entry).task_id == entry.task_id


def test_an_unknown_name_is_answered_with_close_ones(tmp_path):
    registry = AdapterRegistry(BASE, {"pirate": write_peft(tmp_path / "p", random_tensors(BASE))})
    with pytest.raises(NotFound, match=r"'pirat' is not registered. Did you mean pirate\?"):
        registry.find("pirat")
    with pytest.raises(NotFound, match="Registered are: pirate"):
        registry.find("zzz")
    with pytest.raises(NotFound, match="not registered"):
        registry.find("../p")


def test_a_directory_may_gain_change_and_lose_adapters(tmp_path):
    registry = AdapterRegistry(BASE, {}, tmp_path)
    with pytest.raises(NotFound, match="This deployment has no adapters"):
        registry.find("late")
    place = write_peft(tmp_path / "late", random_tensors(BASE))
    first = registry.find("late")
    write_peft(place, random_tensors(BASE, seed=1))
    os.utime(place / "adapter_model.safetensors", ns=(1, 1))
    assert registry.find("late").content_hash != first.content_hash
    (place / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(InvalidRequest, match=r"'late' cannot be served: .*not a whole safetensors file"):
        registry.find("late")
    (place / "adapter_config.json").unlink()
    with pytest.raises(NotFound):
        registry.find("late")
    assert registry.names() == []


def test_a_link_out_of_the_directory_is_not_followed(tmp_path):
    outside = write_peft(tmp_path / "outside", random_tensors(BASE))
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(outside)
    registry = AdapterRegistry(BASE, {}, tmp_path / "root")
    assert registry.names() == []
    with pytest.raises(InvalidRequest, match="leads out of"):
        registry.find("link")


def test_a_named_adapter_that_is_wrong_stops_the_start(tmp_path):
    with pytest.raises(BuildError, match="No such file"):
        AdapterRegistry(BASE, {"gone": tmp_path / "gone"})
    write_peft(tmp_path / "named", random_tensors(BASE))
    write_peft(tmp_path / "more" / "x", random_tensors(BASE))
    with pytest.raises(BuildError, match=r"Adapter name 'x' is that of .*/named and of .*/more/x; rename one"):
        AdapterRegistry(BASE, {"x": tmp_path / "named"}, tmp_path / "more")
    assert AdapterRegistry(BASE, {"x": tmp_path / "more" / "x"}, tmp_path / "more").names() == ["x"]
    with pytest.raises(BuildError, match=r"Adapter name '../x'"):
        AdapterRegistry(BASE, {"../x": tmp_path})


def test_an_adapter_of_another_base_model_is_refused_by_its_name_or_its_weights(tmp_path):
    base = base_of(FAMILIES / "llama", names=("org/Tiny-Llama",), checkpoint_hash="abc")
    for good in ("", "org/Tiny-Llama", "/models/tiny-llama/"):
        read_peft(write_peft(tmp_path / "good", random_tensors(BASE), base_model_name_or_path=good), base, 1)
    place = write_peft(tmp_path / "bad", random_tensors(BASE), base_model_name_or_path="org/Other-7B")
    with pytest.raises(BuildError, match=r"base_model_name_or_path is 'org/Other-7B'; this deployment serves org/Tiny"):
        read_peft(place, base, 1)
    good = write_peft(tmp_path / "labelled", random_tensors(BASE))
    (good / "serving.json").write_text('{"owner": "team a", "checkpoint_hash": "abc"}')
    assert AdapterRegistry(base, {"x": good}).find("x").owner == "team a"
    assert AdapterRegistry(base, {"x": good}, owners={"x": "team b"}).find("x").owner == "team b"
    (good / "serving.json").write_text('{"checkpoint_hash": "abd"}')
    with pytest.raises(BuildError, match=r"checkpoint_hash is abd; this deployment's is abc. The adapter was trained"):
        AdapterRegistry(base, {"x": good})
    for wrong in ('{"owner": 1}', "[]", "{", '{"team": "a"}'):
        (good / "serving.json").write_text(wrong)
        with pytest.raises(BuildError, match=r"serving.json: "):
            AdapterRegistry(base, {"x": good})


def test_the_registry_tells_what_it_refuses_until_that_is_gone(tmp_path):
    place = write_peft(tmp_path / "bad", random_tensors(BASE), r=0)
    registry = AdapterRegistry(BASE, {}, tmp_path)
    ((name, reason),) = registry.refused()
    assert name == "bad"
    assert "r is 0; allowed: an integer >= 1" in reason
    (place / "adapter_config.json").unlink()
    registry.refresh()
    assert registry.refused() == []


def prefetched(directory: Path, adapter: Adapter, *, dtype: Any = np.float16, config: str = "config") -> Path:
    weights, keys = to_rows(adapter, dtype)
    directory.mkdir(parents=True)
    np.save(directory / "model.lora_weights.npy", weights[None])
    np.save(directory / f"model.lora_{config}.npy", keys[None])
    return directory


def test_converted_adapters_are_prefetched_by_their_task_ids(tmp_path):
    adapter = read_peft(write_peft(tmp_path / "x", random_tensors(BASE), ml_dtypes.bfloat16), BASE, 1)
    prefetched(tmp_path / "p" / "12", adapter, dtype=np.float32)
    prefetched(tmp_path / "p" / "7", adapter, dtype=ml_dtypes.bfloat16, config="keys")
    found = list(read_prefetched(tmp_path / "p", BASE))
    assert [one.task_id for one in found] == [7, 12]
    assert found[1].version == adapter.version
    np.testing.assert_allclose(found[0].low_rank(0, "mlp.up_proj")[1], adapter.low_rank(0, "mlp.up_proj")[1], rtol=0.01)


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda place: place.rename(place.with_name("seven")), "folders of lora_prefetch_dir are named by a task id"),
        (lambda place: (place / "model.lora_config.npy").unlink(), "model.lora_config.npy: cannot be read"),
        (
            lambda place: (place / "model.lora_weights.npy").write_bytes(b"\x93NUMPY"),
            "model.lora_weights.npy: cannot be",
        ),
        (lambda place: np.save(place / "model.lora_config.npy", [[[1, 9, 4]]]), "Expected dim1 lora_weights"),
    ],
)
def test_what_cannot_be_prefetched_is_named(tmp_path, break_it, reason):
    adapter = read_peft(write_peft(tmp_path / "x", random_tensors(BASE)), BASE, 1)
    break_it(prefetched(tmp_path / "p" / "7", adapter))
    with pytest.raises(BuildError, match=reason):
        list(read_prefetched(tmp_path / "p", BASE))


@pytest.mark.parametrize("name", ["json", "pirate"])
def test_the_shipped_adapters_fit_the_demo_model(name):
    root = Path(__file__).parents[2]
    adapter = read_peft(
        root / "adapters" / "smollm2-135m" / name, base_of(root / "build_engines/shapes/smollm2-135m"), 1
    )
    assert adapter.rank == 4
    assert len(adapter.parts) == 30 * 4
