"""Which requests a study sends, and in what order.

Owns blocks, rounds and cells, and which prompts a cell asks: all of it follows from the study
file and the prompts' names alone, so that a run can be taken up again where it ended. Leaves
sending to `run`.

Between two cells of one arm lie the same cells of all the others, so whatever drifts with time
(clocks, heat, neighbours) falls on all arms alike; the order within a round turns, so that no arm
is always the one after another. Plain is asked its first rounds again at the end, to the letter:
that shows drift, and whether plain repeats its own text.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from serving.studies.spec import Blocks, StudySpec


@dataclass(frozen=True, slots=True)
class Point:
    """A load that every arm is given alike."""

    category: str
    streams: int
    max_tokens: int
    context_tokens: int | None = None
    """Tokens of text before each prompt; None where the study is not about depth."""

    @property
    def label(self) -> str:
        """The category as recorded: `code`, or `code+1024` at a depth of 1,024 tokens."""
        depth = self.context_tokens
        return self.category if depth is None else f"{self.category}+{depth}"


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm under one load in one round."""

    round: int
    arm: str
    point: Point
    again: bool = False
    """Whether the same was asked before: prompts, order, salts and seeds follow from the round."""

    @property
    def id(self) -> str:
        """Stable over runs of the same study, unique within it."""
        point = self.point
        load = f"{point.label}-s{point.streams}-t{point.max_tokens}"
        return f"r{self.round}-{self.arm}-{load}{'-again' if self.again else ''}"


@dataclass(frozen=True, slots=True)
class Block:
    """Cells in their order, and the arms whose engines run meanwhile."""

    arms: tuple[str, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """One request of a cell: `key` is unique in the cell and the same for every arm."""

    key: str
    prompt: str
    """The prompt's id."""


def plan(spec: StudySpec, categories: Sequence[str], blocks: Blocks) -> tuple[Block, ...]:
    """The whole study. Rounds count through all blocks, so that they pair arms with plain.

    all-at-once: one block of `repetitions` rounds of all arms, and plain's first round again.
    pairs: such a block for each arm, with plain. one-by-one: plain, the first arm, plain, the
    second, …, plain, each a block of its own with all its rounds, those of an arm numbered as the
    plain's before it; the last block is the first again.
    """
    points = points_of(spec, categories)
    arms, plain, rounds = spec.arms.names, spec.plain, spec.repetitions
    others = [arm for arm in arms if arm != plain]
    if blocks == "all-at-once" or not others:
        # Plain first: its first round is the one that its last pass is held against.
        ordered = [plain, *others] if plain is not None else others
        return (_interleaved(ordered, plain, points, 0, rounds),)
    if blocks == "pairs" and plain is not None:
        return tuple(
            _interleaved([plain, arm], plain, points, number * rounds, rounds)
            for number, arm in enumerate(others)
        )
    found = []
    for number, arm in enumerate(others):
        numbers = range(number * rounds, (number + 1) * rounds)
        alone = [arm] if plain is None else [plain, arm]
        found += [_alone(each, points, numbers) for each in alone]
    if plain is not None:
        found.append(_alone(plain, points, range(rounds), again=True))
    return tuple(found)


def points_of(spec: StudySpec, categories: Sequence[str]) -> tuple[Point, ...]:
    """Every load of the study, in the order of a round."""
    depths = spec.context.tokens if spec.context else (None,)
    return tuple(
        Point(category, streams, max_tokens, depth)
        for max_tokens, depth, streams, category in itertools.product(
            spec.max_tokens, depths, spec.streams, categories
        )
    )


def questions_of(cell: Cell, prompts: Sequence[str], spec: StudySpec) -> tuple[Question, ...]:
    """What the cell asks of `prompts`, the ids of its category's, in order.

    Every arm asks the same in the same order in one round; the order changes from
    round to round. Each prompt comes at least once, and as often as it takes to keep the
    cell's streams busy; a repeated one gets a key of its own, `code-3#2`.
    """
    point = cell.point
    order = list(prompts[: spec.prompts_per_category])
    random.Random(f"{spec.seed}:{cell.round}:{point}").shuffle(order)
    count = max(len(order), point.streams * spec.requests_per_stream)
    depth = "" if point.context_tokens is None else f"+{point.context_tokens}"
    questions = []
    for number in range(count):
        turn, place = divmod(number, len(order))
        again = f"#{turn + 1}" if turn else ""
        questions.append(Question(f"{order[place]}{depth}{again}", order[place]))
    return tuple(questions)


def draw(cell: Cell, question: Question) -> int:
    """A number that one question has in one round, the same for every arm."""
    text = f"{cell.round}:{cell.point}:{question.key}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest())


def planned_requests(
    blocks: Sequence[Block], prompts: Mapping[str, Sequence[str]], spec: StudySpec
) -> int:
    """How many requests the whole study sends; `prompts` are ids by category."""
    cells = itertools.chain.from_iterable(block.cells for block in blocks)
    return sum(len(questions_of(cell, prompts[cell.point.category], spec)) for cell in cells)


def _interleaved(
    arms: Sequence[str], plain: str | None, points: Sequence[Point], first: int, rounds: int
) -> Block:
    cells = [
        Cell(number, arm, point)
        for number in range(first, first + rounds)
        for arm, point in _round(arms, points, number - first)
    ]
    if plain is not None:
        cells += [Cell(first, plain, point, again=True) for point in points]
    return Block(tuple(arms), tuple(cells))


def _round(arms: Sequence[str], points: Sequence[Point], turn: int) -> Iterator[tuple[str, Point]]:
    for place, point in enumerate(points):
        shift = (turn + place) % len(arms)
        for arm in (*arms[shift:], *arms[:shift]):
            yield arm, point


def _alone(arm: str, points: Sequence[Point], numbers: range, *, again: bool = False) -> Block:
    cells = tuple(Cell(number, arm, point, again) for number in numbers for point in points)
    return Block((arm,), cells)
