"""How the best plan of a cluster grows with its devices, and what binds it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from megagraph.planner.cluster import Cluster
from megagraph.planner.searching import Candidate, search
from megagraph.planner.split import NoFeasiblePlan

Kind = Literal["strong", "weak"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """The best plan for some of the devices of a cluster.

    Args:
        kind: "strong": the batch of the profile, whatever the devices; "weak": as many sequences for each device as
            the profile's batch gives those of the first point.
        sequences: of a batch.
        best: the plan, or why there is none.
        terms: of its seconds, see ``CostModel.explain``.
    """

    kind: Kind
    world_size: int
    sequences: int
    best: Candidate | str
    terms: dict[str, float]

    @property
    def throughput(self) -> float:
        """Sequences a second."""
        return 0.0 if isinstance(self.best, str) else self.sequences / self.best.step_seconds

    @property
    def binds(self) -> tuple[str, float]:
        """The longest of what a step takes beside computing, and its part of the step."""
        others = {name: seconds for name, seconds in self.terms.items() if name != "slowest rank computes"}
        name = max(others, key=others.__getitem__)
        return name, others[name] / sum(self.terms.values())


def scaling(cluster: Cluster, world_sizes: Iterable[int]) -> Iterator[Point]:
    """Points of every size, strong and, but for full batches, weak, in ascending order of the sizes."""
    first = None
    for world_size in sorted(set(world_sizes)):
        cost = cluster.cost_model(world_size)
        model, given = cost.profiled()
        first = first or world_size
        weak = -(-given.batch_sequences * world_size // first)
        kinds: tuple[tuple[Kind, int], ...] = (("strong", given.batch_sequences), ("weak", weak))
        for kind, sequences in kinds[:1] if given.pairs else kinds:  # a full batch is the graph, and does not grow
            workload = replace(given, batch_sequences=sequences)
            try:
                best = search(cost, model, world_size, cluster.memory_bytes(world_size), workload=workload).best
            except NoFeasiblePlan as error:
                yield Point(kind=kind, world_size=world_size, sequences=sequences, best=str(error), terms={})
                continue
            terms = cost.explain(model, best.plan, workload)
            yield Point(kind=kind, world_size=world_size, sequences=sequences, best=best, terms=terms)


def default_sizes(cluster: Cluster) -> list[int]:
    """One node, and twice as many each time up to all of them."""
    sizes = [cluster.per_node]
    while 2 * sizes[-1] <= cluster.world_size:
        sizes.append(2 * sizes[-1])
    return sizes if sizes[-1] == cluster.world_size else [*sizes, cluster.world_size]
