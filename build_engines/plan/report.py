"""A plan as plain data, the form that `--format json` prints. Units are part of every key."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from build_engines.plan.hardware import GB
from build_engines.plan.kv_cache import kv_bytes_of_twin, kv_bytes_per_token
from build_engines.plan.roofline import EXPECTED
from build_engines.plan.suggestion import Refusal
from build_engines.plan.transfer import ColdStart, HandOver
from build_engines.plan.warnings import warnings
from build_engines.plan.weights import quantize_peak_bytes, weights_by_kind

if TYPE_CHECKING:
    from build_engines.plan.engine_plan import EnginePlan

_BATCHES = (1, 8, 32, 128)
_PROMPTS = (128, 1024, 8192)
_LENGTHS = (1024, 8192, 32768, 131072)
_KV_BITS = {"16": 16.0, "8": 8.0}


def report(plan: EnginePlan) -> dict[str, Any]:
    """Everything a plan says."""
    deployment = plan.spec.deployment
    return {
        "name": deployment.name,
        "target": deployment.target,
        "model": _model(plan),
        "hardware": _hardware(plan),
        "weights": _weights(plan),
        "kv_cache": _kv_cache(plan),
        "memory_per_card": _memory(plan),
        "roofline": _roofline(plan),
        "traffic": deployment.traffic.model_dump(),
        "slo": deployment.slo.model_dump(),
        "suggestion": _suggestion(plan),
        "hand_over": _hand_over(plan),
        "cold_start": _cold_start(plan),
        "warnings": warnings(plan),
    }


def _model(plan: EnginePlan) -> dict[str, Any]:
    shape, parameters = plan.shape, plan.shape.parameters
    return {
        "architecture": shape.architecture,
        "attention": shape.attention,
        "num_layers": shape.num_layers,
        "max_position_embeddings": shape.max_position_embeddings,
        "parameters": asdict(parameters)
        | {
            "total": parameters.total,
            "active": parameters.active,
            "active_percent": round(100 * parameters.active / parameters.total, 1),
        },
    }


def _hardware(plan: EnginePlan) -> dict[str, Any]:
    parallel, card = plan.spec.deployment.parallel, plan.card
    needed = plan.cards_needed()
    return {
        "card": card.name,
        "source": card.source,
        "memory_bytes": card.memory_bytes,
        "memory_bytes_per_s": card.memory_bytes_per_s,
        **parallel.model_dump(include={"tp", "pp", "ep", "instances"}),
        "cards": plan.cards_per_instance * parallel.instances,
        "cards_needed": None if needed is None else {"tp": needed[0], "pp": needed[1], "cards": needed[0] * needed[1]},
    }


def _weights(plan: EnginePlan) -> dict[str, Any]:
    kinds = weights_by_kind(plan.shape, plan.weights)
    algo = plan.spec.deployment.quantization.quant_algo
    published = algo == "FP8_BLOCK_SCALES"  # such checkpoints are taken as they are
    quantizes = not plan.on_cpu and not published and plan.weights.weight_bits < plan.weights.compute_bits
    return {
        "linear_bits": plan.weights.resident_bits,
        "bytes_by_kind": kinds,
        "total_bytes": sum(kinds.values()),
        "draft_model_bytes": _draft_bytes(plan),
        "quantize_peak_bytes": quantize_peak_bytes(plan.shape) if quantizes else None,
    }


def _draft_bytes(plan: EnginePlan) -> int:
    return sum(weights_by_kind(plan.draft, plan.weights).values()) if plan.draft else 0


def _kv_cache(plan: EnginePlan) -> dict[str, Any]:
    shape = plan.shape
    own = kv_bytes_per_token(shape, plan.kv_bits)
    mha = kv_bytes_of_twin(shape, plan.kv_bits, shape.num_heads)
    twins = {
        "MHA": mha,
        "GQA-8": kv_bytes_of_twin(shape, plan.kv_bits, 8),
        "MQA": kv_bytes_of_twin(shape, plan.kv_bits, 1),
    }
    return {
        "bits": plan.kv_bits,
        "bytes_per_token": own,
        "bytes_per_token_per_card": plan.memory().kv_bytes_per_token,
        "bytes_per_token_at_bits": {name: kv_bytes_per_token(shape, bits) for name, bits in _KV_BITS.items()},
        "bytes_per_token_of_twin": twins,
        "ratio_to_twin": {name: round(own / value, 4) for name, value in twins.items()},
        "bytes_at_length": {str(length): own * length for length in (100_000, *_LENGTHS)},
    }


def _memory(plan: EnginePlan) -> dict[str, Any]:
    memory, longest = plan.memory(), plan.step_limits.max_seq_len
    lengths = sorted({*(n for n in _LENGTHS if n <= longest), longest, plan.demand.sequence_tokens})
    return {
        "capacity_bytes": memory.capacity,
        "weights_bytes": memory.weights,
        "activations_bytes": memory.activations,
        "runtime_bytes": memory.runtime,
        "adapters_bytes": memory.adapters,
        "kv_cache_bytes": memory.kv_cache,
        "unused_bytes": memory.unused,
        "max_tokens_in_kv_cache": memory.max_tokens,
        "concurrent_sequences_at_length": {str(length): memory.sequences_of(length) for length in lengths},
        "fits": memory.sequences_of(longest) >= 1,
    }


def _roofline(plan: EnginePlan) -> dict[str, Any]:
    peak, expected = plan.roofline(), plan.roofline(EXPECTED)
    context = plan.demand.mean_context
    positions = plan.shape.max_position_embeddings
    return {
        "expected_efficiency": asdict(EXPECTED),
        "prefill_s": {str(n): peak.prefill_s(n) for n in _PROMPTS if n <= positions},
        "prefill_expected_s": {str(n): expected.prefill_s(n) for n in _PROMPTS if n <= positions},
        "decode_context_tokens": context,
        "decode_step_s": {str(n): peak.decode_s(n, context) for n in _BATCHES},
        "decode_step_expected_s": {str(n): expected.decode_s(n, context) for n in _BATCHES},
    }


def _suggestion(plan: EnginePlan) -> dict[str, Any]:
    found = plan.suggestion()
    if isinstance(found, Refusal):
        return {"possible": False, "reason": found.reason}
    return {"possible": True, "cards": found.instances * plan.cards_per_instance} | asdict(found)


def _hand_over(plan: EnginePlan) -> dict[str, Any]:
    tokens, network = plan.demand.input_tokens, plan.spec.deployment.hardware.network_gbit_per_s
    moved = HandOver(tokens, tokens * kv_bytes_per_token(plan.shape, plan.kv_bits), network)
    return {
        "tokens": tokens,
        "bytes": moved.payload_bytes,
        "network_gbit_per_s": network,
        "seconds": moved.seconds,
    }


def _cold_start(plan: EnginePlan) -> dict[str, Any]:
    hardware = plan.spec.deployment.hardware
    start = ColdStart(
        disk_bytes=sum(weights_by_kind(plan.shape, plan.weights).values()) + _draft_bytes(plan),
        card_bytes=plan.memory().weights,
        disk_bytes_per_s=hardware.disk_gb_per_s * GB,
        host_bytes_per_s=plan.card.host_bytes_per_s,
    )
    return {"disk_bytes": start.disk_bytes, "disk_gb_per_s": hardware.disk_gb_per_s, "seconds": start.seconds}
