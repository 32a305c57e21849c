"""docs/router.md has the settings, the words and the example as they are."""

from __future__ import annotations

import json
import re
from pathlib import Path

from typer.testing import CliRunner

from serving.router.rules import WORDS
from serving.router.settings import RoutingSpec
from serving.stack.route_command import route_app

DOCS = (Path(__file__).parents[3] / "docs" / "router.md").read_text(encoding="utf-8")


def table(head: str) -> dict[str, str]:
    """The first column of the table under this head, without backticks, and the last."""
    rows = DOCS.split(head)[1].split("\n\n")[0].splitlines()[2:]
    cells = [row.strip("| ").split(" | ") for row in rows]
    return {row[0].strip("`"): row[-1] for row in cells}


def test_every_setting_is_in_the_table() -> None:
    assert set(table("| field | default | meaning |")) == set(RoutingSpec.model_fields)


def test_every_word_is_in_the_table_in_order() -> None:
    assert list(table("| word | the variant is |").items()) == list(WORDS.items())


def test_the_example_prints_what_the_page_shows(tmp_path: Path) -> None:
    stack = re.search(r"```yaml\n(.*?)```", DOCS, re.DOTALL)
    shown = re.search(r"    \$ moe-serving route (explain .*)\n((?:    .*\n)+)", DOCS)
    assert stack is not None
    assert shown is not None
    (tmp_path / "routed.yaml").write_text(stack[1])
    body = {"model": "tiny-moe", "prompt": "Write a haiku.", "max_tokens": 200}
    (tmp_path / "request.json").write_text(json.dumps(body))
    arguments = shown[1].replace("request.json", str(tmp_path / "request.json"))
    arguments = arguments.replace("routed.yaml", str(tmp_path / "routed.yaml"))
    parts = [part.strip("'") for part in re.findall(r"'[^']*'|\S+", arguments)]
    printed = CliRunner().invoke(route_app, parts, env={"COLUMNS": "100"}).output
    assert [line.split() for line in printed.splitlines()] == [
        line.split() for line in shown[2].splitlines()
    ]
