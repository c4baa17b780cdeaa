"""The base of every part of a spec, and the number types of its keys. Knows nothing of what the keys mean."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1, strict=True)]
CountOrZero = Annotated[int, Field(ge=0, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Share = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A part of the spec; a key that is not listed is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
