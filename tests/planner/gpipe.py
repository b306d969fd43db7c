"""Seconds of a GPipe step without messages in closed form, an oracle."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def gpipe_seconds(forward: Sequence[float], backward: Sequence[float], num_microbatches: int) -> float:
    """Step time of stages with these seconds per micro-batch: sum_i (f_i + b_i) + (K - 1)(max f + max b).

    Exact for uneven stages: the first micro-batch passes all of them, the others follow in the slowest one's time.
    """
    f, b = np.asarray(forward), np.asarray(backward)
    return float(f.sum() + b.sum() + (num_microbatches - 1) * (f.max() + b.max()))


def gpipe_tail(backward: Sequence[float], num_microbatches: int) -> np.ndarray:
    """From the end of all forward passes to the last micro-batch's backward pass on every stage."""
    b = np.asarray(backward)[::-1]
    return (np.cumsum(b) + (num_microbatches - 1) * np.maximum.accumulate(b))[::-1]
