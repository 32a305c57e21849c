"""Asking the rules about a target.

Owns which rules are asked, and what is told of those that a newer version has
settled. Leaves collecting facts to `collect`, printing to `report`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from serving import catalog
from serving.checks.arguments import parse_arguments
from serving.checks.collect import GGUF, checkpoint_facts, read_target, stack_facts
from serving.checks.errors import CheckError
from serving.checks.facts import Facts, Machine
from serving.checks.finding import OPEN, Finding, Rule, Severity
from serving.checks.rules import RULES
from serving.checks.versions import EngineName, Known, known_version
from serving.stack.load import load_stack, shipped_stacks
from serving.stack.spec import StackSpec


@dataclass(frozen=True, slots=True)
class Report:
    """What a check found, and the version it went by."""

    target: str
    known: Known
    findings: tuple[Finding, ...]
    """Most severe first."""
    fixed: tuple[Finding, ...]
    """What would have been found in an older version, and no longer is."""

    @property
    def worst(self) -> Severity | None:
        """The worst severity found; None where nothing was."""
        return max((finding.rule.severity for finding in self.findings), default=None)


def check(
    target: str,
    *,
    vllm_version: str | None = None,
    llamacpp_build: str | None = None,
    gpu: str | None = None,
    revision: str | None = None,
    cards: int | None = None,
    online: bool = False,
    arguments: Sequence[str] = (),
) -> Report:
    """The report on a stack file, a checkpoint's folder, a GGUF file or a repository.

    `arguments` is the engine's command line for a checkpoint; a stack file has its
    own, as it has its GPU classes. Raises CatalogError, of which CheckError and
    ConfigError are kinds, where the target or an option cannot be read.
    """
    if _is_stack(target):
        if arguments or gpu or revision:
            text = "a stack file says what its engines are given; change the file"
            raise CheckError(f"--gpu, --revision and engine arguments: {text}", code="arguments")
        known = known_version("vllm", vllm_version)
        return check_stack(load_stack(target), known, target=target, cards=cards, online=online)
    engine: EngineName = "llama.cpp" if target.endswith(GGUF) else "vllm"
    known = known_version(engine, llamacpp_build if engine == "llama.cpp" else vllm_version)
    facts = checkpoint_facts(
        target,
        read_target(target, revision),
        known,
        None if gpu is None else catalog.find_gpu(gpu),
        parse_arguments(engine, arguments),
    )
    return _report(target, known, list(ask(facts)))


def check_stack(
    stack: StackSpec,
    known: Known,
    *,
    target: str | None = None,
    cards: int | None = None,
    online: bool = False,
) -> Report:
    """The report on each engine of a stack, and on all of them together.

    `cards` is how many GPUs there are, where that is known.
    """
    engines = stack_facts(stack, known, online=online)
    machine = Machine(cards=cards, memory=psutil.virtual_memory().total)
    found = [each for facts in engines for each in ask(facts)]
    for rule in (each for each in RULES if each.whole_stack):
        found += [(Finding(rule, stack.name, text), True) for text in rule.look(engines, machine)]
    return _report(target or stack.name, known, _once(found))


def refuse(stack: StackSpec) -> list[Finding]:
    """The errors of a stack, for `up`: nothing is asked over the network."""
    report = check_stack(stack, known_version("vllm"))
    return [each for each in report.findings if each.rule.severity is Severity.ERROR]


def _is_stack(target: str) -> bool:
    named = target in shipped_stacks() and not Path(target).is_dir()
    return named or Path(target).suffix in (".yaml", ".yml")


def ask(facts: Facts) -> Iterator[tuple[Finding, bool]]:
    """Each finding, and whether it holds for the version at hand."""
    for rule in RULES:
        applies = _applies(rule, facts)
        if rule.whole_stack or not (applies or _settled(rule, facts)):
            continue
        for text in rule.look(facts):
            yield Finding(rule, facts.subject, text), applies


def _applies(rule: Rule, facts: Facts) -> bool:
    engine = rule.versions.engine
    return engine is None or (engine == facts.engine and rule.versions.includes(facts.version))


def _settled(rule: Rule, facts: Facts) -> bool:
    """Whether a version before the one at hand was concerned, and this one no longer is."""
    before = rule.versions.before
    if rule.status != OPEN or before is None or rule.versions.engine != facts.engine:
        return False
    return facts.version >= before


def _once(found: list[tuple[Finding, bool]]) -> list[tuple[Finding, bool]]:
    """What is said of the checkpoint alone is said once, for all variants that share it."""
    merged: dict[tuple[str, str], tuple[Finding, bool]] = {}
    for finding, applies in found:
        key = (finding.rule.code, finding.found)
        earlier = merged.get(key)
        if earlier is not None:
            subject = f"{earlier[0].subject}, {finding.subject}"
            finding = Finding(finding.rule, subject, finding.found)
        merged[key] = (finding, applies)
    return list(merged.values())


def _report(target: str, known: Known, found: list[tuple[Finding, bool]]) -> Report:
    ordered = sorted(found, key=lambda each: each[0].order)
    findings, fixed = (
        tuple(finding for finding, applies in ordered if applies is wanted)
        for wanted in (True, False)
    )
    return Report(target, known, findings, fixed)
