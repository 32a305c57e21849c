"""Whether greedy decoding gives the same text with drafts as without.

Owns comparing each arm's greedy answers with plain's, token by token. Leaves what follows
from a difference to the reader.

A difference is not yet a fault. A verified step computes several tokens at once, so sums
are taken in another order and bf16 rounds them otherwise; where two tokens are almost
equally likely that alone swaps them, as another batch size does for plain too. The gap
between plain's first and second choice, where the texts part, tells the two cases apart.
Plain is compared with itself as well, since its last pass asks the same as its first: what it
does not repeat itself, no variant can be asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from serving.studies.records import RequestRecord, Run
from serving.studies.statistics import Estimate, proportion

# Logits of a sure choice are of the order of 16 to 32, where bf16 with its 8 significant
# bits is spaced 0.125 apart; each of the two compared may be rounded one step off.
NOISE_NATS = 0.25

Unit = Literal["token", "character"]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where one answer first parts from plain's."""

    arm: str
    category: str
    prompt: str
    round: int
    position: int
    """Of the first different token or character, from 0."""
    unit: Unit
    gap: float | None
    """Plain's log-probability of its first choice there minus its second, nats."""
    within_noise: bool | None
    """Whether the gap is at most NOISE_NATS; None where it is not known."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """The greedy answers of one arm beside plain's."""

    arm: str
    compared: int
    identical: int
    share: Estimate
    """identical / compared, with its Wilson interval."""
    units: tuple[Unit, ...]
    """What was compared; characters where a server gave no token ids."""
    differences: tuple[Difference, ...]

    @property
    def within_noise(self) -> int:
        """Differences that rounding explains."""
        return sum(each.within_noise is True for each in self.differences)

    @property
    def beyond_noise(self) -> int:
        """Differences that rounding does not explain."""
        return sum(each.within_noise is False for each in self.differences)


def in_words(agreements: Sequence[Agreement], plain: str | None) -> str | None:
    """What the variants' answers say together, as a sentence; None where none was compared."""
    variants = [each for each in agreements if each.arm != plain]
    compared = sum(each.compared for each in variants)
    if not compared:
        return None
    beyond = sum(each.beyond_noise for each in variants)
    unknown = compared - beyond - sum(each.identical + each.within_noise for each in variants)
    identical = sum(each.identical for each in variants)
    same = f"{identical} of {compared} answers are plain's to the end"
    if beyond:
        return f"Drafting changes greedy text: {beyond} of {compared} answers part beyond rounding."
    if unknown:
        return f"With drafting, {same}; whether {unknown} others part by rounding is not known."
    if sum(each.within_noise for each in variants):
        return (
            f"Drafting changes greedy text no more than rounding does: {same}, the others part "
            f"where plain's two likeliest tokens are at most {NOISE_NATS:g} nats apart."
        )
    return f"Drafting changes no greedy text: {same}."


def compare_greedy(run: Run) -> tuple[Agreement, ...]:
    """Each arm against plain in the order of the study's arms; empty without a plain arm.

    Compared are whole answers at temperature 0 with the same category, prompt, round,
    streams and max_tokens, since only then was the prompt the same to the letter: each round
    and load opens it with a salt of its own. Plain's own row compares its last pass with the
    round that this asks again. Arms without a pair are left out.
    """
    greedy = sorted(
        (each for each in run.requests if each.ok and each.temperature == 0),
        key=lambda each: each.sent_at,
    )
    references: dict[tuple[object, ...], RequestRecord] = {}
    for each in greedy:
        if each.arm == run.study.plain:
            references.setdefault(_request(each), each)
    agreements: list[Agreement] = []
    for arm in run.study.arms:
        pairs = (
            (reference, each)
            for each in greedy
            if each.arm == arm.name
            and (reference := references.get(_request(each))) is not None
            and reference is not each
        )
        agreements += _agreement(arm.name, pairs)
    return tuple(agreements)


def _request(record: RequestRecord) -> tuple[object, ...]:
    return record.category, record.prompt, record.round, record.streams, record.max_tokens


def _agreement(
    arm: str, pairs: Iterable[tuple[RequestRecord, RequestRecord]]
) -> Iterable[Agreement]:
    """One agreement, or none where no pair kept its answers."""
    units: dict[Unit, None] = {}
    compared = 0
    differences = []
    for reference, answer in pairs:
        contents = _contents(reference, answer)
        if contents is None:
            continue
        unit, expected, found = contents
        units[unit] = None
        compared += 1
        position = first_difference(expected, found)
        if position is not None:
            differences.append(_difference(reference, answer, position, unit))
    if compared:
        identical = compared - len(differences)
        share = proportion(identical, compared)
        yield Agreement(arm, compared, identical, share, tuple(units), tuple(differences))


def _contents(
    reference: RequestRecord, answer: RequestRecord
) -> tuple[Unit, Sequence[object], Sequence[object]] | None:
    if reference.token_ids is not None and answer.token_ids is not None:
        return "token", reference.token_ids, answer.token_ids
    if reference.text is not None and answer.text is not None:
        return "character", reference.text, answer.text
    return None


def first_difference(expected: Sequence[object], found: Sequence[object]) -> int | None:
    """The first place where the two differ; where one goes on, the end of the other."""
    for position, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            return position
    return None if len(expected) == len(found) else min(len(expected), len(found))


def _difference(
    reference: RequestRecord, answer: RequestRecord, position: int, unit: Unit
) -> Difference:
    gaps = reference.logprob_gaps or ()
    gap = gaps[position] if unit == "token" and position < len(gaps) else None
    return Difference(
        arm=answer.arm,
        category=answer.category,
        prompt=answer.prompt,
        round=answer.round,
        position=position,
        unit=unit,
        gap=gap,
        within_noise=None if gap is None else gap <= NOISE_NATS,
    )
