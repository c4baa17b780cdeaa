"""An engine that follows a rule instead of weights and keeps adapters as TensorRT-LLM's does, room for one of them."""

from __future__ import annotations

from typing import Any

import numpy as np


class LoraEngine:
    """Answers with what it was given: the task id, and the sum of the adapter's values as it holds them."""

    def __init__(self, encode: Any) -> None:
        self._encode = encode
        self._cached: tuple[int, str] | None = None
        self.received = 0  # adapters that came with their weights

    def answer(self, task_id: int | None, weights: np.ndarray | None, config: np.ndarray | None) -> list[int]:
        """The whole answer's tokens.

        Raises:
            ValueError: in upstream's words, an id without weights that is not in the cache.
        """
        if task_id is None:
            return list(self._encode("base"))
        if weights is not None and config is not None:
            self.received += 1
            if self._cached is None or self._cached[0] != task_id:
                self._cached = task_id, described(weights, config)
        if self._cached is None or self._cached[0] != task_id:
            raise ValueError(
                "Executor failed process requestId 1 due to the following error: "
                f"LoRA task {task_id} not found in cache. Please send LoRA weights with request"
            )
        return list(self._encode(f"{task_id} {self._cached[1]}"))


def described(weights: np.ndarray, config: np.ndarray) -> str:
    """What tells one adapter from another: shapes, ranks, and the sum of all values."""
    total = weights.astype(np.float64).sum()
    return f"{weights.shape[-2]} {weights.shape[-1]} {config.reshape(-1, config.shape[-1])[:, 2].sum()} {total:.4f}"
