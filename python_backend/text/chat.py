"""Chat messages, checked and rendered with the model's own template.

What a message says stays text: it cannot write the control tokens that only the template may write.
Knows nothing of Triton.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from python_backend.errors import BuildError, InvalidRequest, LimitExceeded, Unsupported
from python_backend.text.json_lists import parse_list
from python_backend.text.sandbox import Budget, make_environment, render
from python_backend.text.tokenizer import check_text
from python_backend.text.tool_formats import HERMES, template_format
from python_backend.text.tool_messages import with_parsed_arguments, without_tools

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jinja2 import Template

    from python_backend.text.tokenizer import Tokenizer
    from python_backend.text.tool_requests import Tool

MAX_MESSAGES = 4096
MAX_DEPTH = 64
_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})
_END = "\ufdd1"  # a noncharacter; marks where an answer that was begun has to be continued

Message = dict[str, Any]


class ChatRenderer:
    """Renders messages for one tokenizer; `max_characters` bounds the result.

    When the last message is the assistant's, the answer goes on from there: no new turn is opened and the turn is not
    closed. Otherwise the template's generation prompt opens the assistant's turn.
    """

    def __init__(self, tokenizer: Tokenizer, max_characters: int = 16_000_000) -> None:
        self._tokenizer = tokenizer
        self._max_characters = max_characters
        templates = tokenizer.files.chat_templates
        self._template = self._compile(templates.get("default"))
        # Some models come with a second template for requests with tools.
        tool_source = templates.get("tool_use", templates.get("default"))
        self._tool_template = self._compile(tool_source)
        taught = template_format(tool_source or "")
        self.tool_format = taught or HERMES
        self._teaches_tools = taught is not None

    def encode(self, messages_json: str, tools: Sequence[Tool] = ()) -> list[int]:
        """Token ids of a JSON list of messages, which may call `tools`.

        Raises:
            InvalidRequest, LimitExceeded, Unsupported: as `parse_messages`; the template refuses the messages.
            Unsupported: the model has no chat template.
        """
        messages = [with_parsed_arguments(message) for message in parse_messages(messages_json)]
        definitions = [tool.definition for tool in tools]
        if not self._teaches_tools:
            messages, definitions = without_tools(messages, definitions), []
        return self._tokenizer.encode_chat(self.render(messages, definitions))

    def render(self, messages: list[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
        """The prompt as text; special-token text of messages holds a guard (`Tokenizer.guard`)."""
        if self._template is None:
            raise Unsupported(
                "messages need a chat template, and this model has none (chat_template in tokenizer_config.json). "
                "Send text_input instead."
            )
        guarded: list[Message] = [self._guard(message) for message in messages]
        begun = guarded[-1]["content"] if guarded[-1]["role"] == "assistant" else None
        if begun is None:
            return self._render(guarded, tools, add_generation_prompt=True)
        # The mark stands before the space at the end, which is left out where the template trims it.
        space = begun[len(begun.rstrip()) :]
        guarded[-1]["content"] = begun.rstrip() + _END + space
        text, mark, behind = self._render(guarded, tools, add_generation_prompt=False).rpartition(_END)
        if not mark:
            raise InvalidRequest(
                "The last message is the assistant's, and the model's chat template does not show it; "
                "end messages with the user's."
            )
        return text + space if behind.startswith(space) else text

    def _guard(self, value: Any) -> Any:
        """A copy with every text guarded, keys of objects included."""
        if isinstance(value, str):
            return self._tokenizer.guard(value)
        if isinstance(value, list):
            return [self._guard(item) for item in value]
        if isinstance(value, dict):
            return {self._guard(key): self._guard(item) for key, item in value.items()}
        return value

    def _render(self, messages: list[Message], tools: Sequence[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        template = self._tool_template if tools else self._template
        assert template is not None
        variables = {
            **self._tokenizer.files.special_tokens,
            "messages": messages,
            "tools": self._guard(list(tools)) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return render(template, variables, Budget(self._max_characters))

    def _compile(self, source: str | None) -> Template | None:
        if source is None:
            return None
        try:
            return make_environment().from_string(source)
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            raise BuildError(f"The chat template is no valid Jinja template (line {line}): {error}") from error


def parse_messages(text: str) -> list[Message]:
    """Messages of a JSON list: a role, and content as text or as a list of text parts (joined with a newline).

    Raises:
        InvalidRequest: no JSON list of such messages; the message and what is wrong with it are named.
        LimitExceeded: more than MAX_MESSAGES.
        Unsupported: content of another kind than text.
    """
    messages = parse_list(text, "messages", ', such as [{"role": "user", "content": "Hello"}]', MAX_MESSAGES)
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} is a JSON {type(message).__name__}; an object with role and content is needed.")
    unknown = sorted(message.keys() - _KEYS)
    if unknown:
        raise InvalidRequest(f"{where} has the unknown key {unknown[0]!r}; known are {', '.join(sorted(_KEYS))}.")
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise InvalidRequest(
            f"{where}.role is {json.dumps(role)[:80]}; a name such as system, user or assistant is needed."
        )
    _check_texts(message, where, MAX_DEPTH)
    parsed = dict(message)
    parsed["content"] = _content(message.get("content"), where, may_lack=bool(message.get("tool_calls")))
    return parsed


def _content(content: Any, where: str, may_lack: bool) -> str | None:
    if isinstance(content, str) or (content is None and may_lack):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content is missing or no text; send text or a list of text parts.")
    return "\n".join(_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind is None:
        raise InvalidRequest(f'{where} is no content part; send {{"type": "text", "text": …}}.')
    if kind != "text":
        raise Unsupported(f"{where} has type {str(kind)[:40]!r}; this model takes text only.")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text is missing or no text.")
    return text


def _check_texts(value: Any, where: str, depth: int) -> None:
    """Every text in it has a UTF-8 form, and it is not nested without end."""
    if depth == 0:
        raise LimitExceeded(f"{where} is nested deeper than {MAX_DEPTH} levels.")
    if isinstance(value, str):
        check_text(value, where)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_texts(item, f"{where}[{index}]", depth - 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            check_text(key, where)
            _check_texts(item, f"{where}.{key}", depth - 1)
