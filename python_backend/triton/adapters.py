"""Adapters of one engine: from what a request says to the matrices that the engine computes with.

A request names an adapter, or brings one as tensors under an id of its own and gives only the id later. Knows nothing
of Triton's objects.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from python_backend.errors import BuildError, InvalidRequest, NotFound, Unsupported
from python_backend.lora.cache import AdapterCache
from python_backend.lora.choice import refuse_name_with_tensors
from python_backend.lora.prefetch import read_prefetched
from python_backend.lora.rows import from_rows
from python_backend.telemetry.adapters import AdapterMetrics
from python_backend.triton.fields import Fields

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from python_backend.lora.adapter import Adapter
    from python_backend.lora.registry import Registered
    from python_backend.request import GenerationRequest
    from python_backend.telemetry.families import MetricFactory
    from python_backend.triton.lora_file import LoraFile

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Lease:
    adapter: Adapter
    name: str  # "" for one that came as tensors


class AdapterService:
    """Finds, loads and keeps adapters. `attach` is called by one thread, `release` by any."""

    def __init__(self, settings: LoraFile, checkpoint_dir: Path) -> None:
        """Check every adapter that the deployment names, and load those of its lora_prefetch_dir.

        Raises:
            BuildError: one of them cannot be served, or not all that are to be prefetched fit into the cache.
        """
        self._base = settings.base(checkpoint_dir)
        self._registry = settings.registry(self._base)
        self._cache = AdapterCache(settings.host_cache_bytes)
        if settings.prefetch_dir is not None:
            self._prefetch(settings.prefetch_dir)
        self._leases: dict[str, _Lease] = {}  # by the engine's request id
        self._metrics: AdapterMetrics | None = None

    def start(self, metrics: MetricFactory, labels: Mapping[str, str]) -> None:
        """Make the metrics."""
        self._metrics = AdapterMetrics(metrics, labels, self._registry.names())
        for entry in self._registry.entries():
            _log.info("Adapter %s: task id %d, rank %d, %d bytes", entry.name, entry.task_id, entry.rank, entry.nbytes)

    def attach(self, prompts: Sequence[GenerationRequest], tensors: Mapping[str, NDArray[Any]]) -> None:
        """Give each prompt the adapter it asks for, in use until `release`; all of them or, with an error, none.

        Raises:
            NotFound: an unknown name, or an id that is not in the cache and came without weights.
            InvalidRequest: the tensors contradict each other or do not fit the model.
            Overloaded: no room, all adapters in the cache are in use.
        """
        fields = Fields(tensors, len(prompts))
        try:
            for row, prompt in enumerate(prompts):
                lease = self._lease(fields, row)
                if lease is not None:
                    self._leases[prompt.request_id] = lease
                    prompt.adapter, prompt.lora_task_id = lease.adapter, lease.adapter.task_id
        except BaseException:
            for prompt in prompts:
                self.release(prompt.request_id)
            raise

    def release(self, engine_id: str, output_tokens: int | None = None) -> None:
        """The prompt has ended; `output_tokens` when it ran. Once is enough, more is harmless."""
        lease = self._leases.pop(engine_id, None)
        if lease is None:
            return
        self._cache.release(lease.adapter)
        if self._metrics is not None and output_tokens is not None:
            self._metrics.ended(lease.name, output_tokens)

    def update(self) -> None:
        """Bring the metrics up to date."""
        if self._metrics is not None:
            stats = self._cache.stats()
            self._metrics.update(stats.adapters, stats.nbytes, stats.hits, stats.misses, stats.evictions)

    def _prefetch(self, directory: Path) -> None:
        for adapter in read_prefetched(directory, self._base):
            if self._cache.stats().nbytes + adapter.nbytes > self._cache.limit_bytes:
                raise BuildError(
                    f"{directory}: its adapters up to task id {adapter.task_id} take more than lora.host_cache_bytes "
                    f"({self._cache.limit_bytes}). Raise it, or remove some."
                )
            self._cache.put(adapter)
            _log.info("LoRA task %d: rank %d, %d bytes, prefetched", adapter.task_id, adapter.rank, adapter.nbytes)

    def _lease(self, fields: Fields, row: int) -> _Lease | None:
        names = [name for name in fields.texts("lora_name", row) if name]
        task_id = fields.scalar("lora_task_id", row)
        weights, config = fields.row("lora_weights", row), fields.row("lora_config", row)
        if names:
            if task_id is not None or weights is not None or config is not None:
                raise refuse_name_with_tensors()
            entry = self._registry.find(names[0])
            return _Lease(self._registered(entry), entry.name)
        if task_id is None:
            if weights is not None or config is not None:
                raise InvalidRequest("lora_task_id must be set for LoRA inference")
            return None
        if (weights is None) != (config is None):
            raise InvalidRequest("Request for LoRA inference must have both lora_weights and lora_keys")
        return self._by_id(int(task_id), weights, config)

    def _by_id(self, task_id: int, weights: NDArray[Any] | None, config: NDArray[Any] | None) -> _Lease:
        known = next((entry for entry in self._registry.entries() if entry.task_id == task_id), None)
        if known is not None:
            return _Lease(self._registered(self._registry.find(known.name)), known.name)
        if weights is not None and config is not None and task_id not in self._cache:
            begun = time.monotonic()
            self._cache.put(from_rows(weights, config, self._base, task_id))
            self._loaded(time.monotonic() - begun)
        return _Lease(self._cache.acquire(task_id), "")

    def _registered(self, entry: Registered) -> Adapter:
        """The adapter as its files are now, loaded again when it was evicted or has changed."""
        try:
            adapter = self._cache.acquire(entry.task_id)
        except NotFound:
            pass
        else:
            if f"{adapter.version:016x}" == entry.content_hash:
                return adapter
            self._cache.release(adapter)
        begun = time.monotonic()
        self._cache.put(self._registry.load(entry))
        self._loaded(time.monotonic() - begun)
        return self._cache.acquire(entry.task_id)

    def _loaded(self, seconds: float) -> None:
        if self._metrics is not None:
            self._metrics.loaded(seconds)


def refuse_adapters(tensors: Mapping[str, NDArray[Any]]) -> None:
    """Refuse what a deployment without adapters cannot serve.

    Raises:
        NotFound: an adapter's name.
        Unsupported: an adapter's tensors.
    """
    if any(text for row in _rows(tensors, "lora_name") for text in row):
        raise NotFound(
            f"lora_name {next(_rows(tensors, 'lora_name'))[0]!r} is not registered: this deployment has no adapters. "
            "Remove it."
        )
    for name in ("lora_task_id", "lora_weights", "lora_config"):
        if name in tensors:
            raise Unsupported(
                f"Input {name} is not supported: adapters are not served by this deployment. Leave the input out, or "
                "add a section lora to the spec."
            )


def _rows(tensors: Mapping[str, NDArray[Any]], name: str) -> Iterator[list[str]]:
    count = len(tensors[name]) if name in tensors else 0
    return (Fields(tensors, count).texts(name, row) for row in range(count))
