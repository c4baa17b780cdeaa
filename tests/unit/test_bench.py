"""The benchmark's own parts: fair turns, workloads as described, a report that says what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtests.bench import cli, report
from loadtests.bench.adapter_files import ATTENTION_QV, AdapterFiles
from loadtests.bench.compare import in_turns, ratio, speeds
from loadtests.bench.drivers import BenchError, LineDriver, Run
from loadtests.bench.sections import TARGETS
from loadtests.bench.workload import Batch, Workload


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level vocabulary large enough to have plain tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"{a}{b}" for a in "abcdefghijklmnopqrst" for b in "abcdefghijklmnopqrst"]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(letters + words)}, [(w[0], w[1]) for w in words]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def test_the_same_seed_gives_the_same_batches_and_no_prompt_twice(tokenizer_file: Path) -> None:
    first, second = (Workload(tokenizer_file, seed=3) for _ in range(2))
    batches = [first.same_length(4, 16, 8) for _ in range(2)]
    assert batches == [second.same_length(4, 16, 8) for _ in range(2)]
    assert len({prompt for batch in batches for prompt in batch.prompts}) == 8


def test_text_prompts_have_exactly_the_asked_number_of_tokens(tokenizer_file: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    batch = Workload(tokenizer_file, seed=1).same_length_text(5, 24, 8)
    for ids, text in zip(batch.prompts, batch.texts, strict=True):
        assert tokenizer.encode(text).ids == list(ids)
        assert len(ids) == 24


def test_a_trace_is_nine_short_answers_to_one_long(tokenizer_file: Path) -> None:
    lengths = Workload(tokenizer_file, seed=1).mixed_lengths(200, 8).max_tokens
    assert lengths.count(256) == 20
    assert all(8 <= length <= 32 for length in lengths if length != 256)
    assert lengths[:20].count(256) < 20, "the long ones are spread"


class _Side:
    def __init__(self, name: str, wall_s: float, seen: list[tuple[str, Batch]]) -> None:
        self.name, self._wall_s, self._seen = name, wall_s, seen

    def run(self, batch: Batch) -> Run:
        self._seen.append((self.name, batch))
        return Run(self._wall_s, batch.output_tokens, (0.1,), (self._wall_s,))

    def close(self) -> None:
        pass


def test_both_sides_get_the_same_batch_and_take_turns_in_beginning(tokenizer_file: Path) -> None:
    seen: list[tuple[str, Batch]] = []
    workload = Workload(tokenizer_file, seed=1)
    sides = [_Side("a", 1.0, seen), _Side("b", 2.0, seen)]
    runs = in_turns(sides, lambda: workload.same_length(2, 4, 10), 2, lambda _: None)
    assert [name for name, _ in seen] == ["a", "b", "b", "a"]
    assert seen[0][1] is seen[1][1] is not seen[2][1]
    assert speeds(runs)["a"]["tokens_per_s"] == 2 * speeds(runs)["b"]["tokens_per_s"] == 20


def test_sides_on_one_server_never_get_what_it_has_cached(tokenizer_file: Path) -> None:
    seen: list[tuple[str, Batch]] = []
    workload = Workload(tokenizer_file, seed=1)
    sides = [_Side("a", 1.0, seen), _Side("b", 2.0, seen)]
    in_turns(sides, lambda: workload.same_length(2, 4, 10), 3, lambda _: None, on_one_server=True)
    assert [name for name, _ in seen] == ["a", "b", "b", "a", "a", "b"]
    assert len({prompt for _, batch in seen for prompt in batch.prompts}) == 12


def test_a_ratio_compares_neighbours_in_time() -> None:
    """The machine gets slower by half from round to round; one side is always a quarter faster than the other."""
    runs = {
        name: [Run(2**number / speed, 100, (0.1,), (1.0,)) for number in range(4)]
        for name, speed in (("a", 1.25), ("b", 1.0))
    }
    runs["a"][0] = Run(0.1, 100, (0.1,), (1.0,))  # one round in which something went wrong
    assert ratio(runs, "a", "b") == pytest.approx(1.25)


def test_a_driver_that_dies_says_why() -> None:
    with pytest.raises(BenchError, match=r"broken ended with code 3: .*no model"):
        LineDriver("broken", ["python3", "-c", "import sys; print('hello'); sys.stderr.write('no model'); sys.exit(3)"])


def test_a_driver_that_makes_too_few_tokens_is_not_counted() -> None:
    code = (
        "import json\nprint(json.dumps({'ready_s': 0}), flush=True)\ninput()\n"
        "print(json.dumps({'wall_s': 1, 'output_tokens': 3, 'ttft_s': [1], 'latency_s': [1]}), flush=True)"
    )
    driver = LineDriver("lazy", ["python3", "-c", code])
    with pytest.raises(BenchError, match="lazy made 3 tokens instead of 8"):
        driver.run(Batch(((1, 2),), (8,)))
    driver.close()


def _results() -> dict[str, Any]:
    side = {"tokens_per_s": 100.0, "rounds": [100.0], "ttft_s": 0.1}
    return {
        "date": "2026-01-01",
        "ratios": {"server_vs_engine": {"1": 0.95, "8": 0.8}, "prefix_reuse_ttft": {"all": 7.0}},
        "targets": TARGETS,
        "settings": {"rounds": 5, "prompt_tokens": 128, "max_tokens": 128, "trace_requests": 64, "quick": False},
        "machine": {
            "cpu": "a cpu",
            "cores": 2,
            "instructions": ["avx2"],
            "python": "3.11",
            "packages": {"numpy": "1.26.4"},
            "commit": "abc",
            "load_average": 0.1,
        },
        "environment_bytes": {"serve": 650_000_000, "total": 700_000_000},
        "raw": {
            "server_vs_engine": {
                "1": {"engine": side, "server": side},
                "8": {"engine": side, "server": side},
                "server_ready_s": 6.5,
            },
            "prefix_reuse_ttft": {"ttft_s": {"cold": 0.7, "warm": 0.1}},
        },
    }


def test_the_page_is_made_of_the_results(tmp_path: Path) -> None:
    (tmp_path / "latest.json").write_text(json.dumps(_results()))
    assert cli.main(["--render", "--out", str(tmp_path / "latest.json"), "--docs", str(tmp_path / "page.md")]) == 0
    page = (tmp_path / "page.md").read_text()
    assert "| server_vs_engine | 8 | 0.80 | 0.9 | engine 100, server 100 tokens/s |" in page
    assert "| prefix_reuse_ttft | all | 7.00 | 5 | cold 700 ms, warm 100 ms |" in page
    assert "From `make serve` to READY with everything built: 6.5 s." in page
    assert ".venv: 650 MB for serving" in page


def test_the_table_marks_what_is_missed() -> None:
    cells = list(report.table(_results()).columns[2].cells)
    assert cells == ["[green]0.95[/]", "[red]0.80[/]", "[green]7.00[/]"]


def test_adapters_are_seeded_fit_the_model_and_appear_as_a_whole(tmp_path: Path) -> None:
    from python_backend.lora.peft import read_peft
    from tests.unit.engine_driver import FAMILIES
    from tests.unit.tiny_adapters import base_of

    files = AdapterFiles(FAMILIES / "llama", tmp_path / "adapters", seed=1)
    assert files.write(range(2, 4)) == ["a002", "a003"]
    again = AdapterFiles(FAMILIES / "llama", tmp_path / "again", seed=1)
    again.write(range(3, 4))
    first, *same = (
        read_peft(place, base_of(FAMILIES / "llama"), 1)
        for place in (files.directory / "a002", files.directory / "a003", again.directory / "a003")
    )
    assert first.rank == 8
    assert len(first.projections) == 7
    assert files.host_bytes() == first.nbytes
    assert first.version != same[0].version == same[1].version
    assert sorted(place.name for place in files.directory.iterdir()) == ["a002", "a003"]


def test_the_spec_of_a_server_with_adapters_is_the_plain_one_with_adapters(tmp_path: Path) -> None:
    from build_engines.spec import load_spec

    plain = Path(__file__).parents[2] / "build_engines" / "specs" / "smollm2-135m.yaml"
    files = AdapterFiles(tmp_path, tmp_path / "adapters", seed=1, projections=ATTENTION_QV)
    spec = load_spec(files.write_spec(plain, 1000)).deployment
    assert spec.limits == load_spec(plain).deployment.limits
    assert spec.lora is not None
    assert (spec.lora.modules, spec.lora.host_cache_bytes) == (("attn_q", "attn_v"), 1000)


def test_popular_names_are_drawn_as_zipf_says(tokenizer_file: Path) -> None:
    drawn = Workload(tokenizer_file, seed=1).zipf(["a", "b", "c"], 11_000)
    assert [drawn.count(name) for name in "abc"] == pytest.approx([6000, 3000, 2000], rel=0.1)


def test_the_page_tells_how_many_loads_a_point_of_the_curve_had() -> None:
    side = {"tokens_per_s": 50.0}
    loads = {"loads": 12.0, "evictions": 3.0, "load_ms": 20.0, "load_share": 0.04}
    results = _results() | {"ratios": {"lora_scale": {"256": 0.8}}}
    results["raw"]["lora_scale"] = {"256": {"base": side, "adapters": side, "loads": loads}}
    row = "| lora_scale | 256 | 0.80 |  | base 50, adapters 50 tokens/s, 12 loads of 20 ms: 4% of the time |"
    assert row in report.page(results)


def test_the_capacity_is_a_sentence_and_no_ratio() -> None:
    found = {"slo": "chat", "requests_per_s": 1.84, "misses_at": 1.92, "first": "TPOT p95", "output_tokens_per_s": 96.4}
    results = _results()
    results["ratios"]["capacity"], results["raw"]["capacity"] = {}, found
    assert report.facts(results)[1] == (
        "Capacity: 1.84 requests/s arriving at random (96 output tokens/s) within the SLO chat; "
        "at 1.92 the first limit missed is TPOT p95."
    )
    results["raw"]["capacity"] = {**found, "requests_per_s": None}
    assert "no rate within the SLO chat was found" in report.facts(results)[1]
    assert "capacity" not in "".join(str(cell) for cell in report.table(results).columns[0].cells)
