"""What an update does with each engine, and when it is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serving.catalog.yaml_file import parse_yaml
from serving.stack.engine_plan import EnginePlan, plan_engines
from serving.stack.spec import StackSpec
from serving.stack.update import (
    UpdateRefused,
    gateway_changes,
    grown,
    plan_update,
    refuse_fixed_fields,
    resources_for,
    shortage,
    too_few_nodes,
)


def stack(model: str = "", gateway: str = "", variants: str = "a: , b: ") -> StackSpec:
    return parse_yaml(
        f"schema: 1\nname: s\ngateway: {{{gateway}}}\nmodels:\n"
        f"- {{id: m, gpu: cpu, inline: {{path: w, max_context: 4096}}, num_cpus: 0.5, "
        f"default_variant: a, {model} variants: {{{variants}}}}}\n",
        StackSpec,
    )


def plans(**blocks: str) -> tuple[EnginePlan, ...]:
    return plan_engines(stack(**blocks))


def names(engines: tuple[EnginePlan, ...]) -> list[str]:
    return [engine.variant for engine in engines]


A, B = (engine.app_name for engine in plans())


def test_the_same_stack_changes_nothing() -> None:
    got = plan_update(plans(), plans(), {A, B})
    assert names(got.keep) == ["a", "b"]
    assert not got.touches_engines


def test_only_the_variant_that_changed_is_replaced() -> None:
    got = plan_update(plans(), plans(variants="a: , b: {max_num_seqs: 4}"), {A, B})
    assert (names(got.start), names(got.keep), got.change, got.remove) == (["b"], ["a"], (), (B,))
    assert got.start[0].app_name != B


@pytest.mark.parametrize(
    "setting",
    [
        "replicas: 2,",
        "autoscaling: {max_replicas: 2},",
        "max_ongoing_requests: 7,",
        "routing: {balancing: session-hash},",
    ],
)
def test_scaling_changes_in_place(setting: str) -> None:
    got = plan_update(plans(), plans(model=setting), {A, B})
    assert (names(got.change), got.start, got.remove) == (["a", "b"], (), ())


def test_changed_balancing_reaches_the_gateway_too() -> None:
    old, new = stack(), stack(model="routing: {balancing: prefix-aware},")
    assert gateway_changes(old, plan_engines(old), new, plan_engines(new))


def test_a_longer_request_time_reaches_the_engines_that_drain_by_it() -> None:
    got = plan_update(plans(), plans(gateway="request_timeout_s: 900"), {A, B})
    assert [engine.drain_within_s for engine in got.change] == [900, 900]


def test_an_engine_that_was_lost_is_started_and_an_unknown_one_ends() -> None:
    got = plan_update(plans(), plans(), {A, "engine-of-nobody"})
    assert (names(got.start), names(got.keep), got.remove) == (["b"], ["a"], ("engine-of-nobody",))


def test_aliases_and_the_default_variant_are_the_gateway_s_alone() -> None:
    old, new = stack(), stack(model="aliases: [n],")
    got = plan_update(plan_engines(old), plan_engines(new), {A, B})
    assert not got.touches_engines
    assert gateway_changes(old, plan_engines(old), new, plan_engines(new))
    assert not gateway_changes(old, plan_engines(old), old, plan_engines(old))


@pytest.mark.parametrize(
    ("gateway", "expected"),
    [
        ("port: 9000", "gateway.port: found 9000, but the running stack has 8000"),
        (
            "host: 0.0.0.0, access: open",
            "gateway.host: found 0.0.0.0, but the running stack has 127.0.0.1",
        ),
        ("num_cpus: 1", "gateway.num_cpus: found 1.0, but the running stack has 0.1"),
        (
            "max_replicas_per_node: 1",
            "gateway.max_replicas_per_node: found 1, but the running stack has none",
        ),
    ],
)
def test_a_field_that_cannot_change_is_named_with_the_cure(gateway: str, expected: str) -> None:
    with pytest.raises(UpdateRefused) as caught:
        refuse_fixed_fields(stack(), stack(gateway=gateway))
    assert str(caught.value) == (
        f"{expected}, and this cannot change while it runs; "
        "`moe-serving down`, then `moe-serving up` again"
    )


def test_a_gateway_for_more_nodes_than_there_are_is_refused_with_the_cure() -> None:
    two = stack(gateway="replicas: 2, max_replicas_per_node: 1").gateway
    assert too_few_nodes(two, 2) is None
    assert too_few_nodes(stack(gateway="replicas: 2").gateway, 1) is None
    assert too_few_nodes(two, 1) == (
        "gateway.replicas: found 2, but with max_replicas_per_node 1 Ray's 1 node can have 1; "
        "lower it, or start Ray on more nodes first"
    )


def test_tls_cannot_come_to_a_running_stack() -> None:
    tls = stack(gateway="tls: {cert_file: /c, key_file: /k}")
    with pytest.raises(UpdateRefused, match=r"^gateway\.tls: found .* stack has none, and this"):
        refuse_fixed_fields(stack(), tls)


@pytest.mark.parametrize("gateway", ["max_body_mib: 1", "cors_origins: [https://a.example]"])
def test_other_fields_of_the_gateway_may_change(gateway: str) -> None:
    old, new = stack(), stack(gateway=gateway)
    refuse_fixed_fields(old, new)
    assert gateway_changes(old, plan_engines(old), new, plan_engines(new))


def test_resources_count_every_replica_at_its_fewest() -> None:
    (one, _) = plans(model="replicas: 3,")
    assert resources_for([one]) == {"GPU": 0, "CPU": 1.5}
    (scaled, _) = plans(model="autoscaling: {min_replicas: 2, max_replicas: 9},")
    assert resources_for([replace(scaled, gpus=2)]) == {"GPU": 4, "CPU": 1}


def test_the_tree_of_prompts_needs_a_core_however_many_engines_use_it() -> None:
    aware = plans(model="routing: {balancing: prefix-aware},")
    assert resources_for(aware) == {"GPU": 0, "CPU": 2}
    assert grown(plans(), aware) == {"GPU": 0, "CPU": 1}


def test_only_growth_needs_more_room() -> None:
    three = plans(model="replicas: 3,")
    assert grown(plans(), three) == {"GPU": 0, "CPU": 2}
    assert grown(three, plans()) == {"GPU": 0, "CPU": 0}


@pytest.mark.parametrize(
    ("need", "free", "expected"),
    [
        ({"GPU": 2}, {"GPU": 1.0}, "needs 2 GPUs, 1 of 4 free"),
        ({"CPU": 1}, {}, "needs 1 CPU, 0 of 2 free"),
        ({"CPU": 2}, {"CPU": 2.0}, None),
        ({}, {}, None),
    ],
)
def test_what_is_missing_is_said_in_numbers(
    need: dict[str, float], free: dict[str, float], expected: str | None
) -> None:
    assert shortage(need, free, {"GPU": 4, "CPU": 2}) == expected


def test_a_machine_without_gpus_is_told_so() -> None:
    assert shortage({"GPU": 1}, {}, {"CPU": 2}) == "needs 1 GPU, none here"
