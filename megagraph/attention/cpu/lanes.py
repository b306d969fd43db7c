"""Tensors as the loops over listed pairs read them: number i of eight heads is vector i."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megagraph.attention import reuse
from megagraph.attention.cpu.row import gather, num_groups, rescale, up
from megagraph.attention.cpu.views import number_of, place_of, plane
from megagraph.jit import jit
from megagraph.simd import LANES, borrowed, finite, load, splat, store
from megagraph.threads import in_threads

PAIRS_PER_THREAD = 1 << 12  # or rows


@jit(nogil=True)
def _to_lanes(first, last, planes, S, H):
    """Rows first..last, as far as there are so many, of all sequences of some planes into lanes.

    With each plane [S, H, R, D] come R, D, the width, its lanes [S, G, R, width, 8], and a factor; a single number a
    row, of width 1, may be -inf, which becomes 0.
    """
    groups = -(-H // LANES)
    for i in range(len(planes)):
        x, R, D, width, out, factor = borrowed(planes[i])
        for b in range(S):
            for group in range(groups):
                heads = min(LANES, H - LANES * group)
                for row in range(first, min(last, R)):
                    at = ((b * groups + group) * R + row) * width * LANES
                    gather(x, place_of(x, (b, LANES * group, row)), heads, D, out, at)
                    if width == 1:
                        store(out, at, finite(load(out, at)))
                    elif factor != 1:
                        rescale(out, at, LANES * width, splat(factor))


def in_lanes(compute: torch.dtype, *given: Tensor, scale: float = 1.0) -> tuple[np.ndarray, ...]:
    """[S, H, R, D] as [S, G, R, width, 8] and [S, H, R] as [S, G, R, 8], flat; heads beyond the last are zeros.

    The first is multiplied by ``scale``; -inf in [S, H, R] becomes 0.
    """
    (S, H), number, planes = given[0].shape[:2], number_of(compute), []
    costs = np.zeros(max(x.shape[2] for x in given), np.int64)
    for i, x in enumerate(given):
        R, D = x.shape[2], 1 if x.ndim == 3 else x.shape[3]
        width = D if x.ndim == 3 else up(D)
        size = S * num_groups(H) * R * width * LANES
        if H % LANES == 0 and width == D:  # all of it is written
            out = reuse.empty_like(torch.empty(size, dtype=compute, device="cpu")).numpy()
        else:
            out = torch.zeros(size, dtype=compute, device="cpu").numpy()
        planes.append((plane(x.to(compute), compute), R, D, width, out, number(1.0 if i else scale)))
        costs[:R] += S * num_groups(H)
    of_all = tuple(planes)

    def run(_: int, first: int, last: int) -> None:
        _to_lanes(first, last, of_all, S, H)

    in_threads(run, costs, PAIRS_PER_THREAD)
    return tuple(out for *_, out, _ in planes)


def table_in_lanes(table: Tensor) -> np.ndarray:
    """[H, R] as [G, R, 8], flat."""
    H, R = table.shape
    out = table.new_zeros(num_groups(H) * LANES, R)
    out[:H] = table
    return out.unflatten(0, (-1, LANES)).transpose(1, 2).contiguous().view(-1).numpy()
