"""Turns guides into compiled ones away from every thread that others wait for, and remembers them.

A guide is tried out in a worker process first. Only what compiled there within its limits is compiled here, on a
thread of low priority while the interpreter is free: a thread alone could not be stopped, and a stack overflow in it
would take the server down.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from python_backend.errors import Overloaded, RequestError
from python_backend.guided.backends import make_backend
from python_backend.guided.cache import CacheStats, GuideCache
from python_backend.guided.limits import GuideLimits
from python_backend.guided.worker_process import WorkerProcess, WorkerSettings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from python_backend.guided.backend import CompiledGuide
    from python_backend.request import Guide

_NICE = 5
_FIXED_BYTES = 64 * 1024  # of a cache entry, beside its grammar


@dataclass(frozen=True, slots=True)
class ReadyGuide:
    """A compiled guide and what has to be told about it."""

    guide: CompiledGuide
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Job:
    key: str
    guide: Guide
    result: Future[ReadyGuide]


class GuideCompiler:
    """Compiles for one tokenizer.

    Args:
        tokenizer_file: tokenizer.json.
        vocab_size: width of the logits.
        end_ids: tokens that end an answer and are never text.
        backend: name of the constraint library.
        special_tokens: texts of special tokens.
        limits: bounds of one guide, and of the cache.
        on_compiled: gets the seconds of each compilation that was not in the cache; called on a worker's thread.
    """

    def __init__(
        self,
        tokenizer_file: Path,
        vocab_size: int,
        end_ids: tuple[int, ...],
        *,
        backend: str = "llguidance",
        special_tokens: tuple[str, ...] = (),
        limits: GuideLimits | None = None,
        on_compiled: Callable[[float], None] | None = None,
    ) -> None:
        self._limits = limits or GuideLimits()
        self._on_compiled = on_compiled
        settings = WorkerSettings(backend, str(tokenizer_file), vocab_size, end_ids, special_tokens)
        self._backend = make_backend(backend, self._limits, special_tokens)
        tokenizer_json = tokenizer_file.read_text(encoding="utf-8")
        self._backend.load_tokenizer(tokenizer_json, vocab_size, end_ids)
        scope = f"{self._backend.name} {self._backend.version} {vocab_size} {end_ids} {tokenizer_json}"
        self._scope = hashlib.sha256(scope.encode()).digest()
        self._cache: GuideCache[ReadyGuide | RequestError] = GuideCache(
            self._limits.cache_entries, self._limits.cache_bytes
        )
        self._stopping = False
        self._lock = threading.Lock()
        self._pending: dict[str, Future[ReadyGuide]] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._workers = [WorkerProcess(settings, self._limits) for _ in range(self._limits.num_workers)]
        self._threads = [
            threading.Thread(target=self._run, args=(worker,), name="guide-compiler", daemon=True)
            for worker in self._workers
        ]

    def start(self) -> None:
        """Start the workers."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the workers; what is being compiled is given up."""
        for _ in self._threads:
            self._jobs.put(None)
        self._stopping = True
        for worker in self._workers:
            worker.kill()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=self._limits.compile_wall_s)
        with self._lock:
            pending, self._pending = list(self._pending.values()), {}
        for future in pending:
            if not future.done():
                future.set_exception(Overloaded("The server is shutting down; send the request to another one."))

    def submit(self, guide: Guide) -> Future[ReadyGuide]:
        """The compiled guide, or the RequestError that refuses it; done at once when it is in the cache.

        Raises:
            Overloaded: too many guides wait to be compiled.
        """
        key = self._key(guide)
        with self._lock:
            pending = self._pending.get(key)
            if pending is not None:
                return pending
            future: Future[ReadyGuide] = Future()
            known = self._cache.get(key)
            if known is None:
                if len(self._pending) >= self._limits.max_queued:
                    raise Overloaded(f"{self._limits.max_queued} structures wait to be compiled; try again later.")
                self._pending[key] = future
        if known is None:
            self._jobs.put(_Job(key, guide, future))
        elif isinstance(known, RequestError):
            future.set_exception(known)
        else:
            future.set_result(known)
        return future

    def forget(self, guide: Guide) -> None:
        """Compile anew next time: a matcher that failed may have filled what all of them share."""
        self._cache.remove(self._key(guide))

    def stats(self) -> CacheStats:
        """Of the cache."""
        return self._cache.stats()

    def _key(self, guide: Guide) -> str:
        digest = hashlib.sha256(self._scope)
        head = f"{guide.kind}\0{guide.strict}\0{guide.whitespace}\0{guide.text}"
        digest.update(head.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    def _run(self, worker: WorkerProcess) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        worker.start()
        try:
            while (job := self._jobs.get()) is not None and not self._stopping:
                self._work(worker, job)
        finally:
            worker.stop()

    def _work(self, worker: WorkerProcess, job: _Job) -> None:
        started = time.monotonic()
        outcome: ReadyGuide | Exception
        size = _FIXED_BYTES + len(job.guide.text)
        try:
            grammar = worker.try_out(job.guide)
            outcome = ReadyGuide(self._backend.compile(grammar), grammar.warnings)
            size = _FIXED_BYTES + 16 * len(grammar.text)
        except Exception as error:  # whatever it is, it belongs to the requests that wait for this guide
            outcome = error
        if isinstance(outcome, ReadyGuide | RequestError) and not isinstance(outcome, Overloaded):
            self._cache.put(job.key, outcome, size)
        with self._lock:
            self._pending.pop(job.key, None)
        if self._on_compiled is not None:
            self._on_compiled(time.monotonic() - started)
        if job.result.done():  # given up by stop
            return
        if isinstance(outcome, ReadyGuide):
            job.result.set_result(outcome)
        else:
            job.result.set_exception(outcome)
