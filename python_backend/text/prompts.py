"""From what a client wrote to what the engine reads: prompts of many requests tokenised together, with words and bias.

One bad request harms no other: its error stands where its result would. Knows nothing of Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np

from python_backend.errors import InvalidRequest, LimitExceeded
from python_backend.text.bias import embedding_bias
from python_backend.text.chat import ChatRenderer
from python_backend.text.words import WordIds, bad_word_ids, clean_words, pack_words, stop_word_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from python_backend.text.tokenizer import Tokenizer
    from python_backend.text.tool_formats import ToolFormat
    from python_backend.text.tool_requests import Tool

_MAX_CACHED_CHARACTERS = 256
_JSON_EXPANSION = 6  # bytes of \u0061 for one byte of text


@dataclass(frozen=True, slots=True)
class PromptInputs:
    """One request as it came in; each list has one entry per batch element, None means not sent."""

    queries: list[str] | None = None
    messages: list[str] | None = None
    tools: list[tuple[Tool, ...]] | None = None  # that the messages may call
    bad_words: list[list[str]] | None = None
    stop_words: list[list[str]] | None = None
    bias_words: list[list[str]] | None = None
    bias_weights: list[list[float]] | None = None

    @property
    def batch_size(self) -> int:
        """Number of prompts.

        Raises:
            InvalidRequest: not exactly one of text_input and messages was sent.
        """
        if (self.queries is None) == (self.messages is None):
            sent = "neither" if self.queries is None else "both"
            raise InvalidRequest(f"Send exactly one of text_input and messages; this request has {sent}.")
        return len(self.queries if self.queries is not None else self.messages or ())


@dataclass(slots=True)
class Prompts:
    """One request ready for the engine; lists have one entry per batch element."""

    ids: list[list[int]]
    bad_words: npt.NDArray[np.int32]  # [B, 2, N]
    stop_words: npt.NDArray[np.int32]  # [B, 2, N]
    bias: npt.NDArray[np.float32]  # [B, vocab_size], or [B, 0] when none was asked for
    warnings: list[str] = field(default_factory=list)


class PromptBuilder:
    """Prepares requests for one tokenizer. `max_input_len` in tokens, None where it is not known."""

    def __init__(self, tokenizer: Tokenizer, max_input_len: int | None = None, add_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._max_input_len = max_input_len
        self._add_special_tokens = add_special_tokens
        if max_input_len is None:
            self._chat = ChatRenderer(tokenizer)
        else:
            most = (max_input_len + 1) * tokenizer.vocabulary.max_token_bytes * 16
            self._chat = ChatRenderer(tokenizer, max_characters=max(most, 65_536))
        # Clients send the same few words with every request; long lists are not worth the memory.
        self._encode = {"stop_words": partial(stop_word_ids, tokenizer), "bad_words": partial(bad_word_ids, tokenizer)}
        self._encode_cached = {name: lru_cache(maxsize=1024)(encode) for name, encode in self._encode.items()}

    @property
    def tool_format(self) -> ToolFormat:
        """How the model writes tool calls."""
        return self._chat.tool_format

    def build(self, requests: Sequence[PromptInputs]) -> list[Prompts | Exception]:
        """Prepare requests in order; one that cannot be served gives its error.

        Raw prompts of all requests are tokenised in one call.
        """
        results: list[Prompts | Exception] = []
        texts: list[str] = []
        places: list[Prompts] = []
        for request in requests:
            try:
                prompts = self._prepare(request)
            except Exception as error:  # whatever it is, it concerns this request alone
                results.append(error)
                continue
            results.append(prompts)
            if request.queries is not None:
                texts += request.queries
                places += [prompts] * len(request.queries)
        for prompts, ids in zip(places, self._tokenizer.encode_batch(texts, self._add_special_tokens), strict=True):
            prompts.ids.append(ids)
        return [self._checked(result) if isinstance(result, Prompts) else result for result in results]

    def _prepare(self, request: PromptInputs) -> Prompts:
        """Everything but the ids of raw prompts."""
        batch_size = request.batch_size
        ids: list[list[int]] = []
        for text in request.queries or ():
            self._check_size(len(text.encode("utf-8")), "text_input")
        messages = request.messages or ()
        tools = request.tools or [()] * len(messages)
        if len(tools) != len(messages):
            raise InvalidRequest(f"tools has {len(tools)} rows for a batch of {len(messages)}; send one row each.")
        for text, callable_tools in zip(messages, tools, strict=True):
            self._check_size(len(text) // _JSON_EXPANSION, "messages")
            ids.append(self._chat.encode(text, callable_tools))
        warnings: list[str] = []
        bad = self._words(request.bad_words, "bad_words", warnings)
        stop = self._words(request.stop_words, "stop_words", warnings)
        for name, rows in (("bad_words", bad), ("stop_words", stop)):
            if rows and len(rows) != batch_size:
                raise InvalidRequest(f"{name} has {len(rows)} rows for a batch of {batch_size}; send one row each.")
        return Prompts(
            ids=ids,
            bad_words=pack_words(bad or [[]] * batch_size),
            stop_words=pack_words(stop or [[]] * batch_size),
            bias=self._bias(request, batch_size),
            warnings=list(dict.fromkeys(warnings)),
        )

    def _words(self, rows: list[list[str]] | None, name: str, warnings: list[str]) -> list[list[WordIds]]:
        result = []
        for row in rows or ():
            words = tuple(clean_words(row, name))
            is_short = sum(map(len, words)) <= _MAX_CACHED_CHARACTERS
            ids, about = (self._encode_cached if is_short else self._encode)[name](words)
            result.append(ids)
            warnings += about
        return result

    def _bias(self, request: PromptInputs, batch_size: int) -> npt.NDArray[np.float32]:
        words, weights = request.bias_words, request.bias_weights
        if words is None and weights is None:
            return np.zeros((batch_size, 0), np.float32)
        words = words if words is not None else [[]] * batch_size
        weights = weights if weights is not None else [[]] * batch_size
        if not len(words) == len(weights) == batch_size:
            raise InvalidRequest(
                f"embedding_bias_words has {len(words)} rows and embedding_bias_weights {len(weights)} for a batch of "
                f"{batch_size}; send one row each."
            )
        rows = zip(words, weights, strict=True)
        return np.stack([embedding_bias(self._tokenizer, row, row_weights) for row, row_weights in rows])

    def _check_size(self, num_bytes: int, name: str) -> None:
        """Refuse what must be too long before any time is spent on it."""
        least = self._tokenizer.least_tokens(num_bytes)
        if self._max_input_len is not None and least > self._max_input_len:
            raise LimitExceeded(
                f"Prompt length (at least {least}) exceeds maximum input length ({self._max_input_len}): {name} has "
                f"{num_bytes} bytes or more. Send a shorter prompt."
            )

    def _checked(self, prompts: Prompts) -> Prompts | InvalidRequest:
        longest = max((len(ids) for ids in prompts.ids), default=0)
        if self._max_input_len is not None and longest > self._max_input_len:
            return LimitExceeded(
                f"Prompt length ({longest}) exceeds maximum input length ({self._max_input_len}). Send a shorter "
                "prompt, or build the engine with a larger max_input_len."
            )
        if not all(prompts.ids):
            return InvalidRequest("The prompt has no tokens: text_input is empty. Send some text.")
        return prompts
