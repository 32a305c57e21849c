"""Small checkpoints, GGUF files and stacks on disk, each as whole as it is told to be."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serving.checks.config import ModelConfig
from serving.checks.head import layout
from serving.checks.safetensors_header import DTYPE_BITS

Entry = tuple[str, tuple[int, ...]]

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "max_position_embeddings": 4096,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "intermediate_size": 128,
    "vocab_size": 512,
    "tie_word_embeddings": False,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default"},
}
MOE: dict[str, Any] = {
    "model_type": "qwen3_5_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
TRUNK: dict[str, Entry] = {
    "model.embed_tokens.weight": ("BF16", (512, 64)),
    "model.layers.3.self_attn.q_proj.weight": ("BF16", (256, 64)),
    "lm_head.weight": ("BF16", (512, 64)),
}
FILES = {"tokenizer.json": "{}", "chat_template.jinja": "{{ messages }}"}


def head(config: Mapping[str, Any] = CONFIG, *, together: bool = False) -> dict[str, Entry]:
    """The whole head of a configuration, in bf16; experts saved together or one by one."""
    fused = {"mtp.layers.0.mlp.experts.gate_up_proj": None} if together else {}
    parts = layout(ModelConfig.of(config), fused)  # type: ignore[arg-type]
    return {
        part.name + ("" if ".experts." in part.name and together else ".weight"): (
            "BF16",
            tuple(size for size in part.shape if size is not None),
        )
        for part in parts
    }


def header_of(tensors: Mapping[str, Entry]) -> tuple[bytes, int]:
    """A safetensors header, its length before it, and the bytes of data that follow."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw, end


def write_safetensors(path: Path, tensors: Mapping[str, Entry]) -> None:
    """A file whose data are a hole."""
    raw, data = header_of(tensors)
    with path.open("wb") as file:
        file.write(raw)
        file.truncate(len(raw) + data)


def checkpoint(
    folder: Path,
    config: Mapping[str, Any] = CONFIG,
    tensors: Mapping[str, Entry] | None = None,
    files: Mapping[str, str] = FILES,
) -> str:
    """A checkpoint in one file; by default whole, with its head."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(
        folder / "model.safetensors", TRUNK | head(config) if tensors is None else tensors
    )
    for name, text in files.items():
        (folder / name).write_text(text)
    return str(folder)


def sharded(folder: Path, shards: Mapping[str, Mapping[str, Entry]], **index: str) -> str:
    """A checkpoint in several files; `index` changes where the index says tensors are."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name, text in FILES.items():
        (folder / name).write_text(text)
    weight_map = {}
    for file, tensors in shards.items():
        write_safetensors(folder / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    content = json.dumps({"metadata": {}, "weight_map": weight_map | index})
    (folder / "model.safetensors.index.json").write_text(content)
    return str(folder)


def gguf_bytes(metadata: Mapping[str, Any], tensors: tuple[str, ...] = ()) -> bytes:
    """The header of a GGUF file, version 3."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        out += _text(key) + _value(value)
    for name in tensors:
        out += _text(name) + struct.pack("<IQIQ", 1, 32, 0, 0)
    return out


def gguf(path: Path, *, layers: int | None = None, nextn: bool = False, tokens: bool = True) -> str:
    """A GGUF file of a Qwen3.5 MoE, with or without its head."""
    metadata: dict[str, Any] = {
        "general.architecture": "qwen35moe",
        "tokenizer.chat_template": "{{ messages }}",
    }
    if layers is not None:
        metadata["qwen35moe.nextn_predict_layers"] = layers
    if tokens:
        metadata["tokenizer.ggml.tokens"] = ["a", "b"]
    names = ("blk.4.nextn.eh_proj.weight",) if nextn else ()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gguf_bytes(metadata, ("output.weight", *names)))
    return str(path)


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_text(each) for each in value)
    return struct.pack("<II", 4, value)
