"""What a load test is told: the command line as plain values.

Knows nothing of how a test is run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from loadtests.errors import UsageFault
from loadtests.slo import Slo, load
from loadtests.stages import Timing
from loadtests.transports import TRANSPORTS, TransportName
from loadtests.workloads import WORKLOADS

LADDER = (1, 2, 4, 8, 16, 32)
QUICK_LADDER = (1, 4, 16)
QUICK = Timing(warmup_s=2.0, window_s=8.0, min_requests=8, max_window_s=16.0, grace_s=30.0)
SEARCH = Timing(warmup_s=8.0, window_s=40.0, min_requests=48, max_window_s=120.0, grace_s=30.0)
WEB_PORT = 8089


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything that can be chosen."""

    slo: Slo
    workload: str
    transport: TransportName
    required: float | None  # load that has to be held, users or the highest rate asked for; None: how much does?
    ladder: tuple[int, ...]
    rates: tuple[float, ...]
    find: bool
    timing: Timing
    seed: int
    salt: str | None
    think_s: float
    timeout_s: float
    trace: Path | None
    trace_scale: float
    speed: float
    host: str | None
    grpc_url: str | None
    metrics_url: str | None
    spec: Path | None
    arrivals: Literal["poisson", "even"]
    max_seq_len: int
    workers: int
    bind: str | None
    ui: int | None
    compare: Path | None
    out: Path
    render: Path | None
    worker: str | None


def parse(argv: Sequence[str] | None = None) -> Options:
    """Read the command line.

    Raises:
        UsageFault: an option asks for what does not exist or does not go with another.
        SystemExit: argparse's own answer to a wrong option or --help.
    """
    given = _parser().parse_args(argv)
    slo = load(given.slo)
    workload = given.workload or ("replay" if given.trace else slo.workload)
    if workload not in WORKLOADS:
        who = "" if given.workload else f" (from the SLO {given.slo})"
        raise UsageFault(f"There is no workload {workload!r}{who}; there are {', '.join(WORKLOADS)}.")
    if given.transport == "http-generate" and {"ttft", "tpot", "itl", "icl", "ttst"} & set(slo.limits_s):
        raise UsageFault(
            f"The SLO {slo.name} limits what only a stream has ({', '.join(slo.limits_s)}); http-generate "
            "returns whole answers. Give an SLO that limits latency."
        )
    if workload == "replay" and (given.trace is None or not given.trace.is_file()):
        lacks = "needs a trace: TRACE=path" if given.trace is None else f"needs a trace; there is no file {given.trace}"
        raise UsageFault(f"The workload replay {lacks}.")
    if given.ui is not None and (given.find or given.rates or workload in ("replay", "burst")):
        raise UsageFault(
            "Locust's page sets users: --ui does not go with --find, --rates, a trace or the workload burst."
        )
    rates = given.rates or (WORKLOADS[workload].rates or ())
    by_rate = bool(rates) or given.find is not None or workload == "replay"
    users = given.users or slo.users
    ladder = given.ladder or (QUICK_LADDER if given.quick else LADDER)
    required: float | None = users
    if by_rate:
        required = max(given.rates) if given.rates and not given.find else None
    elif users not in ladder:
        ladder = (*ladder, users)
    base = SEARCH if given.find else QUICK if given.quick else Timing()
    return Options(
        slo=slo,
        workload=workload,
        transport=given.transport,
        required=required,
        ladder=tuple(sorted(ladder)),
        rates=tuple(sorted(rates)),
        find=given.find is not None,
        timing=_timing(base, given),
        seed=given.seed,
        salt=given.salt,
        think_s=given.think_s,
        timeout_s=given.timeout_s,
        trace=given.trace,
        trace_scale=given.trace_scale,
        speed=given.speed,
        host=given.host,
        grpc_url=given.grpc_url,
        metrics_url=given.metrics_url,
        spec=given.spec,
        arrivals=given.arrivals,
        max_seq_len=given.max_seq_len,
        workers=given.workers,
        bind=given.bind,
        ui=given.ui,
        compare=given.compare,
        out=given.out,
        render=given.render,
        worker=given.worker,
    )


def _timing(base: Timing, given: argparse.Namespace) -> Timing:
    window_s = base.window_s if given.window_s is None else given.window_s
    return Timing(
        warmup_s=base.warmup_s if given.warmup_s is None else given.warmup_s,
        window_s=window_s,
        # A search stops when it is sure; with shorter trials it takes more of them.
        min_requests=round(base.min_requests * window_s / base.window_s) if given.find else base.min_requests,
        max_window_s=max(2 * window_s, base.max_window_s),
        grace_s=base.grace_s,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests",
        description="How much load does this server hold within an SLO, and what gives first?",
        epilog="Exit codes: 0 the SLO is met, 1 it is missed, 2 usage, 3 no server or this machine lacks something.",
    )
    add = parser.add_argument
    add("--slo", default="chat", metavar="NAME|FILE", help="chat, code or a YAML file (default: %(default)s)")
    add("--host", help="HTTP address of a running server; without it the demo server is started and stopped")
    add("--grpc-url", help="its gRPC address (default: the next port)")
    add("--metrics-url", help="its Prometheus endpoint (default: the port after that, /metrics)")
    add("--spec", type=Path, help="what to serve when there is no --host")
    add("--workload", help=f"{', '.join(WORKLOADS)} (default: what the SLO says, with --trace replay)")
    add("--transport", choices=TRANSPORTS, default=TRANSPORTS[0], help="how to ask (default: %(default)s)")
    add("--users", type=_positive, help="requests in flight that have to be held (default: what the SLO says)")
    add("--ladder", type=_numbers(int), help="numbers of users to try, 1,2,4 … (default: 1 to 32)")
    add("--rates", type=_numbers(float), help="open loop: requests per second to try, 0.5,1,2 …")
    add("--arrivals", choices=["poisson", "even"], default="poisson", help="open loop: at random or evenly spaced")
    add("--find", choices=["max"], help="search the highest rate that meets the SLO")
    add("--quick", action="store_true", help="three short stages: a look, not a measurement")
    add("--warmup-s", type=float, help="of each stage, not counted")
    add("--window-s", type=float, help="of each stage, counted")
    add("--think-s", type=float, default=0.0, help="pause of a user after an answer, on average (default: none)")
    add("--timeout-s", type=float, default=120.0, help="after which a request has failed (default: %(default)s)")
    add("--seed", type=int, default=1, help="of lengths, choices and arrivals (default: %(default)s)")
    add("--salt", help="of the words of the prompts; default: new ones each time, which no cache has seen")
    add("--trace", type=Path, help="for --workload replay: our JSONL, Mooncake, Azure or BurstGPT")
    add("--trace-scale", type=float, default=1.0, help="of its prompt and answer lengths (default: %(default)s)")
    add("--max-seq-len", type=_positive, default=4096, help="tokens to which requests of a trace are shortened")
    add("--speed", type=float, default=1.0, help="of its arrivals: 2 is twice as fast (default: %(default)s)")
    add("--workers", type=_positive, default=1, help="processes to make the load (default: %(default)s)")
    add("--bind", metavar="HOST:PORT", help="wait there for --workers started elsewhere, instead of starting them")
    add("--worker", metavar="HOST:PORT", help="be a worker of the test that listens there")
    add("--ui", type=int, nargs="?", const=WEB_PORT, metavar="PORT", help="locust's web page instead of a fixed test")
    add("--compare", type=Path, metavar="DIR|report.json", help="another run to show beside this one")
    add("--out", type=Path, default=Path("reports"), help="directory of the reports (default: %(default)s)")
    add("--render", type=Path, metavar="report.json", help="only write report.html anew")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _numbers(kind: type) -> Callable[[str], Any]:
    def read(text: str) -> tuple[float, ...]:
        try:
            numbers = tuple(kind(part) for part in text.split(","))
        except ValueError:
            numbers = ()
        if not numbers or min(numbers) <= 0:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of positive numbers such as 1,2,4")
        return numbers

    return read
