"""A pydantic model as the structure of an answer, and the answer as an object of it.

Knows nothing of the wire. pydantic itself is the caller's: only the two methods of its models are used.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from clients.errors import IncompleteAnswer

if TYPE_CHECKING:
    from clients.types import Prompt, Result


class SchemaModel(Protocol):
    """What of a pydantic model class is used."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        """JSON schema of the model."""

    @classmethod
    def model_validate_json(cls, json_data: str) -> Any:
        """An object of the model."""


class Generates(Protocol):
    """GrpcClient, HttpClient, or anything else that answers a prompt."""

    def generate(self, prompt: Prompt, **values: Any) -> Result:
        """The whole answer."""


Model = TypeVar("Model", bound=SchemaModel)


def schema_values(model: type[SchemaModel]) -> dict[str, Any]:
    """Fields of GenerateRequest that ask for an answer by the model's schema."""
    schema = json.dumps(model.model_json_schema(), ensure_ascii=False)
    return {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": schema}


def generate_as(client: Generates, prompt: Prompt, model: type[Model], **values: Any) -> Model:
    """Ask for one answer and give it back as an object.

    Args:
        client: a blocking client.
        prompt: as for its `generate`, with `values` as fields of GenerateRequest.
        model: a pydantic model class.

    Raises:
        IncompleteAnswer: max_tokens, a stop word or a timeout cut the answer off.
        ClientError: as from `generate`.
    """
    return parse_as(client.generate(prompt, **{**schema_values(model), **values}), model)


def parse_as(result: Result, model: type[Model]) -> Model:
    """The first sequence of an answer as an object; for asyncio clients, whose `generate` is awaited first.

    Raises:
        IncompleteAnswer: the answer was cut off.
    """
    try:
        parsed: Model = model.model_validate_json(result.text)
    except ValueError as error:
        if result.finish_reason == "stop" and _is_json(result.text):
            raise  # valid by its schema, but the model has checks that no schema can say
        raise IncompleteAnswer(
            f"The answer was cut off (finish_reason {result.finish_reason}) before its structure was complete; "
            "raise max_tokens, or look at .text.",
            result.text,
        ) from error
    return parsed


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
