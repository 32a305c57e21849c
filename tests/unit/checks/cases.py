"""For each rule a target that it fires on, and one it does not.

Each case makes its target in a folder and returns the facts of all engines of it, at a version
of the engine. Targets are small checkpoints, GGUF files and stacks; arguments are given as on an
engine's command line.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packaging.version import Version

from serving import catalog
from serving.catalog.yaml_file import parse_yaml
from serving.checks.arguments import parse_arguments
from serving.checks.collect import checkpoint_facts, read_target, stack_facts
from serving.checks.facts import Facts, Machine
from serving.checks.versions import Known
from serving.stack.spec import StackSpec
from tests.unit.checks.builders import (
    CONFIG,
    MOE,
    TRUNK,
    checkpoint,
    gguf,
    head,
    sharded,
)

Make = Callable[[Path], str]
MTP = '--speculative-config \'{"method": "mtp", "num_speculative_tokens": 2}\' '
NO_CACHE = "--no-enable-prefix-caching "
DYNAMIC = (
    '--speculative-config \'{"method": "mtp", "num_speculative_tokens": 2, '
    '"num_speculative_tokens_per_batch_size": [[1, 8, 2], [9, 64, 0]]}\' '
)


@dataclass(frozen=True)
class Case:
    """A checkpoint with an engine's arguments."""

    make: Make = lambda folder: checkpoint(folder)
    arguments: str = ""
    gpu: str | None = None
    changed: Mapping[str, Any] = field(default_factory=dict)
    """Facts that no target can bring about here."""

    def facts(self, folder: Path, version: Version) -> tuple[Facts, ...]:
        target = self.make(folder)
        known = Known("llama.cpp" if target.endswith(".gguf") else "vllm", version, "given")
        found = checkpoint_facts(
            target,
            read_target(target),
            known,
            catalog.find_gpu(self.gpu) if self.gpu else None,
            parse_arguments(known.engine, shlex.split(self.arguments)),
        )
        return (replace(found, **self.changed),)


@dataclass(frozen=True)
class Stack:
    """A stack of one model."""

    model: str
    variants: str = "{mtp: {speculative: {method: mtp, num_speculative_tokens: 2}}}"
    machine: Machine = field(default_factory=Machine)

    def facts(self, folder: Path, version: Version) -> tuple[Facts, ...]:
        text = f"schema: 1\nname: lab\nmodels:\n- {{{self.model}, variants: {self.variants}}}\n"
        stack = parse_yaml(text.replace("FOLDER", str(folder)), StackSpec)
        return stack_facts(stack, Known("vllm", version, "given"), online=False)


def changed(**config: Any) -> Make:
    """A whole checkpoint of a changed configuration."""
    return lambda folder: checkpoint(folder, CONFIG | config, TRUNK | head(CONFIG | config))


def without(*names: str) -> Make:
    """The checkpoint without some files."""

    def make(folder: Path) -> str:
        target = checkpoint(folder)
        for name in names:
            (folder / name).unlink()
        return target

    return make


def quantised(block: Mapping[str, Any], **dtypes: str) -> Make:
    """A checkpoint with a quantisation block; `dtypes` changes how modules are stored."""

    def make(folder: Path) -> str:
        tensors = TRUNK | head()
        for module, dtype in dtypes.items():
            name = f"mtp.{module.replace('__', '.')}.weight"
            tensors[name] = (dtype, tensors[name][1])
        return checkpoint(folder, CONFIG | {"quantization_config": block}, tensors)

    return make


def headless(folder: Path) -> str:
    return checkpoint(folder, tensors=TRUNK)


def plain(folder: Path) -> str:
    return checkpoint(folder, CONFIG | {"mtp_num_hidden_layers": 0}, TRUNK)


def moe(folder: Path) -> str:
    return checkpoint(folder, CONFIG | MOE, TRUNK | head(CONFIG | MOE))


def cut(folder: Path) -> str:
    target = checkpoint(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate((folder / "model.safetensors").stat().st_size - 1)
    return target


def incomplete(folder: Path) -> str:
    kept = {name: entry for name, entry in head().items() if "v_proj" not in name}
    return checkpoint(folder, tensors=TRUNK | kept)


def misshapen(folder: Path) -> str:
    return checkpoint(folder, tensors=TRUNK | head() | {"mtp.fc.weight": ("BF16", (64, 64))})


def in_two(**index: str) -> Make:
    shards = {"a.safetensors": TRUNK, "b.safetensors": head()}
    return lambda folder: sharded(folder, shards, **index)


def gemma(folder: Path) -> str:
    return checkpoint(folder, {"model_type": "gemma4", "architectures": ["G"]}, TRUNK)


def named(name: str) -> Make:
    return lambda folder: checkpoint(folder / name)


def gguf_file(**content: Any) -> Make:
    return lambda folder: gguf(folder / "model.gguf", **content)


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
AWQ = {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["mtp"]}
NVFP4_CONFIG = {"quantization_config": {**MODELOPT, "ignore": ["mtp*", "lm_head"]}}
LAYERS = [
    "layers__0__self_attn__q_proj", "layers__0__self_attn__k_proj", "layers__0__self_attn__v_proj",
    "layers__0__self_attn__o_proj", "layers__0__mlp__gate_proj", "layers__0__mlp__up_proj",
    "layers__0__mlp__down_proj",
]  # fmt: skip
INT4_27B = "model: qwen3.6-27b, checkpoint: int4-autoround, gpu: rtx3090, max_model_len: 32768"
PRO_6000 = "model: qwen3.6-27b, checkpoint: fp8, gpu: rtxpro6000, max_model_len: 131072"
INLINE = "id: m, gpu: h100, max_model_len: 4096"
TWO = "{a: {speculative: {method: mtp, num_speculative_tokens: 1}}, b: {}}, default_variant: a"
PIPELINE = "pipeline_parallel_size: 2, inline: {repo: lab/model, max_context: 4096}"
DRAFTS = "speculative: {method: mtp, num_speculative_tokens: 2}"

FIRES: dict[str, Case | Stack] = {
    "MTP001": Case(without("config.json")),
    "MTP002": Case(cut),
    "MTP003": Case(in_two(**{"mtp.fc.weight": "a.safetensors"})),
    "MTP004": Case(without("tokenizer.json")),
    "MTP005": Case(without("chat_template.jinja")),
    "MTP006": Stack(f"{INLINE}, inline: {{path: FOLDER/none, max_context: 4096}}"),
    "MTP010": Case(headless),
    "MTP011": Case(incomplete),
    "MTP012": Case(misshapen),
    "MTP020": Case(quantised(FP8)),
    "MTP021": Case(quantised(FP8 | {"ignored_layers": ["mtp.fc"]}, fc="F8_E4M3")),
    "MTP022": Case(quantised(FP8, fc="F8_E4M3")),
    "MTP023": Case(quantised(MODELOPT)),
    "MTP024": Case(plain, MTP),
    "MTP025": Stack(f"{INLINE}, inline: {{repo: lab/model, max_context: 4096}}"),
    "MTP026": Stack(f"{INLINE}, inline: {{repo: lab/model, max_context: 4096, mtp_head: true}}"),
    "MTP101": Case(named("my-dflash-model")),
    "MTP102": Case(arguments=MTP.replace('"mtp"', '"qwen3_5_mtp"')),
    "MTP103": Case(arguments=MTP.replace("2", "5")),
    "MTP104": Case(changed(mtp_num_hidden_layers=2), MTP.replace("2", "3")),
    "MTP105": Case(gemma, MTP),
    "MTP106": Case(changed(model_type="qwen3_5_text", rope_parameters={"mrope_section": [8, 8]})),
    "MTP107": Case(changed(linear_key_head_dim=32, linear_value_head_dim=32), gpu="cpu"),
    "MTP108": Case(
        arguments="--tool-call-parser qwen3_coder "
        '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 3}\''
    ),
    "MTP109": Case(
        arguments='--async-scheduling --speculative-config \'{"method": "mtp", '
        '"num_speculative_tokens": 2, "disable_padded_drafter_batch": true}\''
    ),
    "MTP201": Case(arguments=MTP + "--enable-prefix-caching"),
    "MTP202": Case(arguments=MTP + "--enable-prefix-caching"),
    "MTP203": Case(arguments=MTP + "--enable-prefix-caching"),
    "MTP204": Case(arguments=MTP + "--kv-cache-dtype turboquant_k8v4"),
    "MTP205": Case(arguments="--kv-cache-dtype nvfp4", gpu="rtx5090"),
    "MTP206": Case(arguments="--kv-cache-dtype fp8 --attention-backend TRITON_ATTN", gpu="rtx3090"),
    "MTP207": Case(arguments="--kv-cache-dtype fp8", gpu="rtx3090"),
    "MTP208": Case(arguments=MTP + "--kv-cache-dtype fp8"),
    "MTP209": Case(arguments='--kv-transfer-config \'{"kv_connector": "LMCacheConnector"}\''),
    "MTP210": Case(arguments="--enable-prefix-caching", gpu="cpu"),
    "MTP301": Case(arguments=MTP + "--pipeline-parallel-size 2"),
    "MTP302": Stack(
        f"{INLINE}, {PIPELINE}, env: {{VLLM_USE_V2_MODEL_RUNNER: '0'}}",
    ),
    "MTP303": Case(arguments=DYNAMIC + "--data-parallel-size 2"),
    "MTP304": Case(arguments=DYNAMIC + NO_CACHE, gpu="cpu"),
    "MTP305": Case(quantised(AWQ), MTP + "-tp 2"),
    "MTP306": Stack(
        f"{INLINE}, tensor_parallel_size: 2, inline: {{repo: lab/model, max_context: 4096}}, "
        "env: {PYTORCH_CUDA_ALLOC_CONF: 'expandable_segments:True'}"
    ),
    "MTP307": Case(arguments=MTP + NO_CACHE),
    "MTP308": Case(moe, MTP + "--tool-call-parser qwen3_coder"),
    "MTP309": Case(arguments=MTP + "--reasoning-parser qwen3"),
    "MTP310": Case(arguments=MTP + NO_CACHE, changed={"index_bounded": True}),
    "MTP401": Case(quantised(FP8, **dict.fromkeys([*LAYERS, "fc"], "F8_E4M3")), gpu="rtx3090"),
    "MTP402": Case(changed(**NVFP4_CONFIG), gpu="rtx3090"),
    "MTP403": Case(moe, MTP + "--moe-backend marlin"),
    "MTP404": Case(arguments=MTP + "--gpu-memory-utilization 0.95", gpu="rtx3090"),
    "MTP501": Case(),
    "MTP502": Case(changed(**NVFP4_CONFIG)),
    "MTP503": Case(changed(**NVFP4_CONFIG), gpu="rtx5090"),
    "MTP504": Case(gemma, MTP),
    "MTP601": Stack(f"{PRO_6000}, max_num_seqs: 1024"),
    "MTP602": Stack(INT4_27B.replace("int4-autoround", "bf16")),
    "MTP603": Stack(INT4_27B.replace("32768", "262144")),
    "MTP604": Stack(f"{INT4_27B}, max_num_seqs: 16"),
    "MTP605": Stack(INT4_27B, TWO),
    "MTP606": Stack(INT4_27B, TWO, Machine(cards=1)),
    "MTP607": Stack("model: tiny-moe, gpu: cpu", TWO, Machine(memory=2 * 1024**3)),
    "MTP701": Case(gguf_file(layers=1, nextn=True), "--spec-type mtp"),
    "MTP702": Case(gguf_file(layers=1, nextn=True), "--spec-type draft-mtp"),
    "MTP703": Case(gguf_file(), "--spec-type draft-mtp"),
    "MTP704": Case(gguf_file()),
    "MTP705": Case(gguf_file(layers=1)),
    "MTP706": Case(gguf_file(layers=1, nextn=True), "--spec-type draft-mtp -np 4"),
}

GOOD = Case(arguments=MTP + NO_CACHE + "--no-async-scheduling")
GOOD_GGUF = Case(gguf_file(layers=1, nextn=True), "--spec-type draft-mtp --parallel 3")
GOOD_STACK = Stack(f"{INT4_27B}, max_num_seqs: 1, mamba_ssm_cache_dtype: float16")

# The nearest target that is all right.
QUIET: dict[str, Case | Stack] = {
    **dict.fromkeys(FIRES, GOOD),
    "MTP003": Case(in_two()),
    "MTP006": Stack(f"{INLINE}, inline: {{repo: lab/model, max_context: 4096}}"),
    "MTP020": Case(
        quantised(
            FP8
            | {
                "ignored_layers": sorted(
                    f"mtp.{name.replace('__', '.')}" for name in [*LAYERS, "fc"]
                )
            }
        )
    ),
    "MTP021": Case(quantised(FP8 | {"ignored_layers": ["mtp.fc"]})),
    "MTP022": Case(quantised(FP8 | {"ignored_layers": ["mtp.fc"]})),
    "MTP023": Case(quantised(MODELOPT | {"ignore": ["mtp.fc"]})),
    "MTP025": Stack(f"{INLINE}, inline: {{repo: lab/model, max_context: 4096, mtp_head: true}}"),
    "MTP026": Stack(f"{INLINE}, inline: {{repo: lab/model, max_context: 4096}}"),
    "MTP101": Case(named("my-model")),
    "MTP103": Case(arguments=MTP.replace("2", "4")),
    "MTP104": Case(changed(mtp_num_hidden_layers=2), MTP.replace("2", "4")),
    "MTP105": Case(gemma, MTP.replace("}", ', "model": "google/gemma-4-31B-it-assistant"}')),
    "MTP106": Case(changed(rope_parameters={"mrope_section": [8, 8]})),
    "MTP107": Case(gpu="cpu"),
    "MTP108": Case(
        arguments="--tool-call-parser qwen3_coder --speculative-config "
        '\'{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 8}\''
    ),
    "MTP204": Case(arguments="--kv-cache-dtype turboquant_k8v4"),
    "MTP205": Case(arguments="--kv-cache-dtype nvfp4", gpu="b200"),
    "MTP206": Case(arguments="--kv-cache-dtype fp8 --attention-backend TRITON_ATTN", gpu="rtx4090"),
    "MTP207": Case(arguments="--kv-cache-dtype fp8", gpu="rtx4090"),
    "MTP209": Case(changed(layer_types=["full_attention"] * 4), FIRES["MTP209"].arguments),  # type: ignore[union-attr]
    "MTP210": Case(arguments=NO_CACHE, gpu="cpu"),
    "MTP302": Stack(f"{INLINE}, {PIPELINE}"),
    "MTP303": Case(arguments=MTP + "--data-parallel-size 2"),
    "MTP304": Case(arguments=MTP + NO_CACHE, gpu="cpu"),
    "MTP305": Case(quantised(AWQ), MTP + "-tp 1"),
    "MTP306": Stack(
        f"{INLINE}, tensor_parallel_size: 2, inline: {{repo: lab/model, max_context: 4096}}, "
        "env: {PYTORCH_CUDA_ALLOC_CONF: 'expandable_segments:False'}"
    ),
    "MTP307": Case(arguments=MTP + NO_CACHE, changed={"index_bounded": True}),
    "MTP308": Case(moe, MTP),
    "MTP310": Case(arguments=MTP + NO_CACHE, changed={"index_bounded": False}),
    "MTP401": Case(FIRES["MTP401"].make, gpu="h100"),  # type: ignore[union-attr]
    "MTP402": Case(changed(**NVFP4_CONFIG), gpu="rtx5090"),
    "MTP403": Case(moe, MTP.replace("}", ', "moe_backend": "triton"}') + "--moe-backend marlin"),
    "MTP404": Case(arguments=MTP + "--gpu-memory-utilization 0.93", gpu="rtx3090"),
    "MTP501": Case(gemma),
    "MTP502": Case(),
    "MTP503": Case(changed(**NVFP4_CONFIG), gpu="h100"),
    "MTP504": Case(gemma),
    "MTP601": Stack(f"{PRO_6000}, max_num_seqs: 8"),
    "MTP602": GOOD_STACK,
    "MTP603": GOOD_STACK,
    "MTP604": GOOD_STACK,
    "MTP605": GOOD_STACK,
    "MTP606": Stack(INT4_27B, TWO, Machine(cards=2)),
    "MTP607": Stack("model: tiny-moe, gpu: cpu", TWO, Machine(memory=8 * 1024**3)),
    "MTP701": GOOD_GGUF,
    "MTP702": Case(gguf_file(layers=1, nextn=True), "--spec-type ngram-mod"),
    "MTP703": GOOD_GGUF,
    "MTP704": Case(gguf_file(layers=1, nextn=True)),
    "MTP705": GOOD_GGUF,
    "MTP706": GOOD_GGUF,
}
