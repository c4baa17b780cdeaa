"""Makes tests/data/beam_search.json: what transformers' beam search finds over a seeded table of logits.

Run by hand, as tests/tools/make_family_references.py is:  ref/bin/python -m tests.tools.make_beam_references
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

OUTPUT = Path(__file__).parents[1] / "data" / "beam_search.json"
PROMPT, PAD = [1, 2], 99

# One known difference is kept out: when early stopping falls on the very last step, transformers lets the beams cut off
# by the length compete with the complete hypotheses, TensorRT-LLM and we do not.
CASES: list[dict[str, Any]] = [
    {"vocab": 9, "beam_width": width, "max_tokens": max_tokens, "length_penalty": penalty, "early_stopping": early}
    for width, max_tokens in ((2, 8), (3, 12), (5, 13))
    for penalty in (0.0, 1.0, 2.0)
    for early in (True, False)
] + [
    {"vocab": 9, "beam_width": 3, "max_tokens": 10, "length_penalty": 1.0, "early_stopping": True, "end_ids": [0, 4]},
    {"vocab": 300, "beam_width": 4, "max_tokens": 20, "length_penalty": 1.0, "early_stopping": False},
    {"vocab": 9, "beam_width": 3, "max_tokens": 9, "length_penalty": 1.0, "early_stopping": True, "end_ids": []},
]  # fmt: skip


def table(vocab: int, seed: int) -> np.ndarray:
    """Logits after each pair of tokens: float32 [min(vocab, 40), min(vocab, 40), vocab]."""
    side = min(vocab, 40)
    return (np.random.default_rng(seed).standard_normal((side, side, vocab)) * 2).astype(np.float32)


class TableConfig(PretrainedConfig):
    """Nothing but what `generate` asks for."""

    model_type = "table"


class TableModel(PreTrainedModel, GenerationMixin):
    """A language model whose logits depend on the last two tokens only."""

    config_class = TableConfig
    _supports_cache_class = False

    def __init__(self, config: TableConfig, logits: np.ndarray) -> None:
        super().__init__(config)
        self.anchor = torch.nn.Parameter(torch.zeros(1))
        self.table = torch.tensor(logits)

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **_: Any) -> dict[str, Any]:
        """Always the whole sequence; there is no cache."""
        return {"input_ids": input_ids}

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        """Logits after the last token only."""
        side = self.table.shape[0]
        return CausalLMOutput(logits=self.table[input_ids[:, -2] % side, input_ids[:, -1] % side][:, None])


def run(case: dict[str, Any], seed: int) -> dict[str, Any]:
    """One search; output ids without the end id, with their length-penalised scores."""
    end_ids = case.get("end_ids", [0])
    model = TableModel(TableConfig(vocab_size=case["vocab"]), table(case["vocab"], seed))
    result = model.generate(
        torch.tensor([PROMPT]),
        generation_config=GenerationConfig(
            num_beams=case["beam_width"],
            num_return_sequences=case["beam_width"],
            max_new_tokens=case["max_tokens"],
            length_penalty=case["length_penalty"],
            early_stopping=case["early_stopping"],
            eos_token_id=end_ids or None,
            pad_token_id=PAD,
            do_sample=False,
            use_cache=False,
            return_dict_in_generate=True,
            output_scores=True,
        ),
    )
    outputs = []
    for row in result.sequences[:, len(PROMPT) :].tolist():
        tokens = [token for token in row if token != PAD]
        outputs.append(tokens[:-1] if tokens[-1] in end_ids else tokens)
    scores = [round(score, 5) for score in result.sequences_scores.tolist()]
    return {**case, "end_ids": end_ids, "seed": seed, "output_ids": outputs, "scores": scores}


def main() -> None:
    """Write every case with two seeds, one JSON object a line."""
    lines = [json.dumps(run(case, seed)) for case in CASES for seed in (1, 2)]
    OUTPUT.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
