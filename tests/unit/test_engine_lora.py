"""The engine with adapters: each request of a mixed batch is answered as if it were alone with a merged checkpoint."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from python_backend.errors import LimitExceeded
from python_backend.lora.peft import read_peft
from tests.unit import engine_driver
from tests.unit.engine_driver import FAMILIES, make_request, running_engine
from tests.unit.tiny_adapters import base_of, random_tensors, write_peft


def adapter(directory: Path, family: str = "llama", number: int = 0, **options):
    tensors = random_tensors(base_of(FAMILIES / family), seed=number, size=0.3, **options)
    return read_peft(write_peft(directory / str(number), tensors), base_of(FAMILIES / family), number)


def merged_checkpoint(directory: Path, family: str, change) -> None:
    """The family's checkpoint with the adapter added to its matrices, in float32."""
    shutil.copytree(FAMILIES / family, directory / family)
    path = directory / family / "model.safetensors"
    tensors = {name: values.astype(np.float32) for name, values in load_file(path).items()}
    for (layer, projection), part in change.parts.items():
        tensors[f"model.layers.{layer}.{projection}.weight"] += part.b @ part.a
    save_file(tensors, path)


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, 250, rng.integers(2, 80)).tolist() for _ in range(count)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_equal_those_of_a_checkpoint_with_the_adapter_merged(tmp_path, monkeypatch, family):
    change = adapter(tmp_path, family, ranks={"self_attn.k_proj": 2, "mlp.down_proj": 7})
    prompt = prompts(1)[0]
    options = {"max_tokens": 24, "return_context_logits": True, "top_prompt_logprobs": 0, "top_logprobs": 0}
    with running_engine(family, max_lora_rank=8) as driver:
        plain = driver.run(make_request("r", prompt, **options))["r"]
        adapted = driver.run(make_request("r", prompt, adapter=change, **options))["r"]
    merged_checkpoint(tmp_path, family, change)
    monkeypatch.setattr(engine_driver, "FAMILIES", tmp_path)
    with running_engine(family) as driver:
        merged = driver.run(make_request("r", prompt, **options))["r"]
    logits, expected = adapted.events[0].context_logits, merged.events[0].context_logits
    np.testing.assert_allclose(logits, expected, atol=2e-3, rtol=1e-3)
    assert adapted.tokens == merged.tokens
    for read in (lambda e: e.prompt_log_probs or [], lambda e: e.sequences[0].top_log_probs):
        found, wanted = ([t.log_prob for e in answer.events for t in read(e)] for answer in (adapted, merged))
        np.testing.assert_allclose(found, wanted, atol=2e-3)
    assert np.abs(plain.events[0].context_logits - expected).max() > 0.1


@pytest.mark.parametrize(
    "options", [{"beam_width": 3}, {"num_return_sequences": 3, "temperature": 1.0, "seed": 5}], ids=["beams", "samples"]
)
def test_beams_and_samples_have_the_adapter_too(tmp_path, monkeypatch, options):
    change, prompt = adapter(tmp_path), prompts(1)[0]
    with running_engine(max_lora_rank=4) as driver:
        adapted = driver.run(make_request("r", prompt, adapter=change, **options))["r"].tokens
        assert driver.run(make_request("r", prompt, **options))["r"].tokens != adapted
    merged_checkpoint(tmp_path, "llama", change)
    monkeypatch.setattr(engine_driver, "FAMILIES", tmp_path)
    with running_engine() as driver:
        assert driver.run(make_request("r", prompt, **options))["r"].tokens == adapted


def test_every_request_of_a_mixed_batch_of_16_gets_the_tokens_it_has_alone(tmp_path):
    adapters = [None, *(adapter(tmp_path, number=n, rank=rank) for n, rank in enumerate((1, 4, 8, 3, 16)))]

    def request(i: int):
        return make_request(str(i), prompts(16)[i], max_tokens=40, adapter=adapters[i % len(adapters)])

    with running_engine(max_lora_rank=16, enable_kv_cache_reuse=False) as driver:
        solo = {str(i): driver.tokens(request(i))[str(i)] for i in range(16)}
    with running_engine(max_lora_rank=16) as driver:
        assert driver.tokens(*(request(i) for i in range(16))) == solo
    with running_engine(enable_kv_cache_reuse=False) as driver:  # without adapters at all
        base = {i: driver.tokens(make_request(i, prompts(16)[int(i)], max_tokens=40))[i] for i in ("0", "6", "12")}
    assert {i: solo[i] for i in base} == base


def test_many_adapters_of_changing_company_take_each_others_rows_and_keep_their_answers(tmp_path):
    adapters = [adapter(tmp_path, number=n, rank=1 + n % 5) for n in range(24)]
    prompt = prompts(1)[0]
    with running_engine(max_lora_rank=5, max_batch_size=4) as driver:
        alone = [driver.tokens(make_request("a", prompt, adapter=a))["a"] for a in adapters]
        assert len({tuple(tokens) for tokens in alone}) > 20
        together = driver.tokens(
            *(make_request(str(n), prompt, adapter=adapters[n], max_tokens=16) for n in np.arange(48) * 7 % 24)
        )
    assert [together[str(n)][:16] for n in range(24)] == alone


def test_prefix_blocks_are_shared_within_an_adapter_only_and_not_after_it_has_changed(tmp_path):
    one, same, other = (adapter(tmp_path / str(n), number=number) for n, number in enumerate((0, 0, 1)))
    assert one.version == same.version != other.version
    prompt = prompts(1)[0] * 4
    reused = []
    with running_engine(max_lora_rank=4) as driver:
        for used in (one, None, other, same):
            request = make_request("r", prompt, adapter=used, lora_task_id=1, return_perf_metrics=True)
            reused.append(driver.run(request)["r"].events[0].perf.reused_blocks)
    assert reused[:3] == [0, 0, 0]
    assert reused[3] > 0


def test_values_that_overflow_in_one_adapter_reach_no_other_request(tmp_path):
    tensors = random_tensors(base_of(FAMILIES / "llama"), size=0.3)
    wild = read_peft(
        write_peft(tmp_path / "w", {name: values * np.float32(1e25) for name, values in tensors.items()}),
        base_of(FAMILIES / "llama"),
        1,
    )
    with running_engine(max_lora_rank=4) as driver:
        prompt = prompts(1)[0]
        alone = driver.tokens(make_request("a", prompt))["a"]
        answers = driver.run(make_request("a", prompt, max_tokens=16), make_request("w", prompt, adapter=wild))
    assert answers["a"].tokens[0] == alone
    assert answers["w"].error is not None


@pytest.mark.parametrize("precision", ["fast"])
def test_the_fast_precision_stays_close_to_the_merged_checkpoint(tmp_path, precision):
    change, prompt = adapter(tmp_path), prompts(1)[0]
    options = {"max_tokens": 1, "return_context_logits": True, "adapter": change}
    with running_engine(max_lora_rank=4) as driver:
        exact = driver.run(make_request("r", prompt, **options))["r"].events[0].context_logits
    with running_engine(max_lora_rank=4, precision=precision) as driver:
        fast = driver.run(make_request("r", prompt, **options))["r"].events[0].context_logits
    assert np.abs(fast - exact).mean() < 0.06 * exact.std()


def test_an_adapter_over_the_engines_rank_is_refused(tmp_path):
    with running_engine() as driver, pytest.raises(LimitExceeded, match="rank 4; allowed: up to 0"):
        driver.engine.submit(make_request("r", [5], adapter=adapter(tmp_path)))


def test_graphs_for_adapters_are_compiled_when_the_first_request_needs_them_and_nobody_waits_for_that(tmp_path):
    with running_engine(max_lora_rank=4, start=False) as driver:
        graphs = driver.engine.core.runner.adapted
        assert graphs._future is None
        make, gate = graphs._make, threading.Event()
        graphs._make = lambda: (gate.wait(), make())[1]
        driver.engine.start()
        driver.engine.submit(make_request("adapted", [5, 6], adapter=adapter(tmp_path)))
        driver.engine.submit(make_request("gone", [5, 6], adapter=adapter(tmp_path)))
        assert len(driver.tokens(make_request("plain", [5, 6]))["plain"]) == 16
        driver.engine.cancel("gone")
        assert driver.collect(1)["gone"].reasons == {0: "cancelled"}
        gate.set()
        assert len(driver.collect(1)["adapted"].tokens[0]) == 16


def test_graphs_that_cannot_be_compiled_fail_the_requests_with_adapters_alone(tmp_path):
    with running_engine(max_lora_rank=4) as driver:
        driver.engine.core.runner.adapted._make = lambda: 1 // 0
        for name in ("first", "later"):
            answer = driver.run(make_request(name, [5], adapter=adapter(tmp_path)), make_request("plain", [5]))
            assert "graphs for adapters cannot be compiled: integer division" in str(answer[name].error)
            assert answer["plain"].error is None


def test_linears_that_no_adapter_may_change_get_no_second_product(tmp_path):
    only_q = adapter(tmp_path, projections=("self_attn.q_proj",))
    with running_engine(max_lora_rank=4) as driver:
        expected = driver.tokens(make_request("r", [5, 6], adapter=only_q))
    with running_engine(max_lora_rank=4, lora_projections=("self_attn.q_proj", "mlp.up_proj")) as driver:
        assert driver.tokens(make_request("r", [5, 6], adapter=only_q)) == expected
        graph = driver.engine.core.runner.adapted.ask().result().graphs[0].graph
        assert {group.projections for group in graph.lora_linears.values()} == {("self_attn.q_proj",), ("mlp.up_proj",)}
