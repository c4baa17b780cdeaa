"""A Jinja environment for chat templates as models ship them: a sandbox with a budget.

A template comes with a model and its values come from a request; neither may take the process down.
Knows nothing of messages or tokens.
"""

from __future__ import annotations

import json
import math
import re
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent
from jinja2.sandbox import ImmutableSandboxedEnvironment

from python_backend.errors import InvalidRequest, LimitExceeded

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.parser import Parser
    from jinja2.runtime import Context

_PADDING_METHODS = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs"})
_MAX_PRODUCT = 1_000_000
# What an expression can raise on values it was not written for.
_RENDER_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")
_WIDE_BRACES = re.compile(r":[^{}]*(\d{4}|\{)")


class _RaisedByTemplate(TemplateError):
    """The template called raise_exception."""


@dataclass(slots=True)
class Budget:
    """What one rendering may use up."""

    max_characters: int
    max_iterations: int = 200_000
    max_seconds: float = 2.0
    _iterations: int = field(default=0, init=False)
    _deadline: float = field(default=0.0, init=False)

    def start(self) -> None:
        """Begin to count."""
        self._iterations = 0
        self._deadline = time.monotonic() + self.max_seconds

    def tick(self) -> None:
        """Count one pass through a loop or macro.

        Raises:
            LimitExceeded: too many passes, or too late.
        """
        self._iterations += 1
        if self._iterations > self.max_iterations:
            raise LimitExceeded(
                f"The chat template ran over {self.max_iterations} loop passes with these messages; send fewer."
            )
        if time.monotonic() > self._deadline:
            raise LimitExceeded(f"The chat template took over {self.max_seconds:g} s; send fewer or shorter messages.")


_budget: ContextVar[Budget] = ContextVar("budget")


class _BudgetTicks(Extension):
    """Gives loops and macros a call to the budget that a template cannot shadow."""

    def tick(self) -> None:
        _budget.get().tick()

    def add_to(self, template: nodes.Template) -> None:
        """Put a tick at the start of every loop body and macro."""
        blocks: list[nodes.For | nodes.Macro] = [*template.find_all(nodes.For), *template.find_all(nodes.Macro)]
        for node in blocks:
            node.body.insert(0, nodes.ExprStmt(self.call_method("tick", lineno=node.lineno), lineno=node.lineno))


class _GenerationTag(Extension):
    """`{% generation %}` marks the model's own words for training; here its content is all there is."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """Refuses the few expressions that make something huge in one go, and adds the ticks."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        ticks = self.extensions[_BudgetTicks.identifier]
        assert isinstance(ticks, _BudgetTicks)
        ticks.add_to(template)
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_layout(left, _WIDE_PERCENT)
        if operator == "*" and _size(left) * _size(right) > _MAX_PRODUCT:
            raise SecurityError(f"a product is over {_MAX_PRODUCT}")
        if operator == "**" and (_size(left) > 1000 or _size(right) > 64):
            raise SecurityError("a power has a base over 1000 or an exponent over 64")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_layout(value.__self__, _WIDE_BRACES)
        return wrapped

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _PADDING_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)


def _check_layout(layout: str, too_wide: re.Pattern[str]) -> None:
    if too_wide.search(layout):
        raise SecurityError("a field of a format is wider than 999 or of a computed width")


def _format(layout: str, *args: Any, **kwargs: Any) -> str:
    _check_layout(layout, _WIDE_PERCENT)
    return layout % (kwargs or args)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    if (width if isinstance(width, int) else len(width)) > 999:
        raise SecurityError("indent: width must be under 1000")
    return do_indent(text, width, first, blank)


def _size(value: Any) -> float:
    """How large a factor is: of a number its amount, of a text its length. Lists are not multiplied."""
    if isinstance(value, (int, float)):
        return abs(value)
    return len(value) if isinstance(value, str) else math.inf


def _raise_exception(message: object) -> NoReturn:
    raise _RaisedByTemplate(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes characters of HTML, which models were not trained on."""
    if indent is not None and not 0 <= indent <= 16:
        raise SecurityError("tojson: indent must be 0 to 16")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def make_environment() -> ImmutableSandboxedEnvironment:
    """An environment that renders chat templates the way transformers does."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag, _BudgetTicks]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.filters["tojson"] = _tojson
    environment.filters["format"] = _format
    environment.filters["indent"] = _indent
    for padding in ("center", "wordwrap"):
        del environment.filters[padding]
    return environment


def render(template: Template, variables: dict[str, Any], budget: Budget) -> str:
    """Render within a budget.

    Raises:
        InvalidRequest: the template refuses these values (its raise_exception text), or fails on them.
        LimitExceeded: the budget does not suffice.
    """
    budget.start()
    token = _budget.set(budget)
    pieces: list[str] = []
    length = 0
    try:
        for piece in template.generate(**variables):
            pieces.append(piece)
            length += len(piece)
            if length > budget.max_characters:
                raise LimitExceeded(
                    f"The rendered chat is over {budget.max_characters} characters; send fewer or shorter messages."
                )
            budget.tick()
    except _RaisedByTemplate as error:
        raise InvalidRequest(f"The model's chat template refuses these messages: {error}") from error
    except InvalidRequest:
        raise
    except _RENDER_ERRORS as error:
        raise InvalidRequest(
            f"The model's chat template cannot render these messages: {type(error).__name__}: {str(error)[:300]}"
        ) from error
    finally:
        _budget.reset(token)
    return "".join(pieces)
