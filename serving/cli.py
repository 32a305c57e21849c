"""The `moe-serving` command. Each command calls one function of a room.

Ray and vLLM are imported inside the commands that need them, so that the others
work on a laptop without either.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from serving.catalog.errors import CatalogError
from serving.checks.command import check
from serving.console import console, errors, fail
from serving.planner.command import plan_app
from serving.signals import handled
from serving.stack.route_command import route_app
from serving.teams.command import db_app, keys_app, prices_app, teams_app

if TYPE_CHECKING:
    from serving.stack.events import EngineStatus
    from serving.stack.spec import StackSpec

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help=__doc__.splitlines()[0],
)


@app.callback()
def _with_home(context: typer.Context) -> None:
    from serving.stack import runtime

    context.obj = runtime.home


@app.command()
def up(
    stack: Annotated[
        str | None, typer.Argument(help="a stack file, or the name of a shipped one")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="instead of gateway.port")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="return when the stack is ready")
    ] = False,
    rollback: Annotated[
        bool, typer.Option("--rollback", help="go back to the stack before the last change")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="start even where `moe-serving check` finds errors")
    ] = False,
) -> None:
    """Start a stack and serve until Ctrl-C; where one runs, change it to this one."""
    if rollback == (stack is not None) or (rollback and port is not None):
        fail("give either a stack, or --rollback and nothing beside it")
    spec = None if stack is None else _load(stack)
    if spec is not None and not force:
        _refuse_errors(spec)
    from serving.stack import lifecycle, runtime
    from serving.stack.runtime import RuntimeFailure

    result = None
    with _interrupted_by_termination():
        try:
            if spec is None:
                result = lifecycle.roll_back(console)
            else:
                chosen = spec if port is None else lifecycle.with_port(spec, port)
                result = lifecycle.up(chosen, port, console)
            if not result.started_here:
                console.print(result.text)
                return
            _print_first_request(result.url)
            if not detach:
                console.print("Ctrl-C ends the stack")
                _serve()
        except RuntimeFailure as error:
            fail(str(error))
        except KeyboardInterrupt:
            if result is None or not result.started_here:
                left = "the stack runs as before" if runtime.running() else "nothing is left of it"
                errors.print(f"interrupted; {left}")
                sys.exit(130)
            if not detach:
                console.print(f"ended {lifecycle.end(console)} processes")


def _refuse_errors(spec: StackSpec) -> None:
    """End where the check finds what would not start, or would serve nonsense."""
    from serving.checks.run import refuse

    if found := refuse(spec):
        text = "\n".join(str(finding) for finding in found)
        fail(f"{text}\n`moe-serving check` says more; --force starts it all the same")


def _serve() -> None:
    """Wait until the stack is over by someone else's hand; Ctrl-C raises KeyboardInterrupt."""
    from serving.stack import lifecycle, runtime

    run = runtime.running()
    by_command = run is None or lifecycle.wait_until_ended(run["started"])
    if by_command:
        console.print("the stack was ended by another command")
        return
    lifecycle.end(console)
    fail(f"the stack's Ray ended unexpectedly; {runtime.log_file()} and `dmesg` may say why")


def _interrupted_by_termination() -> AbstractContextManager[None]:
    """SIGTERM and a closed terminal end a command as Ctrl-C does, in order."""
    return handled((signal.SIGTERM, signal.SIGHUP), signal.default_int_handler)


def _load(stack: str) -> StackSpec:
    from serving.stack.load import load_stack

    try:
        return load_stack(stack)
    except CatalogError as error:
        fail(str(error))


def _print_first_request(url: str) -> None:
    from serving.stack import history

    stack = history.current()
    body = json.dumps(
        {
            "model": stack.models[0].id if stack else "",
            "prompt": "def add(a, b):",
            "max_tokens": 48,
            "temperature": 0,
            "stream": True,
        }
    )
    key = ""
    if stack and stack.gateway.access == "keys":
        console.print("who asks needs a key: `moe-serving keys create` makes one")
        key = '-H "Authorization: Bearer $KEY" '
    console.print(f"ready at {url}/v1. Try:\n")
    print(f"curl -N {url}/v1/completions {key}-H 'Content-Type: application/json' -d '{body}'\n")


@app.command()
def down() -> None:
    """End the running stack, and whatever an earlier one of yours left behind."""
    from serving.stack import lifecycle

    console.print(f"ended {lifecycle.end(console)} processes")


@app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Say what runs: the gateway, and each variant with its state."""
    from serving.stack import lifecycle
    from serving.stack.runtime import RuntimeFailure

    try:
        run, found = lifecycle.status(errors)
    except RuntimeFailure as error:
        fail(str(error))
    ready, answer = lifecycle.gateway_ready(run)
    if as_json:
        more = {"url": run["url"], "started": run["started"], "ready": ready}
        print(json.dumps(found.model_dump(mode="json", exclude={"kind"}) | more))
        return
    since = datetime.fromtimestamp(run["started"]).strftime("%Y-%m-%d %H:%M:%S")
    console.print(f"{found.stack} at {run['url']}/v1, started {since}")
    console.print("gateway: ready" if ready else f"gateway: not ready: {answer}", soft_wrap=True)
    for engine in found.engines:
        console.print(_engine_line(engine), soft_wrap=True)


def _engine_line(engine: EngineStatus) -> str:
    drafts = engine.speculative
    how = f"{drafts['method']}, n={drafts['num_speculative_tokens']}" if drafts else "no drafting"
    starting = engine.starting_for_s
    since = "" if starting is None else f", starting for {starting:.0f} s"
    parts = [
        f"{engine.model}@{engine.variant}{' (default)' if engine.default else ''}: {engine.state}",
        f"{engine.running_replicas} of {engine.wanted_replicas} replicas{since}",
        how,
        f"{engine.max_model_len} tokens",
        engine.app,
    ]
    return ", ".join(parts) + (f"\n  {engine.message}" if engine.message else "")


app.command()(check)


@app.command("serve-config")
def serve_config(
    stack: Annotated[str, typer.Argument(help="a stack file, or the name of a shipped one")],
    old: Annotated[
        str | None, typer.Option("--from", help="the stack that runs, for an update of it")
    ] = None,
    step: Annotated[
        Literal["load", "switch", "finish"], typer.Option(help="of an update, in this order")
    ] = "finish",
    env: Annotated[
        bool, typer.Option("--env", help="print what Ray's own processes need, for a shell")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="write to this file instead")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="even where `moe-serving check` finds errors")
    ] = False,
) -> None:
    """Write a stack as a Serve config, for `serve deploy` and a RayService."""
    from serving.stack.serve_config import as_exports, environment, to_yaml
    from serving.stack.serve_config import serve_config as config_of
    from serving.stack.update import UpdateRefused

    if old is None and step != "finish":
        fail(f"--step {step} is of an update; name the stack that runs with --from")
    spec = _load(stack)
    if not force:
        _refuse_errors(spec)
    before = None if old is None else _load(old)
    try:
        text = as_exports(environment(spec)) if env else to_yaml(config_of(spec, before, step))
        if output is None:
            print(text, end="")
        else:
            output.write_text(text, encoding="utf-8")
    except UpdateRefused as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename}: {(error.strerror or str(error)).lower()}; name another file")


@app.command()
def pull(
    stack: Annotated[str, typer.Argument(help="a stack file, or the name of a shipped one")],
) -> None:
    """Fetch the weights of a stack ahead of time, and check them."""
    from serving.stack.weights import WeightsError, pull_stack

    try:
        pull_stack(_load(stack), console)
    except WeightsError as error:
        fail(str(error))
    except KeyboardInterrupt:
        errors.print("interrupted; what is there is kept, and the next pull goes on from it")
        sys.exit(130)


@app.command()
def chat(
    model: Annotated[
        str | None, typer.Argument(help="a model or model@variant; the server's first")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="base URL of an OpenAI API; the running stack's")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="answer this text and end")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="longest answer, tokens")] = 256,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 is greedy; the server's default")
    ] = None,
    completion: Annotated[
        bool, typer.Option("--completion", help="continue the text, without a chat template")
    ] = False,
) -> None:
    """Talk to a model; the key comes from OPENAI_API_KEY where one is set."""
    from serving.studies.chat import run_chat
    from serving.studies.client import ApiFailureError

    options: dict[str, object] = {"max_tokens": max_tokens}
    if temperature is not None:
        options["temperature"] = temperature
    key = os.environ.get("OPENAI_API_KEY")
    try:
        run_chat(url or _stack_url(), model, prompt, options, completion=completion, api_key=key)
    except ApiFailureError as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _stack_url() -> str:
    """The API of the stack that runs here, else where the shipped stacks listen."""
    from serving.stack import runtime

    run = runtime.running()
    return f"{run['url'] if run else 'http://127.0.0.1:8000'}/v1"


app.add_typer(plan_app, name="plan")
app.add_typer(route_app, name="route")
app.add_typer(keys_app, name="keys")
app.add_typer(teams_app, name="teams")
app.add_typer(prices_app, name="prices")
app.add_typer(db_app, name="db")


@app.command()
def usage(
    context: typer.Context,
    team: Annotated[str | None, typer.Option(help="only this team's")] = None,
    by: Annotated[Literal["day", "model", "key"], typer.Option(help="what is added up")] = "day",
    since: Annotated[str | None, typer.Option(help="as 2026-01-31, or 7d")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="print CSV")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for programs")] = False,
) -> None:
    """Add up what teams have used."""
    from serving.teams.usage_report import show_usage

    if as_csv and as_json:
        fail("give one of --csv and --json")
    form: Literal["table", "csv", "json"] = "csv" if as_csv else "json" if as_json else "table"
    show_usage(context.obj(), team=team, by=by, since=since, form=form)


bench = typer.Typer(no_args_is_help=True, help="Measure what serving costs.")
app.add_typer(bench, name="bench")


@bench.command()
def overhead(
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for programs")] = False,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="interleaved rounds")] = 5,
    streams: Annotated[str, typer.Option(help="numbers of concurrent requests")] = "1,8,16",
    output: Annotated[Path | None, typer.Option(help="write the JSON to this file too")] = None,
) -> None:
    """Compare this stack with a bare vLLM server and with ray.serve.llm, on the demo model."""
    from serving.studies.overhead.report import as_json as to_json
    from serving.studies.overhead.report import as_tables
    from serving.studies.overhead.servers import ServerError
    from serving.studies.overhead.study import parse_streams, run_study

    try:
        model, measured = run_study("demo", parse_streams(streams), rounds, errors.print)
    except (CatalogError, ServerError, ValueError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    text = json.dumps(to_json(measured, model), indent=2)
    if output is not None:
        output.write_text(text + "\n", encoding="utf-8")
    if as_json:
        print(text)
    else:
        console.print(as_tables(measured))


@bench.command()
def gateway(
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="interleaved rounds")] = 3,
    seconds: Annotated[float, typer.Option(min=0.5, max=600, help="each measured window")] = 2.5,
    connections: Annotated[int, typer.Option(min=1, max=1024, help="open at once")] = 64,
    chunks: Annotated[int, typer.Option(min=1, max=100_000, help="of each stream")] = 64,
    delay_ms: Annotated[int, typer.Option(min=1, max=1000, help="between paced chunks")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="of the order of targets")] = 0,
    targets: Annotated[
        str | None, typer.Option(help="only these, and what they are compared with")
    ] = None,
    install_peers: Annotated[
        bool, typer.Option("--install-peers", help="install vllm-router and LiteLLM for it")
    ] = False,
    output: Annotated[Path | None, typer.Option("--json", help="write JSON to this file")] = None,
) -> None:
    """Measure what the gateway carries and costs before a mock engine, layer by layer."""
    from serving.studies.capacity.measure import Plan
    from serving.studies.capacity.report import as_json as to_json
    from serving.studies.capacity.report import as_tables
    from serving.studies.capacity.study import run_study
    from serving.studies.capacity.targets import parse_targets
    from serving.studies.overhead.servers import ServerError

    plan = Plan(rounds, seconds, connections, chunks, delay_ms, seed)
    if output is not None and not output.parent.is_dir():
        fail(f"--json: the folder {output.parent} is not there; make it, or name another file")
    try:
        names = parse_targets(targets)
        measured = run_study(names, plan, errors.print, install_peers=install_peers)
    except (ServerError, ValueError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    if output is not None:
        output.write_text(json.dumps(to_json(measured), indent=2) + "\n", encoding="utf-8")
    console.print(as_tables(measured))


study = typer.Typer(
    no_args_is_help=True, help="Measure whether drafting pays: speed, acceptance, sameness of text."
)
app.add_typer(study, name="study")
# What only the extra `loadtest` installs of what the commands import.
LOADTEST = frozenset({"jinja2", "matplotlib", "numpy", "scipy"})
RunFolder = Annotated[Path, typer.Argument(help="the folder of a run, as --out named it")]


@study.command("run")
def study_run(
    study: Annotated[str, typer.Argument(help="a study file, or the name of a shipped one")],
    out: Annotated[Path, typer.Option(help="folder of the run; one that is there is taken up")],
    url: Annotated[
        str | None, typer.Option(help="API of a stack that serves the arms; else one is started")
    ] = None,
) -> None:
    """Carry a study out; Ctrl-C keeps what is done, and the same command goes on from there."""
    from serving.studies.overhead.servers import ServerError
    from serving.studies.prompts import PromptsError
    from serving.studies.records import RecordsError
    from serving.studies.run import StudyError, run_study
    from serving.studies.spec import load_study
    from serving.studies.stage import StageError

    try:
        outcome = run_study(load_study(study), out, console, url=url)
    except (CatalogError, PromptsError, RecordsError, ServerError, StageError, StudyError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    failed = f", {outcome.failed} failed" if outcome.failed else ""
    console.print(f"{outcome.recorded} of {outcome.planned} requests in {out}{failed}")
    if outcome.recorded < outcome.planned:
        console.print("the same command goes on from here")
    console.print(f"moe-serving study report {out}", soft_wrap=True)
    if outcome.interrupted:
        sys.exit(130)


@study.command("report")
def study_report(folder: RunFolder) -> None:
    """Write what a run says as HTML, Markdown and CSV, into its folder."""
    from serving.studies.records import RecordsError

    with _extra_packages():
        from serving.studies.report import write_report
    try:
        files = write_report(folder)
    except RecordsError as error:
        fail(str(error))
    for file in files:
        console.print(str(file), soft_wrap=True, markup=False)


@study.command("compare")
def study_compare(
    first: RunFolder,
    second: RunFolder,
    out: Annotated[Path, typer.Option(help="HTML file to write")] = Path("comparison.html"),
) -> None:
    """Set two runs side by side: two GPUs, two engines or two versions."""
    from serving.studies.records import RecordsError

    with _extra_packages():
        from serving.studies.report import write_comparison
    try:
        file = write_comparison(first, second, out)
    except RecordsError as error:
        fail(str(error))
    console.print(str(file), soft_wrap=True, markup=False)


@study.command("export-policy")
def study_export_policy(
    folder: RunFolder,
    output: Annotated[Path, typer.Option("--output", "-o", help="policy file to write")] = Path(
        "policy.yaml"
    ),
) -> None:
    """Write what was measured as a policy that the router reads."""
    from serving.studies.records import RecordsError

    with _extra_packages():
        from serving.studies.policy_export import PolicyExportError, export_policy
    try:
        file = export_policy(folder, output)
    except (PolicyExportError, RecordsError) as error:
        fail(str(error))
    console.print(str(file), soft_wrap=True, markup=False)


@contextmanager
def _extra_packages() -> Iterator[None]:
    """Imports that need the extra `loadtest`; without it, how to get it is told."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in LOADTEST:
            raise
        fail(f"{package} is not installed; run pip install 'moe-serving[loadtest]'")


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except Exception as error:
        from serving.stack.runtime import home

        home().mkdir(parents=True, exist_ok=True, mode=0o700)
        log = home() / "error.log"
        log.write_text(traceback.format_exc())
        fail(f"{type(error).__name__}: {error} (unexpected; the details are in {log})")
