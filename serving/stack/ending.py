"""Taking a stack's Serve applications down in order.

Owns the order and its time limit. Runs in the `driver` process and imports no
engine, so that it is quick. Leaves processes to `runtime`, which ends what does
not go by itself.
"""

from __future__ import annotations

import time

from ray import serve

from serving.stack.gateway_plan import GATEWAY_APP
from serving.stack.watch import applications, wait_until_gone

# The gateway need only have stopped taking requests before its engines go.
GATEWAY_AHEAD_S = 1.0


def end(within_s: float) -> None:
    """Gateway, engines, Serve; running requests get `within_s` seconds to finish."""
    deadline = time.monotonic() + within_s
    known = applications()
    serve.delete(GATEWAY_APP, _blocking=False)
    time.sleep(GATEWAY_AHEAD_S)
    for name in known.keys() - {GATEWAY_APP}:
        serve.delete(name, _blocking=False)
    # An engine that still loads has nothing to finish, and would not answer before it has loaded.
    running = [name for name, app in known.items() if app.status.value == "RUNNING"]
    left = wait_until_gone(running, deadline)
    if not left and len(running) == len(known):
        serve.shutdown()
