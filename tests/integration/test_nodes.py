"""A stack on two Ray nodes, with an engine and a gateway on each, loses one of them.

On a stack of its own; the second node is a network namespace on this machine (see `nodes`).
"""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest
import ray.util

from serving.stack import runtime
from serving.studies.chaos.processes import StackProcesses
from tests.integration.harness import PROMPT, UNCOMPILED, RunningStack, own_stack, wait_until
from tests.integration.nodes import CORES, Node, Streams, told

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="a network namespace needs root and iproute2's `ip`",
    ),
]
MODEL = "tiny-dense"
NAME = f"{MODEL}@plain"
CLIENTS = 4
STACK: dict[str, Any] = {
    "schema": 1,
    "name": "nodes",
    # On every address, for the head's proxy to reach the gateway of the other node.
    "gateway": {
        "host": "0.0.0.0",
        "access": "open",
        "max_replicas_per_node": 1,
        "request_timeout_s": 60.0,
    },
    "models": [
        {
            "model": MODEL,
            "gpu": "cpu",
            # Two do not fit on one node.
            "num_cpus": 0.6 * CORES,
            "max_model_len": 2048,
            "max_num_seqs": 16,
            **UNCOMPILED,
            "variants": {"plain": {}},
        }
    ],
}


@dataclass(frozen=True, slots=True)
class Cluster:
    """The stack, its second node, and what of it stays when that goes."""

    stack: RunningStack
    node: Node
    gateway: str
    """The address of the head's own gateway, past HAProxy."""
    engine: str
    """The head's engine, by its replica's name."""

    def start_node(self) -> None:
        run = runtime.running()
        assert run is not None
        self.node.join(run, ray.util.get_node_ip_address())

    def wait_until_both_answer(self) -> None:
        def both() -> bool:
            here = [self.node.has(p) for p in self.stack.replica_processes("gateway:")]
            return sorted(here) == [False, True] and len(answering(self.gateway, 8)) == 2

        wait_until(both, 240, "both nodes have a gateway and an engine")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if ray.util.get_node_ip_address().startswith("127."):
        pytest.skip("this machine has no address that another one could reach")
    with contextlib.ExitStack() as ends:
        try:
            node = ends.enter_context(Node().plugged_in())
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespace can be made here: {error}")
        stack = ends.enter_context(own_stack(tmp_path_factory.mktemp("nodes"), STACK))
        (engine,) = StackProcesses(stack.home).engines()
        gateway = address_of(stack.gateway_process())
        both = Cluster(stack, node, gateway, engine.name)
        both.start_node()
        grown = stack.up(stack.write("two", doubled()))
        assert grown.returncode == 0, f"{grown.stdout}\n{stack.log_tail()}"
        both.wait_until_both_answer()
        yield both


def doubled() -> dict[str, Any]:
    content = copy.deepcopy(STACK)
    content["gateway"]["replicas"] = content["models"][0]["replicas"] = 2
    return content


def address_of(gateway: psutil.Process) -> str:
    """Where this gateway process itself listens, past HAProxy."""
    for connection in gateway.net_connections("tcp4"):
        url = f"http://127.0.0.1:{connection.laddr.port}"
        if connection.status == psutil.CONN_LISTEN:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/readyz", timeout=5, trust_env=False).status_code == 200:
                    return url
    raise AssertionError(f"no port of {gateway} answers")


def answering(url: str, requests: int) -> set[str]:
    """The engines behind so many requests, four at a time."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 64, "ignore_eos": True}
    with (
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
        ThreadPoolExecutor(4) as threads,
    ):
        replies = list(
            threads.map(lambda _: client.post("/v1/completions", json=body), range(requests))
        )
    return {reply.headers.get("x-moe-serving-replica", reply.text) for reply in replies}


def reached(gateway: psutil.Process, address: str) -> list[int]:
    """Status of /health at each port of this address that the gateway has a connection to."""
    statuses = []
    for connection in gateway.net_connections("tcp4"):
        if connection.raddr and connection.raddr.ip == address:
            with contextlib.suppress(httpx.HTTPError):
                url = f"http://{address}:{connection.raddr.port}/health"
                statuses.append(httpx.get(url, timeout=5, trust_env=False).status_code)
    return statuses


def test_a_gateway_has_engines_on_both_nodes_and_reaches_the_far_one_by_tcp(
    cluster: Cluster,
) -> None:
    engines = cluster.stack.replica_processes("engine-")
    assert sorted(cluster.node.has(process) for process in engines) == [False, True]
    replicas = answering(cluster.gateway, 16)
    assert len(replicas) == 2 and cluster.engine in replicas
    (near,) = [
        process
        for process in cluster.stack.replica_processes("gateway:")
        if not cluster.node.has(process)
    ]
    assert 200 in reached(near, cluster.node.address)


def lose(cluster: Cluster, how: Callable[[], None]) -> None:
    """Lose the node under load; what did not run through it then must not notice."""
    with (
        Streams(cluster.stack.url, MODEL, CLIENTS) as through,
        Streams(cluster.gateway, MODEL, 2) as past,
    ):
        wait_until(
            lambda: len(through.replicas()) == len(past.replicas()) == 2, 60, "both engines answer"
        )
        lost_at = time.monotonic()
        how()
        gone_at = time.monotonic()
        wait_until(
            lambda: min(len(each.whole(gone_at)) for each in (through, past)) >= 100,
            300,
            "requests go on",
        )
    print(f"{how.__name__}: gone after {gone_at - lost_at:.1f} s")
    print(f"through HAProxy: {told(through, gone_at)}\npast it: {told(past, gone_at)}")
    for each in (through, past):
        assert [x for x in each.broken() if x.began > gone_at] == []
        assert each.replicas(gone_at) == {cluster.engine}
    # Neither its gateway nor its engine was lost.
    assert [x for x in past.broken() if x.replica == cluster.engine] == []


def test_a_node_that_dies_takes_only_what_ran_through_it(cluster: Cluster) -> None:
    lose(cluster, cluster.node.kill)
    cluster.start_node()
    cluster.wait_until_both_answer()


def test_a_node_that_falls_silent_takes_only_what_ran_through_it(cluster: Cluster) -> None:
    lose(cluster, cluster.node.cut)
