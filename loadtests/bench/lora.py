"""What adapters cost: requests that use them, adapters that nobody uses, and ever more of them on one server."""

from __future__ import annotations

import math
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadtests.bench.adapter_files import ATTENTION_QV, AdapterFiles
from loadtests.bench.compare import Section, in_turns, ratio, speeds
from loadtests.bench.drivers import ROOT, ServerDriver
from loadtests.bench.streams import CONCURRENCY, paired

if TYPE_CHECKING:
    from loadtests.bench.drivers import Run
    from loadtests.bench.sections import Bench
    from loadtests.bench.workload import Batch

NUM_MIXED = 8
REGISTERED = (4, 16, 64, 256)
_CACHED = 64  # how many of them the server of lora_scale keeps in memory
_PLAIN_SPEC = ROOT / "build_engines" / "specs" / "smollm2-135m.yaml"


def lora_mixed(bench: Bench) -> Section:
    """32 streams over 8 adapters of rank 8 on every projection, over the same streams without, on one server."""
    with _files(bench) as files, _server("base", files, 1 << 30) as server:
        names = files.write(range(NUM_MIXED))
        return paired("lora_mixed", bench, _Adapted("adapters", server, tuple(names)), server)


def lora_idle(bench: Bench) -> Section:
    """Streams without adapters, on a server that has 8 of them over one that has none."""
    with _files(bench) as files:
        files.write(range(NUM_MIXED))
        with _server("registered", files, 1 << 30) as registered:
            plain = ServerDriver("none")
            try:
                section = paired("lora_idle", bench, registered, plain)
            finally:
                plain.close()
        ready = {"registered": registered.ready_s, "none": plain.ready_s}
    return replace(section, raw={**section.raw, "ready_s": ready})


def lora_scale(bench: Bench) -> Section:
    """32 streams at a time over 4, 16, 64, 256 adapters, some wanted often and most rarely; 64 fit into memory.

    The ratio is to the same streams without adapters at that moment. A load takes `load_ms`; `load_share` is how much
    of the time went into loads, so that a cliff shows what it comes from.
    """
    files = _files(bench, rank=8, projections=ATTENTION_QV)
    ratios: dict[str, float] = {}
    raw: dict[str, Any] = {}
    with files as made, _server("base", made, _CACHED * made.host_bytes()) as server:
        names: list[str] = []
        make = partial(bench.workload.same_length_text, 2 * CONCURRENCY, 32, math.ceil(bench.max_tokens / 4))
        for count in REGISTERED:
            bench.say(f"{count} adapters")
            names += made.write(range(len(names), count))
            drivers = (server, _Adapted("adapters", server, tuple(names), bench.workload.zipf))
            for driver in drivers:
                driver.run(make())
            before = _Loads.of(server)
            runs = in_turns(drivers, make, max(1, bench.rounds - 2), bench.say, on_one_server=True)
            loads = _Loads.of(server).since(before)
            ratios[str(count)] = ratio(runs, "adapters", "base")
            raw[str(count)] = {**speeds(runs), "loads": loads.as_data(sum(run.wall_s for run in runs["adapters"]))}
    return Section("lora_scale", ratios, raw)


class _Adapted:
    """The same server for requests with adapters: these names in turn, or as `draw` draws them."""

    def __init__(self, name: str, server: ServerDriver, names: tuple[str, ...], draw: Any = None) -> None:
        self.name = name
        self._server, self._names, self._draw = server, names, draw

    def run(self, batch: Batch) -> Run:
        """Run one batch to its end."""
        count = len(batch.texts)
        names = self._draw(self._names, count) if self._draw else (self._names * count)[:count]
        return self._server.run(replace(batch, adapters=names))

    def close(self) -> None:
        """Nothing: the server ends with its own driver."""


@dataclass(frozen=True, slots=True)
class _Loads:
    """Adapters read from disk since a server started, and seconds of that."""

    count: float
    seconds: float
    evictions: float

    @classmethod
    def of(cls, server: ServerDriver) -> _Loads:
        with urllib.request.urlopen(server.metrics_url, timeout=30) as reply:
            lines = reply.read().decode().splitlines()

        def total(name: str) -> float:
            return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

        return cls(
            total("llm_lora_load_seconds_count"),
            total("llm_lora_load_seconds_sum"),
            total("llm_lora_evictions_total"),
        )

    def since(self, before: _Loads) -> _Loads:
        return _Loads(self.count - before.count, self.seconds - before.seconds, self.evictions - before.evictions)

    def as_data(self, wall_s: float) -> dict[str, float]:
        return {
            "loads": self.count,
            "evictions": self.evictions,
            "load_ms": 1e3 * self.seconds / self.count if self.count else 0.0,
            "load_share": self.seconds / wall_s,
        }


@contextmanager
def _files(bench: Bench, **options: Any) -> Iterator[AdapterFiles]:
    with tempfile.TemporaryDirectory(prefix="lora-bench-") as place:
        checkpoint = (bench.engine / ".." / "checkpoint").resolve()
        yield AdapterFiles(checkpoint, Path(place) / "adapters", bench.workload.seed, **options)


@contextmanager
def _server(name: str, files: AdapterFiles, host_cache_bytes: int) -> Iterator[ServerDriver]:
    """A server for whatever is, or will be, in the directory of adapters."""
    files.directory.mkdir(parents=True, exist_ok=True)
    spec = files.write_spec(_PLAIN_SPEC, host_cache_bytes)
    driver = ServerDriver.of_spec(name, spec, spec.parent / "engines")
    try:
        yield driver
    finally:
        driver.close()
