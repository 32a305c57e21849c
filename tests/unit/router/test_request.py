"""What the rules are told of a request, in each API's own words, and of odd ones."""

from __future__ import annotations

from typing import Any

import pytest

from serving.router.request import MAX_VALUES, RouteRequest, prompt_beginning, read_request


def read(body: dict[str, Any], **headers: str) -> RouteRequest:
    named = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return read_request(body, named)


@pytest.mark.parametrize(
    ("model", "variant"),
    [("m", None), ("m@plain", "plain"), ("m@", ""), ("m@a@b", "a@b"), (7, None), (None, None)],
)
def test_the_variant_is_what_stands_after_the_at_sign(model: Any, variant: str | None) -> None:
    got = read({"model": model})
    assert (got.model, got.variant) == (model if isinstance(model, str) else "", variant)


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6, "max_tokens": 5}, 6),
        ({"max_output_tokens": 7}, 7),
        ({"messages": []}, None),
        ({"max_tokens": "5"}, None),
        ({"max_tokens": True}, None),
        ({"max_tokens": 0}, None),
        ({"prompt": "x"}, 16),
        ({"prompt": "x", "max_tokens": None}, None),
    ],
)
def test_the_answer_s_limit_is_read_from_every_api(body: dict[str, Any], limit: int | None) -> None:
    assert read(body).max_tokens == limit


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "x" * 40}, 10),
        ({"prompt": ["x" * 20, "y" * 20]}, 10),
        ({"prompt": [1, 2, 3]}, 3),
        ({"prompt": [[1, 2], [3, 4]]}, 4),
        ({"input": "x" * 40, "instructions": "y" * 40}, 20),
        ({"messages": [{"role": "user", "content": "x" * 36}]}, 10),
        ({"messages": [{"content": [{"text": "x" * 40}]}], "system": [{"text": "y" * 40}]}, 20),
        ({"messages": [{"content": [{"image_url": {"url": "data:" + "A" * 4000}}]}]}, 0),
        ({"messages": [{"content": [{"source": {"data": "A" * 4000}}]}]}, 0),
        ({"tools": [{"function": {"description": "x" * 40}}]}, 10),
        ({"messages": 5, "prompt": {"a": [None, {"b": 1.5}]}}, 0),
    ],
)
def test_a_prompt_is_a_token_for_four_characters(body: dict[str, Any], tokens: int) -> None:
    assert read(body).prompt_tokens == tokens


def test_only_so_much_of_a_prompt_is_looked_at() -> None:
    assert read({"messages": ["x" * 4] * (3 * MAX_VALUES)}).prompt_tokens == MAX_VALUES - 1


def test_a_prompt_nested_too_deep_for_recursion_is_read_all_the_same() -> None:
    nested: Any = "x" * 40
    for _ in range(5_000):
        nested = [nested]
    assert read({"prompt": nested}).prompt_tokens == 10


@pytest.mark.parametrize(
    ("body", "structured"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"strict": True}}}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"response_format": {"type": "text"}}, False),
        ({"response_format": "json"}, False),
        ({"structured_outputs": {"regex": "a+"}}, True),
        ({"structured_outputs": {}}, False),
        ({"text": {"format": {"type": "json_schema"}}}, True),
        ({"text": "hello"}, False),
        ({"output_config": {"format": {"type": "json_schema"}}}, True),
        ({}, False),
    ],
)
def test_a_grammar_is_seen_in_every_api(body: dict[str, Any], structured: bool) -> None:
    assert read(body).structured is structured


@pytest.mark.parametrize(
    ("choice", "forced"),
    [
        ("required", True),
        ({"type": "function", "function": {"name": "f"}}, True),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "f"}, True),
        ("auto", False),
        ("none", False),
        ({"type": "auto"}, False),
        ({"type": ["any"]}, False),
        (None, False),
    ],
)
def test_a_forced_call_is_seen_in_every_api(choice: Any, forced: bool) -> None:
    assert read({"tool_choice": choice}).forced_tool is forced


def test_headers_name_variant_category_and_session() -> None:
    got = read({}, x_moe_serving_variant="plain", x_moe_serving_category=" code ", x_session_id="s")
    assert (got.header_variant, got.category, got.session) == ("plain", "code", "s")


def test_an_empty_header_is_none() -> None:
    got = read({}, x_moe_serving_variant="", x_moe_serving_category=" ", x_session_id="")
    assert (got.header_variant, got.category, got.session) == (None, None, None)


def test_a_key_stands_for_a_session_and_is_not_kept() -> None:
    bearer, other = read({}, authorization="Bearer sk-1"), read({}, x_api_key="sk-2")
    assert bearer.session is not None
    assert "sk-1" not in bearer.session
    assert bearer.session == read({}, authorization="Bearer sk-1").session
    assert bearer.session != other.session


@pytest.mark.parametrize(
    ("tier", "header", "priority"),
    [
        (None, None, "interactive"),
        ("flex", None, "batch"),
        ("priority", None, "interactive"),
        (7, None, "interactive"),
        (None, b"batch", "batch"),
        ("flex", b"interactive", "interactive"),
    ],
)
def test_a_priority_is_the_headers_or_the_tiers(
    tier: Any, header: bytes | None, priority: str
) -> None:
    headers = {} if header is None else {b"x-moe-serving-priority": header}
    assert read_request({"service_tier": tier}, headers).priority == priority


ODD: tuple[Any, ...] = (None, True, -1, 1.5, 10**30, "", "x", [], [None, [1]], {}, {"type": []})


@pytest.mark.parametrize("value", ODD)
def test_odd_types_are_no_error_anywhere(value: Any) -> None:
    fields = (
        "model messages prompt input system instructions tools tool_choice response_format text "
        "output_config structured_outputs max_tokens max_completion_tokens service_tier"
    )
    body = dict.fromkeys(fields.split(), value)
    assert isinstance(read(body), RouteRequest)
    assert isinstance(read({name: {"format": value, "type": value} for name in body}), RouteRequest)


@pytest.mark.parametrize(
    ("body", "beginning"),
    [
        ({"prompt": ["One", " two"]}, "One two"),
        ({"messages": [{"role": "user", "content": "Hi"}], "system": "Be kind."}, "Be kind.Hi"),
        (
            {"messages": [{"content": [{"type": "text", "text": "a"}, {"image_url": "x"}]}]},
            "a",
        ),
        ({"instructions": "Be.", "input": [{"content": [{"text": "Go"}]}]}, "Be.Go"),
        ({"prompt": [5, 6]}, ""),
        ({"messages": None, "prompt": {"content": 3}}, ""),
    ],
)
def test_the_beginning_of_a_prompt_is_its_texts_as_a_model_reads_them(
    body: dict[str, Any], beginning: str
) -> None:
    assert prompt_beginning(body, 100) == beginning
    assert prompt_beginning(body, 2) == beginning[:2]
