"""The mtp variant drafts and accepts, the plain one does not, and their texts agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.integration.harness import CODE_PROMPTS, RunningStack, wait_until

DRAFTED, ACCEPTED = (f"vllm:spec_decode_num_{what}_tokens_total" for what in ("draft", "accepted"))
# Two sums in another order differ by about this much in bfloat16 logits.
NEAR_TIE = 0.5


def drafting_of(answer: dict[str, Any]) -> dict[str, Any] | None:
    metrics: dict[str, Any] = answer.get("metrics") or {}
    found: dict[str, Any] | None = metrics.get("speculative_decoding")
    return found


def test_the_mtp_engine_drafts_and_accepts(stack: RunningStack) -> None:
    engine = stack.engine("tiny-moe@mtp")
    before = [engine.metric(name) for name in (DRAFTED, ACCEPTED)]
    answer = stack.complete("tiny-moe@mtp", max_tokens=64)
    drafted, accepted = (
        engine.metric(name) - old for name, old in zip((DRAFTED, ACCEPTED), before, strict=True)
    )

    assert drafted > 0
    assert 0 < accepted <= drafted
    reported = drafting_of(answer)
    assert reported is not None
    assert (reported["num_draft_tokens"], reported["num_accepted_draft_tokens"]) == (
        drafted,
        accepted,
    )


@pytest.mark.parametrize("variant", ["tiny-moe@plain", "tiny-dense@plain"])
def test_a_plain_engine_does_not_draft(stack: RunningStack, variant: str) -> None:
    answer = stack.complete(variant, max_tokens=64)

    assert drafting_of(answer) is None
    assert "vllm:spec_decode_num_draft_tokens_total{" not in (
        stack.engine(variant).get("/metrics").text
    )


def test_drafts_are_accepted_at_temperature_too(stack: RunningStack) -> None:
    # vLLM's CPU sampler, uncured, accepts 0.04 of them and writes noise.
    drafted = accepted = 0
    for prompt in CODE_PROMPTS:
        answer = stack.complete("tiny-moe@mtp", prompt, max_tokens=96, temperature=0.7, seed=7)
        reported = drafting_of(answer)
        assert reported is not None
        drafted += reported["num_draft_tokens"]
        accepted += reported["num_accepted_draft_tokens"]

    assert accepted / drafted > 0.3, f"{accepted} of {drafted} accepted"


@pytest.mark.slow
def test_drafting_that_collapses_is_told_and_so_is_its_recovery(stack: RunningStack) -> None:
    engine = stack.engine("tiny-moe@mtp")
    asked = {"max_tokens": 96, "ignore_eos": True, "top_p": 1}

    def after_text_at(temperature: float) -> bool:
        for prompt in CODE_PROMPTS:
            stack.complete("tiny-moe@mtp", prompt, temperature=temperature, **asked)
        return engine.metric("moe_serving_drafting_collapsed") == 1

    # What others fall from, where nothing was asked of the engine before.
    assert not after_text_at(0.0)
    # So hot, the text is noise, which no head foresees.
    wait_until(lambda: after_text_at(2.0), 240, "the collapse is told")
    wait_until(lambda: not after_text_at(0.0), 240, "the recovery is told")


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token that mtp and plain chose differently, by plain's own logits."""

    position: int
    plain: int
    mtp: int
    gap: float
    """Logit of plain's choice minus that of mtp's; infinite beyond plain's first 20."""


def first_difference(stack: RunningStack, prompt: str) -> Difference | None:
    options = {"max_tokens": 64, "return_token_ids": True}
    said = {
        variant: stack.complete(f"tiny-moe@{variant}", prompt, **options)["choices"][0]["token_ids"]
        for variant in ("plain", "mtp")
    }
    pairs = zip(said["plain"], said["mtp"], strict=False)
    differing = [i for i, (plain, mtp) in enumerate(pairs) if plain != mtp]
    if not differing:
        assert len(said["plain"]) == len(said["mtp"])
        return None
    position = differing[0]
    plain, mtp = said["plain"][position], said["mtp"][position]
    as_ids = {"logprobs": 20, "return_tokens_as_token_ids": True}
    again = stack.complete("tiny-moe@plain", prompt, **options, **as_ids)["choices"][0]
    assert again["token_ids"] == said["plain"]
    top = again["logprobs"]["top_logprobs"][position]
    # A difference of log-probabilities at one position is that of the logits.
    gap = top[f"token_id:{plain}"] - top.get(f"token_id:{mtp}", float("-inf"))
    return Difference(position, plain, mtp, gap)


def test_greedy_texts_of_mtp_and_plain_differ_only_at_near_ties(
    stack: RunningStack, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {prompt: first_difference(stack, prompt) for prompt in CODE_PROMPTS}
    with capsys.disabled():
        print()
        for prompt, difference in found.items():
            print(f"  {prompt.splitlines()[0][:40]!r}: {difference or 'same text'}")

    gaps = [difference.gap for difference in found.values() if difference]
    assert max(gaps, default=0.0) < NEAR_TIE
    assert len(gaps) < len(CODE_PROMPTS)
