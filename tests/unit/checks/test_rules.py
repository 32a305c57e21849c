"""Every rule, on a target that triggers it and on one that does not, at versions on both sides."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.version import Version

from serving.checks.facts import Machine
from serving.checks.finding import Finding, Rule
from serving.checks.rules import RULES
from serving.checks.run import ask
from serving.checks.versions import PINNED, Range
from tests.unit.checks.cases import FIRES, QUIET, Case, Stack

BY_CODE = {rule.code: rule for rule in RULES}
RANGED = [rule.code for rule in RULES if rule.versions.since or rule.versions.before]


def inside(versions: Range) -> Version:
    """A version the rule is about: the pinned one where it is, else the last before the fix."""
    pinned = PINNED[versions.engine or "vllm"]
    if versions.includes(pinned):
        return pinned
    assert versions.before is not None
    return just_before(versions.before, versions)


def just_before(end: Version, versions: Range) -> Version:
    if versions.engine == "llama.cpp":
        return Version(str(int(str(end)) - 1))
    return Version(f"{end}.dev0")


def found(rule: Rule, case: Case | Stack, folder: Path, version: Version) -> list[Finding]:
    engines = case.facts(folder / "target", version)
    if rule.whole_stack:
        machine = case.machine if isinstance(case, Stack) else Machine()
        return [Finding(rule, "lab", text) for text in rule.look(engines, machine)]
    answers = [each for facts in engines for each in ask(facts)]
    return [finding for finding, applies in answers if applies and finding.rule is rule]


def test_every_rule_has_a_target_that_triggers_it_and_one_that_does_not() -> None:
    assert set(FIRES) == set(QUIET) == set(BY_CODE)


def test_no_code_is_used_twice() -> None:
    assert len(BY_CODE) == len(RULES)


@pytest.mark.parametrize("code", BY_CODE)
def test_a_rule_fires_on_its_target(code: str, tmp_path: Path) -> None:
    rule = BY_CODE[code]
    assert found(rule, FIRES[code], tmp_path, inside(rule.versions))


@pytest.mark.parametrize("code", BY_CODE)
def test_a_rule_is_quiet_on_what_is_all_right(code: str, tmp_path: Path) -> None:
    rule = BY_CODE[code]
    assert found(rule, QUIET[code], tmp_path, inside(rule.versions)) == []


@pytest.mark.parametrize("code", RANGED)
def test_a_rule_fires_within_its_versions_only(code: str, tmp_path: Path) -> None:
    rule = BY_CODE[code]
    versions = rule.versions
    sides = []
    if versions.since is not None:
        sides += [(versions.since, True), (just_before(versions.since, versions), False)]
    if versions.before is not None:
        sides += [(versions.before, False), (just_before(versions.before, versions), True)]
    fired = [
        bool(found(rule, FIRES[code], tmp_path / str(version), version)) for version, _ in sides
    ]
    assert fired == [expected for _, expected in sides]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_a_rule_tells_what_happens_and_what_helps(rule: Rule) -> None:
    assert rule.effect.endswith(".")
    assert rule.cure.endswith(".")
    assert rule.thread
    assert rule.look.__doc__
