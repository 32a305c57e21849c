"""`moe-serving route explain`, as a user sees it; nothing is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serving.stack.route_command import route_app

STACK = """\
schema: 1
models:
  - model: tiny-moe
    gpu: cpu
    aliases: [chat]
    replicas: 2
    default_variant: mtp
    variants:
      mtp: {speculative: {method: mtp, num_speculative_tokens: 2}}
      plain:
    routing: {policy: load-aware, crossover_streams: {mtp: 4}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "lab.yaml").write_text(STACK)
    write(tmp_path, model="chat", messages=[{"role": "user", "content": "Hello"}], max_tokens=9)
    return tmp_path


def write(folder: Path, **body: object) -> None:
    (folder / "request.json").write_text(json.dumps(body))


def explain(folder: Path, *options: str) -> tuple[int, str]:
    arguments = ["explain", str(folder / "request.json"), "--stack", str(folder / "lab.yaml")]
    result = CliRunner().invoke(route_app, [*arguments, *options], env={"COLUMNS": "100"})
    return result.exit_code, result.output


def test_the_choice_is_told_with_what_each_rule_left(folder: Path) -> None:
    code, output = explain(folder)
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert (code, lines[0]) == (
        0,
        "tiny-moe@mtp, load: drafting and below its crossover, or the one to go to above it",
    )
    assert "short-output mtp, plain no break-even length is set" in lines
    assert "load mtp mtp has 0 running per replica, open until 4" in lines


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--load", "mtp=7"), "tiny-moe@mtp, load: "),
        (("--load", "mtp=8"), "tiny-moe@plain, load: "),
        (("--load", "mtp=down"), "tiny-moe@plain, fallback: "),
        (("--header", "X-MoE-Serving-Variant: plain"), "tiny-moe@plain, header: "),
    ],
)
def test_load_and_headers_are_told_to_it(
    folder: Path, options: tuple[str, ...], expected: str
) -> None:
    code, output = explain(folder, *options)
    assert code == 0
    assert output.startswith(expected)


def test_as_json_it_is_one_object(folder: Path) -> None:
    write(folder, model="tiny-moe@plain")
    code, output = explain(folder, "--json")
    assert code == 0
    assert json.loads(output) == {
        "model": "tiny-moe",
        "variant": "plain",
        "rule": "explicit",
        "steps": [{"rule": "explicit", "kept": ["plain"], "why": "the request names it"}],
        "shadow": None,
        "arm": None,
    }


def test_a_shadow_is_told(folder: Path) -> None:
    shadow = "{policy: static, shadow: {variant: plain, share: 1}}"
    text = STACK.replace("{policy: load-aware, crossover_streams: {mtp: 4}}", shadow)
    (folder / "lab.yaml").write_text(text)
    assert "repeated to plain, whose answer is dropped" in explain(folder)[1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--load", "fast=1"), "--load: found 'fast=1'; the variants are mtp, plain"),
        (("--load", "mtp=-1"), "--load: found 'mtp=-1'; write mtp=RUNNING or mtp=down"),
        (("--header", "plain"), "--header: found 'plain'; write 'name: value'"),
        (
            ("--header", "x-moe-serving-variant: fast"),
            "model 'tiny-moe' has no variant 'fast'; it has: mtp, plain",
        ),
    ],
)
def test_a_fault_in_an_option_is_told_with_its_cure(
    folder: Path, options: tuple[str, ...], expected: str
) -> None:
    assert explain(folder, *options) == (2, f"error: {expected}\n")


def test_a_name_that_is_not_served_is_told(folder: Path) -> None:
    write(folder, model="chatt@plain")
    assert explain(folder) == (
        2,
        "error: the model 'chatt@plain' is not served here (did you mean 'chat'?); "
        "served: chat, tiny-moe\n",
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[]", "names no model"),
        ("{}", "names no model"),
        ("{", "not JSON"),
        (None, "cannot be read"),
    ],
)
def test_a_body_that_cannot_be_used_is_told(folder: Path, text: str | None, complaint: str) -> None:
    file = folder / "request.json"
    file.unlink() if text is None else file.write_text(text)
    code, output = explain(folder)
    assert code == 2
    assert output.startswith(f"error: {file}: {complaint}")
