"""Typed reading of a request's input tensors, one prompt of the batch at a time.

Knows nothing of what the tensors mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from python_backend.errors import InvalidRequest
from python_backend.triton.pb import text_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


class Fields:
    """The input tensors of one Triton request, all with the same first (batch) dimension."""

    def __init__(self, tensors: Mapping[str, NDArray[Any]], batch_size: int) -> None:
        self._tensors = tensors
        self.batch_size = batch_size

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def scalar(self, name: str, row: int, default: Any = None) -> Any:
        """The value of a one-element input as a plain Python number or bool; `default` when it was not sent.

        Raises:
            InvalidRequest: the tensor does not hold exactly one value per prompt.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            return default
        if tensor.size != self.batch_size:
            raise InvalidRequest(
                f"Invalid size for tensor {name}: shape {list(tensor.shape)} holds {tensor.size} values; "
                f"send one for each of the {self.batch_size} prompts."
            )
        return tensor.reshape(-1)[row].item()

    def row(self, name: str, row: int) -> NDArray[Any] | None:
        """What an input [B, …] holds for one prompt, without the batch dimension; None when it was not sent.

        Raises:
            InvalidRequest: the first dimension is not the batch size.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        if tensor.ndim == 0 or tensor.shape[0] != self.batch_size:
            raise InvalidRequest(
                f"Invalid size for tensor {name}: shape {list(tensor.shape)}; "
                f"the first dimension has to be the number of prompts ({self.batch_size})."
            )
        values: NDArray[Any] = tensor[row]
        return values

    def texts(self, name: str, row: int) -> list[str]:
        """The strings of a BYTES input for one prompt; empty when it was not sent.

        Raises:
            InvalidRequest: an element is no UTF-8, or the first dimension is not the batch size.
        """
        tensor = self.row(name, row)
        return [] if tensor is None else [text_of(value, name) for value in tensor.reshape(-1)]
