"""Recorded traces: our own JSONL and the public formats of Mooncake, Azure and BurstGPT, read as one.

Knows nothing of requests and servers.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from loadtests.errors import UsageFault


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One arrival. Times in seconds after the first one."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()  # one per block of the prompt; equal ids are equal text behind equal text
    adapter: str | None = None
    prompt: str | None = None
    messages: str | None = None


def load(path: Path, limit: int | None = None) -> list[TraceRow]:
    """The rows of a trace in order of time, the first at 0 s.

    Raises:
        UsageFault: the file cannot be read as any of the formats; the message names the line.
    """
    if not path.is_file():
        raise UsageFault(f"There is no trace {path}.")
    read = _read_json_lines if path.suffix in (".jsonl", ".json") else _read_csv
    rows = []
    for row in read(path):
        rows.append(row)
        if limit is not None and len(rows) >= limit:
            break
    if not rows:
        raise UsageFault(f"{path} holds no requests.")
    rows.sort(key=lambda row: row.at_s)
    start = rows[0].at_s
    return [_shifted(row, start) for row in rows]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Our own format: one JSON object per line with at_s, prompt_tokens, output_tokens and what else is known."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _read_json_lines(path: Path) -> Iterator[TraceRow]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield _from_json(json.loads(line))
            except (KeyError, TypeError, ValueError) as error:
                what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
                raise UsageFault(
                    f"{path}, line {number}: {what}. A line is {{at_s, prompt_tokens, output_tokens}} "
                    "with seconds, or Mooncake's {timestamp, input_length, output_length, hash_ids} with milliseconds."
                ) from None


def _from_json(row: Mapping[str, Any]) -> TraceRow:
    if "timestamp" in row and "input_length" in row:  # Mooncake: milliseconds, blocks of 512 tokens
        return TraceRow(
            row["timestamp"] / 1000, int(row["input_length"]), int(row["output_length"]), tuple(row.get("hash_ids", ()))
        )
    return TraceRow(
        float(row["at_s"]),
        int(row["prompt_tokens"]),
        int(row["output_tokens"]),
        tuple(row.get("hash_ids", ())),
        row.get("adapter"),
        row.get("prompt"),
        row.get("messages"),
    )


def _read_csv(path: Path) -> Iterator[TraceRow]:
    with path.open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        read = _csv_format(path, set(reader.fieldnames or ()))
        for number, row in enumerate(reader, 2):
            try:
                found = read(row)
            except (KeyError, TypeError, ValueError) as error:
                raise UsageFault(f"{path}, line {number}: {error!r}.") from None
            if found.output_tokens > 0:  # BurstGPT keeps failed requests, with no answer
                yield found


def _csv_format(path: Path, columns: set[str]) -> Callable[[Mapping[str, str]], TraceRow]:
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= columns:
        return _azure
    if {"Timestamp", "Request tokens", "Response tokens"} <= columns:
        return _burst_gpt
    raise UsageFault(
        f"{path} has the columns {', '.join(sorted(columns)) or 'none'}; known are Azure's TIMESTAMP, ContextTokens, "
        "GeneratedTokens and BurstGPT's Timestamp, Request tokens, Response tokens."
    )


def _azure(row: Mapping[str, str]) -> TraceRow:
    # Seven digits of a second in some files, which fromisoformat of older Pythons refuses; some have a zone.
    text, zone = row["TIMESTAMP"].partition("+")[::2]
    moment, _, fraction = text.partition(".")
    when = datetime.fromisoformat(moment.strip()).replace(tzinfo=timezone.utc)
    del zone  # one zone in a file: only differences matter
    seconds = when.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)
    return TraceRow(seconds, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _burst_gpt(row: Mapping[str, str]) -> TraceRow:
    return TraceRow(float(row["Timestamp"]), int(row["Request tokens"]), int(row["Response tokens"]))


def _shifted(row: TraceRow, start: float) -> TraceRow:
    return TraceRow(
        row.at_s - start,
        row.prompt_tokens,
        row.output_tokens,
        row.hash_ids,
        row.adapter,
        row.prompt,
        row.messages,
    )
