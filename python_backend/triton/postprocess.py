"""The postprocessing model: generated tokens to text, piece by piece.

Pure where `tensorrt_llm` sends the context along (DETOKENIZE_CONTEXT), so that any number of instances may run. A
backend that does not is served by request id. Only moves tensors; text is made in python_backend.text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from python_backend.errors import BuildError, InvalidRequest, StackError
from python_backend.text.detokenize import DetokenizerTable
from python_backend.text.output import Piece
from python_backend.text.tokenizer import Tokenizer
from python_backend.triton import pb
from python_backend.triton.derived_logprobs import DEFAULT_ALTERNATIVES, LogprobsDeriver
from python_backend.triton.tool_inputs import texts_and_calls

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt


class Postprocessor:
    """Requests in, lists of B * beams texts out."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        stateful: bool = False,
        alternatives: int = DEFAULT_ALTERNATIVES,
    ) -> None:
        self._tokenizer = tokenizer
        self._deriver = LogprobsDeriver(tokenizer, alternatives, stateful)
        self._skip = skip_special_tokens
        self._table = DetokenizerTable(tokenizer, skip_special_tokens) if stateful else None

    def run(self, tensors: pb.Tensors, request_id: str = "") -> tuple[list[str], list[str]]:
        """Texts and tool calls of one response, in the order of TOKENS_BATCH; no calls for a request without tools.

        Raises:
            InvalidRequest: the tensors do not fit each other.
        """
        if self._table is None or not request_id:
            tool_format = pb.read_scalar(tensors, "TOOL_FORMAT") or ""
            return texts_and_calls(self._tokenizer, read_pieces(tensors), tool_format, self._skip)
        # A backend without contexts; a response without new tokens ends the stream.
        which = _stream(tensors, request_id)
        return [self._table.push((*which, row), ids, final=not ids) for row, ids in enumerate(_rows(tensors))], []

    def logprobs(self, tensors: pb.Tensors, request_id: str = "") -> list[str]:
        """JSON lists in the same order, made from GENERATION_LOGITS.

        Raises:
            InvalidRequest: the tensors do not fit each other.
        """
        rows, cut = _rows(tensors), tensors.get("TEXT_CUT")
        cuts = [0] * len(rows) if cut is None else _per_row(cut, len(rows), "TEXT_CUT").tolist()
        return self._deriver.run(tensors, rows, cuts, _stream(tensors, request_id) if request_id else None)


class TritonPythonModel:
    """What Triton loads."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer; an error's text becomes the load error."""
        pb.log_to_triton()
        config = json.loads(args["model_config"])
        try:
            directory = pb.parameter(config, "tokenizer_dir")
            if not directory:
                raise BuildError("Parameter tokenizer_dir is not set; give the tokenizer's directory in config.pbtxt.")
            self._postprocessor = Postprocessor(
                Tokenizer.from_dir(Path(directory)),
                skip_special_tokens=pb.bool_parameter(config, "skip_special_tokens", True),
                stateful=pb.parameter(config, "target", "cpu") != "cpu",
                alternatives=pb.int_parameter(config, "top_logprobs", DEFAULT_ALTERNATIVES),
            )
        except StackError as error:
            raise pb.load_error(error) from None

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response for each request."""
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        try:
            tensors = pb.read_inputs(request)
            texts, calls = self._postprocessor.run(tensors, request.request_id())
            outputs = [pb.text_tensor("OUTPUT", texts)]
            if any(calls):
                outputs.append(pb.text_tensor("TOOL_CALLS", calls))
            if "GENERATION_LOGITS" in tensors and "LOGPROBS" in (request.requested_output_names() or ["LOGPROBS"]):
                outputs.append(pb.text_tensor("LOGPROBS", self._postprocessor.logprobs(tensors, request.request_id())))
            return pb.response(outputs)
        except Exception as error:  # whatever it is, it concerns this request alone
            return pb.error_response(error)


def _stream(tensors: pb.Tensors, request_id: str) -> tuple[Any, ...]:
    """What all responses of one sequence of a request have in common."""
    return (request_id, pb.read_scalar(tensors, "BATCH_INDEX"), pb.read_scalar(tensors, "SEQUENCE_INDEX"))


def read_pieces(tensors: pb.Tensors) -> list[Piece]:
    """One piece for each row of tokens.

    Without DETOKENIZE_CONTEXT the tokens are the whole answer. With it they are the next part of one, which ends when
    FINISH_REASON says so.
    """
    rows = _rows(tensors)
    context, cut = tensors.get("DETOKENIZE_CONTEXT"), tensors.get("TEXT_CUT")
    if context is None and cut is None:
        return [Piece(ids) for ids in rows]
    contexts = [[]] * len(rows) if context is None else _contexts(context, len(rows))
    cuts = [0] * len(rows) if cut is None else _per_row(cut, len(rows), "TEXT_CUT").tolist()
    finals = _finals(tensors, context is None, len(rows))
    return [Piece(*of_row) for of_row in zip(rows, contexts, finals, cuts, strict=True)]


def _finals(tensors: pb.Tensors, whole: bool, rows: int) -> list[bool]:
    """Which sequences end with this response."""
    reasons = tensors.get("FINISH_REASON")
    if whole or reasons is None:
        return [whole] * rows
    return [bool(reason) for reason in _per_row(reasons, rows, "FINISH_REASON")]


def _rows(tensors: pb.Tensors) -> list[list[int]]:
    """The tokens of each sequence without the padding behind them."""
    tokens, lengths = tensors.get("TOKENS_BATCH"), tensors.get("SEQUENCE_LENGTH")
    if tokens is None or lengths is None:
        raise InvalidRequest("TOKENS_BATCH and SEQUENCE_LENGTH are both needed.")
    if tokens.ndim != 3 or lengths.size != tokens.shape[0] * tokens.shape[1]:
        raise InvalidRequest(
            f"TOKENS_BATCH has shape {list(tokens.shape)} and SEQUENCE_LENGTH {list(lengths.shape)}; "
            "[B, beams, length] and [B, beams] are needed."
        )
    flat: list[list[int]] = [ids for beams in tokens.tolist() for ids in beams]
    return [ids[: max(0, length)] for ids, length in zip(flat, lengths.reshape(-1).tolist(), strict=True)]


def _contexts(context: npt.NDArray[np.int32], rows: int) -> list[list[int]]:
    """Contexts without the -1 in front of them."""
    if context.ndim != 3 or context.shape[0] * context.shape[1] != rows:
        raise InvalidRequest(f"DETOKENIZE_CONTEXT has shape {list(context.shape)}; TOKENS_BATCH has {rows} rows.")
    return [[token_id for token_id in ids if token_id >= 0] for beams in context.tolist() for ids in beams]


def _per_row(array: npt.NDArray[Any], rows: int, name: str) -> npt.NDArray[Any]:
    if array.size != rows:
        raise InvalidRequest(f"{name} has {array.size} elements; TOKENS_BATCH has {rows} rows.")
    return array.reshape(-1)
