"""A stack that starts with a worthless MTP head: the variant takes no request, the other does.

On a stack of its own, since it is about the first start.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from serving.demo import checkpoint_path
from tests.integration.harness import PROMPT, UNCOMPILED, RunningStack, own_stack, with_zeroed_head

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("probed")
    zeroed = with_zeroed_head(checkpoint_path("tiny-dense"), folder / "zeroed")
    content: dict[str, Any] = {
        "schema": 1,
        "name": "probed",
        "models": [
            {
                "id": "m",
                "inline": {"path": str(zeroed), "max_context": 2048, "mtp_head": True},
                "gpu": "cpu",
                "num_cpus": 0.3,
                **UNCOMPILED,
                "default_variant": "mtp",
                "variants": {
                    "mtp": {"speculative": {"method": "mtp", "num_speculative_tokens": 1}},
                    "plain": {},
                },
            }
        ],
    }
    with own_stack(folder, content) as running:
        yield running


def test_a_variant_that_fails_its_probe_is_named_and_the_other_answers(stack: RunningStack) -> None:
    ready = stack.http.get("/readyz")
    assert ready.status_code == 503
    assert ready.json()["variants"] == {"m@mtp": "unfit", "m@plain": "running"}
    assert "accepted 0.0" in ready.json()["reasons"]["m@mtp"]
    assert "acceptance probe" in stack.command("status").stdout
    reply = stack.post("/v1/completions", {"model": "m", "prompt": PROMPT, "max_tokens": 4})
    assert reply.status_code == 200
    assert reply.headers["x-moe-serving-variant"] == "plain"
    assert reply.headers["x-moe-serving-route"] == "fallback"
    named = stack.post("/v1/completions", {"model": "m@mtp", "prompt": PROMPT})
    assert (named.status_code, named.json()["error"]["code"]) == (503, "engine_unfit")
