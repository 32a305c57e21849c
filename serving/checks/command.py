"""`moe-serving check`.

Owns its options and exit status: 0, 1 for warnings with --strict, 2 for errors.
Leaves the check to `run` and the layout to `report`.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from serving.catalog.errors import CatalogError
from serving.checks.finding import Severity
from serving.console import console, fail


def check(
    target: Annotated[
        str | None,
        typer.Argument(help="a stack, a checkpoint's folder, a GGUF file, or a repository id"),
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="after --: the engine's own options, for a checkpoint"),
    ] = None,
    list_rules: Annotated[
        bool, typer.Option("--list-rules", help="print what is looked for, and end")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="exit with 1 on warnings")] = False,
    vllm_version: Annotated[
        str | None, typer.Option(help="the engine's version; the installed one's")
    ] = None,
    llamacpp_build: Annotated[str | None, typer.Option(help="such as b9180")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="GPU class of the catalogue, for a checkpoint")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="of a repository")] = None,
    cards: Annotated[
        int | None, typer.Option(min=0, help="how many GPUs there are, for a stack")
    ] = None,
    online: Annotated[
        bool, typer.Option("--online", help="for a stack: look into repositories not fetched yet")
    ] = False,
) -> None:
    """Say what would go wrong, before anything is started; needs no GPU and no engine."""
    from serving.checks.report import as_json as report_as_json
    from serving.checks.report import as_table, rule_as_json, rules_table
    from serving.checks.rules import RULES
    from serving.checks.run import check as run_check

    if list_rules:
        if as_json:
            print(json.dumps([rule_as_json(rule) for rule in RULES], indent=2))
        else:
            console.print(rules_table(RULES))
        return
    if target is None:
        fail("give a stack, a checkpoint's folder, a GGUF file or a repository id")
    try:
        report = run_check(
            target,
            vllm_version=vllm_version,
            llamacpp_build=llamacpp_build,
            gpu=gpu,
            revision=revision,
            cards=cards,
            online=online,
            arguments=arguments or (),
        )
    except CatalogError as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    if as_json:
        print(json.dumps(report_as_json(report), indent=2))
    else:
        console.print(as_table(report))
    sys.exit(exit_status(report.worst, strict=strict))


def exit_status(worst: Severity | None, *, strict: bool) -> int:
    """2 for errors, 1 for warnings where they count, else 0."""
    if worst is Severity.ERROR:
        return 2
    return 1 if strict and worst is Severity.WARNING else 0
