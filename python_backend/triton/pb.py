"""The one import of Triton's Python API, and what every model needs of it: tensors in, tensors and errors out.

Knows nothing of prompts, tokens or the engine.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as pb_utils

from python_backend.errors import InvalidRequest, StackError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

    Tensors = Mapping[str, npt.NDArray[Any]]

_TRUE = frozenset({"true", "1", "t", "y", "yes"})
_FALSE = frozenset({"false", "0", "f", "n", "no"})

INTERNAL_ERROR = "Internal error ("  # how the message of an unexpected exception begins

_log = logging.getLogger(__name__)


def read_inputs(request: Any) -> Tensors:
    """Every input that was sent, by name (BYTES: object arrays of bytes; BF16: ml_dtypes.bfloat16)."""
    return {tensor.name(): array_of(tensor) for tensor in request.inputs()}


def array_of(tensor: Any) -> npt.NDArray[Any]:
    """The values of one of Triton's tensors."""
    try:
        found: npt.NDArray[Any] = tensor.as_numpy()
    except pb_utils.TritonModelException:  # numpy has no BF16
        from python_backend.triton import bfloat16  # most servers never need it

        return bfloat16.from_capsule(tensor.to_dlpack())
    return found


def read_scalar(tensors: Tensors, name: str) -> Any:
    """The only element of an input [1, 1] as a plain Python value (BYTES: str), None when it was not sent.

    Raises:
        InvalidRequest: the tensor has more or fewer elements than one, or its text is no UTF-8.
    """
    array = tensors.get(name)
    if array is None:
        return None
    if array.size != 1:
        raise InvalidRequest(f"{name} has {array.size} elements; send exactly one (shape [1, 1]).")
    value = array.flat[0]
    return text_of(value, name) if array.dtype == object else value.item()


def read_texts(tensors: Tensors, name: str) -> list[list[str]] | None:
    """A BYTES input [B, n] as one list of texts per batch element, None when it was not sent.

    Raises:
        InvalidRequest: an element is no UTF-8.
    """
    array = tensors.get(name)
    if array is None:
        return None
    return [[text_of(value, name) for value in row] for row in by_row(array)]


def by_row(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A tensor [B, …] of any rank as [B, n]."""
    array = np.atleast_1d(array)
    batch = len(array)
    return array.reshape(batch, array.size // batch if batch else 0)


def text_of(value: bytes | str, name: str) -> str:
    """One element of a BYTES tensor as text.

    Raises:
        InvalidRequest: the bytes are no UTF-8.
    """
    if isinstance(value, str):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{name} is not valid UTF-8: byte 0x{value[error.start]:02x} at offset {error.start}. Send UTF-8 text."
        ) from error


def tensor(name: str, array: npt.NDArray[Any]) -> Any:
    """An output tensor; numbers as they are, BYTES from an object array of bytes, BF16 from ml_dtypes.bfloat16."""
    if array.dtype.kind == "V":  # not one of numpy's own
        from python_backend.triton import bfloat16

        return pb_utils.Tensor.from_dlpack(name, bfloat16.to_capsule(array))
    return pb_utils.Tensor(name, np.ascontiguousarray(array))


def text_tensor(name: str, texts: Sequence[str], shape: tuple[int, ...] | None = None) -> Any:
    """A BYTES output; 1-D unless a shape is given."""
    array = np.empty(len(texts), dtype=object)
    array[:] = [text.encode("utf-8", "replace") for text in texts]
    return pb_utils.Tensor(name, array if shape is None else array.reshape(shape))


def response(tensors: Iterable[Any] = ()) -> Any:
    """A response that carries these tensors."""
    return pb_utils.InferenceResponse(output_tensors=list(tensors))


def error_response(error: BaseException) -> Any:
    """A response that carries an error and nothing else."""
    return pb_utils.InferenceResponse(output_tensors=[], error=triton_error(error))


def triton_error(error: BaseException) -> Any:
    """The error as Triton reports it: our own by their code and text, anything else as INTERNAL with its type.

    A traceback goes to the log, never to a client.
    """
    if isinstance(error, StackError):
        return pb_utils.TritonError(str(error), getattr(pb_utils.TritonError, error.code))
    _log.error("unexpected error while serving a request", exc_info=error)
    message = f"{INTERNAL_ERROR}{type(error).__name__}: {error}). The server's log has the details."
    return pb_utils.TritonError(message, pb_utils.TritonError.INTERNAL)


def load_error(error: StackError) -> Exception:
    """What `initialize` raises so that Triton shows the error's text, and not a traceback, as the load error."""
    exception: Exception = pb_utils.TritonModelException(str(error))
    return exception


def parameter(model_config: Mapping[str, Any], key: str, default: str = "") -> str:
    """A parameter of config.pbtxt; one that is missing, empty or an unfilled `${…}` counts as not set."""
    value = str(model_config.get("parameters", {}).get(key, {}).get("string_value", "")).strip()
    return default if not value or value.startswith("${") else value


def bool_parameter(model_config: Mapping[str, Any], key: str, default: bool) -> bool:
    """A parameter that is true/false, 1/0, t/f, y/n or yes/no in any case.

    Raises:
        InvalidRequest: it is none of those; the model then fails to load with this text.
    """
    text = parameter(model_config, key).lower()
    if not text:
        return default
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise InvalidRequest(f"Parameter {key} is '{text}'; allowed: true or false. Correct it in config.pbtxt.")


def int_parameter(model_config: Mapping[str, Any], key: str, default: int) -> int:
    """A parameter that is a whole number.

    Raises:
        InvalidRequest: it is none; the model then fails to load with this text.
    """
    text = parameter(model_config, key)
    try:
        return int(text) if text else default
    except ValueError:
        raise InvalidRequest(f"Parameter {key} is '{text}'; send a whole number. Correct it in config.pbtxt.") from None


def log_to_triton(level: int = logging.INFO) -> None:
    """Send the records of Python's logging to Triton's log; call it once, in `initialize`."""
    root = logging.getLogger()
    if not any(isinstance(handler, _TritonHandler) for handler in root.handlers):
        root.addHandler(_TritonHandler(level))
        root.setLevel(level)


class _TritonHandler(logging.Handler):
    """Hands log records to Triton's logger."""

    def emit(self, record: logging.LogRecord) -> None:
        logger = pb_utils.Logger
        text = self.format(record)
        if record.levelno >= logging.ERROR:
            logger.log_error(text)
        elif record.levelno >= logging.WARNING:
            logger.log_warn(text)
        else:
            logger.log_info(text)
