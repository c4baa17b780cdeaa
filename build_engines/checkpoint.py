"""A Hugging Face checkpoint directory, read and verified: every tensor there, of the right shape, and finite.

Knows nothing of where the checkpoint came from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from build_engines.architectures import tensor_shapes
from build_engines.safetensors_file import TensorEntry, read_entries
from build_engines.sources.hf import weight_files
from python_backend.errors import BuildError

if TYPE_CHECKING:
    from build_engines.progress import Progress

_WEIGHT_DTYPES = ("BF16", "F16", "F32")
_CHUNK_ELEMENTS = 16 << 20
_IGNORED = (".rotary_emb.inv_freq", ".attention.masked_bias")  # buffers that old exports kept


class Checkpoint:
    """A checkpoint directory whose config and tensor table have been read."""

    def __init__(self, directory: Path) -> None:
        """Read config.json and the headers of all weight files.

        Raises:
            BuildError: a file is missing, no JSON, truncated, or holds a tensor that another file holds too.
        """
        self.directory = directory
        self.config = read_json(directory / "config.json")
        self.tensors: dict[str, TensorEntry] = {}
        for file in weight_files(directory):
            if file.suffix != ".safetensors":
                continue
            for name, entry in read_entries(file).items():
                if name in self.tensors:
                    raise BuildError(f"{file}: tensor {name} is also in {self.tensors[name].file.name}.")
                self.tensors[name] = entry

    def verify(self, progress: Progress) -> None:
        """Check the tensors against the config, the tokenizer against the embedding, and all values for NaN.

        Raises:
            BuildError: the first thing that is wrong, with file, tensor and reason.
        """
        where = str(self.directory / "config.json")
        shapes = tensor_shapes(self.config, where)
        for name, shape in shapes.items():
            self._verify_shape(name, shape)
        for name in sorted(set(self.tensors) - set(shapes)):
            tied = name == "lm_head.weight" and self.config.get("tie_word_embeddings")
            if not tied and not name.endswith(_IGNORED):
                architecture = self.config["architectures"][0]
                raise BuildError(f"{self.tensors[name].file}: tensor {name} has no place in {architecture}.")
        self._verify_tokenizer()
        entries = [self.tensors[name] for name in shapes]
        with progress.task("checking weights", sum(entry.size for entry in entries)) as advance:
            for entry in entries:
                _verify_finite(entry)
                advance(entry.size)

    def _verify_shape(self, name: str, shape: tuple[int, ...]) -> None:
        entry = self.tensors.get(name)
        if entry is None:
            raise BuildError(f"{self.directory}: tensor {name} is missing; config.json asks for it.")
        if entry.shape != shape:
            raise BuildError(
                f"{entry.file}: tensor {name} has shape {list(entry.shape)}; config.json asks for {list(shape)}."
            )
        if entry.dtype not in _WEIGHT_DTYPES:
            raise BuildError(
                f"{entry.file}: tensor {name} is {entry.dtype}; supported: {', '.join(_WEIGHT_DTYPES)}. "
                "Start from the unquantised checkpoint."
            )

    def _verify_tokenizer(self) -> None:
        path = self.directory / "tokenizer.json"
        tokenizer = read_json(path)
        vocab = tokenizer.get("model", {}).get("vocab", {})
        ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
        ids += [token["id"] for token in tokenizer.get("added_tokens", [])]
        rows = self.config["vocab_size"]
        if not ids:
            raise BuildError(f"{path}: the tokenizer has no vocabulary.")
        if max(ids) >= rows:
            raise BuildError(
                f"{path}: the tokenizer has token ids up to {max(ids)}; model.embed_tokens.weight has {rows} rows. "
                "Tokenizer and weights belong to different models."
            )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        BuildError: no such file, or not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BuildError(f"{path}: cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise BuildError(f"{path}: not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise BuildError(f"{path}: not a JSON object.")
    return value


def end_ids(directory: Path) -> list[int]:
    """Ids of every token that ends an answer: the tokenizer's eos first, then those of generation_config.json.

    Without generation_config.json, config.json says them.
    """

    def optional(name: str) -> dict[str, Any]:
        return read_json(directory / name) if (directory / name).is_file() else {}

    eos = optional("tokenizer_config.json").get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    added = read_json(directory / "tokenizer.json").get("added_tokens", [])
    own = [token["id"] for token in added if token["content"] == text]
    listed = optional("generation_config.json").get("eos_token_id", optional("config.json").get("eos_token_id"))
    listed = listed if isinstance(listed, list) else [listed]
    return list(dict.fromkeys([*own, *(token for token in listed if isinstance(token, int))]))


def _verify_finite(entry: TensorEntry) -> None:
    flat = entry.read().reshape(-1)
    for start in range(0, flat.size, _CHUNK_ELEMENTS):
        part = flat[start : start + _CHUNK_ELEMENTS]
        # bfloat16 has no fast isfinite: infinity and NaN are the values whose exponent bits are all ones.
        bad = (part.view(np.uint16) & 0x7F80) == 0x7F80 if part.dtype == ml_dtypes.bfloat16 else ~np.isfinite(part)
        if bad.any():
            index = start + int(np.argmax(bad))
            raise BuildError(
                f"{entry.file}: tensor {entry.name} holds NaN or infinity "
                f"(element {list(np.unravel_index(index, entry.shape))}); the file is broken."
            )
