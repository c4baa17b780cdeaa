"""A GGUF file's vocabulary becomes tokenizer.json and its companions, id for id what Hugging Face's tokenizer gives.

Two kinds exist: byte-level BPE ("gpt2", with a pre-tokenizer named by `tokenizer.ggml.pre`) and SentencePiece BPE
("llama", with scores and byte fallback). Knows nothing of weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from build_engines.sources.bpe_merges import merges_from_scores
from build_engines.sources.pretokenizers import BYTE_LEVEL_KINDS, ByteLevelKind
from python_backend.errors import BuildError

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # GGUF's token types that matter here; 1 is a normal token
# Control tokens that end an answer, whichever of them the metadata names as eos.
_END_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<|end_of_turn|>",
    "</s>",
)
_ROLES = ("bos", "eos", "unknown", "padding")


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The tokenizer part of the metadata, checked."""

    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[str]
    ids: dict[str, int]  # by role: bos, eos, unknown, padding
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    chat_template: str | None

    def token(self, role: str) -> str | None:
        """The text of the token with a role, if the file names one."""
        return self.tokens[self.ids[role]] if role in self.ids else None


def tokenizer_files(metadata: dict[str, Any], where: str) -> dict[str, Any]:
    """tokenizer.json, tokenizer_config.json and generation_config.json as plain data, by file name.

    Raises:
        BuildError: no vocabulary, or a kind of tokenizer that is not known; `where` names the file.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        kind = _byte_level_kind(metadata, where)
        vocabulary = _vocabulary(metadata, where, add_bos=kind.add_bos)
        tokenizer = _byte_level(vocabulary, kind)
    elif model == "llama":
        vocabulary = _vocabulary(metadata, where, add_bos=True)
        tokenizer = _sentencepiece(vocabulary, where)
    else:
        raise BuildError(f"{where}: tokenizer model {model} is not supported; supported: gpt2 (BPE), llama (SPM).")
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": _tokenizer_config(vocabulary),
        "generation_config.json": _generation_config(vocabulary, metadata),
    }


def _byte_level_kind(metadata: dict[str, Any], where: str) -> ByteLevelKind:
    name = metadata.get("tokenizer.ggml.pre", "missing")
    kind = BYTE_LEVEL_KINDS.get(name)
    if kind is None:
        raise BuildError(
            f"{where}: pre-tokenizer {name} is not known, and another one would give wrong ids; known: "
            f"{', '.join(sorted(BYTE_LEVEL_KINDS))}. Use the model's Hugging Face directory instead."
        )
    return kind


def _vocabulary(metadata: dict[str, Any], where: str, *, add_bos: bool) -> _Vocabulary:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise BuildError(f"{where}: metadata tokenizer.ggml.tokens is missing; the file holds no tokenizer.")
    ids = {role: metadata.get(f"tokenizer.ggml.{role}_token_id") for role in _ROLES}
    for role, token_id in ids.items():
        if token_id is not None and not 0 <= token_id < len(tokens):
            raise BuildError(f"{where}: {role} token id is {token_id}; the vocabulary has {len(tokens)} tokens.")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise BuildError(f"{where}: metadata tokenizer.ggml.token_type has not one type per token.")
    return _Vocabulary(
        tokens=tokens,
        types=types,
        scores=metadata.get("tokenizer.ggml.scores") or [],
        merges=metadata.get("tokenizer.ggml.merges") or [],
        ids={role: token_id for role, token_id in ids.items() if token_id is not None},
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)),
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        add_space_prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _byte_level(vocabulary: _Vocabulary, kind: ByteLevelKind) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": kind.normalizer,
        "pre_tokenizer": kind.pre_tokenizer,
        "post_processor": _template(vocabulary) or byte_level,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": kind.ignore_merges,
            "vocab": _vocab(vocabulary),
            "merges": [merge.split(" ", 1) for merge in vocabulary.merges],
        },
    }


def _sentencepiece(vocabulary: _Vocabulary, where: str) -> dict[str, Any]:
    if len(vocabulary.scores) != len(vocabulary.tokens):
        raise BuildError(f"{where}: metadata tokenizer.ggml.scores has not one score per token.")
    prepend = [{"type": "Prepend", "prepend": "▁"}] if vocabulary.add_space_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if vocabulary.add_space_prefix else []
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    unspace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, space]},
        "pre_tokenizer": None,
        "post_processor": _template(vocabulary),
        "decoder": {"type": "Sequence", "decoders": [unspace, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": vocabulary.token("unknown") or "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": _vocab(vocabulary),
            "merges": merges_from_scores(vocabulary.tokens, vocabulary.types, vocabulary.scores),
        },
    }


def _vocab(vocabulary: _Vocabulary) -> dict[str, int]:
    pairs = zip(vocabulary.tokens, vocabulary.types, strict=True)
    return {token: index for index, (token, kind) in enumerate(pairs) if kind != _UNUSED}


def _added_tokens(vocabulary: _Vocabulary) -> list[dict[str, Any]]:
    named = set(vocabulary.ids.values())
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED) or (index in named and kind != _UNUSED)
    ]


def _template(vocabulary: _Vocabulary) -> dict[str, Any] | None:
    bos = vocabulary.token("bos") if vocabulary.add_bos else None
    eos = vocabulary.token("eos") if vocabulary.add_eos else None
    if not bos and not eos:
        return None

    def sequence(letter: str, type_id: int) -> list[dict[str, Any]]:
        start = [{"SpecialToken": {"id": bos, "type_id": type_id}}] if bos else []
        end = [{"SpecialToken": {"id": eos, "type_id": type_id}}] if eos else []
        return [*start, {"Sequence": {"id": letter, "type_id": type_id}}, *end]

    special = {t: {"id": t, "ids": [vocabulary.tokens.index(t)], "tokens": [t]} for t in (bos, eos) if t}
    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": sequence("A", 0) + sequence("B", 1),
        "special_tokens": special,
    }


def _tokenizer_config(vocabulary: _Vocabulary) -> dict[str, Any]:
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": vocabulary.add_bos,
        "add_eos_token": vocabulary.add_eos,
        "clean_up_tokenization_spaces": False,
    }
    config |= {names[role]: vocabulary.tokens[token_id] for role, token_id in vocabulary.ids.items()}
    if vocabulary.chat_template:
        config["chat_template"] = vocabulary.chat_template
    return config


def _generation_config(vocabulary: _Vocabulary, metadata: dict[str, Any]) -> dict[str, Any]:
    ends = [vocabulary.ids.get("eos"), *(metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom"))]
    control = {token: i for i, token in enumerate(vocabulary.tokens) if vocabulary.types[i] == _CONTROL}
    ends += [control.get(token) for token in _END_TOKENS]
    config: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(end for end in ends if end is not None))}
    if "bos" in vocabulary.ids:
        config["bos_token_id"] = vocabulary.ids["bos"]
    if "padding" in vocabulary.ids:
        config["pad_token_id"] = vocabulary.ids["padding"]
    return config
