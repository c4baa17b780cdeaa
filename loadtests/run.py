"""A whole test: the server, the users, the stages one after the other, and what came of it.

Knows nothing of terminals and files.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from tritonclient.utils import InferenceServerException

from clients.adapter_list import adapters
from loadtests import clock, search, stages, swarm
from loadtests.arrivals import Arrivals, Bursts, Counted, Even, Poisson, Recorded
from loadtests.bench import machine
from loadtests.errors import EnvironmentFault, UsageFault
from loadtests.job import Job
from loadtests.options import Options
from loadtests.outcome import Outcome
from loadtests.results import StageResult, of_stage
from loadtests.scrape import Scraper
from loadtests.server import ROOT, Server, demo_server
from loadtests.stages import Stage
from loadtests.stolen import Stolen, undisturbed
from loadtests.swarm import Swarm
from loadtests.verdict import Verdict, of_ladder, of_search
from loadtests.workloads import WORKLOADS, Replay
from loadtests.workloads.burst import BURST_SIZE

LORA_SPEC = ROOT / "build_engines" / "specs" / "smollm2-135m-lora.yaml"
_PROBE = stages.Timing(warmup_s=4.0, window_s=12.0, min_requests=4, max_window_s=24.0, grace_s=30.0)
_ALONE = stages.Timing(warmup_s=0.0, window_s=0.01, min_requests=0, max_window_s=0.01, grace_s=30.0)
_GROUP = 8  # requests of a search that come in the time that the rate says
_PATTERN = 100_000  # requests between the first ones of two trials
_ALONE_INDEX = _PATTERN - 1  # the request that is asked by itself, the same every time
_MEET = 0.25  # requests in flight on average
_BUSY = 0.25  # load average per core from which on somebody else takes part of the machine

_INTERRUPTED = "Interrupted: these are the stages that were over by then."
_LOST = "The stages below were over by then."


class Watcher(Protocol):
    """Who is told how the test is going."""

    def say(self, text: str) -> None:
        """A line that stays."""
        ...

    def progress(self, stage: Stage, part: str, share: float, note: str) -> None:
        """Where the test is: a stage, a part of it, how much of that is over, and how it is going."""
        ...

    def result(self, result: StageResult) -> None:
        """A stage is over."""
        ...


class Test:
    """A test on a server that is there, with users that are there.

    Args:
        watcher: told how it is going.
    """

    __test__ = False  # for pytest

    def __init__(
        self, options: Options, server: Server, swarm: Swarm, job: Job, *, scraper: Scraper, watcher: Watcher
    ) -> None:
        self._options, self._server, self._swarm, self._job = options, server, swarm, job
        self._scraper, self._watcher = scraper, watcher
        self.results: list[StageResult] = []
        self.found: search.Found | None = None
        self._alone: list[float] = []  # TPOT of a request by itself before each trial of a search, seconds

    def run(self) -> Verdict:
        """All stages, and the answer."""
        options = self._options
        if options.find:
            return self._find()
        if options.workload == Replay.name:
            self._replay()
        elif options.rates:
            for rate in options.rates:
                self._open_stage(rate, self._arrivals(rate, options.seed), options.timing)
        else:
            for users in options.ladder:
                self._keep(stages.closed(self._swarm, users, options.timing, self._progress))
        return self.judge()

    def judge(self) -> Verdict:
        """What the stages that are over say."""
        options = self._options
        if self.found is not None:
            return of_search(self.results, self.found, options.slo, self._alone)
        if options.workload == Replay.name and not options.rates and self.results:
            return of_ladder(self.results, self.results[0].stage.load, options.slo)
        return of_ladder(self.results, options.required, options.slo)

    def _find(self) -> Verdict:
        options = self._options
        self._watcher.say("a first look, to know where to begin")
        short = replace(
            _PROBE,
            warmup_s=min(_PROBE.warmup_s, options.timing.warmup_s),
            window_s=min(_PROBE.window_s, options.timing.window_s),
        )
        probe = stages.closed(self._swarm, options.slo.users, short, self._progress)
        self._swarm.abandon()
        self._swarm.settle(clock.now(), _PROBE.grace_s)
        seen = self._judge(probe)
        begun = max(0.05, seen.rates["requests_per_s"])
        # At so low a rate requests hardly ever meet: if that misses the SLO, so does a single user.
        lowest = _MEET / seen.metrics["latency"].get("mean", 1.0)
        stolen, patterns = Stolen(), itertools.count(1)

        def trial(rate: float) -> float:
            """The same number has the same requests and arrivals in every search, only closer together."""

            def measured() -> Stage:
                self._ask_alone()
                number = next(patterns)
                arrivals = self._arrivals(rate, options.seed + number, _GROUP)
                first_index = number * _PATTERN
                return self._opened(rate, arrivals, options.timing.for_rate(rate, _GROUP), first_index)

            # Whose processors they would be is known of this machine only.
            here = self._server.started_here
            stage = undisturbed(measured, stolen.share, self._watcher.say) if here else measured()
            return self._keep(stage).worst.use

        self.found = search.Found()
        search.find_max(trial, begun, lowest=lowest, found=self.found)
        return self.judge()

    def _ask_alone(self) -> None:
        seen = self._judge(self._opened(1.0, Recorded((0.0,)), _ALONE, _ALONE_INDEX))
        tpot = seen.metrics["tpot"].get("p50")  # none: it failed, or its answer came whole
        self._alone += [] if tpot is None else [tpot]

    def _replay(self) -> None:
        rows = self._job.make_workload()
        assert isinstance(rows, Replay)
        if rows.shortened:
            self._watcher.say(
                f"{rows.shortened} of {len(rows.rows)} requests are longer than {self._job.max_seq_len} tokens and are "
                "shortened; --max-seq-len says what the server takes, --trace-scale makes all of them shorter"
            )
        arrivals = Recorded(tuple(row.at_s for row in rows.rows), self._options.speed)
        length_s = arrivals.at_s[-1] / arrivals.speed
        rate = len(arrivals.at_s) / max(length_s, 1.0)
        # The trace has its own beginning: all of it counts.
        whole = stages.Timing(0.0, length_s + 0.01, 0, length_s + 0.01, self._options.timing.grace_s)
        self._open_stage(rate, arrivals, whole)

    def _arrivals(self, rate: float, seed: int, group: int | None = None) -> Arrivals:
        if self._options.workload == "burst":
            return Bursts(rate, BURST_SIZE, seed)
        if self._options.arrivals == "even":
            return Even(rate)
        return Poisson(rate, seed) if group is None else Counted(rate, group, seed)

    def _open_stage(self, rate: float, arrivals: Arrivals, timing: stages.Timing) -> StageResult:
        return self._keep(self._opened(rate, arrivals, timing))

    def _opened(self, rate: float, arrivals: Arrivals, timing: stages.Timing, first_index: int | None = None) -> Stage:
        return stages.opened(self._swarm, rate, arrivals, timing, self._progress, first_index=first_index)

    def _progress(self, stage: Stage, part: str, share: float) -> None:
        self._check()
        ledger = self._swarm.ledger
        ended = [record for record in ledger.records if record.end_at >= stage.begin]
        failed = sum(not record.ok for record in ended)
        note = f"{len(ended)} answered, {ledger.open_count} under way" + (f", {failed} failed" if failed else "")
        self._watcher.progress(stage, part, share, note)

    def _check(self) -> None:
        self._server.check_running()
        self._swarm.check()

    def _keep(self, stage: Stage) -> StageResult:
        self._check()  # a stage at whose end nobody was there any more is none
        result = self._judge(stage)
        self.results.append(result)
        self._watcher.result(result)
        return result

    def _judge(self, stage: Stage) -> StageResult:
        return of_stage(stage, self._swarm.ledger, self._scraper.samples, self._options.slo)


def perform(options: Options, watcher: Watcher, command: Sequence[str]) -> Outcome:
    """Run a test from beginning to end.

    Raises:
        LoadTestError: it cannot be run.
    """
    about = machine.describe(ROOT)  # now: the load average is that of others
    with server_for(options, watcher.say) as server, swarm_for(options) as users:
        job = job_for(options, server)
        users.configure(job)
        scraper = Scraper(server.metrics_url)
        scraper.start()
        begun_at = clock.now()
        test = Test(options, server, users, job, scraper=scraper, watcher=watcher)
        ended_by: KeyboardInterrupt | EnvironmentFault | None = None
        try:
            verdict = test.run()
        except (KeyboardInterrupt, EnvironmentFault) as error:
            if not test.results:
                raise
            ended_by = error
            verdict = test.judge()
            why = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else f"{error} {_LOST}"
            verdict = replace(verdict, cautions=(why, *verdict.cautions))
        finally:
            users.stop()
            scraper.stop()
        return Outcome(
            options=options,
            server=server,
            about=WORKLOADS[options.workload].about,
            begun_at=begun_at,
            results=sorted(test.results, key=lambda result: result.stage.load) if options.find else test.results,
            verdict=replace(verdict, cautions=(*verdict.cautions, *_others(server, about))),
            records=users.ledger.records,
            samples=scraper.samples,
            machine=about,
            salt=job.salt,
            search=test.found,
            ended_by=ended_by,
            command=command,
        )


@contextlib.contextmanager
def server_for(options: Options, say: Callable[[str], None]) -> Iterator[Server]:
    """The server that was named, or one of our own for as long as the test takes."""
    if options.host is not None:
        server = Server.at(options.host, options.grpc_url, options.metrics_url)
        server.check()
        yield server
        return
    with demo_server(_spec(options), say) as server:
        yield server


def swarm_for(options: Options) -> contextlib.AbstractContextManager[Swarm]:
    """Users here, in processes started here, or in processes that connect to us."""
    if options.bind is not None:
        host, _, port = options.bind.rpartition(":")
        if not port.isdigit():
            raise UsageFault(f"--bind {options.bind} is no address; give HOST:PORT.")
        return swarm.led(host or "127.0.0.1", int(port), options.workers, spawn=False)
    if options.workers > 1:
        return swarm.led("127.0.0.1", swarm.free_port(), options.workers, spawn=True)
    return swarm.local()


def job_for(options: Options, server: Server) -> Job:
    """What every process has to know."""
    names: tuple[str, ...] = ()
    if options.workload == "adapters":
        with contextlib.suppress(InferenceServerException):  # none; the workload says what to do
            names = tuple(entry["name"] for entry in adapters(server.grpc_url))
    return Job(
        http_url=server.http_url,
        grpc_url=server.grpc_url,
        workload=options.workload,
        transport=options.transport,
        seed=options.seed,
        salt=secrets.token_hex(4) if options.salt is None else options.salt,
        adapters=names,
        trace=str(options.trace) if options.trace else None,
        trace_scale=options.trace_scale,
        max_seq_len=options.max_seq_len,
        timeout_s=options.timeout_s,
        think_s=options.think_s,
    )


def _others(server: Server, about: dict[str, Any]) -> list[str]:
    """A caution when a server that was started here had to share the machine."""
    load, cores = about["load_average"], about["cores"]
    if not server.started_here or load < _BUSY * cores:
        return []
    return [f"This machine was busy before the test began: load average {load:.1f} on {cores} cores."]


def _spec(options: Options) -> Path | None:
    return LORA_SPEC if options.spec is None and options.workload == "adapters" else options.spec
