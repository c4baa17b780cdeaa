"""A recorded trace: its lengths, its shared prefixes and, in open loop, its arrival times."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from loadtests import traces
from loadtests.errors import UsageFault
from loadtests.workloads.base import FIXED_LENGTH, Item, Setting, Workload

BLOCK_TOKENS = 512  # of Mooncake's hash ids


class Replay(Workload):
    """Where a trace holds no text, prompts of its lengths are made up; equal hash ids give equal blocks of text."""

    name = "replay"
    about = "A recorded trace: its arrival times, prompt and answer lengths, and shared prefixes."

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        if setting.trace is None:
            raise UsageFault("The workload replay needs a trace: TRACE=path.")
        self.rows = traces.load(setting.trace)

    def item(self, index: int) -> Item:
        """The request at a position; after its end the trace begins again."""
        row = self.rows[index % len(self.rows)]
        prompt, output = self._lengths(row)
        fields: dict[str, Any] = dict(FIXED_LENGTH)
        shared = 0
        if row.messages is not None:
            fields["messages"] = row.messages
        elif row.prompt is not None:
            fields["text_input"] = row.prompt
        else:
            fields["text_input"], shared = self._text(index, row, prompt)
        return Item(index, self.name, fields, output, row.adapter, shared)

    @property
    def shortened(self) -> int:
        """How many rows are longer than the server takes."""
        wanted = (
            (max(1, self._scaled(row.prompt_tokens)), max(1, self._scaled(row.output_tokens))) for row in self.rows
        )
        return sum(self._lengths(row) != lengths for row, lengths in zip(self.rows, wanted, strict=True))

    def _lengths(self, row: traces.TraceRow) -> tuple[int, int]:
        limit = self.setting.max_seq_len - 16  # room for a start token and rounding
        output = max(1, min(self._scaled(row.output_tokens), limit // 2))
        return max(1, min(self._scaled(row.prompt_tokens), limit - output)), output

    def _scaled(self, tokens: int) -> int:
        return round(tokens * self.setting.trace_scale)

    def _text(self, index: int, row: traces.TraceRow, tokens: int) -> tuple[str, int]:
        block = max(1, self._scaled(BLOCK_TOKENS))
        parts, have, shared, known = [], 0, 0, True
        for place, hash_id in enumerate(row.hash_ids):
            if have >= tokens:
                break
            length = min(block, tokens - have)
            parts.append(self.prose(length, "block", hash_id)[0])
            known = known and self._first_use[place, hash_id] < index % len(self.rows)
            shared += length if known else 0
            have += length
        if have < tokens:
            parts.append(self.prose(tokens - have, "rest", index)[0])
        return " ".join(parts), shared

    @cached_property
    def _first_use(self) -> dict[tuple[int, int], int]:
        """The row that first has a hash id at a place."""
        found: dict[tuple[int, int], int] = {}
        for number, row in enumerate(self.rows):
            for pair in enumerate(row.hash_ids):
                found.setdefault(pair, number)
        return found
