"""Random draws that are functions of what they are for, compiled by Numba on their first call and kept on disk.

    key     = mix64(mix64(mix64(seed) ^ source) ^ sample)        unsigned 64-bit arithmetic
    uniform = ((mix64(key ^ (candidate + 1) * 0x9E3779B97F4A7C15) >> 11) + 1) * 2**-53        in (0, 1]

mix64 is the finaliser of SplitMix64 (Steele, Lea & Flood 2014; constants by Stafford).
"""

from __future__ import annotations

import numpy as np

from megagraph.jit import jit

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: spreads neighbouring ids over all bits
_MUL_1, _MUL_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@jit(nogil=True)
def mix64(x):
    """A bijection of uint64 in which every bit of the result depends on every bit of x."""
    x = (x ^ (x >> np.uint64(30))) * _MUL_1
    x = (x ^ (x >> np.uint64(27))) * _MUL_2
    return x ^ (x >> np.uint64(31))


@jit(nogil=True)
def first_arrivals(seed, sources, indptr, nodes, weights, drawn):
    """The candidates of each source whose Exp(1) / weight are smallest, in this order, or -1 where there are no more.

    Args:
        seed: uint64.
        sources: int64 [S], ids that their draws depend on.
        indptr, nodes, weights: candidates of the sources, as ``Neighbors``.
        drawn: int64 [S, samples, k], filled.
    """
    k = drawn.shape[2]
    arrivals = np.empty(k)
    for i in range(len(sources)):
        of_source = mix64(mix64(seed) ^ np.uint64(sources[i]))
        for sample in range(drawn.shape[1]):
            key = mix64(of_source ^ np.uint64(sample))
            chosen = drawn[i, sample]
            chosen[:] = -1
            size = 0
            for entry in range(indptr[i], indptr[i + 1]):
                mixed = mix64(key ^ (np.uint64(nodes[entry]) + np.uint64(1)) * _GOLDEN)
                uniform = (np.float64(mixed >> np.uint64(11)) + 1.0) * 2.0**-53
                # -log(u) >= 1 - u: most of those that come too late need no logarithm
                if size == k and 1.0 - uniform >= arrivals[k - 1] * weights[entry]:
                    continue
                arrival = -np.log(uniform) / weights[entry]
                if size < k:
                    size += 1
                elif arrival >= arrivals[k - 1]:
                    continue
                place = size - 1
                while place > 0 and arrivals[place - 1] > arrival:
                    arrivals[place], chosen[place] = arrivals[place - 1], chosen[place - 1]
                    place -= 1
                arrivals[place], chosen[place] = arrival, nodes[entry]
