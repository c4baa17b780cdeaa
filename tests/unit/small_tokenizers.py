"""Small real tokenizers of every kind, trained in a moment on a few lines of text."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as FastTokenizer

from python_backend.text.files import TokenizerFiles
from python_backend.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog isn't amused, is it?",
    "Hello world! Hello, hello: what is machine learning? It is learning by machines.",
    "def add(a, b):\n    return a + b\n\n\tprint(add(1, 2))  # three",
    "Größe, Übung, naïve café — “quoted” … and 100 % of it.",
    "你好，世界。机器学习是什么？ こんにちは 안녕하세요 Привет мир",
    "emoji 😀 👍🏽 👨‍👩‍👧 done",
]
SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
KINDS = ("byte_level", "llama", "gemma", "metaspace", "wordpiece")


def _byte_level() -> FastTokenizer:
    fast = FastTokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\s+"), "isolated")
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False),
    )
    return fast


def _with_byte_fallback(prepend: bool) -> FastTokenizer:
    """Llama 2's layout, or Gemma's (no leading space) without `prepend`."""
    trained = FastTokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    latin = [line for line in CORPUS if line.isascii()]
    trained.train_from_iterator(
        latin, trainers.BpeTrainer(vocab_size=180, special_tokens=SPECIALS, show_progress=False)
    )
    layout = json.loads(trained.to_str())
    tokens = [t for t, _ in sorted(layout["model"]["vocab"].items(), key=lambda item: item[1])]
    cut = len(SPECIALS)
    tokens[cut:cut] = [f"<0x{byte:02X}>" for byte in range(256)]
    layout["model"]["vocab"] = {token: i for i, token in enumerate(tokens)}
    layout["model"]["byte_fallback"] = True
    layout["model"]["fuse_unk"] = True
    fast = FastTokenizer.from_str(json.dumps(layout))
    if prepend:
        fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prepend else parts)
    _add_bos(fast)
    return fast


def _metaspace() -> FastTokenizer:
    fast = FastTokenizer(models.Unigram())
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    fast.decoder = decoders.Metaspace()
    fast.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(vocab_size=220, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False),
    )
    _add_bos(fast)
    return fast


def _wordpiece() -> FastTokenizer:
    fast = FastTokenizer(models.WordPiece(unk_token="<unk>"))
    fast.normalizer = normalizers.BertNormalizer(lowercase=True)
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast.decoder = decoders.WordPiece(cleanup=True)
    fast.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=220, special_tokens=SPECIALS, show_progress=False)
    )
    return fast


def _add_bos(fast: FastTokenizer) -> None:
    bos = fast.token_to_id("<s>")
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", bos)]
    )


_BUILDERS = {
    "byte_level": _byte_level,
    "llama": lambda: _with_byte_fallback(prepend=True),
    "gemma": lambda: _with_byte_fallback(prepend=False),
    "metaspace": _metaspace,
    "wordpiece": _wordpiece,
}


@cache
def fast_tokenizer_json(kind: str) -> str:
    """tokenizer.json of a small tokenizer of that kind, with one more added token that is not special."""
    fast: FastTokenizer = _BUILDERS[kind]()
    fast.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return str(fast.to_str())


@cache
def small_tokenizer(kind: str) -> Tokenizer:
    """A small tokenizer of that kind with <s>, </s> and <unk>."""
    specials = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return Tokenizer(FastTokenizer.from_str(fast_tokenizer_json(kind)), TokenizerFiles(special_tokens=specials))


def write_tokenizer_dir(directory: Path, kind: str, **config: Any) -> Path:
    """A directory as Hugging Face has it; `config` goes into tokenizer_config.json, None leaves an entry out."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(fast_tokenizer_json(kind), encoding="utf-8")
    entries = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | config
    entries = {key: value for key, value in entries.items() if value is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(entries), encoding="utf-8")
    return directory
