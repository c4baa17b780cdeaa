"""Pre-tokenizers of byte-level BPE vocabularies by the name that `tokenizer.ggml.pre` gives them.

Each entry is the Hugging Face form, as the model's own tokenizer.json has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_GPT2_SPLIT = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTES_ONLY = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_SINGLE_DIGITS = {"type": "Digits", "individual_digits": True}

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"|\p{N}{1,3}" + _REST
_QWEN2 = _WORDS + r"|\p{N}" + _REST
_TEKKEN_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_TEKKEN_LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_TEKKEN = rf"{_TEKKEN_UPPER}|{_TEKKEN_LOWER}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class ByteLevelKind:
    """How text is cut before BPE, and what goes with it."""

    pre_tokenizer: dict[str, Any]
    normalizer: dict[str, Any] | None = None
    ignore_merges: bool = False
    add_bos: bool = False  # where the file does not say


def _sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


def _split(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return _sequence(split, _BYTES_ONLY)


_LLAMA3_KIND = ByteLevelKind(_split(_LLAMA3), ignore_merges=True, add_bos=True)
_DIGITS_KIND = ByteLevelKind(_sequence(_SINGLE_DIGITS, _GPT2_SPLIT))

BYTE_LEVEL_KINDS: dict[str, ByteLevelKind] = {
    "gpt-2": ByteLevelKind(_GPT2_SPLIT),
    "smollm": _DIGITS_KIND,
    "starcoder": _DIGITS_KIND,
    "refact": _DIGITS_KIND,
    "llama-bpe": _LLAMA3_KIND,
    "llama3": _LLAMA3_KIND,
    "llama-v3": _LLAMA3_KIND,
    "qwen2": ByteLevelKind(_split(_QWEN2), normalizer={"type": "NFC"}),
    "deepseek-r1-qwen": ByteLevelKind(_split(_QWEN2), normalizer={"type": "NFC"}, add_bos=True),
    "tekken": ByteLevelKind(_split(_TEKKEN), ignore_merges=True, add_bos=True),
}
