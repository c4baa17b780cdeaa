"""Compiles the decoder and runs one step of it. Owns the KV cache tensors; knows nothing of requests."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov
from openvino import Type

from python_backend.engine.adapter_rows import Adaptable, AdapterRows, Unchanged
from python_backend.engine.model import DecoderGraph, Storage
from python_backend.engine.model_config import ModelConfig
from python_backend.engine.on_demand import OnDemand
from python_backend.engine.weights import Int8Weights, Weights

if TYPE_CHECKING:
    from pathlib import Path

    from python_backend.engine.adapter_rows import AdapterPool
    from python_backend.engine.block_manager import BlockCopy
    from python_backend.engine.config import EngineConfig, Precision
    from python_backend.engine.protocols import AdapterWeights


EXACT_OPTIONS = {"KV_CACHE_PRECISION": "f32", "INFERENCE_PRECISION_HINT": "f32"}


@dataclass(frozen=True, slots=True)
class StepInput:
    """What one sequence contributes to a step."""

    token_ids: list[int]  # tokens to compute now
    num_computed_tokens: int  # tokens of this sequence already in the cache
    block_table: list[int]
    num_logits: int  # how many of the last tokens need logits
    adapter: AdapterWeights | None = None


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to hold the weights, for steps of up to `max_tokens` tokens, or more where it decodes faster."""

    storage: Storage
    max_tokens: int | None = None


# Few tokens wait for weights from memory, many for arithmetic: int8 wins the first race, bf16 the second. Where they
# cross depends on the machine: `warm_up` measures it. Both hold the same matrices, rounded to 8 bits, so that an
# answer does not depend on the company it is computed in.
VARIANTS: dict[Precision, tuple[Variant, ...]] = {
    "fast": (Variant("int8", max_tokens=4), Variant("bf16")),
    "fp8": (Variant("fp8"),),
    "exact": (Variant("f32"),),
}


class ModelRunner:
    """The compiled model, in one or more variants, with its paged KV cache."""

    def __init__(self, checkpoint_dir: Path, config: EngineConfig) -> None:
        self.model_config = ModelConfig.load(checkpoint_dir)
        self._num_blocks = -(-config.kv_cache_tokens // config.tokens_per_block)
        self._compiled = self._compile(checkpoint_dir, config, None)
        self._caches = self._compiled[-1].graph.new_caches(self._num_blocks)
        for sized in self._compiled:
            sized.graph.bind(self._caches, self._num_blocks)
        # A step without adapters runs a graph that knows nothing of them; the others are made when one is asked for.
        self.adapted = OnDemand(partial(self._make_adapted, checkpoint_dir, config), "compile-adapters")
        self._running = self._compiled[-1].graph
        self._decode_limit = 0  # sequences up to which the first variant decodes faster
        self.kv_bytes = sum(cache.nbytes for cache in self._caches)

    def _compile(self, checkpoint_dir: Path, config: EngineConfig, adapters: Adaptable | None) -> list[SizedGraph]:
        weights = (Int8Weights if config.precision == "fast" else Weights)(checkpoint_dir)
        with ThreadPoolExecutor(2) as compiler:  # compiles one graph while the next one is built, and both side by side
            jobs = []
            for variant in VARIANTS[config.precision]:
                graph = DecoderGraph(self.model_config, weights, variant.storage, adapters)
                jobs.append(
                    (variant.max_tokens, graph, compiler.submit(compile_graph, graph.build(), _options(config)))
                )
            return [SizedGraph(limit, CompiledGraph(graph, job.result())) for limit, graph, job in jobs]

    def _make_adapted(self, checkpoint_dir: Path, config: EngineConfig) -> AdaptedGraphs:
        """Graphs for steps with adapters, warm; the cache is in use meanwhile, so they get to see it at the end."""
        kind = Type.f32 if config.precision == "exact" else Type.bf16
        sized = self._compile(checkpoint_dir, config, Adaptable(kind, config.lora_projections))
        adapted = AdaptedGraphs(sized, AdapterRows(sized[0].graph.lora_linears, kind))
        for graph in (entry.graph for entry in sized):
            graph.bind(graph.new_caches(1), 1)
            for steps in _warm_up_steps(config.max_batch_size, Unchanged()):
                adapted.start(graph, steps)
                graph.wait()
            graph.bind(self._caches, self._num_blocks)
        return adapted

    def copy_blocks(self, copies: list[BlockCopy]) -> None:
        """Copy KV blocks in every layer, in order."""
        for cache in self._caches:
            for copy in copies:
                cache[copy.target] = cache[copy.source]

    def warm_up(self, max_batch_size: int) -> None:
        """Run a prompt and decode steps of a few sizes, since the first run of a shape makes its kernels.

        They all write into block 0, which holds nothing yet.
        """
        for steps in _warm_up_steps(max_batch_size, None):
            self.start(steps)
            self.wait()
        self._decode_limit = self._find_decode_limit(max_batch_size)

    def _find_decode_limit(self, max_batch_size: int) -> int:
        limit = 0
        for size in (8, max_batch_size):
            seconds = [_seconds(sized.graph, [StepInput([0], 0, [0], 1)] * size) for sized in self._compiled]
            if seconds[0] > min(seconds):
                break
            limit = size
        return limit

    def start(self, steps: list[StepInput]) -> None:
        """Begin a step; `wait` gives its logits. The interpreter is free meanwhile."""
        num_tokens = sum(len(step.token_ids) for step in steps)
        # Prefill never follows the measured limit: the cached keys and values of a prompt are the same on every start.
        few = num_tokens == len(steps) and num_tokens <= self._decode_limit
        adapted = None if all(step.adapter is None for step in steps) else self.adapted.ask().result()
        graphs = self._compiled if adapted is None else adapted.graphs
        self._running = next(g.graph for g in graphs if few or g.max_tokens is None or num_tokens <= g.max_tokens)
        if adapted is None:
            self._running.start(control_inputs(steps))
        else:
            adapted.start(self._running, steps)

    def wait(self) -> np.ndarray:
        """Logits of the step begun last, float32 [sum of num_logits, vocab]; valid until the next start."""
        return self._running.wait()


class CompiledGraph:
    """One graph compiled for this CPU, reading and writing the caches it is given."""

    def __init__(self, graph: DecoderGraph, compiled: Any) -> None:
        """`compiled` is what compile_graph made of `graph`. Needs caches, see `bind`, before it starts."""
        # Tensors do not own numpy memory, and the plugin packs weights only at the first inference: keep all of it.
        self._buffers: list[Any] = [graph.buffers]
        self.lora_linears = graph.lora_linears
        self._request = compiled.create_infer_request()
        self._index = {port.any_name: i for i, port in enumerate(compiled.inputs)}
        self._cache_ports = [port for port in compiled.inputs if "cache." in port.any_name]
        self._pool: AdapterPool | None = None

    def new_caches(self, num_blocks: int) -> list[np.ndarray]:
        """Memory for the keys and the values of every layer."""
        return [_cache_memory(port, num_blocks) for port in self._cache_ports]

    def bind(self, caches: list[np.ndarray], num_blocks: int) -> None:
        """Read and write these caches from now on."""
        self._buffers[1:] = [caches]
        for port, memory in zip(self._cache_ports, caches, strict=True):
            shape = ov.Shape([num_blocks, *_block_shape(port)])
            self._request.set_input_tensor(self._index[port.any_name], ov.Tensor(memory, shape, port.element_type))

    def read_adapters(self, pool: AdapterPool) -> None:
        """Read that pool from now on."""
        if pool is not self._pool:
            for name, tensor in pool.tensors().items():
                self._request.set_input_tensor(self._index[name], tensor)
            self._pool = pool

    def start(self, control: dict[str, np.ndarray]) -> None:
        """Begin one inference."""
        for name, value in control.items():
            if name in self._index:  # calibration leaves out what its outputs do not need
                self._request.set_input_tensor(self._index[name], ov.Tensor(value))
        self._request.start_async()

    def wait(self) -> np.ndarray:
        """The first output, as rows."""
        self._request.wait()
        output: np.ndarray = self._request.get_output_tensor(0).data
        return output.reshape(-1, output.shape[-1])

    def outputs(self) -> list[np.ndarray]:
        """Every output of the inference that `wait` has seen end."""
        return [tensor.data for tensor in self._request.output_tensors]


@dataclass(frozen=True, slots=True)
class SizedGraph:
    """A compiled variant and the steps it is for."""

    max_tokens: int | None
    graph: CompiledGraph


@dataclass(frozen=True, slots=True)
class AdaptedGraphs:
    """The graphs of steps with adapters, and what they read."""

    graphs: list[SizedGraph]
    rows: AdapterRows

    def start(self, graph: CompiledGraph, steps: list[StepInput]) -> None:
        """Begin a step on one of the graphs."""
        adapters = {step.adapter.version: step.adapter for step in steps if step.adapter is not None}
        pool = self.rows.place(list(adapters.values()))
        graph.read_adapters(pool)
        graph.start(control_inputs(steps) | pool.masks((len(step.token_ids), step.adapter) for step in steps))


def _warm_up_steps(max_batch_size: int, adapter: AdapterWeights | None) -> list[list[StepInput]]:
    """A prompt and decode steps of a few sizes, all in block 0."""
    sizes = ((1, 32), (1, 1), (max(1, max_batch_size // 4), 1), (max_batch_size, 1))
    return [[StepInput([0] * tokens, 0, [0], 1, adapter)] * sequences for sequences, tokens in sizes]


def _seconds(graph: CompiledGraph, steps: list[StepInput]) -> float:
    """The faster of two runs, after one that makes the kernels."""
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        graph.start(control_inputs(steps))
        graph.wait()
        times.append(time.perf_counter() - begun)
    return min(times[1:])


def compile_graph(model: ov.Model, options: dict[str, str]) -> Any:
    """Compile for this CPU."""
    return ov.Core().compile_model(model, "CPU", options)


def _options(config: EngineConfig) -> dict[str, str]:
    options = {"PERFORMANCE_HINT": "LATENCY", "KV_CACHE_PRECISION": "bf16"}
    if config.precision == "exact":
        options |= EXACT_OPTIONS
    if config.num_threads:
        options["INFERENCE_NUM_THREADS"] = str(config.num_threads)
    return options


def _block_shape(port: Any) -> list[int]:
    return [dimension.get_length() for dimension in list(port.partial_shape)[1:]]


def _cache_memory(port: Any, num_blocks: int) -> np.ndarray:
    # numpy has no bf16: own the bytes, so that blocks can be copied whatever their type is.
    return np.zeros([num_blocks, int(np.prod(_block_shape(port))) * port.element_type.size], np.uint8)


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
