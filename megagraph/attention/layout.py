"""How the nodes of a sequence lie on the ranks of a context-parallel (CP) group (paper Sec. 3.2).

Regular nodes are cut into P blocks of R = ceil(N' / P); super nodes are on every rank:

    columns, the same everywhere    0 ......................... N'-1 | N' ... N'+N_s-1
    rows of rank i                  i R ... (i+1) R - 1 | N' ... N'+N_s-1        S = R + N_s

The last blocks may hold fewer nodes than R, or none: padding rows fill them, which nobody attends to. With ``cuts`` the
blocks are as long as these say, and none has padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megagraph.attention.once import differentiable_once


@dataclass(frozen=True)
class NodeLayout:
    """The rows of one rank among all N = ``num_nodes`` + ``num_super`` nodes of a sequence.

    Args:
        num_nodes: regular nodes N'.
        num_super: super nodes N_s, global tokens among them.
        rank, world_size: this rank in its CP group of P ranks.
        cuts: P + 1 regular nodes, from 0 to N': rank i has those from ``cuts[i]`` to before ``cuts[i + 1]``; ``None``:
            equal blocks.

    Raises:
        ValueError: no regular node, a negative ``num_super``, a ``rank`` that is not one of ``world_size`` ranks, or
            cuts that do not give every rank a node.

    Examples:
        >>> layout = mg.NodeLayout(num_nodes=10, num_super=2, rank=2, world_size=3)
        >>> layout.local_to_global  # blocks of 4: two nodes, two rows of padding, the super nodes
        tensor([ 8,  9, -1, -1, 10, 11])
        >>> layout.shard(torch.arange(12.0), dim=0)
        tensor([ 8.,  9.,  0.,  0., 10., 11.])
    """

    num_nodes: int
    num_super: int
    rank: int = 0
    world_size: int = 1
    cuts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.num_super < 0:
            raise ValueError(f"expected num_nodes >= 1 and num_super >= 0, got {self.num_nodes} and {self.num_super}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be in 0..world_size - 1 = {self.world_size - 1}, got {self.rank}")
        if self.cuts is None:
            return
        object.__setattr__(self, "cuts", tuple(self.cuts))  # a list has no hash
        ends = (self.cuts[0], self.cuts[-1]) if len(self.cuts) == self.world_size + 1 else None
        if ends != (0, self.num_nodes) or any(start >= end for start, end in pairwise(self.cuts)):
            raise ValueError(
                f"cuts must be world_size + 1 = {self.world_size + 1} ascending numbers from 0 to num_nodes = "
                f"{self.num_nodes}, got {self.cuts}; every rank needs a node"
            )

    @property
    def num_columns(self) -> int:
        """N."""
        return self.num_nodes + self.num_super

    @property
    def block_size(self) -> int:
        """R, regular rows of this rank with its padding."""
        return self.largest_block if self.cuts is None else len(self.block())

    @property
    def largest_block(self) -> int:
        """Regular rows of the rank that has most, with its padding: what travels is as long."""
        if self.cuts is None:
            return -(-self.num_nodes // self.world_size)
        return max(end - start for start, end in pairwise(self.cuts))

    @property
    def num_local(self) -> int:
        """S = R + N_s."""
        return self.block_size + self.num_super

    def block(self, rank: int | None = None) -> range:
        """The regular nodes of a rank (default: this one), without padding."""
        rank = self.rank if rank is None else rank
        if self.cuts is not None:
            return range(self.cuts[rank], self.cuts[rank + 1])
        start = self.largest_block * rank
        return range(min(start, self.num_nodes), min(start + self.largest_block, self.num_nodes))

    @property
    def local_to_global(self) -> Tensor:
        """int64 [S], the node of every local row, -1 = padding; super rows last."""
        rows = self.row_ids(torch.device("cpu"))
        rows[len(self.block()) : self.block_size] = -1
        return rows

    def row_ids(self, device: torch.device) -> Tensor:
        """int64 [S], ``local_to_global`` on a device, but for padding, which has some number."""
        rows = torch.arange(self.num_local, device=device)
        if self.world_size > 1:
            start = self.block().start
            rows += start
            rows[self.block_size :] += self.num_nodes - self.block_size - start
        return rows

    @property
    def owned(self) -> Tensor:
        """bool [S], rows whose share of a loss this rank counts: its regular nodes, and on rank 0 the super nodes."""
        owned = self.local_to_global >= 0
        owned[self.block_size :] = self.rank == 0
        return owned

    def segments(self, source_rank: int) -> list[tuple[int, int, int]]:
        """(key_start, column_start, length): which bias columns the keys of ``source_rank``'s block stand in.

        A rank's own block brings its super nodes, so that each of them enters the softmax once.
        """
        block = self.block(source_rank)
        segments = [(0, block.start, len(block))]
        if source_rank == self.rank and self.num_super:
            segments.append((self.block_size, self.num_nodes, self.num_super))
        return segments

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's S rows of ``x``, which has N along ``dim``; padding rows are 0. Differentiable.

        Raises:
            ValueError: ``x`` does not have N rows along ``dim``.
        """
        if x.shape[dim] != self.num_columns:
            raise ValueError(
                f"expected N = {self.num_columns} nodes along dim {dim}, got shape {tuple(x.shape)}; "
                "pass the rows of all nodes, regular ones first"
            )
        block = self.block()
        shape = list(x.shape)
        shape[dim] = self.block_size - len(block)
        supers = x.narrow(dim, self.num_nodes, self.num_super)
        return torch.cat([x.narrow(dim, block.start, len(block)), x.new_zeros(shape), supers], dim=dim)

    def join(self, blocks: Sequence[Tensor], supers: Tensor, dim: int) -> Tensor:
        """All N rows, from the regular rows of every rank, whatever follows them, and the super rows."""
        regular = (x.narrow(dim, 0, len(self.block(rank))) for rank, x in enumerate(blocks))
        return torch.cat([*regular, supers], dim=dim)

    def padded(self, x: Tensor, dim: int) -> Tensor:
        """This rank's R regular rows, or more, as the rows of the largest block; 0 in place of what is not there."""
        regular, missing = x.narrow(dim, 0, self.block_size), self.largest_block - self.block_size
        if not missing:
            return regular.contiguous()
        shape = list(x.shape)
        shape[dim] = missing
        return torch.cat([regular, x.new_zeros(shape)], dim=dim)

    def gather(self, x_local: Tensor, dim: int, mesh: DeviceMesh | None = None) -> Tensor:
        """All N rows on every rank, from the S rows ``x_local`` of each, every super row once.

        Backward expects the same loss on every rank: each regular row gets its gradient where it lives, each super
        row on rank 0 alone. Gradients of parameters are then shares, to be summed over the group.

        Raises:
            ValueError: ``x_local`` does not have S rows along ``dim``, or ``mesh`` is not the layout's.
        """
        self.check_mesh(mesh)
        if x_local.shape[dim] != self.num_local:
            raise ValueError(
                f"expected this rank's S = {self.num_local} rows along dim {dim}, got shape {tuple(x_local.shape)}"
            )
        if mesh is None or self.world_size == 1:
            return x_local
        return _Gather.apply(x_local, dim, self, mesh.get_group())

    def check_mesh(self, mesh: DeviceMesh | None) -> None:
        """Raise ValueError unless ``mesh`` has one dim and this layout's rank and world size."""
        found = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size()) if mesh.ndim == 1 else None
        if found is None:
            assert mesh is not None
            raise ValueError(
                f"mesh must have one dim, got {mesh.mesh_dim_names or mesh.ndim}; pass a slice such as mesh['cp']"
            )
        if found != (self.rank, self.world_size):
            raise ValueError(
                f"the layout is that of rank {self.rank} of {self.world_size}, "
                f"but this process is rank {found[0]} of {found[1]} in the mesh"
            )


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_local, dim, layout, group):
        ctx.dim, ctx.layout = dim, layout
        regular, supers = layout.padded(x_local, dim), x_local.narrow(dim, layout.block_size, layout.num_super)
        blocks = [torch.empty_like(regular) for _ in range(layout.world_size)]
        dist.all_gather(blocks, regular, group=group)
        return layout.join(blocks, supers, dim)

    @staticmethod
    @differentiable_once
    def backward(ctx, d_rows):
        d_local = ctx.layout.shard(d_rows, ctx.dim)
        if ctx.layout.rank != 0:
            d_local.narrow(ctx.dim, ctx.layout.block_size, ctx.layout.num_super).zero_()
        return d_local, None, None, None
