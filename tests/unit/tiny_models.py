"""Random models of a few thousand weights as Hugging Face directories and as GGUF files, made in a moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from build_engines.architectures import FAMILIES, tensor_shapes

Tensors = dict[str, NDArray[Any]]
CORPUS = ["The quick brown fox jumps over the lazy dog.", "def add(a, b):\n    return a + b  # 12345", "你好 🎉 naïve"]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_config(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    """A config.json whose sizes are multiples of 32, so that block quantisation applies."""
    return {
        "architectures": [architecture],
        "model_type": FAMILIES[architecture].model_type,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "vocab_size": 320,
    } | changes


def tiny_tensors(config: dict[str, Any], seed: int = 0) -> Tensors:
    """Random weights of the config's shapes, float32 values that bfloat16 holds exactly."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(0, 0.1, shape).astype(ml_dtypes.bfloat16).astype(np.float32)
        for name, shape in tensor_shapes(config, "tiny").items()
    }


def tiny_tokenizer(vocab_size: int = 320) -> Tokenizer:
    """A byte-level BPE with the specials first, cut like GPT-2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write_hf(directory: Path, config: dict[str, Any], tensors: Tensors, shards: int = 1) -> Path:
    """A Hugging Face checkpoint directory in bfloat16."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    stored = {name: values.astype(ml_dtypes.bfloat16) for name, values in tensors.items()}
    if shards == 1:
        save_file(stored, directory / "model.safetensors")
        return directory
    names = list(stored)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: stored[name] for name in names[number::shards]}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def write_gguf(
    path: Path,
    config: dict[str, Any],
    tensors: Tensors,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.BF16,
    **metadata: Any,
) -> Path:
    """The model as llama.cpp's converter writes it: matrices in `kind`, vectors in float32, q and k permuted."""
    family = FAMILIES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, family.gguf_architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    add_tokenizer(writer)
    for key, value in metadata.items():
        writer.add_uint32(f"{family.gguf_architecture}.{key}", value)
    for name, values in tensors.items():
        stored = values
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        if family.gguf_architecture == "llama" and name.split(".")[-2] in heads:
            stored = permute(values, heads[name.split(".")[-2]])
        used = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(stored, used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """The tiny tokenizer as metadata."""
    model = json.loads(tiny_tokenizer().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIALS else 1 for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0].content }}")


def permute(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """Row order of llama.cpp: within a head, row 2i is old row i, row 2i + 1 is old row i + half."""
    size = values.shape[0] // heads
    order = [head * size + half * (size // 2) + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return values[order]


def gguf_name(name: str) -> str:
    """The name that llama.cpp gives a Hugging Face tensor."""
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    _, _, index, rest = name.split(".", 3)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{index}.{GGUF_NAMES[stem]}.{kind}"
