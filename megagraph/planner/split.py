"""Which layers go to which stage of a pipeline.

:func:`split_layers` takes any cost of any stage. :func:`balance` is what the search calls thousands of times: it uses
that the layers of a model are all alike, so that only the first and the last stage differ from the rest in time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megagraph.flags import in_words
from megagraph.planner.plan import Plan

StageCost = Callable[[int, int, int], float]
Floats = NDArray[np.float64]


class NoFeasiblePlan(ValueError):
    """Nothing fits; the message names the tightest stage, what it needs, and what to change."""


def split_layers(
    num_layers: int, num_stages: int, seconds: StageCost, memory_bytes: StageCost, limit_bytes: float
) -> tuple[int, ...]:
    """Layers of every stage such that the slowest stage is as fast as can be (paper Alg. 1 and Eq. 12), exactly.

    A dynamic programme over (stages, layers placed): best[k] = min over j of max(best of one stage less at j, cost of
    layers j..k-1), without the stages that do not fit. Of equally fast splits one with less memory is preferred.

    Args:
        num_layers, num_stages: [L], [P_pp]; every stage gets at least one layer.
        seconds, memory_bytes: (stage, start, stop) -> cost of the layers start..stop-1 on that stage.
        limit_bytes: what a stage may need at most.

    Returns:
        layers of every stage.

    Raises:
        ValueError: fewer layers than stages, a limit that is not above 0, a cost that is NaN or negative.
        NoFeasiblePlan: no split fits the limit.

    Examples:
        A first stage that takes as long as 3.5 layers more.

        >>> seconds = lambda stage, start, stop: stop - start + 3.5 * (stage == 0)
        >>> mg.planner.split_layers(24, 4, seconds, lambda stage, start, stop: 1.0, limit_bytes=1.0)
        (3, 7, 7, 7)
    """
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"num_stages must be in 1..num_layers = {num_layers}, got {num_stages}")
    if not limit_bytes > 0:
        raise ValueError(f"limit_bytes must be above 0, got {limit_bytes}")
    split = _min_max(num_layers, num_stages, seconds, memory_bytes, limit_bytes)
    if split is None:
        lightest = _min_max(num_layers, num_stages, memory_bytes, memory_bytes, math.inf)
        assert lightest is not None
        bounds = np.concatenate([[0], np.cumsum(lightest)]).tolist()
        needs = [memory_bytes(stage, bounds[stage], bounds[stage + 1]) for stage in range(num_stages)]
        tightest = max(range(num_stages), key=needs.__getitem__)
        raise NoFeasiblePlan(
            f"no split of {num_layers} layers over {num_stages} stages fits {in_words(limit_bytes)}: in the "
            f"lightest, {list(lightest)}, stage {tightest} needs {in_words(needs[tightest])}; take more stages, or "
            "raise the limit"
        )
    return split


def _min_max(
    num_layers: int, num_stages: int, seconds: StageCost, memory_bytes: StageCost, limit_bytes: float
) -> tuple[int, ...] | None:
    best: dict[int, tuple[float, float]] = {0: (0.0, 0.0)}
    came_from: list[dict[int, int]] = []
    for stage in range(num_stages):
        reached: dict[int, tuple[float, float]] = {}
        origin: dict[int, int] = {}
        room = num_layers - (num_stages - stage - 1)  # the stages that follow need a layer each
        for start, (slowest, largest) in best.items():
            stops = range(start + 1, room + 1) if stage < num_stages - 1 else (num_layers,)
            for stop in stops:
                need = memory_bytes(stage, start, stop)
                time = seconds(stage, start, stop)
                if not (need >= 0 and time >= 0):
                    raise ValueError(
                        f"costs must be numbers of at least 0, got {time} s and {need} bytes "
                        f"for layers {start}..{stop - 1} on stage {stage}"
                    )
                if need > limit_bytes:
                    continue
                score = (max(slowest, time), max(largest, need))
                if stop not in reached or score < reached[stop]:
                    reached[stop], origin[stop] = score, start
        best = reached
        came_from.append(origin)
    if num_layers not in best:
        return None
    stop, split = num_layers, []
    for origin in reversed(came_from):
        split.append(stop - origin[stop])
        stop = origin[stop]
    return tuple(reversed(split))


@dataclass(frozen=True)
class StageTables:
    """Cost of the first, a middle and the last stage with c = 0..L layers, [3, L + 1] each; entry 0 is never used.

    One stage alone, first and last at once, has the row 0.
    """

    forward: Floats
    backward: Floats

    def stages(self, layers: Sequence[int]) -> tuple[Floats, Floats]:
        """Forward and backward of stages with these layers."""
        roles = np.ones(len(layers), int)
        roles[0], roles[-1] = 0, 2 if len(layers) > 1 else 0
        return self.forward[roles, layers], self.backward[roles, layers]

    def busiest(self, layers: Sequence[int], plan: Plan) -> float:
        """Seconds for which the busiest rank works in a step, where its stages have these layers."""
        forward, backward = self.stages(layers)
        return plan.num_microbatches * float((forward + backward).reshape(-1, plan.pp).sum(axis=0).max())

    def most_even(self, num_layers: int, ranks: int) -> float:
        """Seconds of the busiest of two or more ranks, in any split of all layers, at least."""
        levels, first, middle, last = self._levels
        room = first + last + (ranks - 2) * middle
        enough = (np.minimum(first, last) > 0) & (room >= num_layers)
        if ranks > 2:
            enough &= middle > 0
        return float(levels[enough.argmax()])

    @cached_property
    def _levels(self) -> tuple[NDArray[Any], ...]:
        """All seconds in order, and how many layers a first, a middle and a last stage has within them."""
        levels = np.sort(self.seconds[:, 1:], axis=None)
        rows = (np.searchsorted(row[1:], levels * (1 + 1e-12), side="right") for row in self.seconds)
        return levels, *rows

    @cached_property
    def seconds(self) -> Floats:
        """Seconds of forward and backward together."""
        return self.forward + self.backward

    @cached_property
    def least_layer(self) -> float:
        """Seconds that a layer more takes at least, on any stage that has one."""
        return float(np.diff(self.seconds[:, 1:]).min())


def balance(tables: StageTables, memory: Floats, limit_bytes: float, num_microbatches: int) -> tuple[int, ...] | None:
    """The split of least GPipe time, sum_i (f_i + b_i) + (K - 1)(max f + max b); ``None``: none fits.

    Exact where a middle stage's time is convex and nondecreasing in its layers: however the first and the last stage
    are loaded, the middle ones are then best filled evenly, which makes both their largest and their sum least. So
    the L^2 loads of first and last stage are looked at, all at once. Of equal times the least memory wins.

    Args:
        memory: [P, L - P + 2] bytes of every stage with c layers, nondecreasing in c; the others have one at least.
    """
    num_stages, most = memory.shape[0], memory.shape[1] - 1
    num_layers = most + num_stages - 1
    # the most layers that fit: memory does not fall with c, so they are the first ones
    caps = (memory[:, 1:] <= limit_bytes).sum(axis=1) if limit_bytes < math.inf else np.full(num_stages, most)
    if caps.min() < 1 or caps.sum() < num_layers:
        return None
    f, b, s = tables.forward, tables.backward, tables.seconds
    if num_stages == 1:
        return (num_layers,)
    caps[[0, -1]] = _worth_a_look(tables, caps, num_layers, num_microbatches)
    # the middle stages with what first and last leave of 2, 3, ... layers, filled evenly: none has more than a level
    ends, inner, heights = caps[0] + caps[-1] - 1, caps[1:-1], np.arange(most + 1)
    left = num_layers - 2 - np.arange(ends)
    beside = np.zeros((3, ends))  # seconds together, largest forward, largest backward
    if num_stages > 2:
        if limit_bytes == math.inf:
            filled, sums = len(inner) * heights, len(inner) * s[1, : most + 1]
        else:
            levels = np.minimum(heights[:, None], inner)  # [most + 1, P - 2]
            filled, sums = levels.sum(axis=1), s[1][levels].sum(axis=1)
        level = np.minimum(np.searchsorted(filled, left), most)
        over = filled[level] - left  # stages at the level that hold one less
        beside[0] = sums[level] - over * (s[1, level] - s[1, level - 1])
        beside[1:] = f[1, level], b[1, level]
        beside[0, (left < num_stages - 2) | (over < 0)] = np.inf
    else:
        beside[0, left != 0] = np.inf
    # a window for every load of the first
    shape, steps = (3, caps[0], caps[-1]), (beside.strides[0], beside.strides[1], beside.strides[1])
    total, most_f, most_b = np.ndarray(shape, beside.dtype, beside, strides=steps)
    first, last = slice(1, shape[1] + 1), slice(1, shape[2] + 1)
    largest_f = np.maximum(np.maximum(f[0, first, None], f[2, last]), most_f)
    largest_b = np.maximum(np.maximum(b[0, first, None], b[2, last]), most_b)
    time = s[0, first, None] + s[2, last] + total + (num_microbatches - 1) * (largest_f + largest_b)
    least = time.min()
    if least == np.inf:
        return None
    i, j = np.nonzero(time <= least * (1 + 1e-12))
    best = 0
    if len(i) > 1:
        needs = np.maximum(memory[0, i + 1], memory[-1, j + 1])
        if num_stages > 2:
            needs = np.maximum(needs, memory[1:-1].max(axis=0)[level[i + j]])
        best = needs.argmin()
    x, y = int(i[best]), int(j[best])
    if num_stages == 2:
        return x + 1, y + 1
    counts = np.minimum(level[x + y], inner)
    # the earliest keep the most in flight, so they hold the one less
    counts[np.flatnonzero(counts == level[x + y])[: over[x + y]]] -= 1
    return x + 1, *counts.tolist(), y + 1


def _worth_a_look(
    tables: StageTables, caps: NDArray[np.intp], num_layers: int, num_microbatches: int
) -> tuple[int, int]:
    """The most layers of the first and the last stage with which these alone do not take longer than an even split."""
    layer, inner = tables.least_layer, len(caps) - 2
    low, more = divmod(num_layers, len(caps))
    first, last = int(caps[0]), int(caps[-1])
    if num_microbatches == 1 or layer < 0 or caps.min() < low + (more > 0):
        return first, last
    # as even as can be, the ends among the less full
    fuller = min(more, inner)
    places = [(0, low), (2, low + more - fuller)] + ([(1, low + (fuller > 0))] if inner else [])
    s = tables.seconds
    even = s[places[0]] + s[places[1]] + fuller * s[1, low + 1] + (inner - fuller) * s[1, low]
    for table in (tables.forward, tables.backward):
        even += (num_microbatches - 1) * max(table[place] for place in places)

    def most(end: int, other: int, cap: int) -> int:
        rest = s[other, 1] + inner * s[1, 1] + layer * (num_layers - len(caps) + 1)
        limit = even * (1 + 1e-9) - rest  # grows with the layers, as each takes layer at least
        return bisect_right(range(1, cap + 1), limit, key=lambda c: num_microbatches * s[end, c] - layer * c)

    return most(0, 2, first), most(2, 0, last)


def moves(split: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """One layer from a stage to the next one or the one before, or between an end and the fullest."""
    num = len(split)
    fullest = max(range(num), key=split.__getitem__)
    pairs = {(i, i + step) for i in range(num) for step in (-1, 1) if 0 <= i + step < num}
    pairs |= {(fullest, end) for end in (0, num - 1)} | {(end, fullest) for end in (0, num - 1)}
    for source, target in sorted(pairs):
        if split[source] > 1 and source != target:
            moved = list(split)
            moved[source] -= 1
            moved[target] += 1
            yield tuple(moved)


def lightest_split(memory: Floats) -> tuple[int, ...]:
    """The split whose largest stage needs least; ``memory`` [P, L - P + 2] grows with the layers of a stage.

    The least limit under which the stages hold all L layers is the L-th smallest entry, or the largest for one layer.
    """
    most = memory.shape[1] - 1  # every other stage has one layer at least
    num_layers = most + len(memory) - 1
    memory = memory[:, 1:]
    limit = max(memory[:, 0].max(), np.partition(memory, num_layers - 1, axis=None)[num_layers - 1])
    counts = (memory <= limit).sum(axis=1)
    if counts.sum() == num_layers:
        return tuple(counts.tolist())
    # what is too much is taken from the fullest, so that the stages are as even as this memory lets them
    levels = np.minimum(np.arange(most + 1)[:, None], counts)
    level = int(np.searchsorted(levels.sum(axis=1), num_layers))
    counts = levels[level]
    counts[np.flatnonzero(counts == level)[: counts.sum() - num_layers]] -= 1
    return tuple(counts.tolist())
