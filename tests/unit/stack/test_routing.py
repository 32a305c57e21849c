"""The `routing` block: what it refuses, and what the gateway gets of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.catalog.errors import ConfigError
from serving.catalog.yaml_file import load_yaml, parse_yaml
from serving.gateway.settings import GatewaySettings
from serving.router.settings import External, Routing, RoutingSpec, Shadow, Split
from serving.router.table import ModelRoute, RoutingTable
from serving.stack import history, runtime
from serving.stack.engine_plan import plan_engines
from serving.stack.gateway_plan import plan_gateway, routing_table
from serving.stack.spec import StackSpec
from serving.stack.update import gateway_changes, plan_update

HEAD = """\
schema: 1
name: s
models:
  - model: tiny-moe
    gpu: cpu
    aliases: [chat]
    max_num_seqs: 8
    default_variant: mtp
    variants:
      mtp: {speculative: {method: mtp, num_speculative_tokens: 2}}
      mtp-1: {speculative: {method: mtp, num_speculative_tokens: 1}}
      plain:
"""
POLICY = """\
schema: 1
model: tiny-moe
measured: {study: n-sweep-1, gpu: cpu, date: 2026-11-30, versions: {vllm: 0.32.0}}
best: {variant: mtp, speedup: 1.5, interval: [1.4, 1.6]}
crossover_streams: 6
break_even_output_tokens: 24
by_category: {code: mtp, prose: plain}
limits: {context_tokens: 640, measured_tokens: 98304}
"""
MEASURED = "    routing: {policy: measured, file: policy.yaml}\n"


def stack(routing: str, head: str = HEAD) -> StackSpec:
    return parse_yaml(f"{head}    routing: {{{routing}}}\n", StackSpec, name="s.yaml")


def complaint(routing: str, head: str = HEAD) -> str:
    with pytest.raises(ConfigError) as caught:
        stack(routing, head)
    return str(caught.value)


def route(spec: StackSpec) -> ModelRoute:
    return routing_table(spec, plan_engines(spec)).models[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "policy.yaml").write_text(POLICY)
    (tmp_path / "s.yaml").write_text(HEAD + MEASURED)
    return tmp_path


def load(folder: Path) -> StackSpec:
    return load_yaml(folder / "s.yaml", StackSpec)


# --- refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("routing", "expected"),
    [
        ("polcy: static", "polcy: did you mean policy?"),
        (
            "policy: fast",
            "policy: found 'fast'; should be 'static', 'load-aware' or 'measured'",
        ),
        (
            "policy: load-aware",
            "crossover_streams: missing; write {variant: running requests per replica} as the "
            "study batch-crossover measures it, or take policy: measured",
        ),
        (
            "policy: load-aware, crossover_streams: {mpt: 8}",
            "crossover_streams.mpt: found 'mpt'; the variants are mtp, mtp-1, plain",
        ),
        (
            "policy: load-aware, crossover_streams: {plain: 8}",
            "crossover_streams.plain: does not draft, so it has no crossover; "
            "name a variant that does",
        ),
        (
            "policy: load-aware, crossover_streams: {mtp: 0}",
            "crossover_streams.mtp: found 0; should be greater than or equal to 1",
        ),
        (
            "policy: load-aware, crossover_streams: {mtp: 8}, return_at: 1.0",
            "return_at: found 1.0; should be less than 1",
        ),
        (
            "crossover_streams: {mtp: 8}",
            "crossover_streams: has no effect with policy: static; write load-aware",
        ),
        ("dwell_s: 3.0", "dwell_s: has no effect with policy: static; write load-aware"),
        (
            "policy: measured",
            "file: missing; name what `moe-serving study export-policy` wrote",
        ),
        (
            "policy: measured, file: nowhere.yaml",
            "file: nowhere.yaml: cannot be read (no such file or directory); "
            "check the path and its permissions",
        ),
        (
            "split: {study: ../x, arms: [mtp, plain], share: 0.5}",
            "split.study: found '../x', which names a folder; use letters, digits, . _ and -",
        ),
        ("weights: {plain: 5}", "weights: one variant alone has no share; name the others too"),
        (
            "weights: {plain: 5, mtp: 0}",
            "weights.mtp: found 0; should be greater than or equal to 1",
        ),
        (
            "weights: {plain: 5, canary: 1}",
            "weights.canary: found 'canary'; the variants are mtp, mtp-1, plain",
        ),
        (
            "policy: load-aware, crossover_streams: {mtp: 8}, weights: {mtp: 9, mtp-1: 1}",
            "weights.mtp-1: drafts, but has no crossover; add crossover_streams: {mtp-1: ...}",
        ),
        (
            "by_category: {code: fast}",
            "by_category.code: found 'fast'; the variants are mtp, mtp-1, plain",
        ),
        (
            "shadow: {variant: fast, share: 0.1}",
            "shadow.variant: found 'fast'; the variants are mtp, mtp-1, plain",
        ),
        (
            "shadow: {variant: plain, share: 1.5}",
            "shadow.share: found 1.5; should be less than or equal to 1",
        ),
        (
            "split: {study: a, arms: [mtp, fast], share: 0.1}",
            "split.arms[1]: found 'fast'; the variants are mtp, mtp-1, plain",
        ),
        (
            "split: {study: a, arms: [mtp, mtp], share: 0.1}",
            "split.arms: an arm is named twice; name each variant once",
        ),
        (
            "balancing: random",
            "balancing: found 'random'; should be 'power-of-two', 'prefix-aware' or 'session-hash'",
        ),
        ("fallback: [nope]", "fallback[0]: found 'nope'; the stack serves tiny-moe, chat"),
        (
            "fallback: [chat, chat@fast]",
            "fallback[1]: found 'chat@fast'; chat has the variants mtp, mtp-1, plain",
        ),
        (
            "fallback: [{url: 'host/v1', model: big}]",
            "fallback[0].url: found 'host/v1'; write a base URL, as https://host/v1",
        ),
        (
            "fallback: [{url: 'https://user:pass@host/v1', model: big}]",
            "fallback[0].url: holds a password; put the key into a file and name it in key_file",
        ),
        (
            "fallback: [{url: 'https://host/v1', model: big, keyfile: key}]",
            "fallback[0].keyfile: did you mean key_file?",
        ),
        (
            "fallback: [{url: 'https://host/v1'}]",
            "fallback[0].model: missing; add `model: ...` (the name it has there)",
        ),
        (
            "structured: mtp",
            "structured: found 'mtp'; should be 'plain' or 'any'",
        ),
    ],
)
def test_a_fault_is_told_with_line_field_and_cure(routing: str, expected: str) -> None:
    assert complaint(routing) == f"s.yaml:13: models[0].routing.{expected}"


def test_under_load_there_must_be_a_plain_variant() -> None:
    head = HEAD.replace("      plain:\n", "")
    assert complaint("policy: load-aware, crossover_streams: {mtp: 8}", head) == (
        "s.yaml:12: models[0].routing.policy: every variant drafts, so there is none to go to "
        "under load; add a plain one"
    )


@pytest.mark.parametrize(
    ("line", "instead", "expected"),
    [
        (
            "model: tiny-moe",
            "model: tiny-dense",
            "the policy does not fit: its model is 'tiny-dense'; export a study of 'tiny-moe'",
        ),
        (
            "best: {variant: mtp,",
            "best: {variant: mtp-9,",
            "the policy does not fit: it names the variant 'mtp-9'; "
            "the variants are mtp, mtp-1, plain",
        ),
        (
            "prose: plain",
            "prose: off",
            "the policy does not fit: it names the variant 'off'; "
            "the variants are mtp, mtp-1, plain",
        ),
    ],
)
def test_a_policy_of_something_else_is_refused(
    folder: Path, line: str, instead: str, expected: str
) -> None:
    assert line in POLICY
    text = POLICY.replace(line, instead.replace("off", '"off"'))
    (folder / "policy.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(folder)
    assert str(caught.value) == f"{folder}/s.yaml:13: models[0].routing.file: {expected}"


def test_a_faulty_policy_file_is_told_with_its_own_line(folder: Path) -> None:
    (folder / "policy.yaml").write_text(POLICY.replace("crossover_streams: 6", "crossover: 6"))
    with pytest.raises(ConfigError) as caught:
        load(folder)
    assert str(caught.value).startswith(
        f"{folder}/s.yaml:13: models[0].routing.file: {folder}/policy.yaml:"
    )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("routing", "expected"),
    [
        (
            "{policy: static, file: policy.yaml}",
            "policy: found static, beside a file; write measured",
        ),
        (
            "{policy: measured, file: policy.yaml, measured: {schema: 1}}",
            "file: given beside measured; keep one of the two",
        ),
    ],
)
def test_a_file_stands_alone_and_with_its_policy(folder: Path, routing: str, expected: str) -> None:
    (folder / "s.yaml").write_text(f"{HEAD}    routing: {routing}\n")
    with pytest.raises(ConfigError) as caught:
        load(folder)
    assert str(caught.value) == f"{folder}/s.yaml:13: models[0].routing.{expected}"


# --- what the gateway gets ------------------------------------------------------------------


def test_without_a_block_only_what_drafting_may_break_is_kept_from_it() -> None:
    spec = parse_yaml(HEAD, StackSpec, name="s.yaml")
    assert spec.models[0].routing == RoutingSpec()
    assert route(spec).routing == Routing(structured="plain", tools="plain")


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("model: tiny-moe", "plain"),
        ("model: tiny-dense", "any"),
        ("id: m\n    inline: {path: w, max_context: 4096}", "plain"),
    ],
)
def test_grammars_keep_from_drafting_unless_the_model_is_known_to_be_dense(
    model: str, expected: str
) -> None:
    head = HEAD.replace("model: tiny-moe", model)
    assert route(stack("policy: static", head)).routing.structured == expected
    assert route(stack("structured: any, tools: any", head)).routing.tools == "any"


def test_crossovers_are_taken_from_the_lowest() -> None:
    spec = stack("policy: load-aware, crossover_streams: {mtp-1: 12, mtp: 4}, dwell_s: 1.0")
    got = route(spec).routing
    assert list(got.crossover_streams.items()) == [("mtp", 4), ("mtp-1", 12)]
    assert (got.return_at, got.dwell_s, got.preferred) == (0.75, 1.0, None)


def test_a_policy_file_fills_in_what_was_measured(folder: Path) -> None:
    assert route(load(folder)).routing == Routing(
        crossover_streams={"mtp": 6},
        break_even_output_tokens=24,
        by_category={"code": "mtp", "prose": "plain"},
        context_tokens=640,
        preferred="mtp",
        structured="plain",
        tools="plain",
    )


def test_the_stack_file_s_own_figures_win_over_the_policy_s(folder: Path) -> None:
    own = ", crossover_streams: {mtp: 3, mtp-1: 2}, context_tokens: null, by_category: {a: plain}}"
    (folder / "s.yaml").write_text(HEAD + MEASURED.replace("}", own))
    got = route(load(folder)).routing
    assert list(got.crossover_streams.items()) == [("mtp", 3), ("mtp-1", 2)]
    assert (got.context_tokens, got.by_category) == (None, {"a": "plain"})
    assert got.break_even_output_tokens == 24


def test_where_plain_is_best_nothing_drafts_unless_asked_for(folder: Path) -> None:
    best = "best: {variant: plain, speedup: 1.0, interval: null}"
    text = POLICY.replace("best: {variant: mtp, speedup: 1.5, interval: [1.4, 1.6]}", best)
    (folder / "policy.yaml").write_text(text)
    got = route(load(folder)).routing
    assert (got.crossover_streams, got.preferred) == ({}, "plain")


def test_a_crossover_that_was_never_seen_is_no_end(folder: Path) -> None:
    text = POLICY.replace("crossover_streams: 6", "crossover_streams: null")
    (folder / "policy.yaml").write_text(text)
    assert route(load(folder)).routing.crossover_streams == {"mtp": None}


def test_split_and_shadow_reach_the_gateway_with_each_variant_s_slots() -> None:
    spec = stack(
        "split: {study: live, arms: [mtp, plain], share: 0.1}, shadow: {variant: plain, share: 1}"
    )
    got = route(spec)
    assert got.routing.split == Split(study="live", arms=("mtp", "plain"), share=0.1)
    assert got.routing.shadow == Shadow(variant="plain", share=1)
    assert {each.variant: (each.max_num_seqs, each.drafts) for each in got.variants} == {
        "mtp": (8, True),
        "mtp-1": (8, True),
        "plain": (8, False),
    }


def test_a_fallback_outside_finds_its_key_beside_the_stack_file(folder: Path) -> None:
    outside = "{url: 'https://host/v1', model: big, key_file: key}"
    (folder / "s.yaml").write_text(f"{HEAD}    routing: {{fallback: [chat@plain, {outside}]}}\n")
    settings = plan_gateway(load_yaml(folder / "s.yaml", StackSpec), ()).settings
    back = GatewaySettings.model_validate(settings.model_dump(mode="json"))
    named, there = back.table.models[0].routing.fallback
    assert named == "chat@plain"
    assert there == External(url="https://host/v1", model="big", key_file=folder / "key")


def test_the_table_survives_the_way_through_user_config(folder: Path) -> None:
    spec = load(folder)
    table = routing_table(spec, plan_engines(spec))
    assert RoutingTable.model_validate(table.model_dump(mode="json")) == table


# --- changes --------------------------------------------------------------------------------


def test_routing_changes_without_touching_an_engine() -> None:
    before = stack("policy: static")
    after = stack("policy: load-aware, crossover_streams: {mtp: 8}, balancing: session-hash")
    old, new = plan_engines(before), plan_engines(after)
    assert [plan.app_name for plan in old] == [plan.app_name for plan in new]
    assert not plan_update(old, new, {plan.app_name for plan in old}).start
    assert gateway_changes(before, old, after, new)


def test_a_stack_keeps_the_figures_it_was_started_with(folder: Path) -> None:
    before = load(folder)
    (folder / "policy.yaml").write_text(
        POLICY.replace("crossover_streams: 6", "crossover_streams: 9")
    )
    kept, after = history.from_json(history.to_json(before)), load(folder)
    assert kept == before
    assert route(kept).routing.crossover_streams == {"mtp": 6}
    assert route(after).routing.crossover_streams == {"mtp": 9}
    assert gateway_changes(kept, plan_engines(kept), after, plan_engines(after))


def test_the_gateway_knows_what_a_studys_records_need(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(runtime.HOME_VARIABLE, str(tmp_path))
    spec = stack("split: {study: live-1, arms: [mtp, plain], share: 0.5}")
    settings = plan_gateway(spec, plan_engines(spec)).settings
    assert settings.splits == tmp_path / "splits"
    model = settings.table.models[0]
    assert model.gpu == "cpu"
    assert [variant.draft_tokens for variant in model.variants] == [2, 1, 0]
    # As it travels to the gateway.
    assert GatewaySettings.model_validate(settings.model_dump(mode="json")) == settings
