"""The client of engine ports, before sockets that answer as engines do, and as they should not."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from serving.engines.lease import Endpoint
from serving.gateway.engine_http import (
    MAX_HEAD_BYTES,
    EngineClient,
    EngineConnection,
    EngineConnectionError,
    EngineSilentError,
)
from tests.unit.gateway.harness import PATIENCE_S

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(part: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(part), part)


@dataclass
class Peer:
    """One connection, as the engine sees it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def request(self) -> tuple[bytes, bytes]:
        """Head and body of the next request."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return head, await self.reader.readexactly(length)

    async def send(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()


Behaviour = Callable[[Peer], Awaitable[None]]


@dataclass
class Engine:
    """Listens on a TCP port, and on `socket` where it has one; each connection meets `behave`."""

    behave: Behaviour
    peers: list[Peer] = field(default_factory=list)
    problems: list[Exception] = field(default_factory=list)
    url: str = ""

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        self.peers.append(peer)
        try:
            await self.behave(peer)
        except (ConnectionError, asyncio.IncompleteReadError) as problem:
            self.problems.append(problem)
        finally:
            writer.close()
            peer.over.set()

    def endpoint(self, node: str = "", path: Path | None = None) -> Endpoint:
        place = str(path) if path else None
        return Endpoint(self.url, replica="r", lease_id="l", node=node, socket=place)


@asynccontextmanager
async def running(behave: Behaviour, path: Path | None = None) -> AsyncIterator[Engine]:
    engine = Engine(behave)
    async with AsyncExitStack() as servers:
        port = await asyncio.start_server(engine.meet, "127.0.0.1", 0)
        await servers.enter_async_context(port)
        if path is not None:
            unix = await asyncio.start_unix_server(engine.meet, path)
            await servers.enter_async_context(unix)
        engine.url = f"http://127.0.0.1:{port.sockets[0].getsockname()[1]}"
        yield engine
        for peer in engine.peers:
            peer.writer.transport.abort()
        for peer in engine.peers:
            await asyncio.wait_for(peer.over.wait(), PATIENCE_S)


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    made = EngineClient(node="here")
    yield made
    made.close()
    await asyncio.sleep(0)


def answers(*parts: bytes, times: int = 100) -> Behaviour:
    """Answers each of so many requests on a connection with these parts, then hangs up."""

    async def behave(peer: Peer) -> None:
        for _ in range(times):
            await peer.request()
            await peer.send(*parts)

    return behave


@asynccontextmanager
async def posted(
    client: EngineClient, endpoint: Endpoint, body: bytes = b"body", **headers: str
) -> AsyncIterator[EngineConnection]:
    async with client.post(endpoint, "/v1/completions", headers, body, PATIENCE_S) as reply:
        yield reply


async def read_all(reply: EngineConnection) -> bytes:
    parts = []
    while part := await reply.read():
        parts.append(part)
    return b"".join(parts)


async def ask(client: EngineClient, endpoint: Endpoint, body: bytes = b"body") -> bytes:
    async with posted(client, endpoint, body) as reply:
        return await read_all(reply)


async def test_a_request_is_one_head_and_the_body(client: EngineClient) -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def behave(peer: Peer) -> None:
        seen.append(await peer.request())
        await peer.send(WHOLE)

    async with (
        running(behave) as engine,
        posted(client, engine.endpoint(), b"\x00{}", accept="text/é") as reply,
    ):
        assert (reply.status, reply.content_type) == (200, "application/json")
        assert (reply.content_length, await read_all(reply)) == (2, b"{}")
    host = engine.url.removeprefix("http://")
    assert seen == [
        (
            "POST /v1/completions HTTP/1.1\r\n"
            f"host: {host}\r\ncontent-length: 3\r\naccept: text/é\r\n\r\n".encode("latin-1"),
            b"\x00{}",
        )
    ]


@pytest.mark.parametrize("value", ["a\r\nx: b", "a\nb", "\r"])
async def test_a_header_that_would_be_two_is_not_sent(client: EngineClient, value: str) -> None:
    async with running(answers(WHOLE)) as engine:
        with pytest.raises(ValueError, match="line break"):
            async with posted(client, engine.endpoint(), accept=value):
                pass
        assert engine.peers == []


@pytest.mark.parametrize("status", [400, 404, 500, 503])
async def test_a_refusal_is_a_reply_like_any(client: EngineClient, status: int) -> None:
    parts = (b"HTTP/1.1 %d No\r\n" % status, b"content-length: 3\r\n\r\n", b"bad")
    async with running(answers(*parts)) as engine:
        async with posted(client, engine.endpoint()) as reply:
            assert (reply.status, await read_all(reply)) == (status, b"bad")
        assert await ask(client, engine.endpoint()) == b"bad"
        assert len(engine.peers) == 1


async def test_a_reply_in_single_bytes_is_the_same_reply(client: EngineClient) -> None:
    whole = STREAM + chunk(b"data: 1\n\n") + chunk(b"data: 2\n\n") + b"0\r\n\r\n"

    async def behave(peer: Peer) -> None:
        await peer.request()
        for at in range(len(whole)):
            await peer.send(whole[at : at + 1])
            await asyncio.sleep(0)

    async with running(behave) as engine, posted(client, engine.endpoint()) as reply:
        assert (reply.content_type, reply.content_length) == ("text/event-stream", None)
        assert await read_all(reply) == b"data: 1\n\ndata: 2\n\n"


async def test_each_part_is_there_before_the_next_is_made(client: EngineClient) -> None:
    more = asyncio.Event()

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM, chunk(b"first"))
        await more.wait()
        await peer.send(chunk(b"second"), b"0\r\n\r\n")

    async with running(behave) as engine, posted(client, engine.endpoint()) as reply:
        assert await reply.read() == b"first"
        more.set()
        assert await read_all(reply) == b"second"


@pytest.mark.parametrize("limits_s", [(60.0, 0.05), (0.05, 0.05), (0.05, 0.1)])
async def test_silence_is_told_at_the_limit_of_the_wait_whatever_the_ones_before_had(
    client: EngineClient, limits_s: tuple[float, float]
) -> None:
    first_s, last_s = limits_s

    async def stop_talking(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM, chunk(b"one"))
        await peer.over.wait()

    async with running(stop_talking) as engine, posted(client, engine.endpoint()) as reply:
        assert await reply.read(first_s) == b"one"
        before = asyncio.get_running_loop().time()
        with pytest.raises(EngineSilentError) as silent:
            await reply.read(last_s)
        assert silent.value.limit_s == last_s
        assert asyncio.get_running_loop().time() - before >= last_s - 0.01
        engine.peers[0].over.set()


async def test_an_engine_that_talks_within_each_limit_may_take_longer_in_all(
    client: EngineClient,
) -> None:
    async def talk(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM)
        for _ in range(6):
            await asyncio.sleep(0.3)
            await peer.send(chunk(b"x"))
        await peer.send(b"0\r\n\r\n")

    async with running(talk) as engine, posted(client, engine.endpoint()) as reply:
        got = b""
        while part := await reply.read(1.5):
            got += part
        assert got == b"xxxxxx"


async def test_requests_one_after_another_share_a_connection(client: EngineClient) -> None:
    async with running(answers(WHOLE)) as engine:
        for _ in range(3):
            assert await ask(client, engine.endpoint()) == b"{}"
        assert len(engine.peers) == 1


async def test_requests_at_the_same_time_do_not(client: EngineClient) -> None:
    async with (
        running(answers(WHOLE)) as engine,
        posted(client, engine.endpoint()),
        posted(client, engine.endpoint()),
    ):
        assert len(engine.peers) == 2


async def test_a_connection_that_the_engine_wants_closed_is_not_kept(client: EngineClient) -> None:
    reply = WHOLE.replace(b"content-type", b"connection: close\r\ncontent-type")
    async with running(answers(reply)) as engine:
        assert await ask(client, engine.endpoint()) == b"{}"
        assert await ask(client, engine.endpoint()) == b"{}"
        assert len(engine.peers) == 2


async def test_a_connection_that_the_engine_closed_is_not_taken(client: EngineClient) -> None:
    async with running(answers(WHOLE, times=1)) as engine:
        assert await ask(client, engine.endpoint()) == b"{}"
        await asyncio.wait_for(engine.peers[0].over.wait(), PATIENCE_S)
        await asyncio.sleep(0.05)
        assert await ask(client, engine.endpoint()) == b"{}"
        assert len(engine.peers) == 2


async def test_a_connection_that_was_idle_too_long_is_not_taken(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.gateway.engine_http.IDLE_S", -1.0)
    async with running(answers(WHOLE)) as engine:
        assert await ask(client, engine.endpoint()) == b"{}"
        assert await ask(client, engine.endpoint()) == b"{}"
        assert len(engine.peers) == 2


def hangs_up_on_the_second_request(first_words: bytes = b"") -> Behaviour:
    """Answers once; says `first_words` to the next request, and closes. Later ones are answered."""
    met = 0

    async def behave(peer: Peer) -> None:
        nonlocal met
        met += 1
        await answers(WHOLE, times=1 if met == 1 else 100)(peer)
        await peer.request()
        await peer.send(first_words)

    return behave


async def test_a_request_that_met_a_closing_connection_is_sent_again(client: EngineClient) -> None:
    async with running(hangs_up_on_the_second_request()) as engine:
        assert await ask(client, engine.endpoint()) == b"{}"
        assert await ask(client, engine.endpoint()) == b"{}"
        assert len(engine.peers) == 2


@pytest.mark.parametrize("words", [b"H", STREAM, STREAM + chunk(b"data")])
async def test_a_request_whose_reply_had_begun_is_not_sent_again(
    client: EngineClient, words: bytes
) -> None:
    async with running(hangs_up_on_the_second_request(words)) as engine:
        assert await ask(client, engine.endpoint()) == b"{}"
        with pytest.raises(EngineConnectionError, match="closed the connection"):
            await ask(client, engine.endpoint())
        assert len(engine.peers) == 1


async def test_a_request_on_a_new_connection_is_not_sent_again(client: EngineClient) -> None:
    async with running(answers(times=1)) as engine:
        with pytest.raises(EngineConnectionError):
            await ask(client, engine.endpoint())
        assert len(engine.peers) == 1


CUT = {
    "between chunks": STREAM + chunk(b"first"),
    "inside a chunk": STREAM + b"10\r\nfirst",
    "before its length": b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nfirst",
    # The end of the connection cannot be told from the end of the engine.
    "without a length": b"HTTP/1.1 200 OK\r\n\r\nfirst",
}


@pytest.mark.parametrize("reply", CUT.values(), ids=CUT)
async def test_what_came_before_the_end_is_read_and_then_the_end_is_told(
    client: EngineClient, reply: bytes
) -> None:
    async with (
        running(answers(reply, times=1)) as engine,
        posted(client, engine.endpoint()) as broken,
    ):
        await asyncio.wait_for(engine.peers[0].over.wait(), PATIENCE_S)
        assert await broken.read() == b"first"
        with pytest.raises(EngineConnectionError):
            await broken.read()


async def test_an_engine_waits_for_a_slow_reader(client: EngineClient) -> None:
    part, count, made = b"x" * 2**19, 64, 0

    async def behave(peer: Peer) -> None:
        nonlocal made
        await peer.request()
        await peer.send(STREAM)
        for _ in range(count):
            await peer.send(chunk(part))
            made += 1
        await peer.send(b"0\r\n\r\n")

    async with running(behave) as engine:
        async with posted(client, engine.endpoint()) as reply:
            seen = -1
            while seen != made:
                seen = made
                await asyncio.sleep(0.2)
            # What the sockets' own buffers take, and no more, is made ahead of the reader.
            assert made < count // 2
            assert len(await read_all(reply)) == count * len(part)
        assert await ask_status(client, engine) == 200


async def ask_status(client: EngineClient, engine: Engine) -> int:
    async with posted(client, engine.endpoint()) as reply:
        return reply.status


async def test_leaving_before_the_end_closes_the_connection(client: EngineClient) -> None:
    left = asyncio.Event()

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM, chunk(b"first"))
        assert await peer.reader.read() == b""
        left.set()

    async with running(behave) as engine:
        async with posted(client, engine.endpoint()) as reply:
            assert await reply.read() == b"first"
        await asyncio.wait_for(left.wait(), PATIENCE_S)
        assert await ask_status(client, engine) == 200
        assert len(engine.peers) == 2


async def test_giving_up_before_the_reply_closes_the_connection(client: EngineClient) -> None:
    asked, left = asyncio.Event(), asyncio.Event()

    async def behave(peer: Peer) -> None:
        await peer.request()
        asked.set()
        assert await peer.reader.read() == b""
        left.set()

    async with running(behave) as engine:
        waiting = asyncio.create_task(ask(client, engine.endpoint()))
        await asyncio.wait_for(asked.wait(), PATIENCE_S)
        waiting.cancel()
        await asyncio.wait_for(left.wait(), PATIENCE_S)


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (b"HTTP/1.1 200 OK\r\nx: " + b"a" * MAX_HEAD_BYTES, "the head of the engine's reply is"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: a\r\n" * MAX_HEAD_BYTES, "the head of the engine's reply"),
        (b"SSH-2.0-engine\r\n", "is not HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", "is not HTTP/1.1"),
        (STREAM + b"nonsense\r\n", "is not HTTP/1.1"),
    ],
    ids=["a long header", "many headers", "another protocol", "two lengths", "no chunk"],
)
async def test_a_reply_that_is_none_is_refused(
    client: EngineClient, reply: bytes, problem: str
) -> None:
    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(reply)
        await peer.reader.read()

    async with running(behave) as engine:
        with pytest.raises(EngineConnectionError, match=problem):
            await ask(client, engine.endpoint())
        await asyncio.wait_for(engine.peers[0].over.wait(), PATIENCE_S)


async def test_words_that_nobody_asked_for_end_an_idle_connection(client: EngineClient) -> None:
    speak = asyncio.Event()

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(WHOLE)
        await speak.wait()
        await peer.send(WHOLE)
        await peer.reader.read()

    async with running(behave) as engine:
        assert await ask(client, engine.endpoint()) == b"{}"
        speak.set()
        await asyncio.wait_for(engine.peers[0].over.wait(), PATIENCE_S)
        assert await ask(client, engine.endpoint()) == b"{}"
        assert len(engine.peers) == 2


async def test_a_second_reply_in_the_same_breath_is_no_part_of_the_first(
    client: EngineClient,
) -> None:
    async with running(answers(WHOLE + WHOLE)) as engine:
        assert await ask(client, engine.endpoint()) == b"{}"
        assert await ask(client, engine.endpoint()) == b"{}"
        assert len(engine.peers) == 2


async def test_a_connection_with_an_unsent_request_is_not_kept(client: EngineClient) -> None:
    async def behave(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.send(WHOLE)
        await asyncio.Event().wait()

    async with running(behave) as engine:
        assert await ask(client, engine.endpoint(), b"x" * 2**24) == b"{}"
        assert await ask(client, engine.endpoint()) == b"{}"
        assert len(engine.peers) == 2
        for peer in engine.peers:
            peer.writer.transport.abort()
            peer.over.set()


async def test_an_engine_that_takes_no_connection_is_an_error(client: EngineClient) -> None:
    # Port 1 of the loopback address has no listener.
    nowhere = Endpoint("http://127.0.0.1:1", replica="r", lease_id="l")
    with pytest.raises(EngineConnectionError, match=r"http://127.0.0.1:1 takes no connection"):
        await ask(client, nowhere)


async def test_an_engine_that_does_not_answer_a_connection_in_time_is_an_error(
    client: EngineClient,
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as full,
        # The queue holds one, and the kernel answers no other.
        socket.create_connection(full.getsockname()),
    ):
        endpoint = Endpoint(f"http://127.0.0.1:{full.getsockname()[1]}", replica="r", lease_id="l")
        with pytest.raises(EngineConnectionError, match="TimeoutError"):
            async with client.post(endpoint, "/", {}, b"", connect_timeout_s=0.05):
                pass


def used(engine: Engine) -> list[socket.AddressFamily]:
    """What each of the engine's connections came by."""
    return [peer.writer.get_extra_info("socket").family for peer in engine.peers]


async def test_an_engine_on_this_node_is_reached_by_its_socket(
    client: EngineClient, tmp_path: Path
) -> None:
    path = tmp_path / "http"
    async with running(answers(WHOLE), path) as engine:
        for _ in range(2):
            assert await ask(client, engine.endpoint("here", path)) == b"{}"
        assert used(engine) == [socket.AF_UNIX]


async def test_an_engine_on_another_node_is_reached_by_tcp(
    client: EngineClient, tmp_path: Path
) -> None:
    path = tmp_path / "http"
    async with running(answers(WHOLE), path) as engine:
        assert await ask(client, engine.endpoint("there", path)) == b"{}"
        assert used(engine) == [socket.AF_INET]


async def test_an_engine_whose_socket_is_gone_is_reached_by_tcp(
    client: EngineClient, tmp_path: Path
) -> None:
    path = tmp_path / "http"
    async with running(answers(WHOLE, times=1), path) as engine:
        assert await ask(client, engine.endpoint("here", path)) == b"{}"
        await asyncio.wait_for(engine.peers[0].over.wait(), PATIENCE_S)
        path.unlink()
        for _ in range(2):
            assert await ask(client, engine.endpoint("here", path)) == b"{}"
        assert used(engine)[:2] == [socket.AF_UNIX, socket.AF_INET]


async def test_closing_the_client_closes_what_is_idle(client: EngineClient) -> None:
    async with running(answers(WHOLE)) as engine:
        assert await ask(client, engine.endpoint()) == b"{}"
        client.close()
        await asyncio.wait_for(engine.peers[0].over.wait(), PATIENCE_S)
        assert await ask(client, engine.endpoint()) == b"{}"
        assert len(engine.peers) == 2
