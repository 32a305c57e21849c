"""The admin API's OpenAPI document, and every operation of it under made-up values.

The values are drawn from the document itself, right, nearly right and wrong, so that an operation
that is added is tested as well.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.teams.accounts import Accounts
from serving.teams.admin import admin_app
from serving.teams.admin_errors import OPENAPI_PATH, ErrorBody
from serving.teams.admin_values import Name
from serving.teams.caller import Caller
from serving.teams.database import Database, open_database

SECRET = b"s" * 32
CALLER = Caller("known", "admin222", frozenset({"inference", "admin"}), models=None, priority=None)
JSON = "application/json"
# In a URL: the id of a key that was just made.
NEW_KEY = "new-key"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE", "BREW")

# The document needs no database.
DOCUMENT: dict[str, Any] = admin_app(
    lambda actor: pytest.fail("not to be called"), Database.__new__(Database), tuple, lambda **_: ()
).openapi()
OPERATIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    operation["operationId"]: (method.upper(), path, operation)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
}
each_operation = pytest.mark.parametrize("operation_id", OPERATIONS)


# --- the document ------------------------------------------------------------------------------


@each_operation
def test_an_operation_says_what_it_does_what_it_gives_and_how_it_fails(operation_id: str) -> None:
    _, path, operation = OPERATIONS[operation_id]
    assert operation["summary"] and operation["description"] and operation["tags"]
    assert operation["security"] == [{"HTTPBearer": []}, {"APIKeyHeader": []}]
    answers = operation["responses"]
    assert {"401", "403", "503", "default"} <= answers.keys()
    assert "422" not in answers
    takes_values = "requestBody" in operation or any(
        parameter["in"] == "query" for parameter in operation.get("parameters", ())
    )
    assert ("400" in answers) or not takes_values
    assert ("404" in answers) or "{" not in path or path == "/admin/prices/{model}"
    for status, answer in answers.items():
        schema = answer["content"][JSON]["schema"]
        error = schema == {"$ref": "#/components/schemas/ErrorBody"}
        assert error is not status.startswith("2")


@pytest.mark.parametrize("name", DOCUMENT["components"]["schemas"])
def test_no_part_of_the_document_is_open_or_without_a_bound(name: str) -> None:
    schema = DOCUMENT["components"]["schemas"][name]
    assert schema["additionalProperties"] is False
    if any(name in json.dumps(body) for body in request_bodies()):
        for field_schema in flat(schema):
            kind = field_schema.get("type")
            assert kind != "string" or {"pattern", "maxLength", "enum"} & field_schema.keys()
            assert kind not in ("integer", "number") or "maximum" in field_schema
            assert kind != "array" or "maxItems" in field_schema


async def test_the_document_is_served_and_no_page_with_scripts_is(
    client: Callable[[], httpx.AsyncClient],
) -> None:
    async with client() as opened:
        answer = await opened.get(OPENAPI_PATH)
        assert answer.json() == DOCUMENT
        for path in ("/docs", "/redoc", "/admin/docs", "/admin/redoc", "/openapi.json"):
            assert (await opened.get(path)).status_code == 404


@given(st.one_of(st.text(max_size=70), st.from_regex(r"[\w.\n-]{1,66}", fullmatch=True)))
def test_the_names_that_the_document_allows_are_those_that_accounts_takes(name: str) -> None:
    from serving.teams.accounts import _NAME

    (field,) = Name.__metadata__
    (pattern,) = (each.pattern for each in field.metadata if hasattr(each, "pattern"))
    # `$` ends a JSON schema's pattern at the very end, Python's also before a line break.
    allowed = re.fullmatch(pattern, name) is not None and "\n" not in name
    assert allowed == (_NAME.fullmatch(name) is not None)


def request_bodies() -> Iterator[dict[str, Any]]:
    for _, _, operation in OPERATIONS.values():
        if body := operation.get("requestBody"):
            schema = body["content"][JSON]["schema"]
            yield schema
            yield resolved(schema)


def flat(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for part in (*schema.get("properties", {}).values(), *schema.get("anyOf", ())):
        yield part
        yield from flat(part)
    if "items" in schema:
        yield schema["items"]
        yield from flat(schema["items"])


def resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    while "$ref" in schema:
        schema = DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


# --- values drawn from it --------------------------------------------------------------------

# JSON as a client may send it: huge numbers, NaN, half surrogate pairs and all.
junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**53, -(2**63), 10**400, 1e308, float("nan"), float("inf")])
    | st.floats()
    | st.text()
    | st.text(st.characters(categories=["Cs"]), max_size=3)
    | st.sampled_from(["known", "qwen", "\x00", "'; --", "a" * 3000]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def right(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Values that the schema allows."""
    return drawn(schema, st.nothing())


def mixed(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Values that the schema allows, and others, on every level."""
    return drawn(schema, junk)


def drawn(schema: Mapping[str, Any], wrong: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    schema = resolved(schema)
    if "anyOf" in schema:
        return st.one_of(wrong, *(drawn(each, wrong) for each in schema["anyOf"]))
    return wrong | plain(schema, wrong)


def plain(schema: Mapping[str, Any], wrong: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema["type"]
    if kind == "null":
        return st.none()
    if kind == "string":
        return text_of(schema)
    if kind == "integer":
        least = int(schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1))
        return st.integers(least, int(schema["maximum"]))
    if kind == "number":
        return st.floats(schema["minimum"], schema["maximum"], allow_subnormal=False)
    if kind == "array":
        items = drawn(schema["items"], wrong)
        return st.lists(items, min_size=schema.get("minItems", 0), max_size=3).filter(
            lambda found: len(found) <= schema["maxItems"]
        )
    assert kind == "object"
    return object_of(schema, wrong)


def text_of(schema: Mapping[str, Any]) -> st.SearchStrategy[str]:
    if schema.get("format") == "date-time":
        return st.datetimes().map(lambda moment: moment.isoformat() + "Z")
    if "pattern" in schema:
        # What is in the database as often as what is not.
        known = [name for name in ("known", "qwen") if re.fullmatch(schema["pattern"], name)]
        return st.sampled_from(known) | st.from_regex(schema["pattern"], fullmatch=True)
    return st.text(max_size=schema["maxLength"])


def object_of(schema: Mapping[str, Any], wrong: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    fields = {name: drawn(part, wrong) for name, part in schema["properties"].items()}
    needed = schema.get("required", [])
    given_fields = st.fixed_dictionaries(
        {name: fields[name] for name in needed},
        optional={name: fields[name] for name in fields if name not in needed},
    )
    if wrong.is_empty:
        return given_fields
    others = st.dictionaries(st.text(), wrong, max_size=2)
    return given_fields | st.builds(lambda one, two: {**one, **two}, given_fields, others)


@st.composite
def requests(draw: st.DrawFn, operation_id: str, *, valid: bool) -> dict[str, Any]:
    """Method, URL, headers and content of a request to this operation."""
    method, path, operation = OPERATIONS[operation_id]
    values = right if valid else mixed
    query: dict[str, str] = {}
    for parameter in operation.get("parameters", ()):
        name, schema = parameter["name"], parameter["schema"]
        if parameter["in"] == "path":
            known = st.sampled_from(["known", "qwen", NEW_KEY])
            value = draw(known | (right(schema) if "pattern" in schema else st.text(min_size=1)))
            path = path.replace(f"{{{name}}}", quote(value, safe="/", errors="surrogatepass"))
        elif draw(st.booleans()):
            value = draw(values(schema).filter(lambda found: not valid or found is not None))
            query[name] = str(value)
    if not valid and draw(st.integers(0, 9)) == 0:
        query[draw(st.text())] = draw(st.text())
    url = f"{path}?{urlencode(query, errors='surrogatepass')}" if query else path
    request: dict[str, Any] = {"method": method, "url": url}
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"][JSON]["schema"]
        request["content"] = draw(values(schema).map(lambda body: json.dumps(body).encode()))
        request["headers"] = {"content-type": JSON}
    return request


# --- the app ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """A SQLite database with a team, which all examples of this module change."""
    folder: Path = tmp_path_factory.mktemp("admin")
    opened = open_database(f"sqlite:///{folder / 'teams.db'}")
    opened.upgrade()
    Accounts(opened, SECRET).create_team("known")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def client(database: Database) -> Callable[[], httpx.AsyncClient]:
    app = admin_app(partial(Accounts, database, SECRET), database, lambda: ["qwen"], lambda **_: ())

    async def passed_on(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "state": {"caller": CALLER}}, receive, send)

    # A fault of the app's own is raised, and fails the test with its trace.
    transport = httpx.ASGITransport(passed_on)
    return partial(httpx.AsyncClient, transport=transport, base_url="http://gateway")


def answered(client: Callable[[], httpx.AsyncClient], request: Mapping[str, Any]) -> httpx.Response:
    async def send() -> httpx.Response:
        async with client() as opened:
            url = request["url"]
            if NEW_KEY in url:
                new = await opened.post("/admin/keys", json={"team": "known", "name": "new"})
                url = url.replace(NEW_KEY, new.json()["id"])
            return await opened.request(**{**request, "url": url})

    return asyncio.run(send())


def check_shape(answer: httpx.Response, answers: Mapping[str, Any]) -> None:
    """No fault of the server's, and nothing that the document does not say."""
    assert answer.status_code < 500, answer.text
    schema = answers[str(answer.status_code)]["content"][JSON]["schema"]
    assert answer.headers["content-type"] == JSON
    jsonschema.validate(answer.json(), {**schema, "components": DOCUMENT["components"]})


many = settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@each_operation
@many
@given(data=st.data())
def test_whatever_comes_is_answered_as_the_document_says(
    client: Callable[[], httpx.AsyncClient], operation_id: str, data: st.DataObject
) -> None:
    request = data.draw(requests(operation_id, valid=False))
    answer = answered(client, request)
    if answer.status_code == 404 and answer.json()["error"]["code"] == "unknown_path":
        # A name with a slash, or of dots, leads elsewhere.
        return
    if answer.status_code == 405:
        return
    check_shape(answer, OPERATIONS[operation_id][2]["responses"])


@each_operation
@many
@given(data=st.data())
def test_what_the_document_allows_is_not_refused_as_unusable(
    client: Callable[[], httpx.AsyncClient], operation_id: str, data: st.DataObject
) -> None:
    answer = answered(client, data.draw(requests(operation_id, valid=True)))
    assert answer.status_code not in (400, 422), answer.text


@many
@given(
    method=st.sampled_from(METHODS),
    path=st.sampled_from([*DOCUMENT["paths"], OPENAPI_PATH])
    | st.text().map(lambda text: "/" + text),
    content=st.binary(),
    kind=st.just(JSON) | st.text(st.characters(max_codepoint=255)),
    host=st.sampled_from(["gateway", "[", "[::1", "a b", "", "\xff"]),
)
def test_any_method_path_and_header_is_answered_in_openais_shape(
    client: Callable[[], httpx.AsyncClient],
    method: str,
    path: str,
    content: bytes,
    kind: str,
    host: str,
) -> None:
    headers = {"content-type": kind.encode("latin-1"), "host": host.encode("latin-1")}
    url = quote(path, errors="surrogatepass")
    request = {"method": method, "url": url, "content": content, "headers": headers}
    answer = answered(client, request)
    assert answer.status_code < 500
    # Whatever is answered to HEAD, its body does not go over the wire.
    if answer.status_code >= 400 and method != "HEAD":
        ErrorBody.model_validate_json(answer.text)
