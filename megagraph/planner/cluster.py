"""A cluster: how many nodes of which devices there are, what joins them, and the cost model of all of them.

    {
      "nodes": [{"count": 16, "devices": 8, "cost": "h100.json", "memory_gib": 80},
                {"count": 4, "devices": 8, "cost": "a100.json", "memory_gib": 40}],
      "between_nodes": {"gbit_per_second": 400, "latency_us": 12, "shared_by": "node"}
    }

Ranks are numbered as torchrun numbers them, node by node as they stand here. ``cost`` is a file of ``megagraph fit`` on
such a device, beside this one; a link that is left out is as it was measured there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megagraph import files
from megagraph.flags import short
from megagraph.planner.cost import CostModel
from megagraph.planner.plan import MAX_PROCESSES, Plan
from megagraph.planner.workload import check_number

ALIKE = 1e-3  # kinds of device whose speeds differ by less are one


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Nodes that are alike.

    Args:
        count: of them.
        devices: of each.
        cost: file of ``megagraph fit`` on such a device.
        memory_gib: that a process may use.
    """

    count: int
    devices: int
    cost: Path
    memory_gib: float

    def __post_init__(self) -> None:
        for name in ("count", "devices"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of nodes must be at least 1, got {getattr(self, name)}")
        check_number("memory_gib", self.memory_gib)
        if not self.memory_gib:
            raise ValueError("memory_gib must be above 0, got 0")


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a message between two devices takes.

    Args:
        gbit_per_second: 10^9 bits, each way.
        latency_us: until a message of no length is there.
        shared_by: who has one such link to other nodes, a whole node or each of its devices.
    """

    gbit_per_second: float
    latency_us: float
    shared_by: Literal["node", "device"] = "node"

    def __post_init__(self) -> None:
        check_number("latency_us", self.latency_us)
        check_number("gbit_per_second", self.gbit_per_second)
        if not self.gbit_per_second:
            raise ValueError("gbit_per_second must be above 0, got 0")

    @property
    def rates(self) -> dict[str, float]:
        """Seconds of a message, and of each of its bytes."""
        return {"transfer.call": self.latency_us * 1e-6, "transfer.byte": 8e-9 / self.gbit_per_second}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of one size, of one or more kinds of device, and what joins them."""

    nodes: tuple[Nodes, ...]
    within_node: Link | None = None
    between_nodes: Link | None = None

    def __post_init__(self) -> None:
        if len({kind.devices for kind in self.nodes}) != 1:
            raise ValueError(
                f"nodes must all have as many devices, got {[kind.devices for kind in self.nodes]}; "
                "leave devices out, or plan each kind of node for itself"
            )
        if self.world_size > MAX_PROCESSES:
            raise ValueError(f"nodes must have at most {MAX_PROCESSES} devices together, got {short(self.world_size)}")

    @property
    def world_size(self) -> int:
        return sum(kind.count * kind.devices for kind in self.nodes)

    @property
    def per_node(self) -> int:
        return self.nodes[0].devices

    def memory_bytes(self, world_size: int) -> list[float]:
        """Bytes that each of the first ranks may use."""
        return self._of_ranks([kind.memory_gib * 2**30 for kind in self.nodes], world_size)

    def cost_model(self, world_size: int) -> CostModel:
        """The cost model of the first ranks: what the first kind of device takes, and how much longer others do.

        Raises:
            FileNotFoundError, ValueError: a cost file is not there, or not one; it names no model, or no seconds.
        """
        kinds = [CostModel.load(kind.cost) for kind in self.nodes]
        model, workload = kinds[0].profiled()
        seconds = [cost.explain(model, Plan(), workload)["slowest rank computes"] for cost in kinds]
        for kind, own in zip(self.nodes, seconds, strict=True):
            if not own:
                raise ValueError(f"{kind.cost} must say what a layer takes, and has no seconds; fit rows of layers")
        slowness = self._of_ranks([own / seconds[0] for own in seconds], world_size)
        given = {"node": self.within_node, "across": self.between_nodes}
        links = dict(kinds[0].links) | {name: link.rates for name, link in given.items() if link is not None}
        origin = kinds[0].origin | {"ranks_per_node": str(self.per_node)}
        if self.between_nodes is not None:
            origin |= {"links_of": self.between_nodes.shared_by}
        alike = max(slowness) < (1 + ALIKE) * min(slowness)
        return replace(kinds[0], origin=origin, links=links, slowness=() if alike else tuple(slowness))

    def _of_ranks(self, of_kinds: list[float], world_size: int) -> list[float]:
        if not 1 <= world_size <= self.world_size:
            raise ValueError(
                f"world_size must be at least 1 and at most the cluster's {self.world_size} devices, got {world_size}"
            )
        found: list[float] = np.repeat(of_kinds, [kind.count * kind.devices for kind in self.nodes]).tolist()
        return found[:world_size]

    def save(self, path: Path | str) -> None:
        """Write the cluster as JSON, with cost files relative to its folder, and no checksum: people edit it."""
        folder = Path(path).parent
        values: dict[str, Any] = {"nodes": [vars(kind) | {"cost": _beside(kind.cost, folder)} for kind in self.nodes]}
        for name in ("within_node", "between_nodes"):
            if (link := getattr(self, name)) is not None:
                values[name] = vars(link)
        files.write(Path(path), json.dumps(values, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> Cluster:
        """Read a cluster; one that was written by hand needs no checksum.

        Raises:
            FileNotFoundError, ValueError: the file is not there, not as it was written, or no cluster.
        """
        folder, values = Path(path).parent, files.read_json(Path(path), "a cluster", by_hand=True)
        nodes = values.get("nodes")
        if not isinstance(nodes, list) or not nodes:
            raise ValueError(f"expected a cluster with a list of nodes in {path}, got {nodes!r}")
        kinds = [files.typed(Nodes, kind, f"nodes of the cluster in {path}") for kind in nodes]
        values["nodes"] = [replace(kind, cost=folder / kind.cost) for kind in kinds]
        for name in ("within_node", "between_nodes"):
            if values.get(name) is not None:
                values[name] = files.typed(Link, values[name], f"the link {name} of the cluster in {path}")
        return files.typed(cls, values, f"a cluster in {path}")


def is_cluster(path: Path) -> bool:
    """Whether a file looks like one, and not like a cost model."""
    values = files.parse_json(path, "a cluster or a cost model")
    return isinstance(values, dict) and "nodes" in values


def _beside(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)
