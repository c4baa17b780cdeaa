"""What a request says about log-probabilities. Knows nothing of how they are computed or shown.

Counts are inputs (`top_logprobs`, `top_prompt_logprobs`). An ensemble cannot have an input with the name of an output,
so the names that people know, `logprobs` and `prompt_logprobs`, are request parameters: true, or a count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from python_backend.errors import InvalidRequest, out_of_range

if TYPE_CHECKING:
    from collections.abc import Mapping

    from python_backend.request import GenerationRequest
    from python_backend.triton.fields import Fields

MAX_ALTERNATIVES = 20


def ask_log_probs(request: GenerationRequest, fields: Fields, row: int, parameters: Mapping[str, Any]) -> None:
    """Write into a request what it asks for.

    Raises:
        InvalidRequest: a count is out of range, or a mode is unknown or asked for without log-probabilities.
    """
    request.top_logprobs = _alternatives("logprobs", fields, row, parameters)
    request.top_prompt_logprobs = _alternatives("prompt_logprobs", fields, row, parameters)
    for mode in fields.texts("logprobs_mode", row):
        if mode not in ("raw", "processed"):
            raise InvalidRequest(f"logprobs_mode is {mode!r}; allowed: raw and processed.")
        if request.top_logprobs is None:
            raise InvalidRequest(
                f"logprobs_mode was sent without top_logprobs; send how many alternatives you want (0 to "
                f"{MAX_ALTERNATIVES}) as well. Log-probs of the prompt are always raw."
            )
        request.logprobs_mode = "raw" if mode == "raw" else "processed"


def _alternatives(name: str, fields: Fields, row: int, parameters: Mapping[str, Any]) -> int | None:
    """How many per token; None when nothing is asked for."""
    tensor = f"top_{name}"
    count = fields.scalar(tensor, row)
    if count is None:
        tensor, count = f"Parameter {name}", parameters.get(name)
        if isinstance(count, bool):
            count = 0 if count else None
    if count is None:
        return None
    if not isinstance(count, int) or not 0 <= count <= MAX_ALTERNATIVES:
        raise out_of_range(tensor, count, f"0 to {MAX_ALTERNATIVES} (alternatives per token; 0: the token alone)")
    return count
