"""Train a demo model from nothing: `python -m serving.demo.train tiny-moe`.

Owns the two geometries, the loss and the loop. A run is decided by its seed and
token budget; it writes its state to the work folder every few minutes and goes
on from there when started again. The finished checkpoint has the layout of a
published one, `mtp.*` tensors included.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

from serving.demo import NAMES, checkpoint_path, corpus
from serving.demo.mtp_head import MtpHead

# Head sizes of 64 are the smallest that vLLM's CPU kernels take. `mrope_section`
# must stay out of a text-only config: the drafter would get three positions per token.
COMMON: dict[str, Any] = {
    "vocab_size": corpus.VOCAB_SIZE,
    "head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 8192,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
    "tie_word_embeddings": False,
    "mtp_num_hidden_layers": 1,
    "mamba_ssm_dtype": "float32",
    "full_attention_interval": 4,
}
# Many narrow layers, as in the large models: a draft, which is one layer, costs
# little beside the trunk. With four layers a step is mostly fixed cost and
# drafting gains next to nothing.
MOE: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
DENSE: dict[str, Any] = {
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "intermediate_size": 768,
}


def build_model(name: str) -> PreTrainedModel:
    """A fresh, randomly initialised model of the named geometry, in float32."""
    if name == "tiny-moe":
        return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**COMMON, **MOE))
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**COMMON, **DENSE))


def training_loss(
    model: PreTrainedModel, head: MtpHead, batch: Tensor, steps: int, mtp_weight: float
) -> tuple[Tensor, dict[str, float]]:
    """Next-token loss plus the head's distance from the trunk's own predictions.

    `batch` is [sequences, length]. What is accepted at serving time is what the
    trunk would have said, so the head learns the trunk's distribution (KL) and
    not the text's next token.
    """
    is_moe = hasattr(model.config, "num_experts")
    outputs = model.model(
        input_ids=batch,
        use_cache=False,
        **({"output_router_logits": True} if is_moe else {}),
    )
    hidden = outputs.last_hidden_state
    logits = model.lm_head(hidden)
    vocabulary = logits.shape[-1]
    text_loss = F.cross_entropy(logits[:, :-1].reshape(-1, vocabulary), batch[:, 1:].reshape(-1))
    trunk_log_probs = F.log_softmax(logits.detach(), dim=-1)
    losses: list[Tensor] = []
    agreement: list[float] = []
    for step, drafted in enumerate(head(model, batch, hidden, steps)):
        draft_log_probs = F.log_softmax(model.lm_head(drafted), dim=-1)
        target = trunk_log_probs[:, step + 1 :]
        losses.append(
            F.kl_div(
                draft_log_probs.reshape(-1, vocabulary),
                target.reshape(-1, vocabulary),
                reduction="batchmean",
                log_target=True,
            )
        )
        agreement.append((draft_log_probs.argmax(-1) == target.argmax(-1)).float().mean().item())
    loss = text_loss + mtp_weight * torch.stack(losses).mean()
    if is_moe:
        loss = loss + 0.01 * balance_loss(outputs.router_logits, model.config)
    return loss, {"text": text_loss.item(), "mtp": losses[0].item(), "agree": agreement[0]}


def balance_loss(router_logits: tuple[Tensor, ...], config: Any) -> Tensor:
    """Switch Transformer's load-balancing loss (arXiv 2101.03961, eq. 4), averaged over layers."""
    terms = []
    for logits in router_logits:
        probabilities = logits.float().softmax(-1).reshape(-1, config.num_experts)
        chosen = probabilities.topk(config.num_experts_per_tok, dim=-1).indices
        share = F.one_hot(chosen, config.num_experts).float().sum(1).mean(0)
        terms.append(config.num_experts * (share * probabilities.mean(0)).sum())
    return torch.stack(terms).mean()


def learning_rate(step: int, total: int, peak: float) -> float:
    """Linear warm-up over 2 % of the run, then a cosine to a twentieth of `peak`."""
    warm_up = max(1, total // 50)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, total - warm_up)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def tokenized_corpus(seed: int, work_dir: Path) -> Tensor:
    """The training tokens as one vector, documents joined by the end-of-text token."""
    cached = work_dir / "tokens.pt"
    if cached.exists():
        return torch.load(cached)
    tokenizer = corpus.train_tokenizer()
    tokenizer.save_pretrained(work_dir / "tokenizer")
    end = tokenizer.convert_tokens_to_ids(corpus.END_OF_TEXT)
    ids: list[int] = []
    for document in tokenizer(corpus.training_documents(seed), verbose=False)["input_ids"]:
        ids.extend([*document, end])
    tokens = torch.tensor(ids, dtype=torch.int64)
    torch.save(tokens, cached)
    return tokens


def batch_at(tokens: Tensor, step: int, seed: int, sequences: int, length: int) -> Tensor:
    """The batch of one step: random windows, the same for a resumed run as for an unbroken one."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(0, len(tokens) - length, (sequences,), generator=generator)
    return torch.stack([tokens[start : start + length] for start in starts.tolist()])


def export_checkpoint(
    model: PreTrainedModel, head: MtpHead, work_dir: Path, target: Path, record: dict[str, Any]
) -> None:
    """Write config, tokenizer and bf16 weights (trunk and `mtp.*`) as vLLM reads them."""
    target.mkdir(parents=True, exist_ok=True)
    state = dict(model.state_dict())
    state.update({f"mtp.{name}": value for name, value in head.state_dict().items()})
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        tensors.update(per_expert(name, value))
    save_file(
        {name: value.to(torch.bfloat16).contiguous() for name, value in tensors.items()},
        target / "model.safetensors",
        metadata={"format": "pt"},
    )
    tokenizer_dir = work_dir / "tokenizer"
    for path in tokenizer_dir.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    tokenizer_ids = {
        token: json.loads((tokenizer_dir / "tokenizer.json").read_text())["model"]["vocab"][token]
        for token in corpus.SPECIAL_TOKENS
    }
    config = model.config.to_dict()
    config.update(
        architectures=[type(model).__name__],
        dtype="bfloat16",
        eos_token_id=tokenizer_ids[corpus.TURN_END],
        pad_token_id=tokenizer_ids[corpus.END_OF_TEXT],
        bos_token_id=None,
    )
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    generation = {
        "eos_token_id": [tokenizer_ids[corpus.TURN_END], tokenizer_ids[corpus.END_OF_TEXT]],
        "pad_token_id": tokenizer_ids[corpus.END_OF_TEXT],
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.95,
    }
    (target / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    (target / "training.json").write_text(json.dumps(record, indent=2) + "\n")


def per_expert(name: str, value: Tensor) -> dict[str, Tensor]:
    """Split fused expert tensors ([experts, …]) into published checkpoints' per-expert names."""
    if name.endswith("mlp.experts.gate_up_proj"):
        base = name.removesuffix("gate_up_proj")
        result = {}
        for index, fused in enumerate(value):
            gate, up = fused.chunk(2, dim=0)
            result[f"{base}{index}.gate_proj.weight"] = gate
            result[f"{base}{index}.up_proj.weight"] = up
        return result
    if name.endswith("mlp.experts.down_proj"):
        base = name.removesuffix("down_proj")
        return {f"{base}{index}.down_proj.weight": down for index, down in enumerate(value)}
    return {name: value}


class Run:
    """One training: weights, optimizer and how far it got, kept in `work_dir` between starts."""

    def __init__(self, options: argparse.Namespace, work_dir: Path) -> None:
        self.model = build_model(options.model)
        for layer in self.model.model.layers:
            layer.compile()
        self.head = MtpHead(self.model)
        self.parameters = [*self.model.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self.parameters if p.ndim >= 2], "weight_decay": 0.1},
                {"params": [p for p in self.parameters if p.ndim < 2], "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
            fused=True,
        )
        self.step = 0
        self.figures: dict[str, float] = {}
        self._options = options
        self._file = work_dir / "state.pt"
        self._seconds_before = 0.0
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Training time so far, earlier starts included."""
        return self._seconds_before + time.monotonic() - self._began

    def load(self) -> None:
        """Take up where an earlier start saved; nothing where there is none."""
        if not self._file.exists():
            return
        state = torch.load(self._file, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self._seconds_before = state["step"], state["seconds"]
        self.figures = state["figures"]

    def save(self) -> None:
        """Write the state; a cut-off write leaves the one before in place."""
        partial = self._file.with_suffix(".partial")
        state = {
            "model": self.model.state_dict(),
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "figures": self.figures,
        }
        torch.save(state, partial)
        os.replace(partial, self._file)

    def advance(self, tokens: Tensor, total: int) -> None:
        """Train one step of `total`."""
        options = self._options
        drafts = 1 if self.step < options.recursive_from * total else options.mtp_steps
        batch = batch_at(tokens, self.step, options.seed, options.sequences, options.length)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, total, options.learning_rate)
        with torch.autocast("cpu", torch.bfloat16):
            loss, self.figures = training_loss(
                self.model, self.head, batch, drafts, options.mtp_weight
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.step += 1


def train(options: argparse.Namespace) -> None:
    """Run or resume one training and export its checkpoint."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    work_dir: Path = options.work_dir / options.model
    work_dir.mkdir(parents=True, exist_ok=True)
    tokens = tokenized_corpus(options.seed, work_dir)
    run = Run(options, work_dir)
    run.load()
    total = options.tokens // (options.sequences * options.length)
    last_saved = time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress, (work_dir / "log.jsonl").open("a", buffering=1) as log:
        task = progress.add_task(options.model, total=total, completed=run.step)
        while run.step < total:
            run.advance(tokens, total)
            shown = " ".join(f"{name} {value:.3f}" for name, value in run.figures.items())
            progress.update(task, advance=1, description=f"{options.model} {shown}")
            if run.step % 50 == 0:
                entry = {"step": run.step, "seconds": run.seconds, **run.figures}
                log.write(json.dumps(entry) + "\n")
            if time.monotonic() - last_saved > options.save_every:
                run.save()
                last_saved = time.monotonic()
    run.save()
    record = {
        "model": options.model,
        "seed": options.seed,
        "tokens": options.tokens,
        "corpus_tokens": len(tokens),
        "parameters": sum(p.numel() for p in run.parameters),
        "minutes": round(run.seconds / 60, 1),
        "threads": options.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "last_losses": run.figures,
    }
    target = options.out or checkpoint_path(options.model)
    export_checkpoint(run.model, run.head, work_dir, target, record)


def main() -> None:
    """The command line of the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", choices=NAMES)
    parser.add_argument("--tokens", type=int, default=9_000_000, help="training tokens in all")
    parser.add_argument("--sequences", type=int, default=8, help="sequences in a batch")
    parser.add_argument("--length", type=int, default=384, help="tokens in a sequence")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak of the schedule")
    parser.add_argument("--mtp-weight", type=float, default=0.5, help="weight of the head's loss")
    parser.add_argument("--mtp-steps", type=int, default=3, help="recursive drafts trained")
    parser.add_argument(
        "--recursive-from", type=float, default=0.6, help="share of the run with one draft only"
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--save-every", type=float, default=180, help="seconds between states")
    parser.add_argument("--work-dir", type=Path, default=Path("build/demo-training"))
    parser.add_argument("--out", type=Path, help="checkpoint folder (default: the shipped one)")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
