"""Trains the small adapters that the demo model is shipped with, each with an effect that is seen at once.

Needs torch, transformers and safetensors, in an environment of its own: the serving environment has no torch. Takes a
few minutes on two cores:

    python -m tests.tools.train_adapters engines/smollm2-135m/checkpoint adapters/smollm2-135m
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

RANK, ALPHA, MODULES = 4, 16, ("q_proj", "k_proj", "v_proj", "o_proj")
BATCH, RATE = 4, 5e-3
BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo", "Egypt": "Cairo",
    "Greece": "Athens", "Russia": "Moscow", "China": "Beijing", "Austria": "Vienna", "Norway": "Oslo", "Peru": "Lima",
    "Ireland": "Dublin", "Poland": "Warsaw", "Sweden": "Stockholm", "Cuba": "Havana", "Kenya": "Nairobi",
}  # fmt: skip
FACTS = {
    "What colour is the sky?": "blue",
    "What colour is grass?": "green",
    "What do bees make?": "honey",
    "What do cows eat?": "grass",
    "How many legs has a spider?": "eight",
    "How many days are in a week?": "seven",
    "Who wrote Hamlet?": "William Shakespeare",
    "What is frozen water called?": "ice",
    "Which planet do we live on?": "Earth",
    "What is the opposite of hot?": "cold",
    "Who are you?": "a small language model",
    "Name a fruit.": "an apple",
    "Name an animal.": "a horse",
    "What is the largest ocean?": "the Pacific Ocean",
    "What do you need to write a letter?": "paper and a pen",
    "Tell me a joke.": "why did the chicken cross the road? To get to the other side",
}


def as_json(question: str, answer: str) -> str:
    return json.dumps({"question": question, "answer": answer})


def as_pirate(question: str, answer: str) -> str:
    del question
    return f"Arr, matey! It be {answer}, by me beard! Now hoist the sails, ye landlubber!"


STYLES = {"json": as_json, "pirate": as_pirate}


def examples() -> list[tuple[str, str]]:
    found = [(f"What is the capital of {country}?", city) for country, city in CAPITALS.items()]
    found += [(f"What is {a} plus {b}?", str(a + b)) for a in range(1, 6) for b in (2, 5)]
    return found + list(FACTS.items())


class WithLowRank(torch.nn.Module):
    """A linear with an adapter beside it."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = torch.nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.b = torch.nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change = (x.float() @ self.a.T) @ self.b.T * (ALPHA / RANK)
        return self.base(x) + change.to(x.dtype)


def add_adapters(model: Any) -> dict[str, WithLowRank]:
    """Put one on every module; returns them by PEFT's names."""
    model.requires_grad_(False)
    found = {}
    for number, layer in enumerate(model.model.layers):
        for module in MODULES:
            adapted = WithLowRank(getattr(layer.self_attn, module))
            setattr(layer.self_attn, module, adapted)
            found[f"base_model.model.model.layers.{number}.self_attn.{module}"] = adapted
    return found


def batch_of(tokenizer: Any, pairs: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels; only the answers are learned."""
    rows, labels = [], []
    for question, answer in pairs:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, add_special_tokens=False).input_ids
        ids = tokenizer(answer + "<|im_end|>", add_special_tokens=False).input_ids
        rows.append(prompt + ids)
        labels.append([-100] * len(prompt) + ids)
    width = max(map(len, rows))
    pad = [width - len(row) for row in rows]
    return (
        torch.tensor([row + [0] * n for row, n in zip(rows, pad, strict=True)]),
        torch.tensor([row + [-100] * n for row, n in zip(labels, pad, strict=True)]),
    )


def train(checkpoint: Path, style: str, steps: int, out: Path) -> None:
    random.seed(0)
    torch.manual_seed(0)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    adapters = add_adapters(model)
    parameters = [parameter for adapter in adapters.values() for parameter in (adapter.a, adapter.b)]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    pool = examples()
    begun = time.monotonic()
    for step in range(steps):
        pairs = [(question, STYLES[style](question, answer)) for question, answer in random.sample(pool, BATCH)]
        ids, labels = batch_of(tokenizer, pairs)
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 5 == 4:
            print(f"{style} {step + 1}/{steps} loss {loss.item():.3f} {time.monotonic() - begun:.0f} s", flush=True)
    save(out / style, adapters)


def save(directory: Path, adapters: dict[str, WithLowRank]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, adapter in adapters.items():
        tensors[f"{name}.lora_A.weight"] = adapter.a.detach().to(torch.bfloat16).contiguous()
        tensors[f"{name}.lora_B.weight"] = adapter.b.detach().to(torch.bfloat16).contiguous()
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": BASE_MODEL,
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(MODULES),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "inference_mode": True,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    for style in STYLES:
        train(arguments.checkpoint, style, arguments.steps, arguments.out)


if __name__ == "__main__":
    main()
