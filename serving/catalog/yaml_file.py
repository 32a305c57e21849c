"""Reading a YAML file into a pydantic model, with errors a person can act on.

Owns reading safely (bounded size, depth and expansion, no tags, no duplicate
keys) and turning every fault into one `ConfigError` that lists file, line and
field. Leaves what the fields mean to the model that is passed in. Scalars are
read as YAML 1.1 does, save that dates stay text; keys are always text.
"""

from __future__ import annotations

import difflib
import json
import math
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from serving.catalog.errors import ConfigError, FieldError, Problem

MAX_BYTES = 1024 * 1024
MAX_DEPTH = 32
_TOO_LARGE = f"larger than {MAX_BYTES // 1024} KiB; split it or remove what is not needed"
# Characters after aliases are expanded, with NODE_COST for each value beside them.
MAX_EXPANDED = 4 * MAX_BYTES
NODE_COST = 8

T = TypeVar("T", bound=BaseModel)
Path_ = tuple[str | int, ...]


def load_yaml(path: Path, model: type[T]) -> T:
    """Read the file at `path` as one `model`.

    The validators of `model` find the path under `info.context["path"]`, so that
    relative paths in the file can be taken from its folder. Raises ConfigError.
    """
    name = str(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        text = raw[:MAX_BYTES].decode("utf-8-sig") if len(raw) <= MAX_BYTES else None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        _fail(name, 0, f"cannot be read ({reason}); check the path and its permissions")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        _fail(name, line, f"byte 0x{raw[error.start]:02x} is not UTF-8; save the file as UTF-8")
    if text is None:
        _fail(name, 0, _TOO_LARGE)
    return parse_yaml(text, model, name=name, path=path)


def parse_yaml(text: str, model: type[T], *, name: str = "<text>", path: Path | None = None) -> T:
    """Read `text` as one `model`; `name` stands for the file in errors.

    Raises ConfigError with every problem found.
    """
    if len(text) > MAX_BYTES:
        _fail(name, 0, _TOO_LARGE)
    document = _Document(name)
    data = document.read(text)
    try:
        # JSON mode, so that strict models still take lists for tuples and text for paths.
        return model.model_validate_json(json.dumps(data), context={"path": path})
    except ValidationError as error:
        faults = error.errors()
        problems = [_problem(fault, model, document) for fault in faults if not _echo(fault)]
        # A misspelt key is also a missing one: say it once.
        misspelt = {(p.field.rpartition(".")[0], p.text) for p in problems}
        kept = [p for p in problems if not _is_misspelt(p, misspelt)]
        raise ConfigError(tuple(sorted(kept, key=lambda problem: problem.line))) from None


def _echo(fault: Mapping[str, Any]) -> bool:
    """Whether pydantic counts a list as short only because its items are faulty."""
    count = fault.get("ctx", {}).get("min_length", 0)
    given = fault["input"]
    return fault["type"] == "too_short" and isinstance(given, list | dict) and len(given) >= count


def _is_misspelt(problem: Problem, misspelt: set[tuple[str, str]]) -> bool:
    block, _, key = problem.field.rpartition(".")
    return problem.text.startswith("missing;") and (block, f"did you mean {key}?") in misspelt


class _TooDeep(Exception):
    """Nesting beyond MAX_DEPTH, at this line."""


class _Loader(yaml.SafeLoader):
    """PyYAML's composer, bounded in depth and without dates."""

    nesting = 0

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        self.nesting += 1
        if self.nesting > MAX_DEPTH:
            raise _TooDeep(self.line + 1)
        try:
            return super().compose_node(parent, index)
        finally:
            self.nesting -= 1


_LEFT_AS_TEXT = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag not in _LEFT_AS_TEXT]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}

_SCALAR_TAGS = frozenset(
    f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str")
)


class _Document:
    """A YAML text as plain data, and the line each value came from."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[Path_, int] = {}
        self._expanded = 0

    def read(self, text: str) -> Any:
        """The data in `text`; raises ConfigError for anything YAML cannot mean."""
        try:
            self._loader = _Loader(text)
            try:
                node = self._loader.get_single_node()
            finally:
                self._loader.dispose()
        except _TooDeep as error:
            _fail(self.name, error.args[0], f"nested deeper than {MAX_DEPTH} levels; flatten it")
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark else 1
            _fail(
                self.name,
                line,
                f"not valid YAML: {error.problem or error.context}; correct it here",
            )
        except yaml.reader.ReaderError as error:
            line = text[: error.position].count("\n") + 1
            _fail(
                self.name, line, f"character {error.character!r} is not allowed in YAML; remove it"
            )
        except (ValueError, RecursionError) as error:
            # PyYAML lets some of int()'s and chr()'s own errors through, such as for "\UFFFFFFFF".
            _fail(self.name, 1, f"not valid YAML: {error}; correct it")
        if node is None:
            _fail(self.name, 1, "the file is empty; write the settings as `key: value` lines")
        return self._value(node, ())

    def line(self, path: Path_) -> int:
        """The line of the value at `path`, or of the nearest block around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def _value(self, node: yaml.Node, path: Path_) -> Any:
        line = node.start_mark.line + 1
        # setdefault: in a mapping the line of the key is already there, and is the better one.
        self.lines.setdefault(path, line)
        self._expanded += NODE_COST + (len(node.value) if isinstance(node, yaml.ScalarNode) else 0)
        if self._expanded > MAX_EXPANDED or len(path) > MAX_DEPTH:
            _fail(self.name, line, "holds too much once aliases are expanded; remove the aliases")
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return dict(self._items(node, path))
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return [self._value(item, (*path, i)) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and node.tag in _SCALAR_TAGS:
            return self._scalar(node, path)
        _fail(self.name, line, f"the tag {node.tag} is not allowed; remove it", path)

    def _scalar(self, node: yaml.ScalarNode, path: Path_) -> Any:
        try:
            value = self._loader.construct_object(node)
        except (ValueError, yaml.YAMLError, OverflowError, KeyError, IndexError):
            value = math.nan
        if isinstance(value, int | float) and not abs(value) < 2**63:
            line = node.start_mark.line + 1
            text = (
                f"{node.value[:40]!r} is no number that can be used; correct it or put it in quotes"
            )
            _fail(self.name, line, text, path)
        return value

    def _items(self, node: yaml.MappingNode, path: Path_) -> Iterator[tuple[str, Any]]:
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                _fail(self.name, line, "a key is a list or a block; use plain text", path)
            key: str = key_node.value
            if key_node.tag == "tag:yaml.org,2002:merge":
                _fail(
                    self.name, line, "merge keys (<<) are not supported; write the values out", path
                )
            if key in seen:
                cure = f"given twice, first in line {seen[key]}; remove one"
                _fail(self.name, line, cure, (*path, key))
            seen[key] = line
            self.lines[(*path, key)] = line
            yield key, self._value(value_node, (*path, key))


def _fail(name: str, line: int, text: str, path: Path_ = ()) -> NoReturn:
    raise ConfigError((Problem(name, line, _dotted(path), text),)) from None


def _dotted(path: Path_) -> str:
    """`("models", 0, "id")` as `models[0].id`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")


def _problem(found: Mapping[str, Any], model: type[BaseModel], document: _Document) -> Problem:
    """One pydantic error, located and worded with its cure."""
    kind, value = found["type"], found.get("input")
    cause = found.get("ctx", {}).get("error")
    # Union branches and dictionary keys add parts of their own, which no line has.
    location = _known(found["loc"], document)
    if kind == "missing":
        location = (*location, found["loc"][-1])
    if isinstance(cause, FieldError):
        location = (*location, *cause.path)
    if kind == "extra_forbidden":
        text = _unknown_key(str(location[-1]), _fields_at(model, location[:-1]))
    elif kind == "missing":
        text = f"missing; {_cure_for_missing(_fields_at(model, location[:-1]), str(location[-1]))}"
    elif kind == "json_invalid":
        text = "a text holds half of a surrogate pair; write the character itself"
    elif cause is not None:
        text = str(cause)
    else:
        text = f"found {_short(value)}; {_plainly(str(found['msg']))}"
        if kind == "string_type" and isinstance(value, int | float):
            text += ", so put it in quotes"
    return Problem(document.name, document.line(location), _dotted(location), text)


def _plainly(message: str) -> str:
    """Pydantic's own message in the words of a YAML file."""
    text = message.removeprefix("Input ")
    for theirs, ours in _WORDS.items():
        text = text.replace(theirs, ours)
    return text[:1].lower() + text[1:]


_WORDS = {
    "an object": "a block of keys",
    "a valid dictionary": "a block of keys",
    "a valid array": "a list",
    "a valid list": "a list",
    "a valid tuple": "a list",
    "a valid string": "text",
    " after validation": "",
}


def _known(location: Path_, document: _Document) -> Path_:
    known: Path_ = ()
    for part in location:
        if (*known, part) in document.lines:
            known = (*known, part)
    return known


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "a block of keys"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _unknown_key(key: str, fields: Mapping[str, str]) -> str:
    near = difflib.get_close_matches(key, fields, n=1)
    if near:
        return f"did you mean {near[0]}?"
    return (
        f"unknown key; the keys here are {', '.join(fields)}"
        if fields
        else "unknown key; remove it"
    )


def _cure_for_missing(fields: Mapping[str, str], key: str) -> str:
    description = fields.get(key)
    return f"add `{key}: ...` ({description.rstrip('.')})" if description else f"add `{key}: ...`"


def _fields_at(model: type[BaseModel], location: Path_) -> dict[str, str]:
    """Keys and descriptions of the block that `location` leads to, {} if none can be told."""
    here: Any = model
    for part in location:
        here = _step(here, part)
    return _fields_of(here)


def _step(annotation: Any, part: str | int) -> Any:
    """The annotation of what `part` leads to, None where it leads nowhere."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            if part == (field.alias or name):
                return field.annotation
        return None
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin in (dict, Mapping):
        return arguments[1]
    if origin in (list, tuple):
        return arguments[0]
    found = (_step(argument, part) for argument in arguments)
    return next((step for step in found if step is not None), None)


def _fields_of(annotation: Any) -> dict[str, str]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = annotation.model_fields.items()
        return {field.alias or name: field.description or "" for name, field in fields}
    if typing.get_origin(annotation) in (dict, list, tuple, Mapping):
        return {}
    merged: dict[str, str] = {}
    for argument in typing.get_args(annotation):
        merged |= _fields_of(argument)
    return merged
