"""The terminal: what will happen and how long it takes, where the test is, a table at the end, and the answer.

Knows nothing of how the figures came about.
"""

from __future__ import annotations

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loadtests.options import Options
from loadtests.outcome import Outcome
from loadtests.report.words import answer, milliseconds, missed
from loadtests.results import StageResult
from loadtests.stages import Stage

_BAR = 24
_SEARCH_TRIALS = "9 to 14"


class Screen:
    """A moving line on a terminal, a line per stage elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live("", console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def plan(self, options: Options) -> None:
        """What will happen, before it does."""
        timing = options.timing
        each = f"{timing.warmup_s:g} s of warm-up and {timing.window_s:g} s that count"
        if options.find:
            about_s = 11 * (timing.expected_s + 15)  # windows grow where few requests come
            text = f"search of the highest rate within the SLO {options.slo.name}: {_SEARCH_TRIALS} trials, {each}"
        elif options.workload == "replay":
            self.say(f"replay of {options.trace} against the SLO {options.slo.name}")
            return
        elif options.rates:
            about_s = len(options.rates) * timing.expected_s
            text = f"{options.workload} at {_list(options.rates)} requests/s, open loop; at each {each}"
        else:
            about_s = len(options.ladder) * timing.expected_s
            text = f"{options.workload} with {_list(options.ladder)} users; at each {each}"
        self.say(f"{text}; about {max(1, round(about_s / 60))} min ({options.transport}, seed {options.seed})")

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def progress(self, stage: Stage, part: str, share: float, note: str) -> None:
        """Move the line."""
        done = round(_BAR * share)
        text = f"{stage.label:>14}  {part:8} {'━' * done}{'╌' * (_BAR - done)}  {note}"
        self._live.update(Text(text))

    def result(self, result: StageResult) -> None:
        """A line for a stage that is over."""
        found, server = result.metrics, result.server
        parts = [
            f"{result.stage.label:>14}",
            "met   " if result.met else "missed",
            f"{len(result.records):4d} requests",
            f"TTFT p95 {milliseconds(found['ttft'].get('p95')):>8}",
            f"TPOT p95 {milliseconds(found['tpot'].get('p95')):>8}",
            f"{result.rates['output_tokens_per_s']:6.1f} tokens/s",
            f"errors {100 * result.rates['error_rate']:.1f} %",
        ]
        if "running_mean" in server:
            parts.append(f"batch {server['running_mean']:.1f}")
        self._console.print(Text("  ".join(parts), style="green" if result.met else "red"), soft_wrap=True)


def summary(outcome: Outcome, console: Console) -> None:
    """The table of stages and the answer."""
    table = Table(title=None, header_style="bold")
    heads = ["load", "requests", "TTFT p50", "p95", "p99", "TPOT p50", "p95", "p99", "latency p95"]
    heads += ["tokens/s", "in+out", "good", "errors"]
    for head in heads:
        table.add_column(head, justify="right")
    for result in outcome.results:
        table.add_row(*_row(result), style=None if result.met else "red")
    console.print(table)
    verdict = outcome.verdict
    console.print(answer(verdict.as_dict(), outcome.options.slo.model_dump(), _kind(outcome)), style="bold")
    for line in [*missed(verdict.as_dict(), _kind(outcome)), *verdict.reasons]:
        console.print(f"  {line}", highlight=False)
    for line in verdict.cautions:
        console.print(f"  note: {line}", highlight=False, style="yellow")


def _row(result: StageResult) -> list[str]:
    found, rates = result.metrics, result.rates
    times = [found["ttft"].get(name) for name in ("p50", "p95", "p99")]
    times += [found["tpot"].get(name) for name in ("p50", "p95", "p99")]
    times.append(found["latency"].get("p95"))
    return [
        result.stage.label,
        str(len(result.records)),
        *map(milliseconds, times),
        f"{rates['output_tokens_per_s']:.1f}",
        f"{rates['total_tokens_per_s']:.1f}",
        f"{100 * rates['good_fraction']:.0f} %",
        f"{100 * rates['error_rate']:.1f} %",
    ]


def _kind(outcome: Outcome) -> str:
    return outcome.results[0].stage.kind if outcome.results else "users"


def _list(numbers: tuple[float, ...]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)
