"""How a request chooses its adapter: by name, or by an id with or without weights. Knows nothing of which there are."""

from __future__ import annotations

from python_backend.errors import InvalidRequest


def refuse_name_with_tensors() -> InvalidRequest:
    """The error of a request that sends a name and an adapter of its own."""
    return InvalidRequest("lora_name was sent with lora_task_id, lora_weights or lora_config; send only one.")
