"""Names of spans and attributes: OpenTelemetry's conventions for generative AI, still in development, in one place.

Knows nothing of the OpenTelemetry libraries.
"""

from __future__ import annotations

SCHEMA_URL = "https://opentelemetry.io/schemas/1.41.0"  # the last release that holds gen_ai.*

OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_SEED = "gen_ai.request.seed"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
RESPONSE_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"  # seconds
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
ERROR_TYPE = "error.type"

TEXT_COMPLETION = "text_completion"
PROVIDER = "triton_llm_stack"  # of our own: there is no well-known value

# No convention has a cost; these are ours.
COST = "triton_llm.cost"
GUIDE_TYPE = "triton_llm.guide_type"

# Triton itself has spans of the steps around the engine, by the names of their models.
QUEUE = "queue"
PREFILL = "prefill"
DECODE = "decode"
