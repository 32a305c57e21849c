"""A load that grows in steps; to be given after a file of users.

    locust -f loadtests/decode.py,loadtests/ramp.py --host http://127.0.0.1:8000 \\
        --headless --steps 1,2,4,8 --step-time 30

Owns how many users run when. With `--rate` each user is a source of arrivals, so that the
arrival rate grows in the same steps.
"""

from __future__ import annotations

from argparse import ArgumentTypeError

from locust import LoadTestShape, events

MAX_USERS = 10_000


def numbers_of_users(text: str) -> tuple[int, ...]:
    """The steps in `1,2,4`; raises ArgumentTypeError."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 0 < int(part) <= MAX_USERS for part in parts):
        raise ArgumentTypeError(
            f"found {text!r}; write numbers of users from 1 to {MAX_USERS}, as in 1,2,4,8"
        )
    return tuple(int(part) for part in parts)


@events.init_command_line_parser.add_listener
def add_options(parser):
    """The ramp's own options."""
    parser.add_argument(
        "--steps",
        type=numbers_of_users,
        default=(1, 2, 4, 8),
        help="users of each step, as in 1,2,4,8",
        include_in_web_ui=False,
    )
    parser.add_argument("--step-time", type=float, default=30.0, help="seconds per step")


class Ramp(LoadTestShape):
    """The steps one after another; the test ends with the last."""

    def tick(self):
        """Users, and users to start per second; None at the end."""
        options = self.runner.environment.parsed_options
        step = int(self.get_run_time() // options.step_time)
        if step >= len(options.steps):
            return None
        users = options.steps[step]
        return users, users
