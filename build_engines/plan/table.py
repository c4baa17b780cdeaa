"""A plan as tables for people. Knows nothing of how its figures were made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

Titled = tuple[Text, Table]
_GB, _GIB = 1e9, 1 << 30
_USES = ("weights", "activations", "runtime", "adapters", "kv_cache", "unused")


def tables(report: dict[str, Any]) -> RenderableType:
    """The report of a plan, laid out."""
    warnings = [Text(f"warning: {text}.") for text in report["warnings"]]
    parts: list[RenderableType] = []
    for part in (_model, _memory, _lengths, _times, _advice):
        parts += part(report)
    return Group(*parts, *warnings)


def _model(report: dict[str, Any]) -> Titled:
    model, hardware, kv = report["model"], report["hardware"], report["kv_cache"]
    parameters = model["parameters"]
    rows = [("parameters", f"{parameters['total']:,}")]
    if parameters["active"] != parameters["total"]:
        rows.append(("active per token", f"{parameters['active']:,} ({parameters['active_percent']} %)"))
    rows += [
        ("attention", f"{model['attention']}, {model['num_layers']} layers"),
        ("weights", f"{report['weights']['total_bytes'] / _GB:.1f} GB"),
        ("KV cache per token", f"{kv['bytes_per_token']:,} bytes at {kv['bits']:g} bit"),
        ("against MHA, GQA-8", " and ".join(f"{kv['ratio_to_twin'][twin]:.3g}" for twin in ("MHA", "GQA-8"))),
        (
            "cards",
            f"{hardware['cards']} x {hardware['card']} (tp {hardware['tp']}, pp {hardware['pp']}, ep {hardware['ep']})",
        ),
        ("fewest cards", _needed(hardware["cards_needed"])),
    ]
    if report["weights"]["draft_model_bytes"]:
        rows.append(("draft model", f"{report['weights']['draft_model_bytes'] / _GB:.1f} GB beside it"))
    if report["weights"]["quantize_peak_bytes"]:
        rows.append(("memory to quantise", f"{report['weights']['quantize_peak_bytes'] / _GB:.0f} GB over all cards"))
    return _table(f"{report['name']}: {model['architecture']} for {report['target']}", rows)


def _needed(needed: dict[str, int] | None) -> str:
    return "none hold it" if needed is None else f"{needed['cards']} (tp {needed['tp']}, pp {needed['pp']})"


def _memory(report: dict[str, Any]) -> Titled:
    memory = report["memory_per_card"]
    table = Table("use")
    table.add_column("GB", justify="right")
    table.add_column("share", justify="right")
    for use in _USES:
        size = memory[f"{use}_bytes"]
        table.add_row(use.replace("_", " "), f"{size / _GB:.2f}", f"{100 * size / memory['capacity_bytes']:.1f} %")
    return _titled(f"memory of one card, {memory['capacity_bytes'] / _GB:.0f} GB", table)


def _lengths(report: dict[str, Any]) -> Titled:
    memory, kv = report["memory_per_card"], report["kv_cache"]
    title = f"KV cache: {memory['max_tokens_in_kv_cache']:,} tokens"
    table = Table()
    table.add_column("tokens a sequence", justify="right")
    table.add_column("sequences at once", justify="right")
    table.add_column("GiB a sequence", justify="right")
    for length, count in memory["concurrent_sequences_at_length"].items():
        table.add_row(f"{int(length):,}", f"{count:,}", f"{int(length) * kv['bytes_per_token'] / _GIB:.2f}")
    return _titled(title if memory["fits"] else f"{title}, NOT ENOUGH for one sequence", table)


def _times(report: dict[str, Any]) -> Titled:
    times = report["roofline"]
    table = Table("what")
    table.add_column("at peak, ms", justify="right")
    table.add_column("expected, ms", justify="right")
    for tokens, seconds in times["prefill_s"].items():
        table.add_row(f"prefill of {tokens} tokens", _ms(seconds), _ms(times["prefill_expected_s"][tokens]))
    for batch, seconds in times["decode_step_s"].items():
        table.add_row(
            f"decode step, batch {batch}, context {times['decode_context_tokens']}",
            _ms(seconds),
            _ms(times["decode_step_expected_s"][batch]),
        )
    return _titled("times of one instance", table)


def _advice(report: dict[str, Any]) -> Titled:
    traffic, slo, found = report["traffic"], report["slo"], report["suggestion"]
    start, moved = report["cold_start"], report["hand_over"]
    rows = [
        (
            "traffic",
            f"{traffic['requests_per_s']:g} requests/s of {traffic['input_tokens']} in, {traffic['output_tokens']} out",
        ),
        ("promise", f"first token {slo['ttft_ms']:g} ms, then {slo['itl_ms']:g} ms a token"),
    ]
    if found["possible"]:
        rows += [
            ("instances", f"{found['instances']} ({_cards(found['cards'])})"),
            ("max_batch_size", str(found["max_batch_size"])),
            ("max_num_tokens", str(found["max_num_tokens"])),
            ("max_seq_len", str(found["max_seq_len"])),
            ("expected", f"first token {_ms(found['expected_ttft_s'])} ms, then {_ms(found['expected_itl_s'])} ms"),
        ]
    else:
        rows.append(("cannot be kept", found["reason"]))
    rows += [
        (
            "cold start",
            f"{start['seconds']:.1f} s for {start['disk_bytes'] / _GB:.1f} GB at {start['disk_gb_per_s']:g} GB/s",
        ),
        (
            "hand-over of a prompt",
            f"{moved['bytes'] / _GB:.2f} GB, {_ms(moved['seconds'])} ms at {moved['network_gbit_per_s']:g} Gbit/s",
        ),
    ]
    return _table("suggestion", rows)


def _table(title: str, rows: Iterable[tuple[str, str]]) -> Titled:
    table = Table(show_header=False)
    for row in rows:
        table.add_row(*row)
    return _titled(title, table)


def _titled(title: str, table: Table) -> Titled:
    """A title of its own line: one that belongs to the table would be broken at the table's width."""
    return Text(f"\n{title}", style="bold"), table


def _cards(count: int) -> str:
    return "1 card" if count == 1 else f"{count} cards"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
