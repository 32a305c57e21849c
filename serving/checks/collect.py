"""From a target to facts: a checkpoint's, or those of each engine of a stack.

Owns finding the place a target names and which repositories are asked. Leaves
reading headers to `checkpoint`, and the defaults of a stack to `stack.engine_plan`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from serving import catalog
from serving.catalog.gpus import GpuClass
from serving.catalog.models import Architecture, ModelEntry
from serving.checks.checkpoint import CONFIG, Checkpoint, read_checkpoint, read_gguf
from serving.checks.errors import CheckError
from serving.checks.facts import Facts
from serving.checks.installed import installed_index_bounded
from serving.checks.precision import measured_precision
from serving.checks.source import CheckpointSource, LocalFolder
from serving.checks.versions import Known
from serving.planner.precision import Precision, precision_of
from serving.stack.engine_plan import EnginePlan, plan_engines
from serving.stack.spec import InlineModel, ModelSpec, StackSpec

GGUF = ".gguf"
# owner/name, and for GGUF the file within it.
_REPOSITORY = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:/([\w./-]+\.gguf))?", re.ASCII)
_SHOWN_FILES = 5


def read_target(target: str, revision: str | None = None) -> Checkpoint:
    """The checkpoint that a folder, a GGUF file or a repository id names.

    Raises CheckError where there is none, or it cannot be read.
    """
    path = Path(target)
    if path.is_file() and path.suffix == GGUF:
        return read_gguf(LocalFolder(path.parent, name=target), path.name)
    if path.is_dir():
        return _read(LocalFolder(path, name=target))
    repository = _REPOSITORY.fullmatch(target)
    if repository is None or path.exists():
        raise CheckError(
            f"{target}: no such folder, GGUF file or stack, nor a repository's name (owner/name); "
            "correct it",
            code="no-target",
        )
    from serving.checks.hub import open_repository

    repo, file = repository.groups()
    source = open_repository(repo, revision)
    if file is None:
        return _read(source)
    if file not in source.sizes:
        raise CheckError(f"{repo}: holds no {file}; correct the name", code="missing")
    return read_gguf(source, file)


def _read(source: CheckpointSource) -> Checkpoint:
    files = sorted(name for name in source.sizes if name.endswith(GGUF))
    if files and not any(name.endswith(".safetensors") for name in source.sizes):
        some = ", ".join(files[:_SHOWN_FILES]) + (", …" if len(files) > _SHOWN_FILES else "")
        text = f"holds {len(files)} GGUF files; name one of them, {source.place}/…: {some}"
        raise CheckError(f"{source.place}: {text}", code="which-file")
    return read_checkpoint(source)


def checkpoint_facts(
    target: str,
    checkpoint: Checkpoint,
    known: Known,
    gpu: GpuClass | None = None,
    args: Mapping[str, Any] | None = None,
) -> Facts:
    """The facts of a checkpoint alone, or with an engine's command line."""
    architecture = checkpoint.config.architecture()
    return Facts(
        subject=target,
        engine=known.engine,
        version=known.version,
        place=checkpoint.place,
        checkpoint=checkpoint,
        model_type=checkpoint.config.model_type,
        architecture=architecture,
        precision=measured_precision(checkpoint, architecture),
        quantisation="gguf" if checkpoint.gguf else checkpoint.quantisation.format,
        method=checkpoint.quantisation.method,
        args=args or {},
        gpu=gpu,
        index_bounded=_index_bounded(known),
    )


def stack_facts(stack: StackSpec, known: Known, *, online: bool) -> tuple[Facts, ...]:
    """The facts of each engine of a stack, in the file's order.

    A repository is read from huggingface_hub's cache where all of it is there, and
    with `online` from the hub; else the catalogue has to do.
    """
    plans = iter(plan_engines(stack))
    found: list[Facts] = []
    for model in stack.models:
        source = model.checked_source()
        checkpoint, unreadable = _checkpoint_of(source, online=online)
        for _ in model.variants:
            facts = _engine_facts(model, source, next(plans), checkpoint, known)
            found.append(replace(facts, unreadable=unreadable))
    return tuple(found)


def _engine_facts(
    model: ModelSpec,
    source: InlineModel,
    plan: EnginePlan,
    checkpoint: Checkpoint | None,
    known: Known,
) -> Facts:
    entry = None if model.model is None else catalog.find_model(model.model)
    architecture = checkpoint.config.architecture() if checkpoint else None
    if architecture is None and entry is not None:
        architecture = entry.architecture
    model_type = checkpoint.config.model_type if checkpoint else ""
    autoscaling = plan.autoscaling
    return Facts(
        subject=f"{plan.model_id}@{plan.variant}",
        engine=known.engine,
        version=known.version,
        place=plan.source,
        checkpoint=checkpoint,
        model_type=model_type or (entry.model_type if entry else ""),
        architecture=architecture,
        precision=_precision(model, entry, checkpoint, architecture),
        quantisation=checkpoint.quantisation.format if checkpoint else source.quantisation or "",
        method=checkpoint.quantisation.method if checkpoint else "",
        claimed_head=source.mtp_head,
        args=plan.vllm_args | plan.frontend_args,
        env=plan.env,
        gpu=catalog.find_gpu(plan.gpu),
        # One that may sleep still needs its card when it is woken.
        replicas=max(1, autoscaling.min_replicas) if autoscaling else plan.replicas or 1,
        index_bounded=_index_bounded(known),
    )


def _index_bounded(known: Known) -> bool | None:
    return installed_index_bounded() if known.how == "installed" else None


def _precision(
    model: ModelSpec,
    entry: ModelEntry | None,
    checkpoint: Checkpoint | None,
    architecture: Architecture | None,
) -> Precision | None:
    """Measured where the headers were read, else the layout the catalogue's size speaks for."""
    measured = measured_precision(checkpoint, architecture)
    if measured is not None or entry is None:
        return measured
    return precision_of(entry, model.checkpoint or next(iter(entry.checkpoints)))


def _checkpoint_of(source: InlineModel, *, online: bool) -> tuple[Checkpoint | None, str]:
    """The checkpoint where it can be read without asking too much, and why it cannot be."""
    try:
        if source.path is not None:
            if not source.path.is_dir():
                raise CheckError(f"{source.path}: no such folder")
            return read_checkpoint(LocalFolder(source.path)), ""
        return _repository(str(source.repo), source.revision, online=online), ""
    except CheckError as error:
        return None, str(error)


def _repository(repo: str, revision: str | None, *, online: bool) -> Checkpoint | None:
    from serving.checks.hub import cached_repository, open_repository

    cached = cached_repository(repo, revision)
    # A cache may hold a part only, such as the tokenizer's files; vLLM fetches the rest.
    if cached is not None and CONFIG in cached.sizes:
        weights = any(name.endswith(".safetensors") for name in cached.sizes)
        checkpoint = read_checkpoint(cached)
        if weights and not checkpoint.missing_files:
            return replace(checkpoint, all_files=False)
    return read_checkpoint(open_repository(repo, revision)) if online else None
