"""A sparse matrix times rows, on a CPU."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from megagraph.jit import jit
from megagraph.threads import in_threads

_PRODUCTS_PER_THREAD = 1 << 16


@jit(nogil=True)
def _multiply(first, last, starts, columns, weights, x, out):
    for row in range(first, last):
        out[row] = 0
        for entry in range(starts[row], starts[row + 1]):
            weight, column = x.dtype.type(weights[entry]), columns[entry]
            for i in range(x.shape[1]):
                out[row, i] += weight * x[column, i]


def multiply(starts: Tensor, columns: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    """[M, d], of entries [P] in M rows that begin at ``starts`` [M + 1], and x [N, d] in float32 or float64."""
    out = x.new_empty(len(starts) - 1, x.shape[1])
    given = [tensor.detach().contiguous().numpy() for tensor in (starts, columns, weights, x, out)]

    def run(_: int, first: int, last: int) -> None:
        _multiply(first, last, *given)

    in_threads(run, np.diff(given[0]) * x.shape[1], _PRODUCTS_PER_THREAD)
    return out
