"""A whole deployment of ours around a model of two layers: it is built and started in seconds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from build_engines.build import Build
from build_engines.progress import Silent
from build_engines.spec import load_spec

_FAMILY = Path(__file__).resolve().parents[1] / "data" / "families" / "llama"
_SPECIALS = ["<unk>", "<s>", "</s>"]
MAX_SEQ_LEN = 8192
MAX_BATCH = 8
MAX_QUEUE = 16


def build_tiny_deployment(folder: Path, guided: dict[str, object] | None = None, **limits: object) -> Path:
    """Writes model and spec into folder, builds, and gives the model repository; `guided` is the spec's section."""
    source = folder / "hf"
    source.mkdir(parents=True)
    config = json.loads((_FAMILY / "config.json").read_text()) | {"max_position_embeddings": MAX_SEQ_LEN}
    (source / "config.json").write_text(json.dumps(config))
    shutil.copyfile(_FAMILY / "model.safetensors", source / "model.safetensors")
    _write_tokenizer(source)
    spec = {
        "name": "tiny",
        "source": {"hf": str(source)},
        "precision": "exact",
        "limits": {
            "max_batch_size": MAX_BATCH,
            "max_queue_size": MAX_QUEUE,
            "max_seq_len": MAX_SEQ_LEN,
            "kv_cache_tokens": 8 * MAX_SEQ_LEN,
            **limits,
        },
        "guided": guided or {},
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(spec))
    return Build(load_spec(path), folder / "engines", Silent()).run().root / "model_repo"


def _write_tokenizer(folder: Path) -> None:
    """Bytes and a few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=_SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["once upon a time there was a little model"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
