"""`tensorrt_llm`: the in-flight batching engine as a Triton model. `execute` only takes requests in; answers follow.

Knows nothing of text beyond what stop strings and detokenization contexts need.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton_python_backend_utils as pb_utils

from python_backend import cpu_share
from python_backend.engine.llm_engine import LLMEngine
from python_backend.errors import BuildError, InvalidRequest, Overloaded, StackError, Unsupported
from python_backend.logprobs.tokens import TokenTable
from python_backend.telemetry.gauges import EngineMetrics
from python_backend.telemetry.health import EngineHealth
from python_backend.telemetry.poller import Poller
from python_backend.telemetry.refusals import Refusals
from python_backend.telemetry.requests import RequestMetrics, RequestRecord
from python_backend.telemetry.tracing import tracing_from_environment
from python_backend.text.detokenize import context_start
from python_backend.text.stop import StopText
from python_backend.text.tokenizer import Tokenizer
from python_backend.triton import pb
from python_backend.triton.adapters import AdapterService, refuse_adapters
from python_backend.triton.cancel import CancelWatcher, ShutdownWatcher
from python_backend.triton.deliver import Deliverer
from python_backend.triton.engine_record import check_record
from python_backend.triton.guides import GuideService
from python_backend.triton.health import HEALTH, not_serving
from python_backend.triton.inflight import Answer, InFlight, Part
from python_backend.triton.limits import ServingLimits
from python_backend.triton.parameters import parameters_of
from python_backend.triton.parse import is_stop, parse_requests
from python_backend.triton.respond import Responder
from python_backend.triton.settings import read_settings
from python_backend.triton.trace import traceparent_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from python_backend.engine.output import RequestOutput
    from python_backend.request import GenerationRequest
    from python_backend.triton.settings import ModelSettings

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_LAST_ERRORS_S = 0.5  # Triton sends them on through ensembles; once it is stopping, it does not always
_log = logging.getLogger(__name__)


class TritonPythonModel:
    """What Triton's Python backend looks for; one instance holds the one engine."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Read the settings, compile the engine and start its threads.

        Raises:
            TritonModelException: the model cannot be served; Triton shows the text as the load error.
        """
        pb.log_to_triton()
        cpu_share.compute()
        try:
            self._set_up(args)
        except StackError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: Sequence[Any]) -> None:
        """Take requests in; each is answered through its own response sender, from the delivering thread."""
        for request in requests:
            self._accept(request)

    def finalize(self) -> None:
        """End what runs as cancelled, send that, and end every thread."""
        self._closing = True
        self._engine.stop()
        self._deliverer.stop()
        self._watcher.stop()
        self._poller.stop()
        if self._tracing is not None:
            self._tracing.stop()
        if self._guides is not None:
            self._guides.stop()

    def _set_up(self, args: Mapping[str, str]) -> None:
        config = json.loads(args["model_config"])
        settings = read_settings(config)
        check_record(Path(pb.parameter(config, "gpt_model_path")), settings.tokenizer_dir)
        for note in settings.notes:
            _log.warning(note)
        self._closing = False
        self._tracing, self._model_name = tracing_from_environment(), settings.checkpoint_dir.parent.name
        self._health = EngineHealth(settings.health_patience_s)
        self._engine_ids = map(str, itertools.count())
        self._tokenizer = Tokenizer.from_dir(settings.tokenizer_dir)
        self._tokens = TokenTable(self._tokenizer)
        self._in_flight = InFlight()
        self._deliverer = Deliverer(self._in_flight, self._cancel, self._part_ended, self._answer_ended)
        self._engine = LLMEngine(
            settings.checkpoint_dir, settings.engine, on_outputs=self._deliverer.put, make_text_stop=self._text_stop
        )
        self._adapters = AdapterService(settings.lora, settings.checkpoint_dir) if settings.lora else None
        if settings.lora and settings.lora.compile_at_start:
            self._engine.prepare_adapters()
        self._limits = ServingLimits.of(
            settings.engine, self._engine.vocab_size, settings.decoupled, settings.exclude_input_in_output
        )
        self._guides = self._make_guides(settings)
        self._watcher = CancelWatcher(settings.cancellation_check_period_s, self._cancel_answer)
        self._set_up_metrics(settings, {"model": args["model_name"], "version": args["model_version"]})
        self._deliverer.start()
        self._engine.start()
        self._watcher.start()
        self._poller.start()
        ShutdownWatcher(self._close, self._cancel_all).start()

    def _set_up_metrics(self, settings: ModelSettings, labels: dict[str, str]) -> None:
        family = pb_utils.MetricFamily
        self._request_metrics, self._refusals = RequestMetrics(family, labels), Refusals(family, labels)
        self._engine_metrics = EngineMetrics(family, labels, settings.engine.batching_strategy == "V1")
        if self._guides is not None:
            self._guides.start(family, labels, settings.warm_up)
        if self._adapters is not None:
            self._adapters.start(family, labels)
        self._poller = Poller("metrics", settings.stats_check_period_s, self._poll)

    def _make_guides(self, settings: ModelSettings) -> GuideService | None:
        if settings.guides is None:
            return None
        try:
            vocab_size, backend = self._engine.vocab_size, settings.guide_backend
            return GuideService(self._tokenizer, settings.tokenizer_dir, vocab_size, settings.guides, backend)
        except BuildError as error:
            if settings.guide_backend != "llguidance":  # what was chosen has to be there
                raise
            _log.warning("Requests with a guide are refused: %s", error)
            return None

    def _accept(self, request: Any) -> None:
        """Submit one Triton request, or answer it at once; nothing it holds can harm another one."""
        sender = request.get_response_sender()
        try:
            tensors = pb.read_inputs(request)
            if is_stop(tensors):
                sender.send(self._answer_stop(request), flags=_FINAL)
            else:
                self._submit(request, tensors, sender)
        except Exception as error:
            self._refusals.count(error)
            sender.send(pb.error_response(error), flags=_FINAL)
            if self._tracing is not None and (parent := traceparent_of(request)):
                self._tracing.refused(parent, self._model_name, error)

    def _submit(self, request: Any, tensors: Mapping[str, NDArray[Any]], sender: Any) -> None:
        if self._closing and self._engine.failure is None:
            raise Overloaded("The server is shutting down; send the request to another one.")
        prompts = parse_requests(
            tensors, self._limits, self._engine_ids.__next__, parameters_of(request.parameters()), request.timeout()
        )
        wanted = request.requested_output_names()
        answer = Answer(request.request_id(), sender)
        traceparent = "" if self._tracing is None else traceparent_of(request)
        for prompt in prompts:
            answer.parts[prompt.request_id] = Part(
                prompt, Responder(prompt, wanted, self._clean_start, self._tokens), traceparent=traceparent
            )
        if self._adapters is None:
            refuse_adapters(tensors)
        else:
            self._adapters.attach(prompts, tensors)
        self._in_flight.add(answer)
        self._watcher.watch(answer, sender)
        try:
            for prompt in prompts:
                self._start(prompt)
        except Exception:
            self._watcher.forget(answer)
            for engine_id in self._in_flight.drop(answer):
                self._engine.cancel(engine_id)
            for prompt in prompts:
                self._release(prompt.request_id)
            raise

    def _start(self, prompt: GenerationRequest) -> None:
        if prompt.guide is None:
            self._engine.submit(prompt)
        elif self._guides is not None:
            self._engine.submit(prompt, self._guides.masks(prompt))
        else:
            raise Unsupported(
                "Request is specified with GuidedDecodingParams, but GuidedDecoder is not setup. Please provide a "
                "valid GuidedDecodingConfig to setup GuidedDecoder."
            )

    def _release(self, engine_id: str, output_tokens: int | None = None) -> None:
        if self._adapters is not None:
            self._adapters.release(engine_id, output_tokens)

    def _answer_stop(self, request: Any) -> Any:
        if parameters_of(request.parameters()).get(HEALTH):
            reason = self._health.reason()
            return pb.response() if reason is None else pb.error_response(not_serving(reason))
        self._stop(request.request_id())
        return pb.response()

    def _stop(self, triton_id: str) -> None:
        """Cancel whatever runs under a Triton request id; an id that nothing has is no error."""
        if not triton_id:
            raise InvalidRequest(
                "Trying to stop a request but request ID is not provided: give the id of the request to stop."
            )
        for engine_id in self._in_flight.engine_ids_of(triton_id):
            self._engine.cancel(engine_id)

    def _cancel(self, engine_id: str) -> None:
        """End a prompt whose answer is over."""
        self._engine.cancel(engine_id)

    def _cancel_answer(self, answer: Answer) -> None:
        for engine_id in list(answer.parts):
            self._engine.cancel(engine_id)

    def _close(self) -> None:
        """The server is about to stop: refuse what comes; what runs may finish."""
        self._closing = True
        self._health.close()

    def _cancel_all(self) -> None:
        """The time to finish is over: end what runs with what it has."""
        for answer in self._in_flight.answers():
            self._cancel_answer(answer)

    def _answer_ended(self, answer: Answer) -> None:
        self._watcher.forget(answer)

    def _part_ended(self, event: RequestOutput, part: Part) -> None:
        perf, request = event.perf, part.request
        self._release(request.request_id, part.output_tokens)
        if request.guide is not None and self._guides is not None:
            self._guides.ended(request.guide, failed=event.error is not None)
        record = RequestRecord(
            input_tokens=len(request.prompt_ids),
            output_tokens=part.output_tokens,
            finish_reason="error" if part.error is not None else part.finish_reason or "error",
            arrival_ns=request.arrival_ns,
            first_scheduled_ns=perf.first_scheduled_ns if perf else 0,
            first_token_ns=perf.first_token_ns if perf else 0,
            last_token_ns=perf.last_token_ns if perf else 0,
            end_ns=time.monotonic_ns(),
            sequences=request.sampling.num_return_sequences,
        )
        self._request_metrics.ended(record)
        if self._tracing is not None and part.traceparent:
            self._tracing.request(part.traceparent, self._model_name, request, record, part.error)

    def _poll(self) -> None:
        stats, in_flight = self._engine.stats(), len(self._in_flight)
        self._health.update(stats, in_flight, self._engine.failure, time.monotonic())
        if self._closing:  # whoever stops the server waits for these, and the engine has not looked at all of them
            stats = dataclasses.replace(stats, active_requests=max(stats.active_requests, in_flight))
        self._engine_metrics.update(stats)
        if self._adapters is not None:
            self._adapters.update()
        if self._guides is not None:
            self._guides.update(self._engine.take_mask_times())
        if self._engine.failure is not None and not self._closing:
            self._give_up(self._engine.failure)

    def _give_up(self, failure: BaseException) -> None:
        """A dead engine cannot be revived in its process: end the server, so that whoever supervises it starts anew.

        A Triton model has no way to become unready by itself, and a server that is ready and answers nothing but
        errors keeps its place behind a load balancer.
        """
        self._closing = True
        _log.critical("The engine has failed (%s); the server stops.", failure)
        time.sleep(_LAST_ERRORS_S)
        os.kill(os.getppid(), signal.SIGTERM)

    def _text_stop(self, request: GenerationRequest) -> StopText:
        return StopText(self._tokenizer, request.stop_texts, request.exclude_stop_words)

    def _clean_start(self, sent: list[int]) -> list[int]:
        return sent[context_start(self._tokenizer, sent, len(sent)) :]
