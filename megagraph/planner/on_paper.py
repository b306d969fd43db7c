"""A step on paper in the words of a trace, to be drawn beside one."""

from __future__ import annotations

from megagraph.models.config import ModelConfig
from megagraph.planner.cost import CostModel
from megagraph.planner.links import ranks_of
from megagraph.planner.plan import Plan
from megagraph.planner.workload import Workload
from megagraph.timeline import BUBBLE, STAGE, STEP, Span


def spans(cost: CostModel, config: ModelConfig, plan: Plan, workload: Workload | None = None) -> list[Span]:
    """What every rank does from the start of a step, which takes ``cost.step_seconds``: it waits for its batch, goes
    through its stages, with bubbles between them, sums gradients and updates parameters."""
    terms = cost.explain(config, plan, workload)
    whole, begin = sum(terms.values()), terms["loader stall"]
    update = whole - terms["optimizer"]
    found = []
    ranks = ranks_of(plan).tolist()  # [pp, dp, cp]
    for dp_rank, (*seconds, timeline) in enumerate(cost.replicas_on_paper(config, plan, workload)):
        for pp_rank, of_rank in enumerate(ranks):
            own = [(end, work) for work, end in timeline.ends.items() if work.stage % plan.pp == pp_rank]
            reached, last = begin, begin + timeline.rank_ends[pp_rank]
            parts = [("stall", 0.0, begin)]
            for end, work in sorted(own):
                start, stop = begin + end - seconds[work.backward][work.stage], begin + end
                parts += [(BUBBLE, reached, start), (STAGE[work.backward], start, stop)]
                reached = stop
            if plan.cp * plan.dp > 1:  # alone a rank sums nothing, and waits for the others
                parts.append(("all-reduce", last, update))
            parts.append(("optimizer", update, whole))
            spans_of_rank = [(name, start, stop) for name, start, stop in parts if stop - start > 1e-9 * whole]
            for rank in of_rank[dp_rank]:
                found += [Span(rank, STEP, 0.0, whole), *(Span(rank, *part) for part in spans_of_rank)]
    return sorted(found, key=lambda span: span.start)
