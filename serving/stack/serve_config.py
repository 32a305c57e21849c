"""A stack file as a Serve config: what `serve deploy` sends, and a RayService holds.

Owns the config, the steps of an update by it, and the environment that a Ray brought
up by hand needs. Leaves the applications to `applications`. Ray is not imported.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from serving.engines.keys import KEY_FILE_VARIABLE, make_key_file
from serving.stack import runtime
from serving.stack.applications import Part, engine_part, gateway_part
from serving.stack.engine_plan import EnginePlan, plan_engines
from serving.stack.environment import MARK, ray_environment, ray_token
from serving.stack.gateway_plan import FIXED_FIELDS, plan_gateway
from serving.stack.spec import StackSpec
from serving.stack.update import UpdateRefused

# Of an update, in this order; each waits until all that the one before named is running.
Step = Literal["load", "switch", "finish"]
LINE_WIDTH = 100


def serve_config(new: StackSpec, old: StackSpec | None, step: Step = "finish") -> dict[str, Any]:
    """The config of the stack `new`, or of one step of an update to it from `old`.

    Serve ends what a config does not name. So `load` has the engines of both and the
    gateway as `old` has it, `switch` turns the gateway, and `finish` has `new` alone.
    Raises UpdateRefused for an update that cannot be made on a running Serve.
    """
    engines = plan_engines(new)
    gateway = plan_gateway(new, engines)
    if old is not None:
        _refuse_fixed_fields(old, new)
        before = plan_engines(old)
        gateway = plan_gateway(old, before) if step == "load" else gateway
        engines = engines if step == "finish" else _beside(before, engines)
    parts = [*map(engine_part, engines), gateway_part(gateway)]
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": new.gateway.host, "port": new.gateway.port},
        "applications": [_application(part) for part in parts],
    }


def to_yaml(config: dict[str, Any]) -> str:
    """The config as YAML, in its own order."""
    return yaml.safe_dump(config, sort_keys=False, width=LINE_WIDTH)


def environment(stack: StackSpec) -> dict[str, str]:
    """Variables for every process of a Ray that is to serve this stack; no secrets.

    Makes the engines' key, Ray's token and a place for HAProxy where there is none.
    """
    folder = runtime.home()
    variables = ray_environment(folder, _short_folder(folder), stack.gateway.tls)
    variables |= ray_token(folder / "ray.token")
    make_key_file(Path(variables[KEY_FILE_VARIABLE]))
    # `moe-serving down` would end whatever a shell with the mark has started.
    del variables[MARK]
    return variables


def as_exports(variables: dict[str, str]) -> str:
    """Lines that a shell takes the variables from."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def _short_folder(home: Path) -> Path:
    """A folder that stays the same: HAProxy's sockets below it have at most 97 bytes of path.

    Ray's name of the node takes 57 of them, so that a state folder is too long.
    """
    link = home / "haproxy"
    if not link.is_dir():
        link.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        link.unlink(missing_ok=True)
        link.symlink_to(tempfile.mkdtemp(prefix="ms-", dir="/tmp"))
    return link.resolve()


def _beside(old: Sequence[EnginePlan], new: Sequence[EnginePlan]) -> tuple[EnginePlan, ...]:
    """Every engine of the two once; one of both is as `new` has it."""
    wanted = {plan.app_name for plan in new}
    return (*(plan for plan in old if plan.app_name not in wanted), *new)


def _application(part: Part) -> dict[str, Any]:
    return {
        "name": part.name,
        "route_prefix": part.route_prefix,
        "import_path": part.import_path,
        "args": part.args.model_dump(mode="json"),
        # Not in args: changed args would have the replicas replaced.
        "deployments": [{"name": part.deployment, **part.options}],
    }


def _refuse_fixed_fields(old: StackSpec, new: StackSpec) -> None:
    for name in FIXED_FIELDS:
        before, after = getattr(old.gateway, name), getattr(new.gateway, name)
        if before != after:
            raise UpdateRefused(
                f"gateway.{name}: found {after}, but {old.name} has {before}, and this cannot "
                "change while Serve runs; `serve shutdown`, then deploy the new config alone"
            )
