"""Fetching weights, against a hub that speaks the few requests the library makes."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pytest
from rich.console import Console

from serving.catalog.yaml_file import parse_yaml
from serving.demo import checkpoint_path
from serving.stack import weights
from serving.stack.load import load_stack
from serving.stack.spec import StackSpec
from serving.stack.weights import WeightsError, check_folder, pull_stack, sources

pytest.importorskip("huggingface_hub", reason="pull needs the engines' packages")

COMMIT = "a" * 40
WEIGHTS = b"weights" * 1000
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS, "model.bin": b"another form"}


class Hub(NamedTuple):
    url: str
    content: dict[str, bytes]
    status: dict[str, Any]
    asked: list[str]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    content, status, asked = dict(FILES), dict[str, Any](), list[str]()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            asked.append(self.path)
            name = self.path.rpartition("/")[2]
            if status:
                headers = {"X-Error-Code": status["error"]} if "error" in status else {}
                self.reply(status["code"], b"", headers)
            elif self.path.startswith("/api/models/lab/model/tree/"):
                self.reply(200, json.dumps([tree(n) for n in FILES]).encode(), {})
            elif self.path.startswith("/api/models/lab/model"):
                self.reply(200, json.dumps(described()).encode(), {})
            elif name in content:
                digest = hashlib.sha256(FILES[name]).hexdigest()
                self.reply(200, content[name], {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT})
            else:
                self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})

        def reply(self, code: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(code)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield Hub(f"http://127.0.0.1:{server.server_port}", content, status, asked)
    server.shutdown()
    server.server_close()
    thread.join()


def git_sha1(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


def lfs(name: str) -> dict[str, Any] | None:
    body = FILES[name]
    if name.endswith(".json"):
        return None
    return {"sha256": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 100}


def tree(name: str) -> dict[str, Any]:
    body, large = FILES[name], lfs(name)
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(body), "oid": git_sha1(body)}
    return entry | ({"lfs": large | {"oid": large["sha256"]}} if large else {})


def described() -> dict[str, Any]:
    siblings = []
    for name, body in FILES.items():
        entry = {"rfilename": name, "size": len(body), "blobId": git_sha1(body)}
        siblings.append(entry | ({"lfs": lfs(name)} if lfs(name) else {}))
    return {"id": "lab/model", "modelId": "lab/model", "sha": COMMIT, "siblings": siblings}


def stack(source: str = "{repo: lab/model, max_context: 99}", more: str = "") -> StackSpec:
    text = (
        f"schema: 1\nname: s\nmodels:\n- {{id: m, gpu: h100, inline: {source},"
        f" variants: {{v: {{{more}}}}}}}\n"
    )
    return parse_yaml(text, StackSpec)


def pull(hub: Hub, cache: Path) -> str:
    console = Console(record=True, width=200, quiet=False)
    pull_stack(stack(), console, endpoint=hub.url, cache=cache)
    return console.export_text()


def test_what_is_fetched_is_checked_and_other_forms_are_left(hub: Hub, tmp_path: Path) -> None:
    assert "lab/model: 2 files fetched and checked" in pull(hub, tmp_path)
    folder = tmp_path / "models--lab--model" / "snapshots" / COMMIT
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert not (folder / "model.bin").exists()


def test_a_second_pull_fetches_no_weights_again(hub: Hub, tmp_path: Path) -> None:
    pull(hub, tmp_path)
    hub.content["model.safetensors"] = b"never asked for"
    assert "2 files fetched and checked" in pull(hub, tmp_path)


def test_a_file_with_the_wrong_checksum_is_removed_and_named(hub: Hub, tmp_path: Path) -> None:
    hub.content["model.safetensors"] = WEIGHTS.replace(b"w", b"W")
    with pytest.raises(WeightsError) as caught:
        pull(hub, tmp_path)
    assert str(caught.value) == (
        "lab/model: model.safetensors does not match its checksum; it is removed, "
        "pull again to fetch it anew"
    )
    hub.content["model.safetensors"] = WEIGHTS
    assert "2 files fetched and checked" in pull(hub, tmp_path)


def test_too_small_a_disk_is_named_before_anything_is_fetched(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(weights.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(WeightsError, match=r"0\.0 GB to fetch, but .* has 0\.0 GB free; free some"):
        pull(hub, tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (
            {"code": 403, "error": "GatedRepo"},
            "lab/model: the repository is gated; accept its terms on the page of lab/model and set "
            "HF_TOKEN to a token that may read it",
        ),
        (
            {"code": 404, "error": "RepoNotFound"},
            "lab/model: no such repository, or a private one; correct the name, or set HF_TOKEN",
        ),
        (
            {"code": 404, "error": "RevisionNotFound"},
            "lab/model: no such revision; correct `revision` in the stack file or the catalogue",
        ),
        (
            {"code": 418},
            "lab/model: the hub answered 418; try again later, or check HF_TOKEN",
        ),
    ],
)
def test_what_the_hub_refuses_is_told_with_its_cure(
    hub: Hub, tmp_path: Path, status: dict[str, Any], expected: str
) -> None:
    hub.status.update(status)
    with pytest.raises(WeightsError) as caught:
        pull(hub, tmp_path)
    assert str(caught.value) == expected


def test_no_network_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(WeightsError) as caught:
        pull_stack(stack(), Console(quiet=True), endpoint="http://127.0.0.1:9", cache=tmp_path)
    assert str(caught.value) == (
        "lab/model: the hub cannot be reached; check the network and HF_ENDPOINT, then pull again"
    )


def test_the_demo_s_weights_are_in_the_package_and_whole() -> None:
    console = Console(record=True, width=200)
    pull_stack(load_stack("demo"), console)
    folder = checkpoint_path("tiny-moe")
    assert console.export_text() == f"{folder}: on this machine, 1 file(s) whole\n"


def test_a_cut_weight_file_is_found_without_its_checksum(tmp_path: Path) -> None:
    whole = (checkpoint_path("tiny-dense") / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(WeightsError, match=r"not a whole safetensors file .*; copy it anew"):
        check_folder(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError) as caught:
        check_folder(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: model-1.safetensors, model-2.safetensors missing; correct the path or copy it"
    )


def test_a_drafting_checkpoint_is_fetched_too_and_each_only_once() -> None:
    drafts = "speculative: {method: eagle3, num_speculative_tokens: 2, model: lab/head}"
    assert [str(source) for source in sources(stack(more=drafts))] == ["lab/model", "lab/head"]
    assert len(sources(load_stack("demo"))) == 1
