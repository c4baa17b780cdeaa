"""Runs a checkpoint over text to measure it: activation ranges for FP8, perplexity of a precision.

Knows nothing of files beyond the checkpoint, nor of how scales are chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import openvino as ov
import openvino.opset15 as ops

from python_backend.engine.model import DecoderGraph, Storage
from python_backend.engine.model_config import ModelConfig
from python_backend.engine.runner import EXACT_OPTIONS, CompiledGraph, StepInput, compile_graph, control_inputs
from python_backend.engine.weights import Int8Weights, Weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BLOCK = 32
Mode = Literal["bf16", "int8", "fp8_weights", "fp8"]
_STORAGE: dict[Mode, Storage] = {"bf16": "bf16", "int8": "int8", "fp8_weights": "fp8", "fp8": "fp8_activations"}


def collect_amax(
    checkpoint_dir: Path, token_batches: list[list[int]], progress: Callable[[int], None] | None = None
) -> dict[str, float]:
    """The largest magnitude that feeds every linear, over all tokens.

    Args:
        checkpoint_dir: a plain (not FP8) checkpoint.
        token_batches: texts as token ids, each run from position 0.
        progress: called with the number of texts done.

    Returns:
        Linear name without `.weight` -> amax of its input; `<layer>.self_attn.k_proj.out` and `.v_proj.out` -> amax of
        the keys and values that enter the cache.
    """
    graph = _Probed(ModelConfig.load(checkpoint_dir), Weights(checkpoint_dir), "f32")
    run = _Session(graph, max(map(len, token_batches)))
    found = dict.fromkeys(graph.names, 0.0)
    for done, token_ids in enumerate(token_batches, 1):
        for name, value in zip(graph.names, run(token_ids), strict=True):
            found[name] = max(found[name], float(value.reshape(-1)[0]))
        if progress is not None:
            progress(done)
    return found


def perplexity(
    checkpoint_dir: Path,
    token_ids: list[int],
    mode: Mode,
    *,
    window: int = 512,
    progress: Callable[[int], None] | None = None,
) -> float:
    """exp of the mean negative log-likelihood of the tokens, in windows of `window` tokens without overlap.

    `fp8` rounds the activations to E4M3 too, as a GPU does; for it and for `fp8_weights` the checkpoint is the FP8 one.
    """
    weights = (Int8Weights if mode == "int8" else Weights)(checkpoint_dir)
    graph = DecoderGraph(ModelConfig.load(checkpoint_dir), weights, _STORAGE[mode])
    run = _Session(graph, window)
    total, count = 0.0, 0
    for start in range(0, len(token_ids) - 1, window):
        part = token_ids[start : start + window]
        if len(part) < 2:
            break
        logits = run(part, num_logits=len(part))[0]
        total += _negative_log_likelihood(logits[:-1], np.array(part[1:]))
        count += len(part) - 1
        if progress is not None:
            progress(start + len(part))
    return float(np.exp(total / count))


class _Session:
    """One compiled graph that computes whole texts from position 0."""

    def __init__(self, graph: DecoderGraph, max_tokens: int) -> None:
        compiled = compile_graph(graph.build(), EXACT_OPTIONS)
        self._compiled = CompiledGraph(graph, compiled)
        num_blocks = -(-max_tokens // BLOCK)
        self._compiled.bind(self._compiled.new_caches(num_blocks), num_blocks)

    def __call__(self, token_ids: list[int], num_logits: int = 1) -> list[np.ndarray]:
        table = list(range(-(-len(token_ids) // BLOCK)))
        self._compiled.start(control_inputs([StepInput(token_ids, 0, table, num_logits)]))
        self._compiled.wait()
        return self._compiled.outputs()


class _Probed(DecoderGraph):
    """The decoder with the amax of every probe as output, in place of the logits."""

    def build(self) -> ov.Model:
        model = super().build()
        self.names = [*self.probes, *self.kv_probes]
        nodes = [*self.probes.values(), *self.kv_probes.values()]
        return ov.Model([_amax_node(node) for node in nodes], model.get_parameters(), "calibration")


def _amax_node(node: Any) -> Any:
    flat = ops.reshape(ops.absolute(node), ops.constant(np.array([-1], np.int64)), False)
    return ops.result(ops.reduce_max(flat, ops.constant(np.array([0], np.int64)), True))


def _negative_log_likelihood(logits: np.ndarray, targets: np.ndarray) -> float:
    top = logits.max(axis=1, keepdims=True)
    normalizer = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1, dtype=np.float64))
    return float((normalizer - logits[np.arange(len(targets)), targets]).sum())
