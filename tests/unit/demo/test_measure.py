"""The figures of the model card."""

from __future__ import annotations

from serving.demo.measure import OWN_PROMPTS, Row, card, held_out_prompts


def test_the_speed_up_is_the_median_of_the_rounds() -> None:
    row = Row(1, 0.0, 0.7, (0.7,), 0.5, speed_ups=(1.2, 1.9, 1.4))
    assert row.speed_up == 1.4


def test_prompts_are_code_without_their_rest() -> None:
    prompts = held_out_prompts()
    assert len(prompts) == 12
    assert all(prompt.startswith("def ") for prompt in prompts)
    assert len(set(OWN_PROMPTS)) == 6


def test_the_card_has_every_row_and_names_the_fastest() -> None:
    rows = [
        Row(0, 0.0, None, (), 0.3, (1.0, 1.0)),
        Row(1, 0.0, 0.75, (0.75,), 0.35, (1.1, 1.3)),
        Row(2, 0.7, 0.33, (0.44, 0.21), 0.9, (0.7, 0.9)),
    ]
    training = {
        "parameters": 5_180_000,
        "tokens": 9_000_000,
        "corpus_tokens": 4_400_000,
        "python": "3.11.7",
        "seed": 7,
        "minutes": 64.6,
        "threads": 2,
    }
    text = card("tiny-moe", rows, training, rounds=2)
    assert "| 0 | greedy |  |  | 0.30 | 1 |" in text
    assert "| 1 | greedy | 0.75 | 0.75 | 0.35 | 1.20 (1.10 to 1.30) |" in text
    assert "| 2 | 0.7 | 0.33 | 0.44 0.21 | 0.90 | 0.80 (0.70 to 0.90) |" in text
    assert "Fastest in greedy decoding: n = 1, 1.20 times the speed of n = 0." in text
