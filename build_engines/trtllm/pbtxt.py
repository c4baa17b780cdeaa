"""Parameters of a ModelConfig. Knows nothing of which there are."""

from __future__ import annotations

from typing import Any


def set_parameters(config: Any, **parameters: object) -> None:
    """Write parameters of a ModelConfig; None leaves one out."""
    for key, value in parameters.items():
        if value is not None:
            config.parameters[key].string_value = str(value).lower() if isinstance(value, bool) else str(value)
