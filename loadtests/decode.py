"""A decode load on any server of the OpenAI API, for Locust.

    locust -f loadtests/decode.py --host http://127.0.0.1:8000 -u 8

Owns the load: which prompt is sent when, by how many users, and what Locust shows of it. Closed
loop: each user sends its next request when the last has ended. With `--rate`, open loop: each
user is a Poisson source of arrivals that waits for nothing. Leaves the protocol and its timing
to `serving.studies.client`; Locust's own HTTP users time whole replies, not first tokens.
"""

from __future__ import annotations

import logging
import math
import os
import random
import secrets
import time
from argparse import ArgumentTypeError
from pathlib import Path

import counters
import gevent
import requests
import urllib3
from arguments import whole_number
from gevent.pool import Pool
from locust import User, events, task
from locust.exception import StopUser
from locust.runners import WorkerRunner
from rich.console import Console
from summary import as_table

from serving.studies.client import (
    CONNECT_WITHIN_S,
    MAX_REFUSAL_BYTES,
    SILENT_FOR_S,
    ApiFailureError,
    Reading,
    Request,
    Result,
    prompt_request,
    refusal,
)
from serving.studies.prompts import PromptsError, load_prompts, new_salt, salted
from serving.studies.recording import Sent, as_record
from serving.studies.records import RequestRecord, append_request

API_KEY = "MOE_SERVING_API_KEY"
CELL = "load"
# An open loop on a server that is too slow piles requests up; beyond this it waits.
MAX_IN_FLIGHT = 1024

logger = logging.getLogger(__name__)


def not_negative(text: str) -> float:
    """A number from 0 on; raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value < float("inf"):
        raise ArgumentTypeError(f"found {text!r}; write a number from 0 on")
    return value


@events.init_command_line_parser.add_listener
def add_options(parser):
    """The options of a decode load; the API key comes from the environment only."""
    add = parser.add_argument
    local = {"include_in_web_ui": False}
    add("--model", default="", help="name to ask for; the server's first one without")
    add("--arm", default="", help="name of what is measured, in the records; the model without")
    add(
        "--max-tokens",
        type=whole_number(0),
        default=0,
        help="longest answer; 0: as each prompt says",
    )
    add("--temperature", type=not_negative, default=0.0, help="0 is greedy")
    add("--categories", default="", help="prompts of these only, as in code,chat")
    add("--prompts", default="", help="a shipped set or a file; all shipped without", **local)
    add("--salt", choices=("on", "off"), default="on", help="off lets a prefix cache answer")
    add("--rate", type=not_negative, default=0.0, help="arrivals/s per user; 0: closed loop")
    add("--requests", type=whole_number(0), default=0, help="end after this many; 0: no end")
    add("--record", default="", help="folder for the requests, as JSON lines", **local)
    # Who reaches the web UI names the host that the API key is sent to.
    parser.set_defaults(web_host="127.0.0.1")


@events.init.add_listener
def set_up(environment, **_):
    """One load per process; the users find it in the environment."""
    environment.decode_load = Load(environment)


class LoadError(RuntimeError):
    """The load cannot start; the text names the cure."""


class Load:
    """What is sent, and what came of it; on a master, what came of all workers' requests."""

    def __init__(self, environment):
        self.environment = environment
        self.records = []
        self.unsent = []  # on a worker: records that the master has not got yet
        self.counters = None
        self.drafted = None
        self.ready = False
        environment.events.test_start.add_listener(self.start)
        environment.events.test_stop.add_listener(self.stop)
        environment.events.report_to_master.add_listener(self.report)
        environment.events.worker_report.add_listener(self.take_report)
        environment.events.quit.add_listener(self.show)

    def start(self, **_):
        """Get everything ready, or end the test with a message."""
        self.ready = False
        self.records.clear()
        self.drafted = None
        try:
            self.prepare()
        except (ApiFailureError, LoadError, PromptsError, OSError) as error:
            logger.error(str(error))
            self.environment.process_exit_code = 2
            self.end()
        else:
            self.ready = True

    def prepare(self):
        """Read options and prompts, and ask the server for its models."""
        self.options = options = self.environment.parsed_options
        host = (self.environment.host or "").rstrip("/").removesuffix("/v1")
        if not host:
            raise LoadError("name the server with --host, as in --host http://127.0.0.1:8000")
        self.host, self.session = host, new_session()
        self.model = options.model or self.first_model()
        self.prompts = list(load_prompts(options.prompts or None, categories(options.categories)))
        self.seed = secrets.randbits(64)
        random.Random(self.seed).shuffle(self.prompts)
        self.taken = 0
        if options.record:
            Path(options.record).mkdir(parents=True, exist_ok=True)
        self.counters = self.scrape()

    def first_model(self):
        """The name of the model that the server lists first; raises LoadError."""
        url = f"{self.host}/v1/models"
        try:
            reply = self.session.get(url, timeout=CONNECT_WITHIN_S)
            if reply.status_code != 200:
                raise refusal(reply.status_code, reply.content, reply.reason)
            return reply.json()["data"][0]["id"]
        except requests.ConnectionError as error:
            raise LoadError(
                f"nothing answers at {self.host} ({root_of(error)}); "
                "start a stack with `moe-serving up demo`, or name a server with --host"
            ) from None
        except (requests.RequestException, LookupError, TypeError) as error:
            raise LoadError(f"{url} names no model ({error}); give one with --model") from None

    def scrape(self):
        """The drafting counters of a server that has them."""
        try:
            reply = self.session.get(f"{self.host}/metrics", timeout=CONNECT_WITHIN_S)
        except requests.RequestException:
            return None
        return counters.read(reply.text) if reply.status_code == 200 else None

    def take(self):
        """The number of the next request, from 0; None where none is to be sent."""
        if not self.ready or 0 < self.options.requests <= self.taken:
            return None
        self.taken += 1
        return self.taken - 1

    def send(self, index):
        """Send request `index`, wait for its answer, and keep what came of it."""
        prompt = self.prompts[index % len(self.prompts)]
        max_tokens = self.options.max_tokens or prompt.max_tokens
        sent = Sent(
            cell=CELL,
            round=0,
            arm=self.options.arm or self.model,
            streams=self.streams,
            category=prompt.category,
            prompt=prompt.id,
            temperature=self.options.temperature,
            max_tokens=max_tokens,
            sent_at=time.time(),
        )
        if self.options.salt == "on":
            prompt = salted(prompt, new_salt(self.seed, index))
        began = time.perf_counter()
        try:
            ended = answer(self.session, f"{self.host}/v1", self.request(prompt, max_tokens))
        except ApiFailureError as error:
            ended = error
        self.log("text" if prompt.text else "chat", ended, time.perf_counter() - began, prompt)
        self.keep(as_record(sent, ended))

    @property
    def streams(self):
        """Requests in flight by design; a worker knows only its own share."""
        return 0 if self.options.rate else self.environment.runner.target_user_count

    def request(self, prompt, max_tokens):
        """The request that asks for the answer to `prompt`."""
        options = {"max_tokens": max_tokens, "temperature": self.options.temperature}
        return prompt_request(self.model, prompt, **options)

    def log(self, kind, ended, seconds, prompt):
        """Tell Locust: one request or failure, and times of its own kind beside it."""
        failed = isinstance(ended, ApiFailureError)
        self.environment.events.request.fire(
            request_type=kind,
            name=prompt.category,
            response_time=1e3 * (seconds if failed else ended.duration_s),
            response_length=0 if failed else len(ended.text.encode()),
            exception=ended if failed else None,
            context={},
        )
        if failed:
            return
        # Entries of their own stay out of Locust's total, so its count and rate remain those of
        # requests. It rounds to two digits and whole units, hence microseconds.
        for name, value in (
            ("TTFT ms", 1e3 * ended.ttft_s),
            ("TPOT µs", 1e6 * ended.tpot_s),
            ("tokens/s", 1 / ended.tpot_s if ended.tpot_s else float("nan")),
        ):
            if not math.isnan(value):
                self.environment.stats.get(prompt.category, name).log(value, 0)

    def keep(self, record):
        """Add a record here or, on a worker, to the next report to the master."""
        if isinstance(self.environment.runner, WorkerRunner):
            self.unsent.append(record)
            return
        self.records.append(record)
        if self.options.record:
            append_request(Path(self.options.record), record)
        if len(self.records) == self.options.requests:
            self.end()

    def report(self, data, **_):
        """Worker: hand over what ended since the last report."""
        data["requests"] = [record.model_dump(mode="json") for record in self.unsent]
        self.unsent.clear()

    def take_report(self, data, **_):
        """Master: keep a worker's records, with the number of streams of all workers."""
        for fields in data.get("requests", ()):
            self.keep(RequestRecord.model_validate({**fields, "streams": self.streams}))

    def stop(self, **_):
        """Read the counters again."""
        if self.ready and self.counters is not None:
            self.drafted = counters.between(self.counters, self.scrape() or {})

    def end(self):
        """End the test; in the web UI, keep the UI."""
        runner = self.environment.runner
        if isinstance(runner, WorkerRunner):
            return
        headless = self.environment.parsed_options.headless
        # Not from here: a user cannot wait for its own end.
        gevent.spawn(runner.quit if headless else runner.stop)

    def show(self, **_):
        """Print the summary."""
        if not self.records:
            return
        console = Console(stderr=True, width=None if os.isatty(2) else 160)
        console.print(as_table(self.records))
        if self.drafted and not any(record.drafting for record in self.records):
            told = self.drafted
            console.print(
                f"by the server's counters: {told.accepted} of {told.drafted} draft tokens "
                f"accepted ({told.accepted / told.drafted:.3f}), mean acceptance length "
                f"{1 + told.accepted / told.drafts:.2f}"
            )


class Decode(User):
    """A stream of requests, or with `--rate` a source of arrivals."""

    def on_start(self):
        """Begin with nothing in flight."""
        self.load = self.environment.decode_load
        self.arrivals = Pool(MAX_IN_FLIGHT)
        self.next_at = time.perf_counter()

    @task
    def decode(self):
        """Send one request."""
        index = self.load.take()
        if index is None:
            self.arrivals.join()
            raise StopUser
        rate = self.load.options.rate
        if not rate:
            self.load.send(index)
            return
        # Times of arrival are drawn one after another from the start, so that what starting a
        # request takes does not slow the source down.
        self.next_at += random.expovariate(rate)
        gevent.sleep(max(0.0, self.next_at - time.perf_counter()))
        self.arrivals.spawn(self.load.send, index)

    def on_stop(self):
        """Wait as long as `--stop-timeout` says; what is still in flight counts for nothing."""
        self.arrivals.join(timeout=self.environment.stop_timeout)
        self.arrivals.kill()


def answer(session: requests.Session, url: str, request: Request) -> Result:
    """Send `request` to the API at `url` and read its stream; raises ApiFailureError."""
    url += request.path
    reading = Reading(url)
    timeout = (CONNECT_WITHIN_S, SILENT_FOR_S)
    try:
        reply = session.post(url, json=request.body, stream=True, timeout=timeout)
    except requests.RequestException as error:
        message = f"nothing answers at {url}: {root_of(error)}"
        raise ApiFailureError(message, outcome="unreachable") from error
    with reply:
        try:
            if reply.status_code != 200:
                raise refusal(reply.status_code, reply.raw.read(MAX_REFUSAL_BYTES), reply.reason)
            while chunk := reply.raw.read1():
                for _ in reading.feed(chunk):
                    pass
        except (urllib3.exceptions.HTTPError, OSError) as error:
            message = f"the connection to {url} broke: {type(error).__name__}"
            raise ApiFailureError(message, outcome="cut") from error
        return reading.result(reply.headers)


def new_session() -> requests.Session:
    """Connections that all users of this process share."""
    session = requests.Session()
    session.trust_env = False  # neither a proxy nor a key from .netrc
    adapter = requests.adapters.HTTPAdapter(pool_connections=1, pool_maxsize=MAX_IN_FLIGHT)
    session.mount("http://", adapter)
    session.mount("https://", adapter)
    # A compressed stream would come in lumps.
    session.headers["Accept-Encoding"] = "identity"
    if key := os.environ.get(API_KEY):
        session.headers["Authorization"] = f"Bearer {key}"
    return session


def categories(text: str) -> list[str]:
    """The names in `code, chat`."""
    return [name.strip() for name in text.split(",") if name.strip()]


def root_of(error: BaseException) -> str:
    """What lies at the bottom, in words that are the same each time, as Locust counts by text."""
    while error.__context__ is not None:
        error = error.__context__
    return getattr(error, "strerror", None) or type(error).__name__
