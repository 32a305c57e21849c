"""Findings and rules as a table on the terminal, and as JSON.

Owns their layout. Leaves the words to the rules.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from serving.checks.finding import Finding, Rule, Severity
from serving.checks.run import Report

_STYLES = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}
_THREAD = re.compile(r"([\w.-]+/[\w.-]+)#(\d+)", re.ASCII)


def as_table(report: Report) -> RenderableType:
    """The findings, most severe first, then what the version has settled, then the sum."""
    parts: list[RenderableType] = [Text(f"{report.target}: {report.known}")]
    if report.findings:
        parts.append(_findings_table(report))
    parts += [_settled(finding) for finding in report.fixed]
    parts.append(Text(summary(report)))
    return Group(*parts)


def summary(report: Report) -> str:
    """How many of each severity."""
    counts = {
        severity: sum(each.rule.severity is severity for each in report.findings)
        for severity in sorted(Severity, reverse=True)
    }
    found = [
        f"{count} {severity}{'s' * (count > 1)}" for severity, count in counts.items() if count
    ]
    return ", ".join(found) or "nothing found"


def _findings_table(report: Report) -> Table:
    table = Table(box=box.HORIZONTALS, show_lines=True, expand=False)
    table.add_column("")
    table.add_column("found", ratio=2, overflow="fold")
    table.add_column("what it does", ratio=3, overflow="fold")
    for finding in report.findings:
        rule = finding.rule
        about = "" if finding.subject == report.target else f"{finding.subject}: "
        style = _STYLES[rule.severity]
        found = Text.assemble((rule.title, "bold"), f"\n{about}{finding.found}")
        effect = Text.assemble(
            f"{rule.effect}\n", ("→ ", "green"), f"{rule.cure}\n", (source(rule), "dim")
        )
        table.add_row(Text(f"{rule.severity}\n{rule.code}", style), found, effect)
    return table


def source(rule: Rule) -> str:
    """Versions, state and thread in one line."""
    return f"{rule.versions}, {rule.state}; {rule.thread}"


def _settled(finding: Finding) -> Text:
    rule = finding.rule
    return Text(f"{rule.code} {rule.title}: {rule.state} ({rule.thread})", "dim")


def as_json(report: Report) -> dict[str, Any]:
    """The report for programs; `links` are the addresses of GitHub's threads."""
    return {
        "target": report.target,
        "engine": report.known.engine,
        "version": str(report.known.version),
        "version_is": report.known.how,
        "worst": None if report.worst is None else str(report.worst),
        "findings": [_finding(each) for each in report.findings],
        "fixed": [_finding(each) for each in report.fixed],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {"subject": finding.subject, "found": finding.found, **rule_as_json(finding.rule)}


def rule_as_json(rule: Rule) -> dict[str, Any]:
    """One rule for programs."""
    return {
        "code": rule.code,
        "severity": str(rule.severity),
        "title": rule.title,
        "effect": rule.effect,
        "cure": rule.cure,
        "versions": str(rule.versions),
        "state": rule.state,
        "thread": rule.thread,
        "links": links(rule.thread),
    }


def links(thread: str) -> list[str]:
    """The address of each `owner/repository#number`."""
    return [
        f"https://github.com/{repo}/issues/{number}" for repo, number in _THREAD.findall(thread)
    ]


def rules_table(rules: Sequence[Rule]) -> Table:
    """Every rule; on a wide terminal the text is a Markdown table."""
    table = Table(box=box.MARKDOWN, expand=False)
    for heading in ("code", "severity", "rule", "versions", "state", "thread"):
        table.add_column(heading, overflow="fold")
    for rule in rules:
        cells = (
            rule.code,
            str(rule.severity),
            rule.title,
            str(rule.versions),
            rule.state,
            rule.thread,
        )
        table.add_row(*(Text(cell) for cell in cells))
    return table
