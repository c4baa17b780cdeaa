"""Makes tests/data/families: a tiny seeded checkpoint of each model family, and what transformers computes with it.

Run by hand in an environment of its own, never in CI; the files it writes are committed:

    python -m venv ref && ref/bin/pip install torch==2.13.0 transformers==5.24.0
    ref/bin/python tests/tools/make_family_references.py [FAMILY …]

Each directory holds config.json and model.safetensors (float32), and reference.npz:

    prompt_ids        int32 [50]
    positions         int32 [p]           positions of the prompt that `logits` belong to
    logits            float32 [p, vocab]  computed in float32
    greedy_ids        int32 [32]          what greedy search appends to the prompt
    greedy_log_probs  float32 [32]        their natural log-probabilities
    greedy_margins    float32 [32]        logit of the token taken minus that of the runner-up
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

OUTPUT = Path(__file__).parents[1] / "data" / "families"
PROMPT_LENGTH, NEW_TOKENS = 50, 32
POSITIONS = [0, 1, 2, 7, 15, 30, 31, 32, 33, 47, 48, 49]  # 32 starts the second KV block
MIN_MARGIN = 0.02  # between the two best logits at each greedy step, so that rounding cannot change the token

COMMON = {
    "hidden_act": "silu", "num_hidden_layers": 2, "max_position_embeddings": 512, "initializer_range": 0.02,
    "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32", "attention_dropout": 0.0,
}  # fmt: skip
# Some as small as hidden_size = heads * head_dim allows, some with a head_dim of their own.
DERIVED_HEADS = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
OWN_HEADS = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", **DERIVED_HEADS, "vocab_size": 320,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    },
    "llama3-rope": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", **OWN_HEADS, "vocab_size": 512,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", **OWN_HEADS, "vocab_size": 512,
        "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "tie_word_embeddings": False, "sliding_window": None,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **DERIVED_HEADS, "vocab_size": 320,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True, "use_sliding_window": False,
        "sliding_window": 512, "max_window_layers": 2,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 512,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": False, "attention_bias": False,
        "use_sliding_window": False, "sliding_window": None, "max_window_layers": 2,
    },
    # The same families in the layout that transformers 5 writes: theta and scaling inside rope_parameters.
    "qwen3-rope-parameters": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **OWN_HEADS, "vocab_size": 512,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "attention_bias": False, "use_sliding_window": False,
        "sliding_window": None, "max_window_layers": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    },
}  # fmt: skip


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Weights that keep the signal's size, biases and norms that are not neutral, so that a missing one shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(noise * 0.3 if name.endswith("bias") else 1 + noise * 0.2)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(noise * 2.5 / math.sqrt(parameter.shape[1]))
            else:
                parameter.copy_(noise * 1.8 / math.sqrt(parameter.shape[1]))


def reference(model: torch.nn.Module, prompt: list[int]) -> dict[str, np.ndarray]:
    """What the docstring of this module promises for reference.npz."""
    ids = list(prompt)
    log_probs, margins = [], []
    with torch.no_grad():
        prompt_logits = model(torch.tensor([ids])).logits[0].float().numpy()
        for _ in range(NEW_TOKENS):
            logits = model(torch.tensor([ids])).logits[0, -1].float()
            best = torch.topk(logits, 2)
            ids.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            log_probs.append(float(torch.log_softmax(logits, dim=-1)[ids[-1]]))
    return {
        "prompt_ids": np.array(prompt, dtype=np.int32),
        "positions": np.array(POSITIONS, dtype=np.int32),
        "logits": prompt_logits[POSITIONS].astype(np.float32),
        "greedy_ids": np.array(ids[len(prompt) :], dtype=np.int32),
        "greedy_log_probs": np.array(log_probs, dtype=np.float32),
        "greedy_margins": np.array(margins, dtype=np.float32),
    }


def make(name: str, fields: dict[str, Any]) -> None:
    """Write one family; the first seed is taken whose greedy text is varied and far from ties."""
    directory = OUTPUT / name
    directory.mkdir(parents=True, exist_ok=True)
    config_text = json.dumps({**COMMON, **fields}, indent=2) + "\n"
    (directory / "config.json").write_text(config_text)
    config = AutoConfig.from_pretrained(directory)
    for seed in range(200):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        randomize(model, seed)
        prompt = np.random.default_rng(seed).integers(3, config.vocab_size, PROMPT_LENGTH).tolist()
        result = reference(model, prompt)
        if result["greedy_margins"].min() > MIN_MARGIN and len(set(result["greedy_ids"].tolist())) > NEW_TOKENS // 2:
            break
    else:
        raise SystemExit(f"{name}: no seed gives a varied text with margins over {MIN_MARGIN}.")
    model.save_pretrained(directory)
    (directory / "config.json").write_text(config_text)  # as checkpoints on the Hub have it
    (directory / "generation_config.json").unlink(missing_ok=True)
    (directory / "model.safetensors").chmod(0o644)
    reloaded = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").float().eval()
    result = reference(reloaded, prompt)
    np.savez_compressed(directory / "reference.npz", **result)
    size = sum(path.stat().st_size for path in directory.iterdir())
    sys.stdout.write(
        f"{name}: seed {seed}, {size / 1000:.0f} kB, smallest margin {result['greedy_margins'].min():.3f}, "
        f"{len(set(result['greedy_ids'].tolist()))} distinct tokens\n"
    )


def main() -> None:
    """Write the families named on the command line, or all."""
    for name in sys.argv[1:] or FAMILIES:
        make(name, FAMILIES[name])


if __name__ == "__main__":
    main()
