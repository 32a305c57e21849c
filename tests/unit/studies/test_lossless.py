"""Whether greedy answers with drafts are plain's, and where they part."""

from __future__ import annotations

from typing import Any

import pytest

from serving.studies.lossless import (
    NOISE_NATS,
    Agreement,
    Difference,
    compare_greedy,
    first_difference,
    in_words,
)
from serving.studies.records import Arm, RequestRecord, Run, StudyRecord
from serving.studies.statistics import proportion

IDS = (5, 6, 7, 8)
GAPS = (2.0, 1.0, 0.1, 3.0)


def run(*requests: RequestRecord, plain: str | None = "plain") -> Run:
    arms = tuple(Arm(name=name, url="http://a/v1", model="tiny") for name in ("plain", "mtp2"))
    study = StudyRecord(
        id="1",
        name="losslessness",
        question="Is the text the same?",
        arms=arms,
        plain=plain,
        gpu="cpu",
        environment={},
        spec={},
        started_at=0,
    )
    return Run(study, requests)


def record(arm: str, token_ids: tuple[int, ...] | None = IDS, **fields: Any) -> RequestRecord:
    given: dict[str, Any] = {
        "cell": "c",
        "round": 0,
        "arm": arm,
        "draft_tokens": 0,
        "streams": 1,
        "category": "code",
        "prompt": "p1",
        "temperature": 0.0,
        "max_tokens": 4,
        "sent_at": 0.0,
        "outcome": "ok",
        "token_ids": token_ids,
        "logprob_gaps": GAPS if arm == "plain" else None,
    }
    return RequestRecord(**given | fields)


def test_identical_answers_are_counted_with_an_interval() -> None:
    found = compare_greedy(
        run(
            record("plain"),
            record("plain", prompt="p2"),
            record("mtp2"),
            record("mtp2", prompt="p2"),
        )
    )
    assert found == (Agreement("mtp2", 2, 2, proportion(2, 2), ("token",), ()),)


@pytest.mark.parametrize(
    ("ids", "position", "gap", "within"),
    [
        ((5, 6, 9, 8), 2, 0.1, True),
        ((5, 9, 9, 8), 1, 1.0, False),
        ((5, 6, 7), 3, 3.0, False),
        ((5, 6, 7, 8, 9), 4, None, None),
    ],
    ids=["a near tie", "a clear choice", "an early end", "longer than plain"],
)
def test_the_first_difference_is_told_with_plains_gap(
    ids: tuple[int, ...], position: int, gap: float | None, within: bool | None
) -> None:
    (found,) = compare_greedy(run(record("plain"), record("mtp2", ids)))
    assert found.differences == (
        Difference("mtp2", "code", "p1", 0, position, "token", gap, within),
    )
    assert (found.identical, found.share) == (0, proportion(0, 1))
    assert (found.within_noise, found.beyond_noise) == (within is True, within is False)


def test_a_gap_is_within_noise_up_to_two_steps_of_bf16() -> None:
    # From 16 to 32 bf16 has 7 bits after the leading one: steps of 16 / 2^7 = 0.125.
    assert NOISE_NATS == 2 * 16 / 2**7
    gaps = (NOISE_NATS, NOISE_NATS + 0.001)
    plain = record("plain", (1, 2), logprob_gaps=gaps)
    at = [
        compare_greedy(run(plain, record("mtp2", ids)))[0].within_noise for ids in ((9, 2), (1, 9))
    ]
    assert at == [1, 0]


def test_texts_are_compared_where_token_ids_are_missing() -> None:
    (found,) = compare_greedy(
        run(record("plain", text="a = 1\n"), record("mtp2", None, text="a = 2\n"))
    )
    # The gaps are by token, and a character does not tell its token.
    assert found.units == ("character",)
    assert found.differences == (Difference("mtp2", "code", "p1", 0, 4, "character", None, None),)


def test_answers_that_were_not_kept_are_not_compared() -> None:
    assert compare_greedy(run(record("plain"), record("mtp2", None))) == ()


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.7},
        {"round": 1},
        {"streams": 4},
        {"max_tokens": 8},
        {"prompt": "p2"},
        {"category": "chat"},
        {"outcome": "cut"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_only_greedy_answers_to_the_same_request_are_compared(fields: dict[str, Any]) -> None:
    assert compare_greedy(run(record("plain"), record("mtp2", **fields))) == ()


def test_plains_last_pass_is_compared_with_the_round_that_it_asks_again() -> None:
    (found,) = compare_greedy(
        run(
            record("plain", (5, 6, 7, 9), again=True, sent_at=9.0),
            record("plain", prompt="p2", again=True, sent_at=8.0),
            record("plain", sent_at=5.0),
            record("plain", prompt="p2", sent_at=1.0),
            record("plain", (1, 2, 3, 4), round=1, sent_at=7.0),
        )
    )
    assert (found.arm, found.compared, found.identical) == ("plain", 2, 1)
    assert [(each.round, each.position) for each in found.differences] == [(0, 3)]


def test_without_a_plain_arm_nothing_is_compared() -> None:
    assert compare_greedy(run(record("plain"), record("mtp2"), plain=None)) == ()


def test_the_first_difference_of_equal_sequences_is_none() -> None:
    assert first_difference("abc", "abc") is None
    assert first_difference("abc", "abd") == 2
    assert first_difference("", "a") == 0


@pytest.mark.parametrize(
    ("mtp_ids", "gaps", "sentence"),
    [
        (IDS, GAPS, "Drafting changes no greedy text: 1 of 1 answers are plain's to the end."),
        (
            (5, 6, 9, 8),
            GAPS,
            "Drafting changes greedy text no more than rounding does: 0 of 1 answers are plain's "
            "to the end, the others part where plain's two likeliest tokens are at most 0.25 nats "
            "apart.",
        ),
        (
            (5, 9, 9, 8),
            GAPS,
            "Drafting changes greedy text: 1 of 1 answers part beyond rounding.",
        ),
        (
            (5, 9, 9, 8),
            None,
            "With drafting, 0 of 1 answers are plain's to the end; whether 1 others part by "
            "rounding is not known.",
        ),
    ],
)
def test_the_answers_are_summed_up_in_a_sentence(
    mtp_ids: tuple[int, ...], gaps: tuple[float, ...] | None, sentence: str
) -> None:
    found = compare_greedy(run(record("plain", logprob_gaps=gaps), record("mtp2", mtp_ids)))
    assert in_words(found, "plain") == sentence
    assert in_words((), "plain") is None
