"""Reading YAML: whole messages, and no crash whatever the bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from serving.catalog.errors import ConfigError, FieldError
from serving.catalog.yaml_file import MAX_BYTES, load_yaml, parse_yaml


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    num_speculative_tokens: int = Field(ge=1, description="n, draft tokens per step")
    note: str = ""


class Whole(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    parts: dict[str, Part] = {}
    list_of: list[Part] = []
    where: Path | None = None
    share: float = 0
    tags: dict[str, str] = {}

    @field_validator("tags")
    @classmethod
    def _no_bad_tag(cls, tags: dict[str, str]) -> dict[str, str]:
        if "bad" in tags:
            raise FieldError("a bad tag; remove it", "bad")
        return tags

    @field_validator("where")
    @classmethod
    def _from_the_file(cls, where: Path | None, info: ValidationInfo) -> Path | None:
        path = (info.context or {}).get("path")
        return path.parent / where if path and where else where


def message(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, Whole, name="a.yaml")
    return str(caught.value)


def test_a_file_is_read_and_its_path_reaches_the_validators(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("parts:\n  a: {num_speculative_tokens: 2}\nwhere: weights\nshare: 1\n")
    whole = load_yaml(path, Whole)
    assert whole.parts["a"].num_speculative_tokens == 2
    assert whole.where == tmp_path / "weights"
    assert whole.share == 1.0


def test_a_misspelt_key_is_named_once_with_the_right_name() -> None:
    assert message("parts:\n  a:\n    num_speculative_token: 2\n") == (
        "a.yaml:3: parts.a.num_speculative_token: did you mean num_speculative_tokens?"
    )


def test_a_key_like_no_other_lists_the_keys_there_are() -> None:
    assert message("parts:\n  a: {num_speculative_tokens: 1, xyz: 2}\n") == (
        "a.yaml:2: parts.a.xyz: unknown key; the keys here are num_speculative_tokens, note"
    )


def test_every_problem_is_listed_in_the_order_of_lines() -> None:
    text = "share: x\nparts:\n  a: {}\nlist_of:\n  - num_speculative_tokens: '3'\n    note: 4\n"
    assert message(text).splitlines() == [
        "a.yaml:1: share: found 'x'; should be a valid number",
        "a.yaml:3: parts.a.num_speculative_tokens: missing; "
        "add `num_speculative_tokens: ...` (n, draft tokens per step)",
        "a.yaml:5: list_of[0].num_speculative_tokens: found '3'; should be a valid integer",
        "a.yaml:6: list_of[0].note: found 4; should be text, so put it in quotes",
    ]


def test_a_validator_can_point_below_its_own_field() -> None:
    assert message("tags:\n  good: a\n  bad: b\n") == "a.yaml:3: tags.bad: a bad tag; remove it"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("share: 1\nshare: 2\n", "a.yaml:2: share: given twice, first in line 1; remove one"),
        ("", "a.yaml:1: the file is empty; write the settings as `key: value` lines"),
        ("- 1\n", "a.yaml:1: found a list; should be a block of keys"),
        (
            "share: .nan\n",
            "a.yaml:1: share: '.nan' is no number that can be used; correct it or put it in quotes",
        ),
        (
            "share: !!python/name:os.x\n",
            "a.yaml:1: share: the tag tag:yaml.org,2002:python/name:os.x is not allowed; remove it",
        ),
        (
            "tags: &t {a: b}\nparts: {<<: *t}\n",
            "a.yaml:2: parts: merge keys (<<) are not supported; write the values out",
        ),
        (
            "share: [1\ntags: 2",
            "a.yaml:2: not valid YAML: expected ',' or ']', but got ':'; correct it here",
        ),
        ("share: \x07\n", "a.yaml:1: character 7 is not allowed in YAML; remove it"),
        ("? [a]\n: 1\n", "a.yaml:1: a key is a list or a block; use plain text"),
        (
            'tags: {a: "\\ud800"}\n',
            "a.yaml:1: a text holds half of a surrogate pair; write the character itself",
        ),
    ],
)
def test_what_is_no_usable_yaml_is_refused_with_its_line(text: str, expected: str) -> None:
    assert message(text) == expected


def test_dates_stay_text_and_keys_are_text() -> None:
    whole = parse_yaml("tags: {1: 2026-01-01, on: 'x'}", Whole)
    assert whole.tags == {"1": "2026-01-01", "on": "x"}


def test_an_alias_is_read_as_what_it_stands_for() -> None:
    whole = parse_yaml("parts: {a: &n {num_speculative_tokens: 1}, b: *n}", Whole)
    assert whole.parts["a"] == whole.parts["b"]


@pytest.mark.parametrize(
    "text",
    [
        "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)),
        f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 100)}]\n",
        "a: &a [*a]\n",
    ],
)
def test_aliases_that_expand_without_bound_are_refused(text: str) -> None:
    assert "holds too much once aliases are expanded; remove the aliases" in message(text)


def test_deep_nesting_is_refused() -> None:
    assert message("a: " + "[" * 5000) == "a.yaml:1: nested deeper than 32 levels; flatten it"


def test_files_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    absent, large, latin = (tmp_path / name for name in ("absent", "large", "latin"))
    large.write_bytes(b"#" * (MAX_BYTES + 1))
    latin.write_bytes(b"share: 1\n# \xe9\n")
    expected = {
        absent: f"{absent}: cannot be read (no such file or directory); "
        "check the path and its permissions",
        large: f"{large}: larger than 1024 KiB; split it or remove what is not needed",
        latin: f"{latin}:2: byte 0xe9 is not UTF-8; save the file as UTF-8",
    }
    for path, text in expected.items():
        with pytest.raises(ConfigError) as caught:
            load_yaml(path, Whole)
        assert str(caught.value) == text


def parses_or_refuses(text: str) -> bool:
    try:
        return isinstance(parse_yaml(text, Whole), Whole)
    except ConfigError as error:
        return bool(str(error))


@given(st.text())
def test_any_text_is_read_or_refused_with_a_message(text: str) -> None:
    assert parses_or_refuses(text)


@given(st.text(alphabet="ab:-?[]{}&*!|>'\"%@`#,.<=\\uUx0129 \n\t~eE+_"))
def test_any_text_of_yaml_marks_is_read_or_refused_with_a_message(text: str) -> None:
    assert parses_or_refuses(text)


@given(st.sampled_from(["parts", "list_of", "share", "tags", "where"]), st.text())
def test_any_value_of_a_field_is_read_or_refused_with_a_message(key: str, value: str) -> None:
    assert parses_or_refuses(f"{key}: {value}")


@given(st.binary())
def test_any_bytes_are_read_or_refused_with_a_message(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.yaml"
    path.write_bytes(raw)
    try:
        assert isinstance(load_yaml(path, Whole), Whole)
    except ConfigError as error:
        assert str(error).startswith(str(path))
