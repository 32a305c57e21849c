"""A plan as a picture: tokens/s by number of draft tokens and by running requests.

Owns the figure. matplotlib comes with the extra `loadtest` and is imported on first use.
"""

from __future__ import annotations

from pathlib import Path

from serving.planner.errors import PlannerError
from serving.planner.plan import Plan
from serving.planner.words import LABEL


def write_plot(plan: Plan, file: Path) -> None:
    """Write the figure, in the format of the file's ending; raises PlannerError."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise PlannerError(
            "--plot: matplotlib is not installed; run pip install 'moe-serving[loadtest]'"
        ) from None
    request = plan.request
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    by_n, by_load = figure.subplots(1, 2)
    counts = [each.draft_tokens for each in plan.speeds]
    by_n.plot(counts, [each.per_request for each in plan.speeds], "o-", color="tab:blue")
    by_n.set_xlabel("draft tokens per step, n")
    by_n.set_ylabel(f"tokens/s of each of {request.concurrency} requests")
    by_n.set_ylim(bottom=0)
    requests = [load.concurrency for load in plan.loads]
    by_load.plot(requests, [load.plain.tokens_per_s for load in plan.loads], "k.-", label="plain")
    by_load.plot(
        requests, [load.best.tokens_per_s for load in plan.loads], "o--", label="best n, drafting"
    )
    by_load.set_xscale("log", base=2)
    by_load.set_yscale("log")
    by_load.set_xlabel("requests at once")
    by_load.set_ylabel("tokens/s in all")
    by_load.legend()
    figure.suptitle(f"{request.model.name}, {request.checkpoint}, {request.gpu.name} ({LABEL})")
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise PlannerError(f"--plot: {file}: {error}; name a .svg, .png or .pdf file") from error
