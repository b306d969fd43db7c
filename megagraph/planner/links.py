"""Which link a message of a plan takes, how many messages share it, and for how long it has it.

Ranks are numbered as ``Plan.strides`` says, those of a ring side by side; a node has ``per_node`` of them in a row.
What leaves a node, or enters one, takes the one link that the node has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megagraph.planner.plan import Plan
from megagraph.planner.terms import Rates, all_reduce_terms, dot

Ranks = NDArray[np.int64]


class Wire(NamedTuple):
    """What a message takes.

    Args:
        seconds: for which it has the link.
        latency: after which it is there.
        burst: seconds of sending that a link which was idle for as long makes up for.
        out, back: the links that it takes to the next stage and on the way back, of those that others take, too.
    """

    seconds: float = 0.0
    latency: float = 0.0
    burst: float = 0.0
    out: int | None = None
    back: int | None = None

    @property
    def total(self) -> float:
        """Seconds from a message's start to its arrival."""
        return self.seconds + self.latency


@dataclass(frozen=True)
class Links:
    """Seconds per message and byte of the links of some nodes.

    Args:
        rates: of "node", within one, and "across", between two; where one is missing, the other one's.
        per_node: ranks of a node; ``None``: one node has all.
        own: every rank has a link of its own to other nodes; else those of a node share one.
    """

    rates: Mapping[str, Rates]
    per_node: int | None = None
    own: bool = False

    def boundaries(self, plan: Plan, size: float) -> list[Wire]:
        """Messages from each stage to the next; those of the way back take as long.

        Where replicas share the link of a node they send one after the other, in two groups.
        """
        if self.per_node is None:
            return [self._wire(size, 0)] * (plan.num_stages - 1)
        ranks, groups = ranks_of(plan), self.groups(plan)
        wires = []
        for i in range(plan.pp):
            flows = _to_next_stage(_shape(plan), plan.strides, i, self.per_node)
            wire = self._wire(size, flows)
            if flows and not self.own:
                out, back = (int(ranks[stage, 0, 0]) // self.per_node for stage in (i, (i + 1) % plan.pp))
                wire = wire._replace(seconds=wire.seconds / groups, out=out, back=back)
            wires.append(wire)
        return [wires[stage % plan.pp] for stage in range(plan.num_stages - 1)]

    def groups(self, plan: Plan) -> int:
        """Groups of replicas that send over one link one after the other, see ``boundaries``."""
        if self.per_node is None or plan.pp == 1 or self.own:
            return 1
        flows = (_to_next_stage(_shape(plan), plan.strides, i, self.per_node) for i in range(plan.pp))
        return 2 if max(flows) > 1 else 1

    def hop(self, plan: Plan, size: float) -> Wire:
        """A message that every rank of every ring sends to the next one."""
        return self._wire(size, _around(_shape(plan), plan.strides, 1, self.per_node), "hop")

    def to_all(self, plan: Plan, size: float) -> float:
        """Seconds in which every rank sends as much to each other one of its ring: its own link has P - 1 messages, its
        node's all that leave."""
        inside = self._wire(size * (plan.cp - 1), 0)
        return max(inside.total, self._wire(size, _to_all(plan.cp, plan.world_size, self.per_node)).total)

    def shared(self, plan: Plan, size: float) -> float:
        """Seconds in which every rank sends so much to others of its ring, nobody knows to which."""
        spans = _around(_shape(plan), plan.strides, 1, self.per_node) > 0
        return self._wire(size, min(self.per_node or 1, plan.cp) if spans else 0).total

    def all_reduce(self, plan: Plan) -> tuple[float, float]:
        """Seconds, and seconds a byte, of a sum over all replicas of a stage."""
        ranks = plan.cp * plan.dp
        flows = _around(_shape(plan), plan.strides, 2, self.per_node)
        rates = self._rates(flows)
        if "all_reduce.byte" not in rates:  # messages of a ring, where nobody has measured a sum
            rates = {f"all_reduce.{part}": rates.get(f"transfer.{part}", 0.0) for part in ("call", "byte")}
        terms = all_reduce_terms(1.0, ranks)
        calls = dot(rates, {"all_reduce.call": terms["all_reduce.call"]})
        return calls, self._sharing(flows) * dot(rates, {"all_reduce.byte": terms["all_reduce.byte"]})

    def spans_nodes(self, world_size: int) -> bool:
        return self.per_node is not None and world_size > self.per_node

    def _wire(self, size: float, flows: int, kind: str = "transfer") -> Wire:
        """What a message of ``size`` bytes takes, where at most so many leave a node; 0: none does.

        A "hop" is one of many: all ranks of a ring send and receive at once.
        """
        rates = self._rates(flows)
        if f"{kind}.byte" not in rates:
            kind = "transfer"
        call, per_byte, burst = (rates.get(f"{kind}.{part}", 0.0) for part in ("call", "byte", "burst"))
        return Wire(per_byte * size * self._sharing(flows), call, per_byte * burst)

    def _sharing(self, flows: int) -> int:
        """How many of the messages that leave a node take one link."""
        return 1 if self.own else max(flows, 1)

    def _rates(self, flows: int) -> Rates:
        own, other = ("across", "node") if flows else ("node", "across")
        return self.rates.get(own, {}) or self.rates.get(other, {})


def ranks_of(plan: Plan) -> Ranks:
    """The ranks of a plan, [pp, dp, cp]."""
    return _ranks(_shape(plan), plan.strides)


def _shape(plan: Plan) -> tuple[int, int, int]:
    return plan.pp, plan.dp, plan.cp


@cache
def _ranks(shape: tuple[int, int, int], strides: tuple[int, int, int]) -> Ranks:
    places = np.indices(shape).reshape(3, -1)
    return (np.array(strides) @ places).reshape(shape)


@cache
def _to_next_stage(shape: tuple[int, int, int], strides: tuple[int, int, int], stage: int, per_node: int | None) -> int:
    ranks = _ranks(shape, strides)
    return _most_that_leave(ranks[stage], ranks[(stage + 1) % len(ranks)], per_node)


@cache
def _around(shape: tuple[int, int, int], strides: tuple[int, int, int], dims: int, per_node: int | None) -> int:
    """Most messages of one node to or from others in rings over the last dims, side by side."""
    rings = _ranks(shape, strides).reshape(-1, math.prod(shape[-dims:]))
    return _most_that_leave(rings, np.roll(rings, -1, axis=1), per_node)


@cache
def _to_all(size: int, world_size: int, per_node: int | None) -> int:
    if per_node is None:
        return 0
    ranks = np.arange(world_size)
    (nodes, _), here = np.unique([ranks // per_node, ranks // size], axis=1, return_counts=True)
    return int(np.bincount(nodes, here * (size - here)).max())


def _most_that_leave(source: Ranks, target: Ranks, per_node: int | None) -> int:
    """Most messages between ranks that leave one node, or enter one; 0 where all stay inside."""
    if per_node is None:
        return 0
    source, target = source.ravel(), target.ravel()
    crossing = source // per_node != target // per_node
    return max((int(np.bincount(ranks[crossing] // per_node).max(initial=0)) for ranks in (source, target)), default=0)
