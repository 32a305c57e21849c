"""Which fault a failure is due to, and whether it had to be.

Owns the rule. Unavoidable is only what was already being answered: a stream that had begun on
a replica which was killed or hung then, and what was inside a gateway process or HAProxy when
that was killed. Everything else a stack could have answered by another way, and is a finding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from serving.studies.chaos.faults import Fault
from serving.studies.chaos.load import Request
from serving.studies.chaos.schedule import FaultKind

# Its connection breaks at once; a failure later on has another reason.
BROKEN_WITHIN_S = 10.0
ON_A_REPLICA = {FaultKind.CORE_KILLED, FaultKind.REPLICA_KILLED, FaultKind.CORE_HUNG}
ON_THE_WAY = {FaultKind.GATEWAY_KILLED, FaultKind.PROXY_KILLED}


def unavoidable(request: Request, faults: Iterable[Fault]) -> Fault | None:
    """The fault that this failed request was lost with; None where it need not have been."""
    return next((fault for fault in faults if _lost_with(request, fault)), None)


def during(request: Request, faults: Sequence[Fault]) -> Fault | None:
    """The last fault before the request failed; None where none had been."""
    before = [fault for fault in faults if fault.began <= request.ended_at]
    return before[-1] if before else None


def _lost_with(request: Request, fault: Fault) -> bool:
    """Times overlap by the length of the signal itself, which counts for the stack."""
    if not request.sent_at <= fault.done or request.ended_at < fault.began:
        return False
    if fault.kind in ON_A_REPLICA:
        begun = request.streamed and request.head_at is not None and request.head_at <= fault.done
        return begun and request.replica == fault.replica != ""
    if fault.kind in ON_THE_WAY:
        return request.ended_at <= fault.done + BROKEN_WITHIN_S
    return False
