"""The prompts of a study: the shipped set, public sets, and salts against prefix caches.

Owns `Prompt`, finding and reading prompt files, and what makes a prompt new to a cache. Leaves
which prompts are sent, when and how often to the study, and sending them to `client`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from serving.catalog.errors import Problem

PACKAGE_DIR = Path(__file__).resolve().parents[1]

MAX_FILE_BYTES = 64 * 2**20
MAX_PROMPT_CHARS = 256 * 2**10
MAX_TOKENS = 32_768
# For public sets, which do not tell how long an answer is.
DEFAULT_MAX_TOKENS = 256
# Sets for the demo models, which no other model is to be judged by.
DEMO_PREFIX = "demo-"
ROLES = ("system", "user", "assistant")
CHARS_PER_TOKEN = 4
GZIP_MAGIC = b"\x1f\x8b"

T = TypeVar("T")


class PromptsError(ValueError):
    """Prompts cannot be read; the text names file, line, field and cure."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: a chat, or where `text` is given a text to be continued."""

    id: str
    category: str
    messages: tuple[Mapping[str, str], ...]
    """As the OpenAI chat API takes them; empty where `text` is given."""
    max_tokens: int
    """The expected length of the answer."""
    text: str | None = None
    response_format: Mapping[str, Any] | None = None
    """As the OpenAI API takes it, with the JSON schema of the answer."""


def prompts_dir(package: Path = PACKAGE_DIR) -> Path:
    """The folder of the shipped prompts.

    `package` is the folder of the package `serving`: an installed one carries its own
    `loadtests/prompts/`, in a checkout it is beside it. Raises PromptsError where neither is.
    """
    # The package's own first: in an installation the folder beside it is site-packages.
    folders = [root / "loadtests" / "prompts" for root in (package, package.parent)]
    for folder in folders:
        if folder.is_dir():
            return folder
    raise PromptsError(
        f"no prompts in {folders[0]} nor in {folders[1]}; "
        "install moe-serving again, or run it from a complete checkout"
    )


def load_prompts(
    path_or_name: str | Path | None = None, categories: Sequence[str] = ()
) -> tuple[Prompt, ...]:
    """The prompts of one source, in its order; with `categories`, only theirs.

    None is the shipped set without the demo models' files, a name one shipped file
    (`code`, `demo-code`), and anything else a path. What a file holds is told by its content,
    compressed by gzip or not:

    - JSON Lines of this project (loadtests/prompts/README.md has the fields)
    - `question.jsonl` of Spec-Bench and MT-Bench: the first turn, since the second needs the
      answer to the first; categories are kept
    - HumanEval: each a text to be continued, category `code`
    - ShareGPT, as JSON or JSON Lines: the first question of each conversation that begins with
      one, category `chat`; `max_tokens` is from the length of the answer given there, about
      4 characters to a token
    - plain text: each paragraph is one prompt, category `text`; so is a file called *.txt

    A folder's `*.txt` files are one prompt each. Raises PromptsError.
    """
    seen: dict[str, str] = {}
    prompts = []
    for record, prompt in _source(path_or_name):
        if prompt.id in seen:
            record.fail("id", f"{prompt.id!r} is taken by {seen[prompt.id]}; make ids unique")
        seen[prompt.id] = record.where
        prompts.append(prompt)
    source = "the shipped set" if path_or_name is None else str(path_or_name)
    if not prompts:
        raise PromptsError(f"{source}: holds no prompt; add one, or name another file")
    known = sorted({prompt.category for prompt in prompts})
    for category in categories:
        if category not in known:
            raise PromptsError(
                f"{source}: has no category {category!r}; the known ones are {', '.join(known)}"
            )
    return tuple(p for p in prompts if not categories or p.category in categories)


def new_salt(seed: int, index: int) -> str:
    """16 hexadecimal digits that are always the same for `seed` and `index`, else never.

    A run takes a `seed` of its own. The arms that one comparison pairs take the same
    `index`, so that they get the same tokens.
    """
    return hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).hexdigest()


def salted(prompt: Prompt, salt: str) -> Prompt:
    """`prompt` with `salt` before everything that it sends.

    A prefix cache keys each block of tokens by all the tokens up to its end. So a difference
    at the very beginning makes every block new, while one further down would leave all the
    blocks before it shared, and the prefill measured would be that of the rest. Text instead of
    vLLM's `cache_salt`, since other servers have no such field. Code to be continued
    gets a comment line, which leaves it code.
    """
    if prompt.text is not None:
        line = f"# {salt}" if prompt.category == "code" else f"[{salt}]"
        return replace(prompt, text=f"{line}\n{prompt.text}")
    first, *rest = prompt.messages
    opened = {**first, "content": f"[{salt}]\n{first['content']}"}
    return replace(prompt, messages=(opened, *rest))


@dataclass(frozen=True, slots=True)
class _Record:
    """One prompt as a file has it, and where."""

    file: Path
    line: int
    data: Mapping[str, Any]
    item: str = ""
    """Its place in a JSON list, where there is no line to tell."""
    number: int = 0

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}" if self.line else f"{self.file}{self.item}"

    def fail(self, field: str, text: str) -> NoReturn:
        path = ".".join(part for part in (self.item, field) if part)
        raise PromptsError(str(Problem(str(self.file), self.line, path, text)))

    def take(self, field: str, kind: type[T], cure: str) -> T:
        """The field's value; fails unless it is a non-empty `kind`."""
        if field not in self.data:
            self.fail(field, f"missing; {cure}")
        value = self.data[field]
        if not isinstance(value, kind) or isinstance(value, bool) or value in ("", [], {}):
            self.fail(field, f"found {short(value)}; {cure}")
        return value

    def text(self, field: str, cure: str) -> str:
        return self.usable(field, self.take(field, str, cure))

    def usable(self, field: str, text: Any) -> str:
        """`text`; fails where it cannot be sent as a prompt."""
        if not isinstance(text, str) or not text.strip():
            self.fail(field, f"found {short(text)}; write the prompt's text")
        if len(text) > MAX_PROMPT_CHARS:
            self.fail(
                field, f"{len(text)} characters, over the limit of {MAX_PROMPT_CHARS}; shorten it"
            )
        if re.search("[\ud800-\udfff]", text):
            self.fail(field, "holds half of a surrogate pair; write the character itself")
        return text


def _source(source: str | Path | None) -> Iterator[tuple[_Record, Prompt]]:
    if source is None:
        shipped = _shipped()
        for name in shipped:
            if not name.startswith(DEMO_PREFIX):
                yield from _prompts(shipped[name])
        return
    path = Path(source).expanduser()
    if isinstance(source, str) and source.removesuffix(".jsonl") in (shipped := _shipped()):
        yield from _prompts(shipped[source.removesuffix(".jsonl")])
    elif path.is_dir():
        for file in sorted(path.glob("*.txt")):
            yield _plain(file, 0, file.stem, _read(file))
    elif isinstance(source, str) and not path.exists():
        raise PromptsError(
            f"{source}: no such file, and no shipped set of that name; "
            f"those are {', '.join(_shipped())}"
        )
    else:
        yield from _prompts(path)


def _shipped() -> dict[str, Path]:
    return {file.stem: file for file in sorted(prompts_dir().glob("*.jsonl"))}


def _read(file: Path) -> str:
    """The file's text, unpacked; raises PromptsError."""
    try:
        with file.open("rb") as raw:
            packed = raw.read(len(GZIP_MAGIC)) == GZIP_MAGIC
            raw.seek(0)
            content = (gzip.GzipFile(fileobj=raw) if packed else raw).read(MAX_FILE_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        _fail(file, f"cannot be read ({reason.lower()}); check the path and the file")
    if len(content) > MAX_FILE_BYTES:
        _fail(
            file,
            f"holds more than {MAX_FILE_BYTES // 2**20} MiB; "
            "cut it down, as with `head -n 1000` or `jq '.[:1000]'`",
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        _fail(file, f"byte 0x{content[error.start]:02x} is not UTF-8; save the file as UTF-8", line)


def _prompts(file: Path) -> Iterator[tuple[_Record, Prompt]]:
    text = _read(file)
    opening = text.lstrip()[:1]
    if file.suffix == ".txt" or opening not in ("{", "["):
        for number, (line, paragraph) in enumerate(_split(text), 1):
            yield _plain(file, line, f"{file.stem}-{number}", paragraph)
        return
    for record in _list(file, text) if opening == "[" else _lines(file, text):
        parse = next((p for key, p in _FORMATS.items() if key in record.data), _own)
        prompt = parse(record)
        if prompt is not None:
            yield record, prompt


def _split(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs, each with its first line's number."""
    lines: list[str] = []
    for number, line in enumerate([*text.split("\n"), ""], 1):
        if line.strip():
            lines.append(line)
        elif lines:
            yield number - len(lines), "\n".join(lines)
            lines = []


def _plain(file: Path, line: int, prompt_id: str, text: str) -> tuple[_Record, Prompt]:
    record = _Record(file, line, {})
    return record, _asked(prompt_id, "text", record.usable("", text.strip()))


def _lines(file: Path, text: str) -> Iterator[_Record]:
    # Not splitlines(): JSON text may hold the other line ends Unicode knows.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            data = _parse(file, line, number)
            if not isinstance(data, dict):
                _fail(file, f"found {short(data)}; write one JSON object a line", number)
            yield _Record(file, number, data, number=number)


def _list(file: Path, text: str) -> Iterator[_Record]:
    for index, data in enumerate(_parse(file, text, 1)):
        record = _Record(file, 0, data, f"[{index}]", index)
        if not isinstance(data, dict) or "conversations" not in data:
            record.fail("", "no conversation; of JSON lists only ShareGPT's are read")
        yield record


def _parse(file: Path, text: str, line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        _fail(file, f"not valid JSON: {error.msg}; correct it here", line + error.lineno - 1)
    except (ValueError, RecursionError) as error:
        _fail(file, f"not usable JSON: {error}; correct it", line)


def _own(record: _Record) -> Prompt:
    data = record.data
    for key in data:
        if key not in _OWN_FIELDS:
            record.fail(key, f"unknown key; the keys here are {', '.join(_OWN_FIELDS)}")
    if ("messages" in data) == ("text" in data):
        record.fail("messages", "give either `messages` for a chat or `text` to be continued")
    tokens = record.take("max_tokens", int, "write the expected length of the answer in tokens")
    if not 1 <= tokens <= MAX_TOKENS:
        record.fail("max_tokens", f"found {tokens}; write a number from 1 to {MAX_TOKENS}")
    schema: dict[str, Any] | None = None
    if "response_format" in data:
        schema = record.take("response_format", dict, "write it as the OpenAI API takes it")
    return Prompt(
        id=record.text("id", "give the prompt a name of its own"),
        category=record.text("category", "name what kind of prompt it is"),
        messages=tuple(_messages(record)) if "messages" in data else (),
        max_tokens=tokens,
        text=record.text("text", "write the text to be continued") if "text" in data else None,
        response_format=schema,
    )


_OWN_FIELDS = ("id", "category", "messages", "text", "max_tokens", "response_format", "licence")


def _messages(record: _Record) -> Iterator[Mapping[str, str]]:
    cure = 'write a list of {"role": ..., "content": ...}'
    messages = record.take("messages", list, cure)
    for index, message in enumerate(messages):
        field = f"messages[{index}]"
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            record.fail(field, f"found {short(message)}; {cure}")
        if message["role"] not in ROLES:
            role = short(message["role"])
            record.fail(f"{field}.role", f"found {role}; write one of {', '.join(ROLES)}")
        record.usable(f"{field}.content", message["content"])
        yield message
    if messages[-1]["role"] != "user":
        record.fail("messages", "the last one is not the user's; end with what is asked")


def _question(record: _Record) -> Prompt:
    number = record.data.get("question_id", record.line)
    category = record.text("category", "name what kind of question it is")
    turns = record.take("turns", list, "write the questions as a list of texts")
    return _asked(f"{record.file.stem}-{number}", category, record.usable("turns[0]", turns[0]))


def _human_eval(record: _Record) -> Prompt:
    task = record.text("task_id", "name the task")
    text = record.text("prompt", "write the code to be continued")
    return Prompt(task, "code", (), DEFAULT_MAX_TOKENS, text=text)


def _share_gpt(record: _Record) -> Prompt | None:
    turns = record.data["conversations"]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        record.fail("conversations", f"found {short(turns)}; write a list of turns")
    said = [(turn.get("from"), turn.get("value")) for turn in turns[:2]]
    # A long conversation is cut into several entries, of which all but one begin with an answer.
    if len(said) < 2 or said[0][0] not in ("human", "user") or not said[0][1]:
        return None
    question = record.usable("conversations[0].value", said[0][1])
    answer = record.usable("conversations[1].value", said[1][1] or "-")
    prompt = _asked(f"{record.file.stem}-{record.number}", "chat", question)
    tokens = -(-len(answer) // CHARS_PER_TOKEN)
    return replace(prompt, max_tokens=min(tokens, MAX_TOKENS))


_FORMATS: Mapping[str, Callable[[_Record], Prompt | None]] = {
    "turns": _question,
    "task_id": _human_eval,
    "conversations": _share_gpt,
}


def _asked(prompt_id: str, category: str, text: str) -> Prompt:
    return Prompt(prompt_id, category, ({"role": "user", "content": text},), DEFAULT_MAX_TOKENS)


def _fail(file: Path, text: str, line: int = 0) -> NoReturn:
    raise PromptsError(str(Problem(str(file), line, "", text))) from None


def short(value: Any) -> str:
    """JSON of a value for a message, at most 60 characters."""
    shown = json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= 60 else shown[:57] + "..."
