"""The ways in which keys and values of all ranks of a context-parallel group get to a rank's queries.

ring        block by block, in P - 1 steps behind which they travel
allgather   at once, and kept: backward sums what all ranks have of a block's gradient where the block is at home
halo        just the rows that a sparse bias names
ulysses     for some of the heads each, queries as well; ``context_parallel`` has this one, as ranks then attend alone
"""

from __future__ import annotations

from typing import Literal, get_args

Comm = Literal["ring", "allgather", "halo", "ulysses"]


def check_comm(comm: Comm, *, sparse: bool = True, alone: bool = False, heads: int = 1, ranks: int = 1) -> Comm:
    """``comm``, or a ValueError where there is no such way, for such a bias, on one rank, or for so many heads."""
    if comm not in get_args(Comm):
        raise ValueError(f"comm must be 'ring', 'allgather', 'halo' or 'ulysses', got {comm!r}")
    if comm == "halo" and not sparse:
        raise ValueError(
            "comm must be 'ring', 'allgather' or 'ulysses' where all pairs attend, got 'halo'; pass a sparse bias"
        )
    if comm == "ulysses" and heads % ranks:
        raise ValueError(
            f"heads must be a multiple of the {ranks} ranks that comm 'ulysses' deals them out to, got {heads}; take "
            "'ring' or 'allgather', or ranks that divide them"
        )
    if comm == "halo" and alone:
        raise ValueError("comm must be 'ring' without a mesh, got 'halo'; pass the mesh of the ranks with the nodes")
    return comm
