"""Study files: what is refused and how it is said, and every shipped one."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.catalog.errors import ConfigError
from serving.studies import stage
from serving.studies.prompts import load_prompts
from serving.studies.schedule import plan, planned_requests
from serving.studies.spec import StudySpec, load_study, shipped_studies

STUDY = """\
schema: 1
question: Is it faster?
stack: demo
arms: {draft_tokens: [0, 2]}
streams: [1]
max_tokens: [16]
repetitions: 1
"""


def study(tmp_path: Path, old: str = "", new: str = "") -> StudySpec:
    assert old in STUDY
    file = tmp_path / "lab.yaml"
    file.write_text(STUDY.replace(old, new), encoding="utf-8")
    return load_study(file)


def refusal(tmp_path: Path, old: str, new: str) -> str:
    with pytest.raises(ConfigError) as caught:
        study(tmp_path, old, new)
    return str(caught.value).removeprefix(f"{tmp_path / 'lab.yaml'}:")


def test_a_study_is_named_after_its_file_and_plain_is_the_yardstick(tmp_path: Path) -> None:
    spec = study(tmp_path)
    assert (spec.name, spec.plain, spec.arms.names) == ("lab", "plain", ("plain", "mtp-2"))


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("streams", "stream", "5: stream: did you mean streams?"),
        (
            "stack: demo",
            "stack: dmeo",
            "3: stack: found 'dmeo'; give a path or one of ",
        ),
        (
            "[0, 2]",
            "[1, 2]",
            "1: plain: found 'plain'; name one of the arms (mtp-1, mtp-2), or write null",
        ),
        (
            "stack: demo\n",
            "",
            "1: stack: missing; draft_tokens and variants need one",
        ),
        (
            "[0, 2]",
            "[0, 2, 2]",
            "4: arms: 'mtp-2' is there twice; every arm needs a name of its own",
        ),
        (
            "draft_tokens: [0, 2]",
            "endpoints: {plain: {url: 'http://me:secret@host/v1', model: m}}",
            "4: arms.endpoints.plain.url: holds a user or a password; "
            "put the key under api_key_env instead",
        ),
        (
            "streams: [1]",
            "streams: [1]\nrequest: {max_tokens: 3}",
            "6: request.max_tokens: the study sets it itself; remove it",
        ),
        ("[1]", "[0]", "5: streams[0]: found 0; "),
    ],
)
def test_a_faulty_study_is_refused_with_line_field_and_cure(
    tmp_path: Path, old: str, new: str, text: str
) -> None:
    assert refusal(tmp_path, old, new).startswith(text)


def test_paths_are_taken_from_the_study_file_s_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("")
    spec = study(tmp_path, "stack: demo", "stack: demo\nprompts: mine.jsonl")
    assert spec.prompts == str(tmp_path / "mine.jsonl")


def test_endpoints_alone_need_a_gpu_class(tmp_path: Path) -> None:
    endpoint = "arms: {endpoints: {plain: {url: 'http://127.0.0.1:8080/v1', model: m}}}"
    both = "stack: demo\narms: {draft_tokens: [0, 2]}"
    assert refusal(tmp_path, both, endpoint) == (
        "1: gpu: missing; say what the endpoints run on (configs/gpus)"
    )
    assert study(tmp_path, both, f"gpu: cpu\n{endpoint}").stack is None


def test_an_unknown_study_names_the_shipped_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        load_study("n-swep")
    assert str(caught.value) == (
        "n-swep: no such study file; did you mean n-sweep? give a path or one of "
        + ", ".join(shipped_studies())
    )


def test_all_studies_of_the_issue_are_shipped() -> None:
    assert set(shipped_studies()) == {
        "quick",
        "n-sweep",
        "batch-crossover",
        "break-even",
        "context",
        "ampere-moe",
        "losslessness",
    }


@pytest.mark.parametrize("name", shipped_studies())
def test_every_shipped_study_loads_with_its_stack_and_its_prompts(name: str) -> None:
    spec = load_study(name)
    stack = stage.study_stack(spec)
    ids: dict[str, list[str]] = {}
    for prompt in load_prompts(spec.prompts, spec.categories):
        ids.setdefault(prompt.category, []).append(prompt.id)
    arms = stage.arms_of(spec, stack, "http://127.0.0.1:8000/v1")
    assert tuple(arm.name for arm in arms) == spec.arms.names
    assert planned_requests(plan(spec, tuple(ids), "pairs"), ids, spec) > 100
    assert stack is None or stack.models[0].max_num_seqs is not None
    # More streams than an engine decodes at once would measure its queue.
    assert stack is None or max(spec.streams) <= (stack.models[0].max_num_seqs or 0)
