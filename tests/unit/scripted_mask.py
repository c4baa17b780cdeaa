"""A token mask whose answers a test writes down: fixed tokens, choices between tokens, and forced runs."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

from python_backend.errors import EngineFailure

if TYPE_CHECKING:
    import numpy as np


class ScriptedMask:
    """`script` lists the tokens allowed at each place; where only one is, it is forced unless `forcing` is off.

    Behind the script only the end id is allowed.
    """

    def __init__(self, script: list[list[int]], end_id: int, *, forcing: bool = True) -> None:
        self.script, self.end_id, self.forcing = script, end_id, forcing
        self.place = 0
        self.num_fills = 0

    def fill(self, bitmask: np.ndarray) -> None:
        self.num_fills += 1
        bitmask[:] = 0
        words = bitmask.view("uint32")
        for token_id in self.script[self.place] if self.place < len(self.script) else [self.end_id]:
            words[token_id >> 5] |= 1 << (token_id & 31)

    def accept(self, token_id: int) -> None:
        if token_id not in self.script[self.place]:
            raise EngineFailure(f"token {token_id} breaks the script at {self.place}")
        self.place += 1

    def forced_tokens(self) -> list[int]:
        run = []
        for allowed in self.script[self.place :] if self.forcing else []:
            if len(allowed) > 1:
                break
            run += allowed
        return run

    @property
    def finished(self) -> bool:
        return self.place == len(self.script)


def future_mask(*arguments: object, **options: object) -> Future:
    """What LLMEngine.submit takes, ready at once."""
    future: Future = Future()
    future.set_result(lambda: ScriptedMask(*arguments, **options))
    return future
