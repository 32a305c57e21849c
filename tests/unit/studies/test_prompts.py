"""The shipped prompts, the public formats, and salts."""

from __future__ import annotations

import codeop
import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from serving.studies import prompts as module
from serving.studies.prompts import (
    Prompt,
    PromptsError,
    load_prompts,
    new_salt,
    prompts_dir,
    salted,
)

ROOT = Path(__file__).parents[3]
SPEC_BENCH = ROOT.parent / "shared" / "prompts" / "spec_bench.jsonl"
CATEGORIES = (
    "chat",
    "code",
    "creative",
    "reasoning",
    "retrieval",
    "structured",
    "summarisation",
    "translation",
)
LINE = {"id": "a", "category": "chat", "messages": [{"role": "user", "content": "Hi"}]}
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file of one JSON value a line, or of a text."""

    def file(*lines: Any, name: str = "set.jsonl") -> Path:
        path = tmp_path / name
        text = "\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines)
        path.write_text(text, encoding="utf-8")
        return path

    return file


def asked(prompt: Prompt) -> str:
    return prompt.messages[-1]["content"]


def words(prompt: Prompt) -> int:
    return sum(len(message["content"].split()) for message in prompt.messages)


def shipped_lines() -> Iterator[tuple[str, dict[str, Any]]]:
    for file in prompts_dir().glob("*.jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines():
            yield file.stem, json.loads(line)


# The shipped set


def test_every_category_ships_at_least_twelve_prompts() -> None:
    counts = Counter(prompt.category for prompt in load_prompts())
    assert tuple(sorted(counts)) == CATEGORIES
    assert min(counts.values()) >= 12


@pytest.mark.parametrize("name", CATEGORIES)
def test_a_shipped_file_holds_one_category_named_like_it(name: str) -> None:
    assert {prompt.category for prompt in load_prompts(name)} == {name}
    assert load_prompts(name) == load_prompts(f"{name}.jsonl") == load_prompts(categories=(name,))


def test_no_two_shipped_prompts_share_an_id_or_a_paragraph() -> None:
    shipped = [*load_prompts(), *load_prompts("demo-code")]
    assert len({prompt.id for prompt in shipped}) == len(shipped)
    texts = [
        prompt.text or "\n\n".join(m["content"] for m in prompt.messages) for prompt in shipped
    ]
    # Short lines such as "import os" or a question of three words may well come twice.
    paragraphs = Counter(part for text in texts for part in text.split("\n\n") if len(part) > 60)
    assert [part for part, count in paragraphs.items() if count > 1] == []
    assert len({text[:40] for text in texts}) == len(texts)


def test_every_shipped_line_says_its_licence() -> None:
    licences = {line.get("licence") for _, line in shipped_lines()}
    assert licences == {"Apache-2.0, written for this project"}


def test_the_expected_lengths_vary() -> None:
    for category in CATEGORIES:
        lengths = {prompt.max_tokens for prompt in load_prompts(category)}
        assert len(lengths) >= 5, category


def test_texts_to_summarise_and_to_search_have_their_lengths() -> None:
    assert all(150 <= words(prompt) <= 500 for prompt in load_prompts("summarisation"))
    assert all(800 <= words(prompt) <= 2000 for prompt in load_prompts("retrieval"))


def objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object schema in `schema`."""
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield schema
        for part in schema.values():
            yield from objects(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from objects(part)


def test_structured_prompts_carry_a_closed_schema_and_no_others_do() -> None:
    for prompt in load_prompts():
        assert (prompt.response_format is not None) == (prompt.category == "structured")
        if prompt.response_format is None:
            continue
        assert prompt.response_format["type"] == "json_schema"
        schema = prompt.response_format["json_schema"]["schema"]
        assert schema["type"] == "object"
        for part in objects(schema):
            assert part["additionalProperties"] is False
            assert part["required"] == list(part["properties"])


def test_the_demo_models_set_is_python_to_be_continued() -> None:
    shipped = load_prompts("demo-code")
    assert len(shipped) >= 16
    for prompt in shipped:
        assert prompt.text is not None and prompt.messages == ()
        inside = f"class _:\n{prompt.text}" if prompt.text.startswith(" ") else prompt.text
        # Raises SyntaxError for a text that no continuation makes Python.
        codeop.compile_command(inside, symbol="exec")


def test_an_installed_package_carries_its_own_prompts(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "serving"
    (package / "loadtests" / "prompts").mkdir(parents=True)
    # Another distribution's folder of the same name must not be taken for ours.
    (package.parent / "loadtests" / "prompts").mkdir(parents=True)
    assert prompts_dir(package) == package / "loadtests" / "prompts"


def test_a_checkout_has_its_prompts_beside_the_package(tmp_path: Path) -> None:
    (tmp_path / "loadtests" / "prompts").mkdir(parents=True)
    assert prompts_dir(tmp_path / "serving") == tmp_path / "loadtests" / "prompts"


def test_missing_prompts_are_named_with_their_cure(tmp_path: Path) -> None:
    with pytest.raises(PromptsError) as caught:
        prompts_dir(tmp_path / "serving")
    assert str(caught.value) == (
        f"no prompts in {tmp_path}/serving/loadtests/prompts nor in {tmp_path}/loadtests/prompts; "
        "install moe-serving again, or run it from a complete checkout"
    )


# Formats


def test_a_file_of_our_own_format_is_read_whole(write: Write) -> None:
    form = {"type": "json_object"}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi\u2028there"},
    ]
    file = write(
        {"id": "a", "category": "x", "messages": chat, "max_tokens": 5, "response_format": form},
        "",
        {"id": "b", "category": "y", "text": "def f(", "max_tokens": 7, "licence": "mine"},
    )
    # Unescaped, U+2028 must not be taken for the end of a line.
    file.write_text(file.read_text().replace("\\u2028", "\u2028"), encoding="utf-8")
    assert load_prompts(file) == (
        Prompt("a", "x", tuple(chat), 5, response_format=form),
        Prompt("b", "y", (), 7, text="def f("),
    )
    assert [prompt.id for prompt in load_prompts(str(file), ["y"])] == ["b"]


def test_of_benchmark_questions_the_first_turn_and_the_category_are_taken(write: Write) -> None:
    file = write(
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
        {"question_id": 401, "category": "rag", "turns": ["Who?"], "reference": ["me"]},
        name="question.jsonl",
    )
    first, second = load_prompts(file)
    assert first == Prompt(
        "question-81",
        "writing",
        ({"role": "user", "content": "Write."},),
        module.DEFAULT_MAX_TOKENS,
    )
    assert (second.id, second.category, asked(second)) == ("question-401", "rag", "Who?")


@pytest.mark.parametrize("packed", [False, True])
def test_human_eval_is_code_to_be_continued_packed_or_not(write: Write, packed: bool) -> None:
    task = {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "    pass\n"}
    file = write({**task, "test": "assert f() is None", "entry_point": "f"})
    if packed:
        file.write_bytes(gzip.compress(file.read_bytes()))
    assert load_prompts(file) == (
        Prompt("HumanEval/0", "code", (), module.DEFAULT_MAX_TOKENS, text="def f():\n"),
    )


def test_of_share_gpt_the_conversations_that_begin_with_a_question_are_taken(write: Write) -> None:
    talk = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "x" * 41}]
    file = write(
        [
            {"id": "p_0", "conversations": talk},
            {"id": "p_1", "conversations": talk[1:]},
            {"id": "p_2", "conversations": []},
            {"id": "p_0", "conversations": [*talk, *talk]},
        ],
        name="sg.json",
    )
    loaded = load_prompts(file)
    assert [(p.id, p.category, asked(p), p.max_tokens) for p in loaded] == [
        ("sg-0", "chat", "Why?", 11),
        ("sg-3", "chat", "Why?", 11),
    ]


def test_each_paragraph_of_a_plain_text_is_a_prompt(write: Write) -> None:
    file = write("\nFirst line,\nsecond line.\n \n\nAnother.\n", name="notes.md")
    assert [(p.id, p.category, asked(p)) for p in load_prompts(file)] == [
        ("notes-1", "text", "First line,\nsecond line."),
        ("notes-2", "text", "Another."),
    ]


def test_a_text_file_is_text_even_where_it_looks_like_json(write: Write) -> None:
    assert asked(load_prompts(write("{ not: json }", name="a.txt"))[0]) == "{ not: json }"


def test_each_text_file_of_a_folder_is_a_prompt(write: Write) -> None:
    write("One.\n\nStill one.\n", name="b.txt")
    folder = write("Zero.", name="a.txt").parent
    assert [(p.id, asked(p)) for p in load_prompts(folder)] == [
        ("a", "Zero."),
        ("b", "One.\n\nStill one."),
    ]


@pytest.mark.skipif(not SPEC_BENCH.exists(), reason=f"{SPEC_BENCH} is not here")
def test_spec_bench_keeps_its_categories() -> None:
    counts = Counter(prompt.category for prompt in load_prompts(SPEC_BENCH))
    assert sum(counts.values()) == 480
    assert {counts[name] for name in ("translation", "summarization", "qa", "rag")} == {80}
    assert counts["math_reasoning"] == 80 and counts["coding"] == 10


# Salts


def test_a_salt_comes_before_everything_that_is_sent() -> None:
    chat = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"})
    prompt = salted(Prompt("a", "chat", chat, 5), "s1")
    assert prompt.messages[0] == {"role": "system", "content": "[s1]\nBe brief."}
    assert prompt.messages[1] == chat[1]
    assert chat[0]["content"] == "Be brief."


def test_code_to_be_continued_gets_its_salt_as_a_comment() -> None:
    assert salted(Prompt("a", "code", (), 5, text="import os\n"), "s1").text == "# s1\nimport os\n"
    assert salted(Prompt("a", "story", (), 5, text="Once"), "s1").text == "[s1]\nOnce"


def test_a_salt_changes_nothing_else() -> None:
    for prompt in [*load_prompts("structured"), *load_prompts("demo-code")]:
        sent = salted(prompt, "s1")
        assert (sent.id, sent.category, sent.max_tokens, sent.response_format) == (
            prompt.id,
            prompt.category,
            prompt.max_tokens,
            prompt.response_format,
        )


def test_salts_differ_by_seed_and_index_and_repeat_for_the_same() -> None:
    salts = {new_salt(seed, index) for seed in range(30) for index in range(300)}
    assert len(salts) == 30 * 300
    # 1, 11 and 11, 1 are no more alike than others.
    assert new_salt(1, 11) != new_salt(11, 1)
    assert new_salt(3, 4) == new_salt(3, 4)
    assert {len(salt) for salt in salts} == {16}


# What cannot be used


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "max_tokens: missing; write the expected length of the answer in tokens"),
        ({"max_tokens": 0}, "max_tokens: found 0; write a number from 1 to 32768"),
        (
            {"max_tokens": True},
            "max_tokens: found true; write the expected length of the answer in tokens",
        ),
        (
            {"max_tokens": 5, "max_token": 5},
            "max_token: unknown key; the keys here are id, category, messages, text, max_tokens, "
            "response_format, licence",
        ),
        (
            {"max_tokens": 5, "text": "also"},
            "messages: give either `messages` for a chat or `text` to be continued",
        ),
        (
            {"max_tokens": 5, "messages": [{"role": "bot", "content": "Hi"}]},
            'messages[0].role: found "bot"; write one of system, user, assistant',
        ),
        (
            {"max_tokens": 5, "messages": [{"role": "user", "content": " "}]},
            'messages[0].content: found " "; write the prompt\'s text',
        ),
        (
            {"max_tokens": 5, "messages": ["Hi"]},
            'messages[0]: found "Hi"; write a list of {"role": ..., "content": ...}',
        ),
        (
            {"max_tokens": 5, "messages": [{"role": "assistant", "content": "Hi"}]},
            "messages: the last one is not the user's; end with what is asked",
        ),
        (
            {"max_tokens": 5, "category": "\ud800"},
            "category: holds half of a surrogate pair; write the character itself",
        ),
        ({"max_tokens": 5, "id": 7}, "id: found 7; give the prompt a name of its own"),
    ],
)
def test_a_faulty_line_is_named_with_field_and_cure(
    write: Write, change: dict[str, Any], expected: str
) -> None:
    file = write({**LINE, "id": "ok", "max_tokens": 5}, LINE | change)
    with pytest.raises(PromptsError) as caught:
        load_prompts(file)
    assert str(caught.value) == f"{file}:2: {expected}"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (['{"id": '], ":1: not valid JSON: Expecting value; correct it here"),
        (['{"turns": ["a"]}', "5"], ":1: category: missing; name what kind of question it is"),
        (
            [{**LINE, "max_tokens": 5}, "5"],
            ":2: found 5; write one JSON object a line",
        ),
        (
            [{"category": "x", "turns": []}],
            ":1: turns: found []; write the questions as a list of texts",
        ),
        (
            [[{"id": "a"}]],
            ": [0]: no conversation; of JSON lists only ShareGPT's are read",
        ),
        (
            [[{"conversations": "a"}]],
            ': [0].conversations: found "a"; write a list of turns',
        ),
        (["[\n1,\n]"], ":3: not valid JSON: Expecting value; correct it here"),
        ([""], ": holds no prompt; add one, or name another file"),
        (["[" * 100_000], ":1: not usable JSON: "),
    ],
)
def test_a_faulty_file_is_named_with_line_and_cure(
    write: Write, lines: list[Any], expected: str
) -> None:
    file = write(*lines)
    with pytest.raises(PromptsError) as caught:
        load_prompts(file)
    assert str(caught.value).startswith(f"{file}{expected}")


def test_an_id_given_twice_is_refused(write: Write) -> None:
    file = write({**LINE, "max_tokens": 5}, {**LINE, "max_tokens": 5})
    with pytest.raises(PromptsError) as caught:
        load_prompts(file)
    assert str(caught.value) == f"{file}:2: id: 'a' is taken by {file}:1; make ids unique"


def test_an_unknown_category_is_answered_with_the_known_ones() -> None:
    with pytest.raises(PromptsError) as caught:
        load_prompts(categories=("code", "poetry"))
    assert str(caught.value) == (
        "the shipped set: has no category 'poetry'; the known ones are " + ", ".join(CATEGORIES)
    )


def test_an_unknown_name_is_answered_with_the_shipped_ones() -> None:
    with pytest.raises(PromptsError) as caught:
        load_prompts("cod")
    names = ", ".join(sorted([*CATEGORIES, "demo-code"]))
    assert str(caught.value) == (
        f"cod: no such file, and no shipped set of that name; those are {names}"
    )


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptsError) as caught:
        load_prompts(tmp_path / "gone")
    assert str(caught.value) == (
        f"{tmp_path}/gone: cannot be read (no such file or directory); check the path and the file"
    )


@pytest.mark.parametrize("content", [b"\x1f\x8bnonsense", gzip.compress(b"{}" * 999)[:-20]])
def test_a_broken_archive_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "set.gz"
    file.write_bytes(content)
    with pytest.raises(PromptsError, match=r"set\.gz: cannot be read \(.+\); check the path"):
        load_prompts(file)


def test_bytes_that_are_not_utf_8_are_named_with_their_line(tmp_path: Path) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes("eins\nzwölf".encode("latin-1"))
    with pytest.raises(PromptsError) as caught:
        load_prompts(file)
    assert str(caught.value) == f"{file}:2: byte 0xf6 is not UTF-8; save the file as UTF-8"


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_over_the_limit_is_refused_packed_or_not(
    write: Write, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 2**20)
    file = write("a" * (2**20 + 1))
    if packed:
        file.write_bytes(gzip.compress(file.read_bytes()))
    with pytest.raises(PromptsError) as caught:
        load_prompts(file)
    assert str(caught.value) == (
        f"{file}: holds more than 1 MiB; cut it down, as with `head -n 1000` or `jq '.[:1000]'`"
    )


def test_a_prompt_over_the_limit_is_refused(write: Write) -> None:
    file = write("a" * (module.MAX_PROMPT_CHARS + 1))
    with pytest.raises(PromptsError) as caught:
        load_prompts(file)
    assert str(caught.value) == (
        f"{file}:1: 262145 characters, over the limit of 262144; shorten it"
    )
