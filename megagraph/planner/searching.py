"""The best plan for a machine: every layout, each with its best split of the layers (paper Alg. 1)."""

from __future__ import annotations

import gc
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import combinations, count, islice, pairwise
from operator import itemgetter
from typing import Any, get_args

import numpy as np

from megagraph.flags import in_words
from megagraph.models.config import ModelConfig
from megagraph.planner.cost import CostModel
from megagraph.planner.links import ranks_of
from megagraph.planner.memory import Kept, kept_bytes, shared_bytes, stage_totals
from megagraph.planner.plan import MAX_PROCESSES, Across, Plan
from megagraph.planner.shapes import shapes_with
from megagraph.planner.split import Floats, NoFeasiblePlan, StageTables, balance, lightest_split, moves
from megagraph.planner.terms import stage_parameters
from megagraph.planner.workload import RankWork, Workload

KERNEL_TILE = 16  # regular rows of a rank: fewer do not fill one tile of the fused step
HEADROOM = 0.08  # of the memory limit, left for what the model does not know
FEW_SPLITS = 64  # of the layers, of which all are run on paper
MOST_MOVES, NEAR = 12, 1.1  # runs on paper to find a better split of a plan that is not slower than the best by more


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A plan with what it is predicted to cost, or why it was not looked at.

    ``step_seconds``, in s, is a lower bound, for all splits of the layers, unless ``exact``: another plan is better
    without a run on paper. ``lightest``: the split is the one of least memory.
    ``pruned`` names the first constraint that fails: "batch", "layers", "tile", "memory" or "extrapolated".
    ``peak_bytes``, in bytes, is that of the rank that needs most, ``tightest`` the rank of the pipeline that has least
    room.
    """

    plan: Plan
    step_seconds: float = float("inf")
    exact: bool = False
    lightest: bool = False
    peak_bytes: float = float("inf")
    tightest: int = 0
    pruned: str | None = None
    extrapolated: tuple[str, ...] = ()


@dataclass(frozen=True)
class SearchResult:
    """The best candidate, and all of them; what [megagraph.planner.search][] gives.

    Attributes:
        best: the fastest candidate that fits.
    """

    best: Candidate
    _found: _Search

    @cached_property
    def candidates(self) -> list[Candidate]:
        """All of them, fastest first, then those that are not possible; looks at those that the search could leave
        out."""
        return self._found.everything(self.best)

    @cached_property
    def pareto(self) -> list[Candidate]:
        """Candidates that no other one beats in step time and peak memory, fastest first; takes runs on paper of all
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
                timed.append(self._found.exactly(candidate))
                heappush(later, (timed[-1].step_seconds, timed[-1].peak_bytes))
        front: list[Candidate] = []
        for candidate in sorted(timed, key=_rank):
            if not front or candidate.peak_bytes < front[-1].peak_bytes:
                front.append(candidate)
        return front


@contextmanager
def _uncollected() -> Iterator[None]:
    """Switch off garbage collection, which finds no cycles and takes a quarter of the time of 100,000 candidates."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_uncollected()
def search(
    cost: CostModel,
    model_config: ModelConfig,
    world_size: int,
    memory_limit_bytes: float | Sequence[float],
    *,
    workload: Workload | None = None,
    fixed: Mapping[str, Any] | None = None,
    strict: bool = False,
) -> SearchResult:
    """The plan of least step time for ``world_size`` processes that each may use ``memory_limit_bytes``, the same or
    one for every rank.

    Every (pp, cp, dp, K, schedule, checkpoint, shard, comm) with pp * cp * dp = W is a candidate, and again with the
    layer split of least memory; 2 to 4 stages a rank; halos, where pairs are listed; ulysses, where cp divides the
    heads; and, over nodes or ranks that differ, with stages or replicas ``across``. In the order of a closed form that
    no split of theirs is faster than, until that is above the best of them, their splits are found and run on paper:
    the one of least GPipe time, then every split where these are few (``FEW_SPLITS``), else those that move a layer
    and make it faster. Of equal times the one of less memory wins, then the one of fewer stages. Zero-bubble is looked
    at where ``fixed`` asks for it.

    Args:
        cost: of the machine.
        model_config: the model to train.
        world_size: processes W.
        memory_limit_bytes: of each process.
        workload: batch and sequence sizes; ``None``: those of the profile.
        fixed: fields of the plan that are given, as ``{"pp": 1}``.
        strict: refuse plans that need sizes outside the measured ones.

    Returns:
        the best candidate, and all of them.

    Raises:
        ValueError: a world size or memory limit that is not above 0, an unknown field in ``fixed``.
        NoFeasiblePlan: nothing fits; the message says what is tightest and what to change.

    Examples:
        >>> cost = mg.planner.CostModel.load("bench/results/cpu/real_plans/cost.json")
        >>> model, workload = cost.profiled()
        >>> found = mg.planner.search(cost, model, 2, 2**30)
        >>> found.best.plan.world_size, found.best.exact, len(found.candidates) > 20
        (2, True, True)
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size must be an integer of at least 1, got {world_size!r}")
    if world_size > MAX_PROCESSES:
        raise ValueError(f"world_size must be at most {MAX_PROCESSES}, got {world_size}")
    limits = np.atleast_1d(np.asarray(memory_limit_bytes, float))
    if not (limits > 0).all():
        raise ValueError(f"memory_limit_bytes must be above 0, got {memory_limit_bytes}")
    limits = np.minimum(limits, np.finfo(float).max)  # inf has no parts to compare
    if len(limits) not in (1, world_size):
        raise ValueError(f"memory_limit_bytes must be one, or one for each of {world_size} ranks, got {len(limits)}")
    given = cost.workload_of(workload)
    fixed = dict(fixed or {})
    known = tuple(field.name for field in fields(Plan) if field.name not in ("shares", "layers"))
    if not set(fixed) <= set(known):
        raise ValueError(f"fixed must name fields of {known}, got {sorted(fixed)}")
    mappings = cost.mappings(world_size) if len(limits) == 1 else get_args(Across)
    wanted = shapes_with(fixed, model_config, world_size, given, mappings)
    found = _Search(cost, model_config, given, limits, strict, wanted)
    best = found.best()
    if best is None:
        raise NoFeasiblePlan(_why_nothing_fits(found.everything(), world_size, limits, given, model_config))
    chosen = replace(best, extrapolated=tuple(cost.extrapolated(model_config, best.plan, given)))
    return SearchResult(chosen, found)


def _rank(candidate: Candidate) -> tuple[bool, float, float, int]:
    # nine digits: what differs by rounding only is equal
    seconds = float(f"{candidate.step_seconds:.9g}")
    return candidate.pruned is not None, seconds, candidate.peak_bytes, candidate.plan.num_stages


class _Search:
    """Candidates of one model on one machine; times are shared by plans that differ in their memory only."""

    def __init__(
        self, cost: CostModel, config: ModelConfig, given: Workload, limits: Floats, strict: bool, wanted: list[Plan]
    ) -> None:
        self.cost, self.config, self.given, self.strict = cost, config, given, strict
        self.limits = limits * (1 - HEADROOM)
        self._tables: dict[tuple[Any, ...], StageTables] = {}
        self._loads: dict[int, tuple[Floats, Floats]] = {}  # layers of every stage, and their parameters
        self._kept: dict[tuple[int, int, str], Kept] = {}
        self._passes: dict[tuple[Any, ...], float] = {}
        self._splits: dict[tuple[Any, ...], tuple[int, ...] | None] = {}
        self._found: list[Candidate] = []
        self._left: list[tuple[float, RankWork]] = []  # to be looked at, the largest bound first
        self.timed: dict[Plan, Candidate] = {}
        for plan in wanted:
            reason = self._prune(plan)
            if reason is None:
                work = RankWork.of(config, plan, given)
                self._left.append((self._bound(work), work))
            else:
                self._found.append(Candidate(plan=plan, pruned=reason))
        self._left.sort(key=itemgetter(0), reverse=True)

    def best(self) -> Candidate | None:
        """The best candidate of those that fit, by looking at the least bounds first."""
        best, possible = None, list[tuple[Candidate, Candidate]]()
        for bounded in self._in_order():
            if best is not None:
                if bounded.step_seconds > best.step_seconds * (1 + 1e-9):
                    break
                if not self._few_splits(bounded.plan) and self._least(bounded) > NEAR * best.step_seconds:
                    continue
            possible.append((bounded, self.exactly(bounded)))
            best = min(filter(None, (best, possible[-1][1])), key=_rank)
        for bounded, timed in sorted(possible, key=lambda pair: _rank(pair[1])):
            assert best is not None
            if bounded.step_seconds <= best.step_seconds and not bounded.lightest:
                self.timed[bounded.plan] = resplit = self._resplit(timed, best.step_seconds)
                best = min(best, resplit, key=_rank)
        return best

    def _bound(self, work: RankWork) -> float:
        plan, tables = work.plan, self._tables_of(work)
        key = id(tables), plan.pp, plan.dp, plan.num_microbatches, plan.schedule, plan.stages_per_rank, plan.across
        if key not in self._passes:
            self._passes[key] = self.cost.passes_bound(work, tables)
        return self.cost.bound_with(work, self._passes[key])

    def _in_order(self) -> Iterator[Candidate]:
        """Candidates that fit, in the order of their bounds; a plan is looked at when it is its turn."""
        ready: list[tuple[float, int, Candidate]] = []
        numbers = count()
        while self._left or ready:
            while self._left and not (ready and ready[0][0] < self._left[-1][0]):
                for candidate in self._look_at(*self._left.pop()):
                    if candidate.pruned is None:
                        heappush(ready, (candidate.step_seconds, next(numbers), candidate))
            if ready:
                yield heappop(ready)[-1]

    @_uncollected()
    def everything(self, best: Candidate | None = None) -> list[Candidate]:
        """All candidates, fastest first, with the seconds that are known; the best one as it is given."""
        while self._left:
            self._look_at(*self._left.pop())
        known = (self.timed.get(candidate.plan, candidate) for candidate in self._found)
        return sorted((best if best and candidate.plan == best.plan else candidate for candidate in known), key=_rank)

    def exactly(self, candidate: Candidate) -> Candidate:
        """A candidate with the time of a run on paper, with its split."""
        if candidate.plan not in self.timed:
            seconds = candidate.step_seconds
            if not candidate.exact:
                seconds = self._seconds(RankWork.of(self.config, candidate.plan, self.given), candidate.plan.layers)
            self.timed[candidate.plan] = replace(candidate, step_seconds=seconds, exact=True)
        return self.timed[candidate.plan]

    def _least(self, candidate: Candidate) -> float:
        """Seconds that a candidate takes at least, with its split."""
        if candidate.exact:
            return candidate.step_seconds
        return self._seconds(
            RankWork.of(self.config, candidate.plan, self.given), candidate.plan.layers, on_paper=False
        )

    def _seconds(self, work: RankWork, split: tuple[int, ...], *, on_paper: bool = True) -> float:
        """Seconds of a step with a split, on paper or at least."""
        return sum(self.cost.step_terms(work, split, self._tables_of(work), on_paper=on_paper).values())

    def _few_splits(self, plan: Plan) -> bool:
        return math.comb(self.config.layers - 1, plan.num_stages - 1) <= FEW_SPLITS

    def _resplit(self, timed: Candidate, most: float) -> Candidate:
        """A candidate with the best of all splits that may take no longer than ``most`` or, if its own is near that,
        of those to which moves of a layer lead."""
        plan, num_layers = timed.plan, self.config.layers
        work = RankWork.of(self.config, plan, self.given)
        memory = self._memory(work)
        if self._few_splits(plan):
            cuts = combinations(range(1, num_layers), plan.num_stages - 1)
            splits = [tuple(b - a for a, b in pairwise((0, *cut, num_layers))) for cut in cuts]
            return min((timed, *self._runs(work, splits, memory, most)), key=_rank)
        while timed.step_seconds <= NEAR * most:
            limit = min(most, timed.step_seconds)
            runs = self._runs(work, moves(timed.plan.layers), memory, limit)
            better = min((timed, *islice(runs, MOST_MOVES)), key=_rank)
            if better is timed:
                break
            timed = better
        return timed

    def _runs(
        self, work: RankWork, splits: Iterable[tuple[int, ...]], memory: Floats, most: float
    ) -> Iterator[Candidate]:
        """Candidates on paper, with those splits that fit and may not take longer than ``most``."""
        for split in splits:
            candidate = self._candidate(work, split, memory, 0.0)
            if candidate.pruned is not None:
                continue
            if self._seconds(work, split, on_paper=False) <= most * (1 + 1e-9):
                yield replace(candidate, step_seconds=self._seconds(work, split), exact=True)

    def _look_at(self, bound: float, work: RankWork) -> list[Candidate]:
        """A plan with its fastest split, and where that is another one with its lightest."""
        plan, tables, memory = work.plan, self._tables_of(work), self._memory(work)
        taken = memory / self._room(plan)
        lightest = lightest_split(taken)
        fastest, free = self._fastest(work, tables, taken)
        if plan.schedule == "gpipe":  # whose bound knows the split
            bound = max(bound, self.cost.step_bound(work, tables, free))
        found = [] if fastest is None else [self._candidate(work, fastest, memory, bound)]
        if lightest != fastest:
            alone = fastest is None  # others may fit that give the stages of a rank unequal parts of its room
            if not alone and not self.cost.knows_ranks(plan):
                bound = max(bound, tables.busiest(lightest, plan))
            found.append(self._candidate(work, lightest, memory, bound, lightest=not alone))
        if found[0].pruned is None and not plan.shares and self.cost.unequal(plan):
            found.append(self._uneven(found[0]))
        self._found += found
        return found

    def _uneven(self, even: Candidate) -> Candidate:
        """The plan with shares and a split of the layers for ranks of unequal speed, each found for the other."""
        best, plan = None, even.plan
        while True:
            work = RankWork.of(self.config, plan, self.given)
            shares = self.cost.best_shares(work, plan.layers, self._most_sequences(work, plan.layers))
            work = RankWork.of(self.config, replace(plan, shares=shares), self.given)
            found = replace(self._candidate(work, plan.layers, self._memory(work), math.inf), exact=False)
            if found.pruned is None:
                found = self._resplit(self.exactly(found), math.inf)
            if best is not None and _rank(found) >= _rank(best):
                return best
            best, plan = found, found.plan

    def _most_sequences(self, work: RankWork, split: tuple[int, ...]) -> int:
        """Most sequences of a micro-batch of one replica that fit; what a plan has that fits is taken to."""
        num, replicas = work.plan.num_microbatches, work.plan.dp
        most = work.whole_batch - (replicas - 1) * num  # the others have one in each of theirs

        def too_many(sequences: int) -> bool:
            own = work.of_sequences(min(num * sequences, most))
            return self._candidate(own, split, self._memory(own), 0.0).pruned is not None

        fit = -(-work.batch_sequences // num)
        return fit + bisect_left(range(fit + 1, -(-work.whole_batch // num) - replicas + 2), True, key=too_many)

    def _tables_of(self, work: RankWork) -> StageTables:
        plan = work.plan
        key = (plan.cp, work.sequences, plan.checkpoint, plan.comm, plan.pp == 1, plan.schedule == "zero_bubble")
        if key not in self._tables:
            self._tables[key] = self.cost.stage_tables(work)
        return self._tables[key]

    def _prune(self, plan: Plan) -> str | None:
        if self.given.batch_sequences < plan.dp * plan.num_microbatches:
            return "batch"
        if plan.num_stages > self.config.layers:
            return "layers"
        if plan.cp > 1 and self.given.num_nodes / plan.cp < KERNEL_TILE:
            return "tile"
        return "extrapolated" if self.strict and self.cost.extrapolated(self.config, plan, self.given) else None

    def _memory(self, work: RankWork) -> Floats:
        """[stages, L - stages + 2] bytes of every stage with 0, 1, ... layers, where each other one has one at least;
        several stages of a rank share what it holds once."""
        rates, num_stages = self.cost.memory, work.plan.num_stages
        if num_stages not in self._loads:
            counts = np.tile(np.arange(self.config.layers - num_stages + 2.0), (num_stages, 1))
            self._loads[num_stages] = counts, stage_parameters(self.config, counts, work.codes)
        key = work.plan.cp, work.sequences, work.plan.comm
        if key not in self._kept:
            self._kept[key] = kept_bytes(rates, work)
        kept = self._kept[key]
        stages = stage_totals(rates, work, *self._loads[num_stages], kept)
        return stages + shared_bytes(rates, work, kept) / work.plan.stages_per_rank

    def _fastest(
        self, work: RankWork, tables: StageTables, taken: Floats
    ) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
        """The split of least GPipe time of those that fit, and of all."""
        plan, all_fit = work.plan, taken[:, -1].max() <= 1.0

        def best(limit: float, caps: tuple[int, ...]) -> tuple[int, ...] | None:
            key = (id(tables), plan.num_stages, plan.num_microbatches, caps)
            if key not in self._splits:
                self._splits[key] = balance(tables, taken, limit, plan.num_microbatches)
            return self._splits[key]

        free = best(math.inf, ())
        assert free is not None, "a stage has a layer"
        return free if all_fit else best(1.0, tuple((taken[:, 1:] <= 1.0).sum(axis=1).tolist())), free

    def _candidate(
        self, work: RankWork, split: tuple[int, ...], memory: Floats, bound: float, lightest: bool = False
    ) -> Candidate:
        ranks = memory[np.arange(len(split)), split]
        if work.plan.stages_per_rank > 1:
            ranks = ranks.reshape(-1, work.plan.pp).sum(axis=0)
        taken = ranks / self._limits(work.plan)
        tightest = int(taken.argmax())
        return Candidate(
            plan=replace(work.plan, layers=split),
            step_seconds=bound,
            exact=work.plan.pp == 1 and not self.cost.knows_ranks(work.plan),
            lightest=lightest,
            peak_bytes=float(ranks.max()),
            tightest=tightest,
            pruned="memory" if taken[tightest] > 1.0 else None,
        )

    def _limits(self, plan: Plan) -> Floats:
        """Bytes that every rank of a pipeline may take [pp], or [1], in all replicas."""
        return self.limits if len(self.limits) == 1 else self.limits[ranks_of(plan)].min(axis=(1, 2))

    def _room(self, plan: Plan) -> Floats:
        """Bytes that every stage may take, an equal part of its rank's, [stages, 1] or [1, 1]."""
        limits = self._limits(plan) / plan.stages_per_rank
        return limits[:, None] if len(limits) == 1 else np.tile(limits, plan.stages_per_rank)[:, None]


def _why_nothing_fits(
    candidates: list[Candidate], world_size: int, limits: Floats, given: Workload, config: ModelConfig
) -> str:
    heavy = [candidate for candidate in candidates if candidate.pruned == "memory"]
    if heavy:
        lightest = min(heavy, key=lambda candidate: candidate.peak_bytes)
        return (
            f"no plan of {world_size} processes fits {in_words(limits.min())} with {HEADROOM:.0%} headroom: the "
            f"lightest, {lightest.plan}, needs {in_words(lightest.peak_bytes)} on its heaviest rank, and has no room "
            f"on rank {lightest.tightest} of a pipeline; start more processes, lower the batch size "
            f"({given.batch_sequences} sequences), or raise the limit"
        )
    reasons = {
        "batch": f"dp * num_microbatches must be at most the batch of {given.batch_sequences} sequences",
        "layers": f"pp must be at most the model's {config.layers} layers",
        "tile": f"cp must leave each rank {KERNEL_TILE} of the {given.num_nodes} regular nodes",
        "extrapolated": "every size must have been measured (strict)",
    }
    counted = {reason: sum(c.pruned == reason for c in candidates) for reason in reasons}
    named = "; ".join(f"{reasons[reason]} ({count} plans)" for reason, count in counted.items() if count)
    return (
        f"no plan of {world_size} processes is possible: {named}; "
        "change the number of processes, the batch size, or what is fixed"
    )
