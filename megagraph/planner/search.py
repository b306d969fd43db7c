"""The best plan for a machine: every layout, each with its best split of the layers (paper Alg. 1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from heapq import heappop, heappush
from operator import add
from typing import Any

import numpy as np

from megagraph.models.config import ModelConfig
from megagraph.planner.cost import CostModel
from megagraph.planner.memory import shared_bytes, stage_bytes
from megagraph.planner.plan import Plan
from megagraph.planner.split import Floats, NoFeasiblePlan, StageTables, balance, gib
from megagraph.planner.workload import RankWork, Workload

KERNEL_TILE = 16  # regular rows of a rank: fewer do not fill one tile of the fused step
HEADROOM = 0.08  # of the memory limit, left for what the model does not know
MAX_MICROBATCHES = 64
MAX_PROCESSES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan with what it is predicted to cost, or why it was not looked at.

    ``step_seconds`` is a lower bound unless ``exact``: it took no run on paper to see that another plan is better.
    ``pruned`` names the first constraint that fails: "batch", "layers", "tile", "memory" or "extrapolated".
    ``peak_bytes`` is that of the rank that needs most, ``tightest`` that rank of the pipeline.
    """

    plan: Plan
    step_seconds: float = float("inf")
    exact: bool = False
    peak_bytes: float = float("inf")
    tightest: int = 0
    pruned: str | None = None
    extrapolated: tuple[str, ...] = ()


@dataclass(frozen=True)
class SearchResult:
    """The best candidate, and all of them, fastest first."""

    best: Candidate
    candidates: list[Candidate]
    _exactly: Callable[[Candidate], Candidate]

    @cached_property
    def pareto(self) -> list[Candidate]:
        """Those that no other candidate beats in step time and peak memory, fastest first; takes runs on paper of all
        whose bound does not tell."""
        timed: list[Candidate] = []
        later: list[tuple[float, float]] = []  # seconds and bytes of those, slower than the next bound
        least = float("inf")  # bytes of those that are faster
        for candidate in self.candidates:
            if candidate.pruned is not None:
                break
            while later and later[0][0] <= candidate.step_seconds:
                least = min(least, heappop(later)[1])
            if candidate.peak_bytes < least:
                timed.append(self._exactly(candidate))
                heappush(later, (timed[-1].step_seconds, timed[-1].peak_bytes))
        front: list[Candidate] = []
        for candidate in sorted(timed, key=_rank):
            if not front or candidate.peak_bytes < front[-1].peak_bytes:
                front.append(candidate)
        return front


def search(
    cost: CostModel,
    model_config: ModelConfig,
    world_size: int,
    memory_limit_bytes: float,
    *,
    workload: Workload | None = None,
    fixed: Mapping[str, Any] | None = None,
    strict: bool = False,
) -> SearchResult:
    """The plan of least step time for ``world_size`` processes that each may use ``memory_limit_bytes``.

    Every (pp, cp, dp, K, schedule, checkpoint, comm) with pp * cp * dp = W is a candidate, with the layer split of
    least GPipe time and the one of least memory; halos, where pairs are listed. They run on paper in the order of a
    closed form that no run is faster than, until that is above the best of them.
    Of equal times the one of less memory wins, then the one of fewer stages. Zero-bubble is looked at where ``fixed``
    asks for it.

    Args:
        workload: batch and sequence sizes; ``None``: those of the profile.
        fixed: fields of the plan that are given, as ``{"pp": 1}``.
        strict: refuse plans that need sizes outside the measured ones.

    Raises:
        ValueError: a world size or memory limit that is not above 0, an unknown field in ``fixed``.
        NoFeasiblePlan: nothing fits; the message says what is tightest and what to change.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size must be an integer of at least 1, got {world_size!r}")
    if world_size > MAX_PROCESSES:
        raise ValueError(f"world_size must be at most {MAX_PROCESSES}, got {world_size}")
    if not memory_limit_bytes > 0:
        raise ValueError(f"memory_limit_bytes must be above 0, got {memory_limit_bytes}")
    given = cost.workload_of(workload)
    fixed = dict(fixed or {})
    known = ("pp", "cp", "dp", "num_microbatches", "schedule", "checkpoint", "comm", "stages_per_rank", "shard")
    if not set(fixed) <= set(known):
        raise ValueError(f"fixed must name fields of {known}, got {sorted(fixed)}")
    found = _Search(cost, model_config, given, memory_limit_bytes, strict)
    wanted = [
        plan
        for plan in shapes(model_config, world_size, given, fixed)
        if all(getattr(plan, name, value) == value for name, value in fixed.items())
    ]
    candidates = [candidate for plan in wanted for candidate in found.candidates(plan)]
    possible = [candidate for candidate in candidates if candidate.pruned is None]
    if not possible:
        raise NoFeasiblePlan(_why_nothing_fits(candidates, world_size, memory_limit_bytes, given, model_config))
    best = None
    for candidate in sorted(possible, key=_rank):
        if best is not None and candidate.step_seconds > best.step_seconds * (1 + 1e-9):
            break
        timed = found.exactly(candidate)
        best = timed if best is None or _rank(timed) < _rank(best) else best
    assert best is not None
    extrapolated = tuple(cost.extrapolated(model_config, best.plan, given))
    known_times = found.timed | {best.plan: replace(best, extrapolated=extrapolated)}
    candidates = sorted((known_times.get(candidate.plan, candidate) for candidate in candidates), key=_rank)
    return SearchResult(known_times[best.plan], candidates, found.exactly)


def _rank(candidate: Candidate) -> tuple[bool, float, float, int]:
    # nine digits: what differs by rounding only is equal
    seconds = float(f"{candidate.step_seconds:.9g}")
    return candidate.pruned is not None, seconds, candidate.peak_bytes, candidate.plan.num_stages


def divisors(number: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]


def shapes(config: ModelConfig, world_size: int, given: Workload, fixed: Mapping[str, Any]) -> Iterator[Plan]:
    """Every plan but for its layers."""
    shard = bool(fixed.get("shard", False))
    for pp in divisors(world_size):
        for cp in divisors(world_size // pp):
            dp = world_size // pp // cp
            if any(fixed.get(name, value) != value for name, value in (("pp", pp), ("cp", cp), ("dp", dp))):
                continue
            ways = ("ring", "allgather", "halo") if given.pairs else ("ring", "allgather")
            for comm in ways if cp > 1 else ("ring",):
                for checkpoint in (False, True):
                    base: dict[str, Any] = dict(pp=pp, cp=cp, dp=dp, comm=comm, checkpoint=checkpoint, shard=shard)
                    asked = fixed.get("schedule")
                    yield from _schedules(base, config.layers, max(given.batch_sequences // dp, 1), asked)


def _schedules(base: dict[str, Any], num_layers: int, local_batch: int, asked: str | None) -> Iterator[Plan]:
    pp = base["pp"]
    yield Plan(**base, num_microbatches=1)
    if pp > num_layers:
        return
    for num in divisors(local_batch):
        if not 1 < num <= MAX_MICROBATCHES:
            continue
        yield Plan(**base, num_microbatches=num)
        if pp == 1:
            continue
        if num >= pp:
            yield Plan(**base, num_microbatches=num, schedule="1f1b")
        if num % pp == 0 and 2 * pp <= num_layers:
            yield Plan(**base, num_microbatches=num, schedule="interleaved", stages_per_rank=2)
        # on paper it runs like 1F1B with attention's backward pass twice: only for who asks for it
        possible = not base["checkpoint"] and (base["shard"] or base["cp"] * base["dp"] == 1)
        if asked == "zero_bubble" and num % pp == 0 and possible:
            yield Plan(**base, num_microbatches=num, schedule="zero_bubble")


class _Search:
    """Candidates of one model on one machine; times are shared by plans that differ in their memory only."""

    def __init__(self, cost: CostModel, config: ModelConfig, given: Workload, limit: float, strict: bool) -> None:
        self.cost, self.config, self.given, self.strict = cost, config, given, strict
        self.limit = limit * (1 - HEADROOM)
        self._tables: dict[tuple[Any, ...], StageTables] = {}
        self._splits: dict[tuple[Any, ...], tuple[int, ...] | None] = {}
        self.timed: dict[Plan, Candidate] = {}

    def exactly(self, candidate: Candidate) -> Candidate:
        """The same with the time of a run on paper, once."""
        if candidate.exact:
            return candidate
        if candidate.plan not in self.timed:
            seconds = self.cost.step_seconds(self.config, candidate.plan, self.given)
            self.timed[candidate.plan] = replace(candidate, step_seconds=seconds, exact=True)
        return self.timed[candidate.plan]

    def candidates(self, plan: Plan) -> list[Candidate]:
        """The plan with its fastest split, and where that is another one with its lightest."""
        reason = self._prune(plan)
        if reason is not None:
            return [Candidate(plan=plan, pruned=reason)]
        key = (
            plan.cp,
            plan.dp * plan.num_microbatches,
            plan.checkpoint,
            plan.comm,
            plan.pp == 1,
            plan.schedule == "zero_bubble",
        )
        work = RankWork.of(self.config, plan, self.given)
        if key not in self._tables:
            self._tables[key] = self.cost.stage_tables(work)
        tables = self._tables[key]
        memory = self._memory(work)
        lightest = self._split(plan, key, None, memory)
        assert lightest is not None
        fastest = self._split(plan, key, tables, memory)
        if fastest is None:
            return [self._candidate(work, lightest, tables, memory)]
        splits = [fastest] if fastest == lightest else [fastest, lightest]
        return [self._candidate(work, split, tables, memory) for split in splits]

    def _prune(self, plan: Plan) -> str | None:
        if self.given.batch_sequences % (plan.dp * plan.num_microbatches):
            return "batch"
        if plan.num_stages > self.config.layers:
            return "layers"
        if plan.cp > 1 and self.given.num_nodes / plan.cp < KERNEL_TILE:
            return "tile"
        return "extrapolated" if self.strict and self.cost.extrapolated(self.config, plan, self.given) else None

    def _memory(self, work: RankWork) -> Floats:
        """[stages, L + 1] bytes; several stages of a rank share what it holds once."""
        rates, counts = self.cost.memory, np.arange(self.config.layers + 1.0)[None]
        stages = reduce(add, stage_bytes(rates, work, counts).values())
        return stages + shared_bytes(rates, work) / work.plan.stages_per_rank

    def _split(
        self, plan: Plan, key: tuple[Any, ...], tables: StageTables | None, memory: Floats
    ) -> tuple[int, ...] | None:
        """The split of least time, or without ``tables`` of least memory."""
        if tables is None:
            return lightest_split(memory)
        limit = self.limit / plan.stages_per_rank
        caps = tuple((memory[:, 1:] <= limit).sum(axis=1).tolist())
        key = (key, plan.num_stages, plan.num_microbatches, caps)
        if key not in self._splits:
            found = balance(tables, memory, limit, plan.num_microbatches)
            self._splits[key] = None if found is None else found[0]
        return self._splits[key]

    def _candidate(self, work: RankWork, split: tuple[int, ...], tables: StageTables, memory: Floats) -> Candidate:
        stages = memory[np.arange(len(split)), split]
        ranks = stages.reshape(-1, work.plan.pp).sum(axis=0)
        tightest = int(ranks.argmax())
        peak = float(ranks[tightest])
        terms = self.cost.step_terms(work, split, *tables.stages(split), bound=True)
        return Candidate(
            plan=replace(work.plan, layers=split),
            step_seconds=sum(terms.values()),
            exact=work.plan.pp == 1,
            peak_bytes=peak,
            tightest=tightest,
            pruned="memory" if peak > self.limit else None,
        )


def lightest_split(memory: Floats) -> tuple[int, ...]:
    """The split whose largest stage needs least; ``memory`` [P, L + 1] grows with the layers of a stage.

    The least limit under which the stages hold all L layers is the L-th smallest entry, or the largest for one layer.
    """
    num_layers = memory.shape[1] - 1
    most = num_layers - len(memory) + 1  # every other stage has one layer at least
    memory = memory[:, 1 : most + 1]
    limit = max(memory[:, 0].max(), np.partition(memory, num_layers - 1, axis=None)[num_layers - 1])
    counts = (memory <= limit).sum(axis=1)
    # what is too much is taken from the fullest, so that the stages are as even as this memory lets them
    levels = np.minimum(np.arange(most + 1)[:, None], counts)
    level = int(np.searchsorted(levels.sum(axis=1), num_layers))
    counts = levels[level]
    counts[np.flatnonzero(counts == level)[: counts.sum() - num_layers]] -= 1
    return tuple(counts.tolist())


def _why_nothing_fits(
    candidates: list[Candidate], world_size: int, limit: float, given: Workload, config: ModelConfig
) -> str:
    heavy = [candidate for candidate in candidates if candidate.pruned == "memory"]
    if heavy:
        lightest = min(heavy, key=lambda candidate: candidate.peak_bytes)
        plan = lightest.plan
        return (
            f"no plan of {world_size} processes fits {gib(limit)} with {HEADROOM:.0%} headroom: the lightest, "
            f"pp={plan.pp} cp={plan.cp} dp={plan.dp} layers={list(plan.layers)} num_microbatches="
            f"{plan.num_microbatches} {plan.schedule}{' checkpoint' if plan.checkpoint else ''}, needs "
            f"{gib(lightest.peak_bytes)} on stage {lightest.tightest}; start more processes, lower the batch size "
            f"({given.batch_sequences} sequences), or raise the limit"
        )
    reasons = {
        "batch": f"dp * num_microbatches must divide the batch of {given.batch_sequences} sequences",
        "layers": f"pp must be at most the model's {config.layers} layers",
        "tile": f"cp must leave each rank {KERNEL_TILE} of the {given.num_nodes} regular nodes",
        "extrapolated": "every size must have been measured (strict)",
    }
    counted = {reason: sum(c.pruned == reason for c in candidates) for reason in reasons}
    named = "; ".join(f"{reasons[reason]} ({count} plans)" for reason, count in counted.items() if count)
    return (
        f"no plan of {world_size} processes is possible: {named or 'the fixed fields leave none'}; "
        "change the number of processes, the batch size, or what is fixed"
    )
