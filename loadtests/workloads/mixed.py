"""Long prompts among short ones: what a summary of a report does to those who only ask for the time."""

from __future__ import annotations

from loadtests.workloads.base import FIXED_LENGTH, Item, Workload, log_normal

_LONG_SHARE = 0.1
_LONG_TOKENS = 1500


class Mixed(Workload):
    """One request in ten has a long prompt. Reports keep both kinds apart as mixed/short and mixed/long."""

    name = "mixed"
    about = f"Nine short prompts (about 40 tokens) to a long one ({_LONG_TOKENS} tokens); 16 to 64 tokens to answer."

    def item(self, index: int) -> Item:
        """The request at a position."""
        rng = self.rng(index)
        long = rng.random() < _LONG_SHARE
        wanted = min(_LONG_TOKENS, self.setting.max_seq_len // 2) if long else log_normal(rng, 40, 0.5, 16, 128)
        text, _ = self.prose(wanted, index)
        kind = f"{self.name}/{'long' if long else 'short'}"
        fields = {"text_input": f"{text}\n\nIn short:", **FIXED_LENGTH}
        return Item(index, kind, fields, log_normal(rng, 32, 0.4, 16, 64))
