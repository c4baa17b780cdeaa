"""Conversations of several turns that share a system prompt; each turn repeats what was said before."""

from __future__ import annotations

from typing import Any

from loadtests.workloads.base import FIXED_LENGTH, Item, Workload, log_normal

_SYSTEM = (
    "You are a patient assistant for the visitors of a small town by the sea. Answer in plain words, say so when you "
    "do not know something, and never invent opening hours, prices or names."
)
_TURNS = 3
_AT_ONCE = 8  # conversations under way at the same time


class Chat(Workload):
    """Eight conversations at a time, three turns each; the history holds made-up answers, so that it is known."""

    name = "chat"
    about = (
        "Conversations of three turns behind one system prompt: about 40 new tokens a turn, the history repeated, "
        "16 to 128 tokens (median 48) to answer."
    )

    def item(self, index: int) -> Item:
        """The request at a position."""
        round_, place = divmod(index, _AT_ONCE)
        conversation = (round_ // _TURNS) * _AT_ONCE + place
        turn = round_ % _TURNS
        messages: list[dict[str, Any]] = [{"role": "system", "content": _SYSTEM}]
        shared = 0
        for number in range(turn + 1):
            rng = self.rng(conversation, number)
            question, asked = self.prose(log_normal(rng, 36, 0.6, 8, 160), conversation, number, "question")
            answer, answered = self.prose(log_normal(rng, 48, 0.5, 16, 128), conversation, number, "answer")
            messages.append({"role": "user", "content": f"{question} What do you think about this?"})
            if number < turn:
                messages.append({"role": "assistant", "content": answer})
                shared += asked + answered
        max_tokens = log_normal(self.rng(conversation, turn, "length"), 48, 0.5, 16, 128)
        return Item(index, self.name, {"messages": messages, **FIXED_LENGTH}, max_tokens, shared_tokens=shared)
