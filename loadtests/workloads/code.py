"""Completion in an editor: a file up to the cursor, a few tokens to add."""

from __future__ import annotations

from loadtests.workloads.base import FIXED_LENGTH, Item, Workload, log_normal


class Code(Workload):
    """Prompts of code, short answers. The person types on, so the next request repeats most of the last one."""

    name = "code"
    about = "The file up to the cursor, 64 to 512 tokens of code (median 160), and 8 to 32 tokens to complete it."
    _KEYSTROKES = 3  # requests at one place in a file, each a little longer

    def item(self, index: int) -> Item:
        """The request at a position."""
        place, step = divmod(index, self._KEYSTROKES)
        text, tokens = self.code(log_normal(self.rng(place), 160, 0.6, 64, 512), place)
        typed, _ = self.code(24, place, "typed")
        words = typed.split(" ")
        now = " ".join(words[: len(words) * (step + 1) // self._KEYSTROKES])
        max_tokens = self.rng(place, step).randint(8, 32)
        fields = {"text_input": f"{text}\n\n{now}", **FIXED_LENGTH}
        return Item(index, self.name, fields, max_tokens, shared_tokens=tokens if step else 0)
