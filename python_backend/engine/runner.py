"""Compiles the decoder and runs one step of it. Owns the KV cache tensors; knows nothing of requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov

from python_backend.engine.model import DecoderGraph, Storage
from python_backend.engine.model_config import ModelConfig
from python_backend.engine.weights import Weights

if TYPE_CHECKING:
    from pathlib import Path

    from python_backend.engine.block_manager import BlockCopy
    from python_backend.engine.config import EngineConfig, Precision


@dataclass(frozen=True, slots=True)
class StepInput:
    """What one sequence contributes to a step."""

    token_ids: list[int]  # tokens to compute now
    num_computed_tokens: int  # tokens of this sequence already in the cache
    block_table: list[int]
    num_logits: int  # how many of the last tokens need logits


STORAGE: dict[Precision, tuple[Storage, dict[str, str]]] = {
    "fast": ("bf16", {"KV_CACHE_PRECISION": "bf16"}),
    "fp8": ("fp8", {"KV_CACHE_PRECISION": "bf16"}),
    "exact": ("f32", {"KV_CACHE_PRECISION": "f32", "INFERENCE_PRECISION_HINT": "f32"}),
}


class ModelRunner:
    """One compiled model with its paged KV cache."""

    def __init__(self, checkpoint_dir: Path, config: EngineConfig) -> None:
        self.model_config = ModelConfig.load(checkpoint_dir)
        storage, options = STORAGE[config.precision]
        graph = DecoderGraph(self.model_config, Weights(checkpoint_dir), storage)
        options = {"PERFORMANCE_HINT": "LATENCY", **options}
        if config.num_threads:
            options["INFERENCE_NUM_THREADS"] = str(config.num_threads)
        compiled = ov.Core().compile_model(graph.build(), "CPU", options)
        self._request = compiled.create_infer_request()
        self._input_index = {port.any_name: i for i, port in enumerate(compiled.inputs)}
        # The plugin packs weights at the first inference, so the memory behind the constants must outlive that too.
        self._buffers = graph.buffers
        self._caches = allocate_cache(self._request, compiled, -(-config.kv_cache_tokens // config.tokens_per_block))
        self.kv_bytes = sum(cache.nbytes for cache in self._caches)

    def copy_blocks(self, copies: list[BlockCopy]) -> None:
        """Copy KV blocks in every layer, in order."""
        for cache in self._caches:
            for copy in copies:
                cache[copy.target] = cache[copy.source]

    def warm_up(self, max_batch_size: int) -> None:
        """Run a prompt and decode steps of a few sizes, since the first run of a shape makes its kernels.

        They all write into block 0, which holds nothing yet.
        """
        for sequences, tokens in ((1, 32), (1, 1), (max(1, max_batch_size // 4), 1), (max_batch_size, 1)):
            self.start([StepInput([0] * tokens, 0, [0], 1)] * sequences)
            self.wait()

    def start(self, steps: list[StepInput]) -> None:
        """Begin a step; `wait` gives its logits. The interpreter is free meanwhile."""
        for name, value in control_inputs(steps).items():
            self._request.set_input_tensor(self._input_index[name], ov.Tensor(value))
        self._request.start_async()

    def wait(self) -> np.ndarray:
        """Logits of the step begun last, float32 [sum of num_logits, vocab]; valid until the next start."""
        self._request.wait()
        logits: np.ndarray = self._request.get_output_tensor(0).data
        return logits.reshape(-1, logits.shape[-1])


def allocate_cache(request: Any, compiled: Any, num_blocks: int) -> list[np.ndarray]:
    """Give every cache input of a compiled model its memory: uint8 arrays [num_blocks, bytes of a block]."""
    caches = []
    for index, port in enumerate(compiled.inputs):
        if "cache." not in port.any_name:
            continue
        shape = [num_blocks, *(d.get_length() for d in list(port.partial_shape)[1:])]
        # numpy has no bf16: own the bytes, so that blocks can be copied whatever their type is.
        raw = np.zeros([num_blocks, int(np.prod(shape[1:])) * port.element_type.size], np.uint8)
        request.set_input_tensor(index, ov.Tensor(raw, ov.Shape(shape), port.element_type))
        caches.append(raw)
    return caches


def control_inputs(steps: list[StepInput]) -> dict[str, np.ndarray]:
    """The inputs of the graph beside the caches, see `model`."""
    counts = [len(s.token_ids) for s in steps]
    past = np.array([s.num_computed_tokens for s in steps], np.int32)
    begins = np.zeros(len(steps) + 1, np.int32)
    np.cumsum(counts, out=begins[1:])
    total = int(begins[-1])
    # position of a token = its place in the step, moved so that each sequence starts behind its past
    positions = np.arange(total, dtype=np.int64) + np.repeat(past - begins[:-1], counts)
    block_begins = np.zeros(len(steps) + 1, np.int32)
    np.cumsum([len(s.block_table) for s in steps], out=block_begins[1:])
    sampled = np.concatenate([np.arange(e - s.num_logits, e) for s, e in zip(steps, begins[1:].tolist(), strict=True)])
    return {
        "input_ids": np.array([t for s in steps for t in s.token_ids], np.int64),
        "position_ids": positions,
        "past_lens": past,
        "subsequence_begins": begins,
        "block_indices": np.array([b for s in steps for b in s.block_table], np.int32),
        "block_indices_begins": block_begins,
        "max_context_len": np.array(int((past + counts).max()), np.int32),
        "sampled_tokens_indices": sampled.astype(np.int64),
    }


