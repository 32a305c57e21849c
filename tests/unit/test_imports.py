"""Imports go one way, and a laptop without engines or Ray can use the light rooms.

The first half reads the sources with `ast`, so an import inside a function counts as well.
The second imports the light rooms in a fresh interpreter that refuses the heavy packages.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# From the top down; a room imports from its own level or below, never from above.
LEVELS: tuple[frozenset[str], ...] = (
    frozenset({"cli", "__main__"}),
    frozenset({"stack", "studies", "planner", "checks"}),
    frozenset({"gateway", "engines"}),
    frozenset({"teams"}),
    frozenset({"router"}),
    frozenset({"catalog", "telemetry", "demo"}),
)
HEAVY = frozenset({"ray", "torch", "transformers", "vllm"})
RAY_ROOMS = frozenset({"stack", "engines", "gateway", "cli"})
# Programs of their own: what the stack is measured against, and the gateway before a mock engine.
RAY_PROGRAMS = frozenset(
    {
        Path("serving/studies/overhead/ray_llm.py"),
        Path("serving/studies/capacity/deployed.py"),
        Path("serving/teams/actor.py"),
    }
)
# What crosses from an engine replica to the gateway: the endpoint value and the key header.
OPEN_TO_GATEWAY = ("serving.engines.lease", "serving.engines.keys")
LIGHT_ROOMS = ("catalog", "telemetry", "router", "planner", "checks", "cli")


@dataclass(frozen=True)
class Import:
    """One import: where it stands, and the dotted module it names."""

    path: Path
    line: int
    module: str

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    @property
    def importer(self) -> str:
        """The room the import stands in: `gateway`, or `cli` for serving/cli.py."""
        return self.path.parts[1].removesuffix(".py")

    @property
    def room(self) -> str | None:
        """The room the import names; none when it is not one of ours."""
        parts = self.module.split(".")
        return parts[1] if parts[0] == "serving" and len(parts) > 1 else None

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.module}"


def imports_of(root: Path) -> list[Import]:
    """Every import under root/serving; paths are relative to root."""
    found: list[Import] = []
    for path in sorted((root / "serving").rglob("*.py")):
        relative = path.relative_to(root)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for module in modules_named(node, relative):
                found.append(Import(relative, node.lineno, module))  # type: ignore[attr-defined]
    return found


def modules_named(node: ast.AST, path: Path) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = path.parts[: len(path.parts) - node.level] if node.level else ()
        base = ".".join((*above, *([node.module] if node.module else [])))
        # `from serving import gateway` and `from . import gateway` name a room too.
        yield from (f"{base}.{alias.name}" for alias in node.names)


def upward(imports: list[Import]) -> list[str]:
    level = {room: depth for depth, rooms in enumerate(LEVELS) for room in rooms}
    return [
        str(each)
        for each in imports
        if each.room in level and each.importer in level and level[each.room] < level[each.importer]
    ]


def beyond_the_endpoint(imports: list[Import]) -> list[str]:
    return [
        str(each)
        for each in imports
        if each.importer == "gateway"
        and each.room == "engines"
        and not any(f"{each.module}.".startswith(f"{module}.") for module in OPEN_TO_GATEWAY)
    ]


def outside_its_place(imports: list[Import]) -> list[str]:
    return [str(each) for each in imports if each.package in HEAVY and not may_import_it(each)]


def may_import_it(found: Import) -> bool:
    if found.package == "ray":
        return found.importer in RAY_ROOMS or found.path in RAY_PROGRAMS
    if found.importer == "engines":
        return found.path.parts[2].startswith("vllm")
    return found.importer == "demo"


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """The rooms of one import cycle, each importing the next; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


@pytest.fixture(scope="module")
def ours() -> list[Import]:
    return imports_of(ROOT)


def test_no_room_imports_from_a_room_above_it(ours: list[Import]) -> None:
    assert upward(ours) == []


def test_no_two_rooms_import_each_other_in_a_circle(ours: list[Import]) -> None:
    graph: dict[str, set[str]] = {}
    for each in ours:
        if each.room and each.room != each.importer:
            graph.setdefault(each.importer, set()).add(each.room)
    assert cycle_in(graph) == []


def test_a_circle_between_rooms_is_found() -> None:
    assert sorted(set(cycle_in({"gateway": {"engines"}, "engines": {"gateway"}}))) == [
        "engines",
        "gateway",
    ]


def test_the_gateway_knows_engines_only_by_endpoint_and_key(ours: list[Import]) -> None:
    assert beyond_the_endpoint(ours) == []


def test_engines_and_ray_are_imported_only_in_their_rooms(ours: list[Import]) -> None:
    assert outside_its_place(ours) == []


def test_every_room_has_a_level(ours: list[Import]) -> None:
    rooms = {path.name for path in (ROOT / "serving").iterdir() if (path / "__init__.py").exists()}
    assert rooms - frozenset().union(*LEVELS) == set()


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("from serving.gateway import relay", "imports serving.gateway.relay"),
        ("from serving import gateway", "imports serving.gateway"),
        ("from ..gateway.relay import Relay", "imports serving.gateway.relay.Relay"),
        ("def late():\n    import serving.gateway.app", "imports serving.gateway.app"),
    ],
)
def test_an_import_from_above_is_found_in_every_form(
    tmp_path: Path, source: str, complaint: str
) -> None:
    write(tmp_path, "serving/router/rules.py", source)
    line = source.count("\n") + 1
    assert upward(imports_of(tmp_path)) == [f"serving/router/rules.py:{line} {complaint}"]


@pytest.mark.parametrize(
    ("source", "allowed"),
    [
        ("from serving.engines.lease import Endpoint", True),
        ("from serving.engines import keys", True),
        ("import serving.engines.keys", True),
        ("import serving.engines", False),
        ("from serving import engines", False),
        ("from serving.engines.vllm import VllmEngine", False),
        ("from serving.engines.keys_of_others import Keys", False),
        ("from ..engines.vllm_args import check_engine_args", False),
    ],
)
def test_a_gateway_import_beyond_endpoint_and_key_is_found(
    tmp_path: Path, source: str, allowed: bool
) -> None:
    write(tmp_path, "serving/gateway/relay.py", source)
    assert (beyond_the_endpoint(imports_of(tmp_path)) == []) is allowed


@pytest.mark.parametrize(
    ("place", "source", "allowed"),
    [
        ("serving/engines/vllm.py", "import vllm", True),
        ("serving/engines/vllm/app.py", "from vllm import envs", True),
        ("serving/engines/protocol.py", "import vllm", False),
        ("serving/demo/train.py", "import torch.nn", True),
        ("serving/planner/memory.py", "import torch", False),
        ("serving/gateway/app.py", "from ray import serve", True),
        ("serving/checks/config.py", "from ray import serve", False),
        ("serving/studies/overhead/ray_llm.py", "from ray import serve", True),
        ("serving/studies/overhead/servers.py", "import ray", False),
        ("serving/studies/capacity/deployed.py", "import ray", True),
        ("serving/studies/capacity/targets.py", "import ray", False),
        ("serving/gateway/app.py", "from transformers import AutoTokenizer", False),
    ],
)
def test_a_heavy_package_outside_its_place_is_found(
    tmp_path: Path, place: str, source: str, allowed: bool
) -> None:
    write(tmp_path, place, source)
    assert (outside_its_place(imports_of(tmp_path)) == []) is allowed


@pytest.mark.parametrize(
    "room",
    [
        room
        for room in LIGHT_ROOMS
        if (ROOT / "serving" / room).is_dir() or (ROOT / "serving" / f"{room}.py").exists()
    ],
)
def test_a_light_room_imports_without_engines_or_ray(room: str) -> None:
    program = f"""
import pkgutil, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {set(HEAVY)!r}:
            raise ImportError(f"{{name}} is not on a laptop")
sys.meta_path.insert(0, Refuse())
module = __import__("serving.{room}", fromlist=["*"])
for found in pkgutil.walk_packages(getattr(module, "__path__", []), "serving.{room}."):
    __import__(found.name)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def write(root: Path, place: str, source: str) -> None:
    path = root / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, encoding="utf-8")
