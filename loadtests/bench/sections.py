"""The comparisons, one function each. What they have to reach is in TARGETS and CEILINGS."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from loadtests.bench.compare import Progress, Section, in_turns, ratio, speeds
from loadtests.bench.drivers import Driver, LineDriver, ServerDriver, engine_driver
from loadtests.bench.guided import fast_forward, guide_warm_ttft, guided_vs_free
from loadtests.bench.load_tests import capacity, load_tool_overhead
from loadtests.bench.logprobs import logprobs_5
from loadtests.bench.lora import lora_idle, lora_mixed, lora_scale
from loadtests.bench.mask_time import mask_time
from loadtests.bench.peer_weights import convert
from loadtests.bench.workload import Batch, Workload

TARGETS = {
    "engine_vs_openvino_genai": {"1": 1.0, "8": 1.35, "32": 1.25},
    "server_vs_engine": {"1": 0.9, "8": 0.9, "32": 0.9},
    "inflight_vs_static": {"all": 2.5},
    "prefix_reuse_ttft": {"all": 5.0},
    "lora_mixed": {"32": 0.75},
    "lora_idle": {"32": 0.98},
    "logprobs_5": {"32": 0.9},
    "load_tool_overhead": {"32": 0.9},
    "mask_time": {"49k p50": 1.0, "49k p99": 1.0, "128k p50": 1.0, "128k p99": 1.0},
}
CEILINGS = {"guided_vs_free": {"32": 1.05}, "fast_forward": {"1": 0.8}, "guide_warm_ttft": {"1": 1.0}}
"""What has to stay below: the smaller the better."""
CONCURRENCY = (1, 8, 32)


@dataclass(frozen=True, slots=True)
class Bench:
    """What the sections share."""

    engine: Path  # directory of the engine's config.json
    gguf: Path  # the weights that the engine was built from
    work_dir: Path  # for converted weights
    peer_python: str
    workload: Workload
    rounds: int
    prompt_tokens: int
    max_tokens: int
    trace_requests: int
    say: Progress


@contextmanager
def _closing(drivers: Sequence[Driver]) -> Iterator[Sequence[Driver]]:
    with ExitStack() as ending:
        for driver in drivers:
            ending.callback(driver.close)
        yield drivers


def engine_vs_openvino_genai(bench: Bench) -> Section:
    """Our engine against the peer with each kind of weights; the ratio is to the peer's fastest."""
    ours = engine_driver(bench.engine)
    peers = [_peer(bench, kind, weights) for kind, weights in _peer_weights(bench).items()]
    ratios: dict[str, float] = {}
    raw: dict[str, Any] = {"ready_s": {driver.name: driver.ready_s for driver in (ours, *peers)}}
    with _closing([ours, *peers]) as drivers:
        _warm_up(bench, drivers)
        for count in CONCURRENCY:
            runs = in_turns(drivers, _batches(bench, count), bench.rounds, bench.say)
            ratios[str(count)] = min(ratio(runs, "engine", peer.name) for peer in peers)
            raw[str(count)] = speeds(runs)
    return Section("engine_vs_openvino_genai", ratios, raw)


def server_vs_engine(bench: Bench) -> Section:
    """Streams through gRPC and the ensemble against the engine in its own process, same prompts."""
    ratios: dict[str, float] = {}
    server = ServerDriver()
    raw: dict[str, Any] = {"server_ready_s": server.ready_s}
    drivers: list[Driver] = [engine_driver(bench.engine), server]
    with _closing(drivers):
        _warm_up(bench, drivers, text=True)
        for count in CONCURRENCY:
            runs = in_turns(drivers, _batches(bench, count, text=True), bench.rounds, bench.say)
            ratios[str(count)] = ratio(runs, "server", "engine")
            raw[str(count)] = speeds(runs)
    return Section("server_vs_engine", ratios, raw)


def inflight_vs_static(bench: Bench) -> Section:
    """A trace of short and long answers, batched in flight and batch by batch, on the same engine."""
    inflight = engine_driver(bench.engine, "inflight", max_queue_size=0)
    static = engine_driver(bench.engine, "static", max_queue_size=0, batching_strategy="V1")
    with _closing([inflight, static]) as drivers:
        _warm_up(bench, drivers)
        batches = partial(bench.workload.mixed_lengths, bench.trace_requests, 32)
        runs = in_turns(drivers, batches, math.ceil(bench.rounds / 2), bench.say)
    raw = {"all": speeds(runs), "requests": bench.trace_requests}
    return Section("inflight_vs_static", {"all": ratio(runs, "inflight", "static")}, raw)


def prefix_reuse_ttft(bench: Bench, prefix_tokens: int = 512) -> Section:
    """Time to first token of a prompt whose prefix is new, over one whose prefix another request had."""
    times: dict[str, list[float]] = {"cold": [], "warm": []}
    engine = engine_driver(bench.engine)
    with _closing([engine]):
        _warm_up(bench, [engine])
        for number in range(4 * bench.rounds):
            bench.say(f"prefix {number + 1} of {4 * bench.rounds}")
            prefix = bench.workload.random_ids(prefix_tokens)
            for found in (times["cold"], times["warm"]):
                run = engine.run(Batch((prefix + bench.workload.random_ids(16),), (2,)))
                found.append(run.ttft_s[0])
    medians = {state: median(found) for state, found in times.items()}
    return Section("prefix_reuse_ttft", {"all": medians["cold"] / medians["warm"]}, {"ttft_s": medians, "all": times})


SECTIONS = {
    function.__name__: function
    for function in (
        *(engine_vs_openvino_genai, server_vs_engine, inflight_vs_static, prefix_reuse_ttft),
        *(lora_mixed, lora_idle, lora_scale, logprobs_5, load_tool_overhead, capacity),
        *(guided_vs_free, fast_forward, guide_warm_ttft, mask_time),
    )
}


def _batches(bench: Bench, count: int, *, text: bool = False) -> Callable[[], Batch]:
    make = bench.workload.same_length_text if text else bench.workload.same_length
    return partial(make, count, bench.prompt_tokens, bench.max_tokens)


def _warm_up(bench: Bench, drivers: Sequence[Driver], *, text: bool = False) -> None:
    """Every shape once, so that no round pays for what is made on first use."""
    make = bench.workload.same_length_text if text else bench.workload.same_length
    for driver in drivers:
        bench.say(f"warming up {driver.name}")
        for count in CONCURRENCY:
            driver.run(make(count, bench.prompt_tokens, math.ceil(bench.max_tokens / 16)))


def _peer_weights(bench: Bench) -> dict[str, Path]:
    bench.work_dir.mkdir(parents=True, exist_ok=True)
    stem = bench.gguf.stem.rpartition(".")[0]
    converted = {kind: convert(bench.gguf, bench.work_dir / f"{stem}.{kind}.gguf", kind) for kind in ("q8_0", "f16")}
    return {"gguf": bench.gguf, **converted}


def _peer(bench: Bench, kind: str, weights: Path) -> LineDriver:
    bench.say(f"loading the peer, weights {kind}")
    command = [bench.peer_python, "-m", "loadtests.bench.peer_genai", "--model", str(weights)]
    return LineDriver(f"genai {kind}", command)
