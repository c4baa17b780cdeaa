"""The models that a draft model adds to a repository: its engine, and the loop that puts both engines together."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

from build_engines.repository import TEMPLATES
from build_engines.templates import BLS, from_text
from build_engines.trtllm.pbtxt import set_parameters

if TYPE_CHECKING:
    from pathlib import PurePosixPath

    from build_engines.plan.engine_plan import EnginePlan

DRAFT = "tensorrt_llm_draft"
_NOT_OF_A_DRAFT = ("lora_", "guided_decoding_", "xgrammar_", "decoding_mode")


def draft_models(plan: EnginePlan, deployment_dir: PurePosixPath, configs: dict[str, Any]) -> dict[str, Any]:
    """The two ModelConfigs by name; `configs` holds those of the classic models, the engine's among them.

    Both engines take what the plan gives their caches, since shares of what happens to be free would depend on which
    of them loads first. The engine of the large model is changed accordingly.
    """
    target, draft = configs["tensorrt_llm"], deepcopy(configs["tensorrt_llm"])
    draft.name = DRAFT
    for key in [key for key in draft.parameters if key.startswith(_NOT_OF_A_DRAFT)]:
        del draft.parameters[key]
    for config in (target, draft):
        set_parameters(config, max_tokens_in_paged_kv_cache=plan.memory().max_tokens)
    set_parameters(draft, gpt_model_path=deployment_dir / "draft-engine")
    return {DRAFT: draft, BLS: _bls(plan, deployment_dir, target)}


def _bls(plan: EnginePlan, deployment_dir: PurePosixPath, target: Any) -> Any:
    deployment = plan.spec.deployment
    assert deployment.speculative is not None
    config = from_text((TEMPLATES / BLS / "config.pbtxt").read_text())
    config.max_batch_size = target.max_batch_size
    config.model_transaction_policy.decoupled = deployment.server.decoupled
    set_parameters(
        config,
        tensorrt_llm_model_name=target.name,
        tensorrt_llm_draft_model_name=DRAFT,
        num_draft_tokens=deployment.speculative.max_draft_len,
        tokenizer_dir=deployment_dir / "weights",
        gpt_model_path=deployment_dir / "engine",
        skip_special_tokens=deployment.server.skip_special_tokens,
    )
    return config
