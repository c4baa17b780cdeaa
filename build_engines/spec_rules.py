"""What is wrong between the GPU parts of a spec that are each fine by themselves.

Knows nothing of the model: what its shape rules out is found when its config.json is read.
"""

from __future__ import annotations

from typing import Any

from build_engines.spec_file import Location, SpecFile

Finding = tuple[Location, str]
_FP8_CARDS = ("l40s", "h100-sxm", "h200-sxm", "b200")
_FP4_CARDS = ("b200",)
# Which cards can compute with a quantisation; what is not listed runs on all of them.
CARDS_OF_QUANT_ALGO: dict[str, tuple[str, ...]] = {
    "FP8": _FP8_CARDS,
    "FP8_PER_CHANNEL_PER_TOKEN": _FP8_CARDS,
    "FP8_BLOCK_SCALES": ("h100-sxm", "h200-sxm", "b200"),
    "W4A8_AWQ": ("l40s", "h100-sxm", "h200-sxm"),
    "NVFP4": _FP4_CARDS,
}
CARDS_OF_KV_CACHE: dict[str, tuple[str, ...]] = {"FP8": _FP8_CARDS, "NVFP4": _FP4_CARDS}
WITHOUT_FP8 = ("W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN", "W4A16_AWQ", "W8A16", "NO_QUANT")
_LLMAPI_ONLY = ("FP8_BLOCK_SCALES",)  # no engine builder ever read these checkpoints
_LLMAPI_WITHOUT = ("W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN", "W8A16", "W4A16")  # plugins of engines
_LOOKAHEAD = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")


def gpu_contradictions(file: SpecFile, limits: dict[str, Any], invalid: set[Location]) -> list[Finding]:
    """Findings of a spec whose target is a GPU; of the cpu target only what names a GPU's machine.

    Args:
        file: the spec as it was written.
        limits: its limits with the defaults filled in.
        invalid: places that are wrong by themselves and are left alone here.
    """
    target = file.data.get("target", "cpu")
    if target not in ("trtllm", "llmapi"):
        return _source(file, "cpu")
    found = _quantization(file, target, invalid) + _parallel(file, target, invalid)
    found += _speculative(file, target) + _source(file, target)
    card = file.section("hardware").get("card", "cpu")
    if card == "cpu":
        found.append((("hardware", "card"), f"is cpu; target {target} needs a GPU, for example h100-sxm."))
    tokens = limits["max_num_tokens"]
    if ("limits", "max_num_tokens") not in invalid and isinstance(tokens, int) and tokens % 32:
        text = f"is {tokens}; allowed: multiples of tokens_per_block, 32. Newer runtimes refuse anything else."
        found.append((("limits", "max_num_tokens"), text))
    beams = file.section("limits").get("max_beam_width", 4)
    if file.section("speculative") and beams != 1:
        found.append((("limits", "max_beam_width"), f"is {beams}; speculative decoding allows 1 only."))
    return found


def _quantization(file: SpecFile, target: str, invalid: set[Location]) -> list[Finding]:
    quantization = file.section("quantization")
    card = file.section("hardware").get("card", "cpu")
    if ("hardware", "card") in invalid or card == "cpu":
        return []
    found: list[Finding] = []
    algo = quantization.get("quant_algo", "FP8")
    place = ("quantization", "quant_algo")
    if place not in invalid:
        cards = CARDS_OF_QUANT_ALGO.get(algo)
        if cards and card not in cards:
            found.append((place, f"is {algo}, which {card} cannot compute. {_alternatives(algo, cards)}"))
        if target == "trtllm" and algo in _LLMAPI_ONLY:
            found.append((place, f"is {algo}; target trtllm cannot build it. Use FP8, or target llmapi."))
        if target == "llmapi" and algo in _LLMAPI_WITHOUT:
            found.append((place, f"is {algo}; target llmapi cannot load it. Use FP8, W4A16_AWQ, or target trtllm."))
    kv, place = quantization.get("kv_cache_quant_algo"), ("quantization", "kv_cache_quant_algo")
    if kv is not None and place not in invalid:
        cards = CARDS_OF_KV_CACHE.get(kv)
        if cards and card not in cards:
            found.append((place, f"is {kv}, which {card} cannot compute. Use INT8, leave it out, or {_one_of(cards)}."))
        if target == "llmapi" and kv == "INT8":
            found.append((place, "is INT8; target llmapi has FP8 and NVFP4. Use FP8, or target trtllm."))
    return found


def _alternatives(algo: str, cards: tuple[str, ...]) -> str:
    if "FP4" in algo:
        return f"Use {_one_of(cards)}, or FP8, or W4A16_AWQ for four-bit weights."
    return f"Use {', '.join(WITHOUT_FP8)}, or {_one_of(cards)}."


def _one_of(cards: tuple[str, ...]) -> str:
    return f"hardware.card {' or '.join(cards)}"


def _parallel(file: SpecFile, target: str, invalid: set[Location]) -> list[Finding]:
    parallel = {"tp": 1, "pp": 1, "ep": 1, "instances": 1} | file.section("parallel")
    if any(("parallel", key) in invalid for key in parallel) or ("hardware", "cards_per_node") in invalid:
        return []
    found: list[Finding] = []
    tp, ep = parallel["tp"], parallel["ep"]
    if tp % ep:
        found.append((("parallel", "ep"), f"is {ep}; it must divide tp ({tp}): experts are spread over the tp cards."))
    ranks = tp * parallel["pp"]
    leads = target == "trtllm" and parallel.get("mpi", "leader") == "leader"
    if parallel["instances"] > 1 and ranks > 1 and leads:
        text = f"is {parallel['instances']}; of {ranks} ranks each, only parallel.mpi orchestrator serves several."
        found.append((("parallel", "instances"), text))
    return found + _machines(file, tp, ranks, parallel["instances"], target)


def _machines(file: SpecFile, tp: int, ranks: int, instances: int, target: str) -> list[Finding]:
    """What one machine holds, and what may cross to another."""
    per_node = file.section("hardware").get("cards_per_node", 8)
    if tp > per_node:
        text = f"is {tp}; allowed: up to cards_per_node ({per_node}). Give the rest to pp: it crosses machines cheaply."
        return [(("parallel", "tp"), text)]
    found: list[Finding] = []
    if ranks > per_node and per_node % tp:
        text = f"is {tp}; over several machines it must divide cards_per_node ({per_node}), or it would cross them."
        found.append((("parallel", "tp"), text))
    if ranks > per_node and target == "trtllm" and file.section("parallel").get("mpi") == "orchestrator":
        text = f"is orchestrator, which spawns workers on its own machine only; {ranks} ranks need leader."
        found.append((("parallel", "mpi"), text))
    most = max(1, per_node // ranks)
    if instances > most:
        text = f"is {instances}; one deployment holds {most} of {ranks} cards. Run more deployments of it for the rest."
        found.append((("parallel", "instances"), text))
    return found


def _speculative(file: SpecFile, target: str) -> list[Finding]:
    section = file.section("speculative")
    mode = section.get("mode")
    if mode is None:
        return []
    found: list[Finding] = []
    if mode == "lookahead_decoding":
        missing = [key for key in _LOOKAHEAD if key not in section]
        if missing:
            found.append((("speculative", "mode"), f"is lookahead_decoding, which needs {', '.join(missing)}."))
    elif "draft_model" not in section:
        found.append((("speculative", "draft_model"), f"is missing; {mode} needs the weights that propose."))
    if mode == "draft_tokens_external":
        found += _draft_model(file, section, target)
    if mode == "medusa" and "num_medusa_heads" not in section:
        found.append((("speculative", "num_medusa_heads"), "is missing; medusa needs it."))
    if mode == "medusa" and target == "llmapi":
        found.append((("speculative", "mode"), "is medusa; target llmapi has eagle and draft_tokens_external."))
    if file.section("outputs").get("context_logits") is True:
        found.append((("outputs", "context_logits"), "is true; trtllm-build refuses it together with drafts."))
    return found


def _draft_model(file: SpecFile, section: dict[str, Any], target: str) -> list[Finding]:
    """A second model beside the first, in a loop that makes each answer so far the next prompt."""
    found: list[Finding] = []
    if "draft_shape" not in section:
        text = "is missing; the plan needs a directory with the draft model's config.json."
        found.append((("speculative", "draft_shape"), text))
    if target == "llmapi":
        return found
    limits, parallel = file.section("limits"), {"tp": 1, "pp": 1} | file.section("parallel")
    if "max_input_len" in limits:
        text = "is set; with a draft model each round's prompt is the answer so far. Leave it out."
        found.append((("limits", "max_input_len"), text))
    if limits.get("enable_kv_cache_reuse") is False:
        text = "is false; with a draft model each round would compute the whole prompt anew. Leave it out."
        found.append((("limits", "enable_kv_cache_reuse"), text))
    if parallel.get("mpi", "leader") == "leader" and (parallel["tp"] != 1 or parallel["pp"] != 1):
        text = "is leader, under which ranks load one engine; a draft model beside it needs orchestrator."
        found.append((("parallel", "mpi"), text))
    return found


def _source(file: SpecFile, target: str) -> list[Finding]:
    source = file.section("source")
    if "weights" in source and "shape" not in source:
        text = "is missing; with weights on another machine, a directory with the model's config.json is needed here."
        return [(("source", "shape"), text)]
    if "weights" in source and target == "cpu":
        return [(("source", "weights"), "is for GPU targets; give hf, gguf or package to target cpu.")]
    return []
