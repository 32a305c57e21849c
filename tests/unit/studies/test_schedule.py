"""The order of a study's requests, from the study file alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from serving.studies.schedule import Block, Cell, Point, draw, plan, planned_requests, questions_of
from serving.studies.spec import Blocks, StudySpec

PROMPTS = ("a", "b", "c")


def spec(**fields: Any) -> StudySpec:
    values = {
        "schema": 1,
        "name": "lab",
        "question": "Is it faster?",
        "stack": "demo",
        "arms": {"draft_tokens": [0, 1, 2]},
        "streams": [1],
        "max_tokens": [16],
        "repetitions": 3,
    }
    return StudySpec.model_validate(values | fields)


def order(block: Block) -> list[tuple[int, str]]:
    """Round and arm of each cell; what is asked again has a star."""
    return [(cell.round, cell.arm + "*" * cell.again) for cell in block.cells]


def test_rounds_are_interleaved_turned_and_end_with_plains_first_again() -> None:
    (block,) = plan(spec(), ["code"], "all-at-once")
    assert order(block) == [
        *((0, arm) for arm in ("plain", "mtp-1", "mtp-2")),
        *((1, arm) for arm in ("mtp-1", "mtp-2", "plain")),
        *((2, arm) for arm in ("mtp-2", "plain", "mtp-1")),
        (0, "plain*"),
    ]


def test_all_arms_have_one_load_before_any_has_the_next() -> None:
    (block,) = plan(spec(streams=[1, 4], repetitions=1), ["code"], "all-at-once")
    loads = [(cell.arm, cell.point.streams) for cell in block.cells]
    assert loads == [
        *((arm, 1) for arm in ("plain", "mtp-1", "mtp-2")),
        *((arm, 4) for arm in ("mtp-1", "mtp-2", "plain")),
        ("plain", 1),
        ("plain", 4),
    ]


def test_pairs_put_plain_beside_each_arm_in_rounds_of_their_own() -> None:
    blocks = plan(spec(repetitions=1), ["code"], "pairs")
    assert [block.arms for block in blocks] == [("plain", "mtp-1"), ("plain", "mtp-2")]
    assert order(blocks[0]) == [(0, "plain"), (0, "mtp-1"), (0, "plain*")]
    assert order(blocks[1]) == [(1, "plain"), (1, "mtp-2"), (1, "plain*")]


def test_one_by_one_comes_back_to_plain_between_the_arms_and_at_the_end() -> None:
    blocks = plan(spec(repetitions=2), ["code"], "one-by-one")
    assert [block.arms for block in blocks] == [
        ("plain",),
        ("mtp-1",),
        ("plain",),
        ("mtp-2",),
        ("plain",),
    ]
    assert [order(block)[0] for block in blocks] == [
        (0, "plain"),
        (0, "mtp-1"),
        (2, "plain"),
        (2, "mtp-2"),
        (0, "plain*"),
    ]


def test_without_a_plain_arm_nothing_is_repeated() -> None:
    study = spec(arms={"draft_tokens": [1, 2]}, plain=None, repetitions=1)
    (block,) = plan(study, ["code"], "all-at-once")
    assert order(block) == [(0, "mtp-1"), (0, "mtp-2")]


@pytest.mark.parametrize("blocks", ["all-at-once", "pairs", "one-by-one"])
def test_every_arm_s_answer_has_plain_s_to_the_same_prompt_in_the_same_round(
    blocks: Blocks,
) -> None:
    study = spec(streams=[1, 4], context={"tokens": [0, 64]})
    asked: Counter[tuple[str, int, Point, str]] = Counter()
    again: Counter[tuple[str, int, Point, str]] = Counter()
    for block in plan(study, ["code", "chat"], blocks):
        for cell in block.cells:
            for question in questions_of(cell, PROMPTS, study):
                counts = again if cell.again else asked
                counts[cell.arm, cell.round, cell.point, question.key] += 1
    assert set(asked.values()) == set(again.values()) == {1}
    assert again.keys() < asked.keys()
    arms = [key for key in asked if key[0] != "plain"]
    assert len(arms) == 2 * 3 * 2 * 2 * (3 + 4)
    assert all(("plain", *rest) in asked for _, *rest in arms)


def test_cell_ids_are_unique_and_the_same_every_time() -> None:
    study = spec(streams=[1, 4], max_tokens=[8, 16], context={"tokens": [0, 64]})
    first, second = (
        [cell.id for block in plan(study, ["code"], "pairs") for cell in block.cells]
        for _ in range(2)
    )
    assert first == second
    assert len(set(first)) == len(first)
    assert first[0] == "r0-plain-code+0-s1-t8"


def test_arms_get_the_same_prompts_in_the_same_order_and_rounds_another() -> None:
    study, many = spec(), [str(number) for number in range(20)]
    point = Point("code", 1, 16)
    plain, drafting, later = (
        questions_of(Cell(number, arm, point), many, study)
        for number, arm in [(0, "plain"), (0, "mtp-1"), (1, "plain")]
    )
    assert plain == drafting
    assert plain != later
    assert {each.prompt for each in later} == set(many)


def test_prompts_come_again_under_another_key_until_the_streams_are_busy() -> None:
    study = spec(streams=[4], requests_per_stream=2)
    asked = questions_of(Cell(0, "plain", Point("code", 4, 16)), PROMPTS, study)
    assert len({each.key for each in asked}) == 8
    assert Counter(each.prompt for each in asked).most_common()[2][1] == 2
    assert [each.key for each in asked[3:6]] == [f"{each.key}#2" for each in asked[:3]]


def test_only_the_first_prompts_of_a_category_are_asked_where_so_many_are_wanted() -> None:
    cell = Cell(0, "plain", Point("code", 1, 16))
    asked = questions_of(cell, PROMPTS, spec(prompts_per_category=2))
    assert {each.prompt for each in asked} == {"a", "b"}


def test_a_depth_is_part_of_the_category_and_of_the_prompt_s_key() -> None:
    study = spec(context={"tokens": [64]})
    cell = plan(study, ["code"], "all-at-once")[0].cells[0]
    assert cell.point.label == "code+64"
    assert {each.key for each in questions_of(cell, PROMPTS, study)} == {"a+64", "b+64", "c+64"}


def test_what_a_question_draws_depends_on_the_round_and_not_on_the_arm() -> None:
    point, study = Point("code", 1, 16), spec()
    (question, *_) = questions_of(Cell(0, "plain", point), PROMPTS, study)
    drawn = [
        draw(Cell(number, arm, point), question)
        for number, arm in [(0, "plain"), (0, "mtp-1"), (1, "plain")]
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_requests_of_the_whole_study_are_counted_ahead() -> None:
    study = spec(streams=[1, 4])
    blocks = plan(study, ["code"], "all-at-once")
    assert planned_requests(blocks, {"code": PROMPTS}, study) == (3 * 3 + 1) * (3 + 4)
