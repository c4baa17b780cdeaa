"""Python functions and pydantic models as tools: definitions out of them, and objects or results out of calls.

Knows nothing of the wire. pydantic is needed for functions, and is the caller's.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from clients.errors import IncompleteAnswer

if TYPE_CHECKING:
    from clients.structured import SchemaModel
    from clients.tool_calls import ToolCall
    from clients.types import Result


class Toolbox:
    """Tools that a model may call.

    Args:
        tools: functions with annotated parameters, or pydantic model classes. The docstring is the description.
    """

    def __init__(self, *tools: Callable[..., Any] | type[SchemaModel]) -> None:
        self._tools = {tool.__name__: tool for tool in tools}
        if len(self._tools) != len(tools):
            raise ValueError("Two tools have the same name; give each a name of its own.")
        self._models = {name: _arguments_model(tool) for name, tool in self._tools.items()}

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """The tools in OpenAI's shape."""
        return [_definition(name, self._tools[name], model) for name, model in self._models.items()]

    def values(self, choice: str | None = None, *, parallel: bool | None = None) -> dict[str, Any]:
        """Fields of GenerateRequest that offer the tools.

        Args:
            choice: auto (default), none, required, or the name of one tool.
            parallel: whether one answer may hold several calls (the server's default: yes).
        """
        return {"tools": self.definitions, "tool_choice": choice, "parallel_tool_calls": parallel}

    def parse(self, call: ToolCall) -> Any:
        """The arguments as an object: of the pydantic model, or for a function of a model made of its parameters.

        Raises:
            KeyError: no tool has that name.
            ValueError: they do not satisfy the model; pydantic's ValidationError is one.
        """
        return self._models[call.name].model_validate_json(call.arguments)

    def parse_all(self, result: Result) -> list[Any]:
        """The objects of all calls of an answer's first sequence.

        Raises:
            IncompleteAnswer: max_tokens cut the last call off.
        """
        objects = []
        for call in result.tool_calls:
            try:
                json.loads(call.arguments)
            except ValueError as error:
                raise IncompleteAnswer(
                    f"The call of {call.name} was cut off (finish_reason {result.finish_reason}); raise max_tokens.",
                    call.arguments,
                ) from error
            objects.append(self.parse(call))
        return objects

    def run(self, call: ToolCall) -> dict[str, Any]:
        """Call the function and give its result as the message that answers the call.

        Raises:
            TypeError: the tool is a model, not a function.
        """
        tool, arguments = self._tools[call.name], self.parse(call)
        if tool is self._models[call.name]:
            raise TypeError(f"{call.name} is a model; use parse() for its object.")
        result = tool(**{name: getattr(arguments, name) for name in inspect.signature(tool).parameters})
        content = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}


def _arguments_model(tool: Any) -> Any:
    """The tool itself, if it is a model, or a model of a function's parameters."""
    if hasattr(tool, "model_json_schema"):
        return tool
    try:
        from pydantic import create_model
    except ImportError:
        raise ImportError("Functions as tools need pydantic; install it, or write the definitions by hand.") from None
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(tool, eval_str=True).parameters.items():
        if parameter.annotation is parameter.empty or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise TypeError(f"Parameter {name} of {tool.__name__} needs an annotation and a name of its own.")
        fields[name] = (parameter.annotation, ... if parameter.default is parameter.empty else parameter.default)
    return create_model(tool.__name__, **fields)


def _definition(name: str, tool: Any, model: Any) -> dict[str, Any]:
    parameters: Mapping[str, Any] = model.model_json_schema()
    function: dict[str, Any] = {"name": name}
    description = parameters.get("description") or (None if tool is model else inspect.getdoc(tool))
    if description:
        function["description"] = description
    dropped = ("title", "description")
    schema = {key: value for key, value in parameters.items() if key not in dropped}
    return {"type": "function", "function": {**function, "parameters": {"additionalProperties": False, **schema}}}
