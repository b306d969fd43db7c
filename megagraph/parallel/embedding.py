"""A learned vector for every node of a graph: a table too large for each rank, shared out by rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

_DRAWN_ROWS = 4096  # initial values are drawn in blocks of rows, each of its own seed


@dataclass(frozen=True, slots=True)
class Route:
    """Between n ids of this rank and the m rows of this rank that anyone wants.

    order: [n'] positions of the ids, sorted by row, without those of no row; rows: [m] by who wants them;
    wanted, served: how many rows this rank wants of each rank, and each rank of this one.
    """

    num_ids: int
    order: Tensor
    rows: Tensor
    wanted: list[int]
    served: list[int]


class NodeTable(nn.Module):
    """Rows for all nodes of a graph, then for all its super nodes; each rank of a group owns a run of them.

    A super node has a row of its own: the mean of its members' rows would touch the whole table in every step.

    The ids of a batch go to the owners of their rows and the rows come back; after the backward pass the gradients of
    the rows go to the owners, which add them up, in the same order each time. This happens once a step, outside the
    model: neither DistributedDataParallel nor fully_shard knows the table. Its gradient is sparse, for
    ``torch.optim.SparseAdam``: a row that no sequence of a batch holds keeps its value and its moments, and there is
    no weight decay.

    Args:
        num_rows: V nodes and P super nodes.
        dim: d.
        seed: of the initial values, N(0, 0.02), the same for any number of ranks.
        replicas: 1-D mesh of the ranks that own the table; ``None`` for one.
    """

    def __init__(self, num_rows: int, dim: int, *, seed: int = 0, replicas: DeviceMesh | None = None) -> None:
        super().__init__()
        self.num_rows, self.replicas = num_rows, replicas
        rank, size = (0, 1) if replicas is None else (replicas.get_local_rank(), replicas.size())
        # as DTensor splits: equal runs but for the end
        self._starts = [min(part * -(-num_rows // size), num_rows) for part in range(size + 1)]
        self._start = self._starts[rank]
        self.weight = nn.Parameter(_initial_rows(self._start, self._starts[rank + 1], dim, seed))

    def route(self, ids: Tensor) -> Route:
        """Ask the owners for the rows of ids int64 [n], -1 for none. Collective."""
        order = ids.argsort(stable=True)[(ids < 0).sum() :]
        ordered = ids[order]
        wanted = torch.searchsorted(ordered, torch.tensor(self._starts, device=ids.device)).diff()
        served = self._exchange(wanted).tolist()
        rows = self._exchange(ordered, served, wanted.tolist()) - self._start
        return Route(len(ids), order, rows, wanted.tolist(), served)

    @torch.no_grad()
    def forward(self, route: Route) -> Tensor:
        """The rows of n ids, [n, d] and no part of any graph; zeros where there is no row. Collective."""
        rows = self.weight.new_zeros(route.num_ids, self.weight.shape[1])
        rows[route.order] = self._exchange(self.weight[route.rows], route.wanted, route.served)
        return rows

    def add_gradient(self, route: Route, gradient: Tensor) -> None:
        """Add the gradient [n, d] of what ``forward`` gave, on all ranks, to that of the table. Collective."""
        values = self._exchange(gradient[route.order], route.served, route.wanted)
        with torch.sparse.check_sparse_tensor_invariants(enable=False):  # torch 2.11 wants to be told
            own = torch.sparse_coo_tensor(route.rows[None], values, self.weight.shape)
            self.weight.grad = (own if self.weight.grad is None else self.weight.grad + own).coalesce()

    def whole(self, part: Tensor) -> Tensor:
        """This rank's rows, or their optimizer state, as the part of the whole that they are; nothing is copied."""
        if self.replicas is None:
            return part
        shape = torch.Size((self.num_rows, part.shape[1]))
        return DTensor.from_local(
            part, self.replicas, [Shard(0)], run_check=False, shape=shape, stride=(part.shape[1], 1)
        )

    def _exchange(self, x: Tensor, received: list[int] | None = None, sent: list[int] | None = None) -> Tensor:
        """Runs of x by receiver -> runs by sender; runs of one length where no lengths are given."""
        if self.replicas is None:
            return x
        out = torch.empty_like(x) if received is None else x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=self.replicas.get_group())
        return out


def _initial_rows(start: int, stop: int, dim: int, seed: int) -> Tensor:
    rows = torch.empty(stop - start, dim, dtype=torch.float32)
    for block in range(start // _DRAWN_ROWS, -(-stop // _DRAWN_ROWS)):
        first = block * _DRAWN_ROWS
        drawn = np.random.default_rng([seed, block]).standard_normal((_DRAWN_ROWS, dim), np.float32) * 0.02
        low, high = max(start, first), min(stop, first + _DRAWN_ROWS)
        rows[low - start : high - start] = torch.from_numpy(drawn[low - first : high - first])
    return rows
