"""JSON lists that requests bring: messages, tools. Knows nothing of what the entries are."""

from __future__ import annotations

import json
from typing import Any

from python_backend.errors import InvalidRequest, LimitExceeded


def parse_list(text: str, name: str, form: str, at_most: int) -> list[Any]:
    """The entries of a non-empty list; `name` is the input's, `form` goes on "must be a non-empty JSON list".

    Raises:
        InvalidRequest: it is no such list.
        LimitExceeded: more than `at_most`.
    """
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} is no valid JSON: {error}") from error
    if not isinstance(entries, list) or not entries:
        raise InvalidRequest(f"{name} must be a non-empty JSON list{form}.")
    if len(entries) > at_most:
        raise LimitExceeded(f"{name} has {len(entries)} {name}; at most {at_most} are allowed.")
    return entries
