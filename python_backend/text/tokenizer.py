"""Text to token ids and back, exactly as the model's own tokenizer.json has it, with one BOS and no surprises.

Knows nothing of requests, streaming or Triton.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as FastTokenizer

from python_backend.errors import BuildError, InvalidRequest
from python_backend.text.files import TokenizerFiles, read_tokenizer_files
from python_backend.text.vocabulary import Vocabulary, build_vocabulary

if TYPE_CHECKING:
    from collections.abc import Sequence

GUARD = "\ufdd0"  # a noncharacter; marks special-token text that must stay plain text


class Tokenizer:
    """Encodes and decodes for one model. `bos_id` and `eos_id` are None where it has none; `pad_id` always is an id."""

    def __init__(self, fast: FastTokenizer, files: TokenizerFiles | None = None) -> None:
        self.files = files or TokenizerFiles()
        # Saved truncation or padding would silently change every prompt.
        fast.no_truncation()
        fast.no_padding()
        self._fast = fast
        self._decoder = fast.decoder
        self.vocabulary: Vocabulary = build_vocabulary(fast)
        self.bos_id = self._special_id("bos_token")
        self.unk_id = self._special_id("unk_token")
        own_eos = self._special_id("eos_token")
        eos_ids = ([] if own_eos is None else [own_eos]) + list(self.files.generation_eos_ids)
        self.end_ids: tuple[int, ...] = tuple(dict.fromkeys(eos_ids))
        self.eos_id: int | None = self.end_ids[0] if self.end_ids else None
        self.pad_id, self.warnings = self._choose_pad_id()
        self._own_specials = fast.encode("", add_special_tokens=True).ids

    @classmethod
    def from_dir(cls, directory: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json, generation_config.json, config.json and chat templates.

        Raises:
            BuildError: tokenizer.json is missing or broken, or another of the files is no JSON object.
        """
        path = Path(directory) / "tokenizer.json"
        if not path.is_file():
            raise BuildError(
                f"{path} does not exist. Give a directory with a fast tokenizer (tokenizer.json); "
                "a model that has tokenizer.model only must be converted first."
            )
        try:
            fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise BuildError(f"{path} is no readable tokenizer: {error}") from error
        return cls(fast, read_tokenizer_files(Path(directory)))

    @property
    def vocab_size(self) -> int:
        """Highest token id + 1; a model's logits may be wider."""
        return self.vocabulary.size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written in the text become those tokens; a doubled BOS becomes one.

        Raises:
            InvalidRequest: the text has lone surrogates.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of several texts at once, in order."""
        for text in texts:
            check_text(text)
        encodings = self._fast.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        ids = [encoding.ids for encoding in encodings]
        return [self._with_one_bos(row) for row in ids] if add_special_tokens else ids

    def encode_chat(self, text: str) -> list[int]:
        """Token ids of a rendered chat template, which writes its own special tokens.

        Special-token text that holds GUARD (see `guard`) is encoded as the plain text it is without it.
        """
        check_text(text)
        if GUARD not in text:
            return list(self._fast.encode(text, add_special_tokens=False).ids)
        guarded, own_ids = self._guarded
        return [own_ids.get(token_id, token_id) for token_id in guarded.encode(text, add_special_tokens=False).ids]

    def guard(self, text: str) -> str:
        """The text with GUARD inside every special token that it spells out.

        Raises:
            InvalidRequest: the text spells out a special token and holds GUARD itself.
        """
        found = [special for special in self.vocabulary.special_texts if special in text]
        if not found:
            return text
        if GUARD in text:
            raise InvalidRequest(f"messages hold the noncharacter U+{ord(GUARD):04X}, which is reserved. Remove it.")
        for special in found:
            while len(special) > 1 and special in text:
                text = text.replace(special, special[0] + GUARD + special[1:])
        return text

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        if self.vocabulary.byte_values and not self.vocabulary.byte_values.keys().isdisjoint(ids):
            return self._decode_byte_runs(ids, skip_special_tokens)
        try:
            text: str = self._fast.decode(ids, skip_special_tokens=skip_special_tokens)
        except OverflowError:
            known = [token_id for token_id in ids if 0 <= token_id < self.vocab_size]
            text = self._fast.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def least_tokens(self, num_bytes: int) -> int:
        """A lower bound of the number of tokens of a text of so many bytes, without looking at it."""
        # A normalizer that drops characters allows no exact bound; no real text shrinks sixteenfold.
        return num_bytes // (self.vocabulary.max_token_bytes * (1 if self.vocabulary.lossless else 16))

    def _decode_byte_runs(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Decode with byte-fallback tokens: a run of bytes loses only what is broken in it, not all of it."""
        vocabulary = self.vocabulary
        tokens: list[str] = []
        run = bytearray()
        for token_id in ids:
            if not 0 <= token_id < vocabulary.size or (skip_special_tokens and token_id in vocabulary.special_ids):
                continue
            byte = vocabulary.byte_values.get(token_id)
            if byte is not None:
                run.append(byte)
                continue
            if run:
                tokens.append(run.decode("utf-8", "replace"))
                run.clear()
            token = vocabulary.tokens[token_id]
            if token is not None:
                tokens.append(token)
        if run:
            tokens.append(run.decode("utf-8", "replace"))
        return str(self._decoder.decode(tokens))

    def _special_id(self, name: str) -> int | None:
        text = self.files.special_tokens.get(name)
        return None if text is None else self._fast.token_to_id(text)

    def _choose_pad_id(self) -> tuple[int, tuple[str, ...]]:
        pad_id = self._special_id("pad_token")
        if pad_id is None:
            pad_id = self.files.pad_token_id
        if pad_id is not None:
            return pad_id, ()
        if self.eos_id is not None:
            return self.eos_id, (f"The tokenizer has no pad token; its end token (id {self.eos_id}) stands in for it.",)
        return 0, ("The tokenizer has neither pad nor end token; id 0 pads, and answers end by length only.",)

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        bos_id = self.bos_id
        if bos_id is None:
            return ids
        own = bool(self._own_specials) and self._own_specials[0] == bos_id
        if self.files.add_bos is False and own:
            ids = ids[1:]
        elif self.files.add_bos and not own:
            ids = [bos_id, *ids]
        while len(ids) > 1 and ids[0] == bos_id == ids[1]:
            ids = ids[1:]
        return ids

    @cached_property
    def _guarded(self) -> tuple[FastTokenizer, dict[int, int]]:
        """The tokenizer that drops GUARD, but only after it looked for special tokens; and its added ids -> ours."""
        layout = json.loads(self._fast.to_str())
        drop = {"type": "Replace", "pattern": {"String": GUARD}, "content": ""}
        own = layout.get("normalizer")
        layout["normalizer"] = {"type": "Sequence", "normalizers": [drop, own]} if own else drop
        specials = {token["content"] for token in layout["added_tokens"] if token["special"]}
        for token in layout["added_tokens"]:
            if token["special"]:
                token["normalized"] = False
        _hide_pieces(layout["model"], specials)
        guarded = FastTokenizer.from_str(json.dumps(layout))
        contents: dict[str, int] = {token["content"]: token["id"] for token in layout["added_tokens"]}
        here = guarded.get_vocab(with_added_tokens=True)
        return guarded, {here[content]: token_id for content, token_id in contents.items()}


def _hide_pieces(model: dict[str, Any], specials: set[str]) -> None:
    """Rename special tokens in a model's own vocabulary, where it could put them together from plain text.

    The unknown token stays: the model needs it, and it controls nothing.
    """
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram: [piece, score] by id
        for token_id, entry in enumerate(vocab):
            if entry[0] in specials and token_id != model.get("unk_id"):
                entry[0] = GUARD + entry[0]
    else:
        for piece in specials.intersection(vocab) - {model.get("unk_token")}:
            vocab[GUARD + piece] = vocab.pop(piece)


def check_text(text: str, name: str = "The text") -> None:
    """Refuse what has no UTF-8 form.

    Raises:
        InvalidRequest: the text has lone surrogates.
    """
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise InvalidRequest(
            f"{name} has a lone surrogate U+{code:04X} at character {error.start}; send whole Unicode characters."
        ) from error
