"""The preprocessing model: text, messages and word lists to the tensors that `tensorrt_llm` takes.

Only moves tensors; what they mean is decided in python_backend.text.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as pb_utils

from python_backend.errors import BuildError, InvalidRequest, NotFound, StackError, Unsupported
from python_backend.guided.gpu_targets import check_for_target
from python_backend.request import Guide
from python_backend.telemetry.refusals import Refusals
from python_backend.text.prompts import PromptBuilder, PromptInputs, Prompts
from python_backend.text.tokenizer import Tokenizer
from python_backend.triton import pb
from python_backend.triton.derived_logprobs import DEFAULT_ALTERNATIVES, wants_logits
from python_backend.triton.tool_inputs import read_tools, tool_outputs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from python_backend.text.tool_requests import ToolRequest
    from python_backend.triton.named_adapters import NamedAdapters

_log = logging.getLogger(__name__)

_IMAGE_INPUTS = ("IMAGE_BYTES", "IMAGE_URL", "IMAGES", "VIDEO_BYTES")


@dataclass(frozen=True, slots=True)
class PreprocessSettings:
    """The parameters of the model's config.pbtxt."""

    tokenizer_dir: Path
    add_special_tokens: bool = True
    max_input_len: int | None = None  # tokens; None: unknown here, the engine checks
    target: str = "cpu"
    top_logprobs: int = DEFAULT_ALTERNATIVES  # at most, where they are derived from logits
    adapters: NamedAdapters | None = None  # where the engine does not know them by name

    @classmethod
    def from_config(cls, model_config: Mapping[str, Any]) -> PreprocessSettings:
        """Read tokenizer_dir, add_special_tokens, gpt_model_path (for the engine's limits) and target.

        Raises:
            BuildError: tokenizer_dir is not set, or the engine's config.json is broken.
            Unsupported: the repository asks for a multimodal model.
        """
        tokenizer_dir = pb.parameter(model_config, "tokenizer_dir")
        if not tokenizer_dir:
            raise BuildError("Parameter tokenizer_dir is not set; give the tokenizer's directory in config.pbtxt.")
        if pb.parameter(model_config, "multimodal_model_path"):
            raise Unsupported("Parameter multimodal_model_path is set; multimodal models are not supported. Remove it.")
        engine_dir = pb.parameter(model_config, "gpt_model_path")
        adapters = pb.parameter(model_config, "lora_registry")
        return cls(
            tokenizer_dir=Path(tokenizer_dir),
            add_special_tokens=pb.bool_parameter(model_config, "add_special_tokens", True),
            max_input_len=_max_input_len(Path(engine_dir) / "config.json") if engine_dir else None,
            target=pb.parameter(model_config, "target", "cpu"),
            top_logprobs=pb.int_parameter(model_config, "top_logprobs", DEFAULT_ALTERNATIVES),
            adapters=_named_adapters(Path(adapters), Path(engine_dir), model_config) if adapters else None,
        )


class Preprocessor:
    """Requests in, dictionaries of output arrays (or errors) out."""

    def __init__(self, settings: PreprocessSettings) -> None:
        self._settings = settings
        self._tokenizer = Tokenizer.from_dir(settings.tokenizer_dir)
        for warning in self._tokenizer.warnings:
            _log.warning("%s", warning)
        self._builder = PromptBuilder(self._tokenizer, settings.max_input_len, settings.add_special_tokens)

    def run(self, requests: Sequence[Any]) -> list[dict[str, npt.NDArray[Any]] | Exception]:
        """One result for each request, in order."""
        results: dict[int, dict[str, npt.NDArray[Any]] | Exception] = {}
        tensors: dict[int, pb.Tensors] = {}
        inputs: dict[int, PromptInputs] = {}
        guide_warnings: dict[int, list[str]] = {}
        tools: dict[int, list[ToolRequest | None]] = {}
        for index, request in enumerate(requests):
            try:
                tensors[index] = pb.read_inputs(request)
                self._refuse_unsupported(tensors[index], request.request_id())
                guide_warnings[index] = self._check_guides(tensors[index])
                tools[index] = read_tools(tensors[index], self._settings.target)
                inputs[index] = _prompt_inputs(tensors[index], tools[index])
            except Exception as error:  # whatever it is, it concerns this request alone
                results[index] = error
        for index, prompts in zip(inputs, self._builder.build(list(inputs.values())), strict=True):
            try:
                if isinstance(prompts, Exception):
                    results[index] = prompts
                    continue
                wanted = requests[index].requested_output_names()
                prompts.warnings.extend(guide_warnings[index])
                outputs = self._outputs(tensors[index], prompts, tools[index])
                results[index] = {name: array for name, array in outputs.items() if not wanted or name in wanted}
            except Exception as error:
                results[index] = error
        return [results[index] for index in range(len(requests))]

    def _refuse_unsupported(self, tensors: pb.Tensors, request_id: str) -> None:
        for name in _IMAGE_INPUTS:
            if name in tensors:
                raise Unsupported(f"{name} was sent; the model of this deployment takes text only. Remove it.")
        decoder_query = pb.read_texts(tensors, "DECODER_QUERY")
        if decoder_query is not None and any(text for row in decoder_query for text in row):
            raise Unsupported(
                "decoder_text_input (DECODER_QUERY) is for encoder-decoder models; this deployment has a decoder-only "
                "model. Remove it."
            )
        no_adapters = self._settings.adapters is None and self._settings.target != "cpu"  # our engine knows them
        lora_name = pb.read_scalar(tensors, "LORA_NAME") if no_adapters else None
        if lora_name:
            raise NotFound(f"lora_name {lora_name!r} is not registered: this deployment has no adapters. Remove it.")
        if self._settings.target != "cpu" and not request_id and np.any(tensors.get("STREAM", False)):
            raise InvalidRequest(
                "A streaming request needs a request id with this backend, which keeps the pieces of text apart by it. "
                "Set the request's id."
            )

    def _check_guides(self, tensors: pb.Tensors) -> list[str]:
        """Warnings; our own engine checks guides more thoroughly, where they are compiled."""
        if self._settings.target == "cpu" or "GUIDED_DECODING_GUIDE_TYPE" not in tensors:
            return []
        kinds = _one_each(tensors, "GUIDED_DECODING_GUIDE_TYPE") or []
        texts = _one_each(tensors, "GUIDED_DECODING_GUIDE") or [""] * len(kinds)
        strict = bool(np.all(tensors.get("GUIDED_DECODING_STRICT", True)))
        found: list[str] = []
        for kind, text in zip(kinds, texts, strict=True):
            guide = Guide(kind, text, strict=strict)
            found += check_for_target(guide, self._settings.target)
        return found

    def _outputs(
        self, tensors: pb.Tensors, prompts: Prompts, tools: Sequence[ToolRequest | None]
    ) -> dict[str, npt.NDArray[Any]]:
        tokenizer = self._tokenizer
        batch = len(prompts.ids)
        pad_ids = _column(tensors, "PAD_ID", batch)
        pads = np.full((batch, 1), tokenizer.pad_id, np.int32) if pad_ids is None else pad_ids
        end_ids = _column(tensors, "END_ID", batch)
        all_end_ids = end_ids
        if all_end_ids is None:
            all_end_ids = np.tile(np.array(tokenizer.end_ids or (-1,), np.int32), (batch, 1))
        outputs: dict[str, npt.NDArray[Any]] = {
            "INPUT_ID": pad_rows(prompts.ids, pads),
            "REQUEST_INPUT_LEN": np.array([[len(ids)] for ids in prompts.ids], np.int32),
            "DECODER_INPUT_ID": pads,
            "REQUEST_DECODER_INPUT_LEN": np.ones((batch, 1), np.int32),
            "BAD_WORDS_IDS": prompts.bad_words,
            "STOP_WORDS_IDS": prompts.stop_words,
            "EMBEDDING_BIAS": prompts.bias,
            "REQUEST_OUTPUT_LEN": _required(tensors, "REQUEST_OUTPUT_LEN"),
            "OUT_END_ID": all_end_ids[:, :1],
            "OUT_PAD_ID": pads,
            "OUT_END_IDS": all_end_ids,
            **tool_outputs(tools, self._builder.tool_format),
        }
        if "PROMPT_TABLE_EXTRA_ID" in tensors:
            # Extra ids belong to rows of a prompt table, which text never refers to.
            outputs["OUT_PROMPT_TABLE_EXTRA_IDS"] = np.zeros(outputs["INPUT_ID"].shape, np.uint64)
        logits = wants_logits(tensors, self._settings.top_logprobs, batch)
        if logits is not None:
            outputs["OUT_RETURN_GENERATION_LOGITS"] = logits
        if self._settings.adapters is not None:
            outputs |= self._settings.adapters.outputs(tensors, batch)
        if prompts.warnings:
            warnings = np.array([text.encode() for text in prompts.warnings], object)
            outputs["WARNINGS"] = np.tile(warnings, (batch, 1))
        return outputs


class TritonPythonModel:
    """What Triton loads."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer; an error's text becomes the load error."""
        pb.log_to_triton()
        try:
            self._preprocessor = Preprocessor(PreprocessSettings.from_config(json.loads(args["model_config"])))
        except StackError as error:
            raise pb.load_error(error) from None
        self._refusals = Refusals(
            pb_utils.MetricFamily, {"model": args["model_name"], "version": args["model_version"]}
        )

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response for each request."""
        return [
            self._refuse(result)
            if isinstance(result, Exception)
            else pb.response(pb.tensor(name, array) for name, array in result.items())
            for result in self._preprocessor.run(requests)
        ]

    def _refuse(self, error: Exception) -> Any:
        self._refusals.count(error)
        return pb.error_response(error)


def pad_rows(rows: Sequence[Sequence[int]], pads: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Token lists as int32 [B, longest], padded behind the ids: backends read the first REQUEST_INPUT_LEN of a row."""
    width = max(map(len, rows))
    padded = np.repeat(pads, width, axis=1)
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = ids
    return padded


def _prompt_inputs(tensors: pb.Tensors, tools: Sequence[ToolRequest | None]) -> PromptInputs:
    weights = tensors.get("EMBEDDING_BIAS_WEIGHTS")
    return PromptInputs(
        queries=_one_each(tensors, "QUERY"),
        messages=_one_each(tensors, "MESSAGES"),
        tools=[() if request is None else request.tools for request in tools] or None,
        bad_words=pb.read_texts(tensors, "BAD_WORDS_DICT"),
        stop_words=pb.read_texts(tensors, "STOP_WORDS_DICT"),
        bias_words=pb.read_texts(tensors, "EMBEDDING_BIAS_WORDS"),
        bias_weights=None if weights is None else pb.by_row(weights).tolist(),
    )


def _one_each(tensors: pb.Tensors, name: str) -> list[str] | None:
    """The one text of each batch element."""
    rows = pb.read_texts(tensors, name)
    if rows is None:
        return None
    if not rows or any(len(row) != 1 for row in rows):
        raise InvalidRequest(f"{name} needs shape [B, 1]: one text for each batch element.")
    return [row[0] for row in rows]


def _required(tensors: pb.Tensors, name: str) -> npt.NDArray[Any]:
    array = tensors.get(name)
    if array is None:
        raise InvalidRequest(f"{name} is missing; send how many tokens may be generated (max_tokens).")
    return array


def _column(tensors: pb.Tensors, name: str, batch: int) -> npt.NDArray[np.int32] | None:
    """An input [B, 1], None when it was not sent."""
    array = tensors.get(name)
    if array is None:
        return None
    if array.size != batch:
        raise InvalidRequest(f"{name} has {array.size} elements for a batch of {batch}; send one for each.")
    return array.reshape(batch, 1).astype(np.int32)


def _named_adapters(path: Path, engine_dir: Path, model_config: Mapping[str, Any]) -> NamedAdapters:
    from python_backend.triton.named_adapters import NamedAdapters  # pydantic: only where they are served

    return NamedAdapters(path, engine_dir, model_config)


def _max_input_len(path: Path) -> int | None:
    """build_config.max_input_len of an engine's config.json; CPU and TensorRT-LLM engines both have it."""
    if not path.is_file():
        raise BuildError(f"{path} does not exist; gpt_model_path must be the directory of a built engine.")
    try:
        limit = json.loads(path.read_text(encoding="utf-8")).get("build_config", {}).get("max_input_len")
    except (ValueError, AttributeError) as error:
        raise BuildError(f"{path} is no readable engine configuration: {error}") from error
    return limit if isinstance(limit, int) and limit > 0 else None
