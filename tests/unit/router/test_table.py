"""Which model and variant answer to a name, and what an unknown name is told."""

from __future__ import annotations

import pytest

from serving.router.table import ModelRoute, RoutingTable, UnknownModelError, VariantRoute


def route(variant: str) -> VariantRoute:
    return VariantRoute(variant=variant, app_name=f"app-{variant}", max_model_len=4096)


TABLE = RoutingTable(
    models=(
        ModelRoute(
            id="tiny-moe",
            aliases=("chat", "small"),
            default_variant="mtp",
            variants=(route("mtp"), route("plain")),
        ),
        ModelRoute(id="tiny-dense", default_variant="plain", variants=(route("plain"),)),
    )
)


@pytest.mark.parametrize(
    ("requested", "header", "expected"),
    [
        ("tiny-moe", None, ("tiny-moe", "mtp")),
        ("tiny-dense", None, ("tiny-dense", "plain")),
        ("chat", None, ("tiny-moe", "mtp")),
        ("tiny-moe@plain", None, ("tiny-moe", "plain")),
        ("small@plain", None, ("tiny-moe", "plain")),
        ("tiny-moe", "plain", ("tiny-moe", "plain")),
        ("chat", "plain", ("tiny-moe", "plain")),
        ("tiny-moe", "", ("tiny-moe", "mtp")),
        ("tiny-moe@mtp", "plain", ("tiny-moe", "mtp")),
    ],
)
def test_a_name_leads_to_its_model_and_variant(
    requested: str, header: str | None, expected: tuple[str, str]
) -> None:
    model, variant = TABLE.resolve(requested, header)
    assert (model.id, variant.variant) == expected


@pytest.mark.parametrize(
    ("requested", "header", "message"),
    [
        (
            "tiny-mo",
            None,
            "the model 'tiny-mo' is not served here (did you mean 'tiny-moe'?); "
            "served: chat, small, tiny-dense, tiny-moe",
        ),
        (
            "tiny-mo@plain",
            None,
            "the model 'tiny-mo@plain' is not served here (did you mean 'tiny-moe'?); "
            "served: chat, small, tiny-dense, tiny-moe",
        ),
        (
            "gpt",
            None,
            "the model 'gpt' is not served here; served: chat, small, tiny-dense, tiny-moe",
        ),
        ("", None, "the model '' is not served here; served: chat, small, tiny-dense, tiny-moe"),
        ("tiny-moe@fast", None, "model 'tiny-moe' has no variant 'fast'; it has: mtp, plain"),
        ("chat", "fast", "model 'tiny-moe' has no variant 'fast'; it has: mtp, plain"),
        ("tiny-moe@", None, "model 'tiny-moe' has no variant ''; it has: mtp, plain"),
        ("tiny-dense", "mtp", "model 'tiny-dense' has no variant 'mtp'; it has: plain"),
    ],
)
def test_an_unknown_name_is_told_what_is_served(
    requested: str, header: str | None, message: str
) -> None:
    with pytest.raises(UnknownModelError) as error:
        TABLE.resolve(requested, header)
    assert str(error.value) == message


def test_a_stack_without_models_says_so() -> None:
    with pytest.raises(UnknownModelError) as error:
        RoutingTable().resolve("tiny-moe")
    assert str(error.value) == "the model 'tiny-moe' is not served here; served: none"


def test_the_names_are_ids_and_aliases_then_every_variant() -> None:
    assert [(name, model.id, variant.variant) for name, model, variant in TABLE.names()] == [
        ("tiny-moe", "tiny-moe", "mtp"),
        ("chat", "tiny-moe", "mtp"),
        ("small", "tiny-moe", "mtp"),
        ("tiny-moe@mtp", "tiny-moe", "mtp"),
        ("tiny-moe@plain", "tiny-moe", "plain"),
        ("tiny-dense", "tiny-dense", "plain"),
        ("tiny-dense@plain", "tiny-dense", "plain"),
    ]


def test_a_table_survives_the_way_through_user_config() -> None:
    assert RoutingTable.model_validate(TABLE.model_dump()) == TABLE
