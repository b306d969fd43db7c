"""The least time an attention call can take on a device: its work on each unit over that unit's rate.

Work is counted per score element (b, h, i, j), by hand and at its least: every input read once and every output
written once, matrix products on tiles padded to what the tensor cores take, one exponential per score. The floor is
that of the busiest unit. Not counted: L2 bandwidth, launches, latency, tails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from bench.shapes import NUM_BUCKETS, NUM_CHANNELS, Case

SMS, HERTZ = 132, 1.98e9


@dataclass(frozen=True)
class Rates:
    """What one device does in a second."""

    arch: str
    hbm: float  # bytes, read and written
    tensor: float  # bf16 or fp16 floating point operations
    exp: float  # results of the special function units
    fma: float  # fp32 fused multiply-adds
    alu: float  # integer, compare, convert
    issue: float  # instructions, counted per lane
    shared: float  # bytes of shared memory
    gather: float  # lanes of a load or store


RATES = {
    "NVIDIA H200": Rates(
        arch="sm_90",
        hbm=4.3e12,  # measured: device-to-device copy
        tensor=790e12,  # measured: 8192^3 bf16 product of random matrices
        # per SM and clock: CUDA C++ programming guide, arithmetic throughput for compute capability 9.0
        exp=16 * SMS * HERTZ,
        fma=128 * SMS * HERTZ,
        alu=64 * SMS * HERTZ,
        issue=128 * SMS * HERTZ,
        shared=128 * SMS * HERTZ,
        gather=32 * SMS * HERTZ,
    )
}


class Floor(NamedTuple):
    seconds: float
    unit: str  # the field of Rates that binds


def device_rates() -> Rates | None:
    """None where we have no rates: on a CPU, on another GPU."""
    return RATES.get(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def floor(case: Case, direction: str, rates: Rates | None) -> Floor | None:
    """Floor of one call; ``direction``: "forward", "backward" or "forward_backward". None: not known."""
    if rates is None or case.form == "factored" or case.dtype not in (torch.bfloat16, torch.float16):
        return None
    if direction == "forward_backward":
        parts = [_floor(case, backward, rates) for backward in (False, True)]
        return Floor(sum(part.seconds for part in parts), parts[1].unit)
    return _floor(case, direction == "backward", rates)


def _floor(case: Case, backward: bool, rates: Rates) -> Floor:
    seconds = {unit: amount * case.elements / getattr(rates, unit) for unit, amount in work(case, backward).items()}
    seconds["hbm"] = hbm_bytes(case, backward) / rates.hbm
    unit = max(seconds, key=lambda name: seconds[name])
    return Floor(seconds[unit], unit)


def work(case: Case, backward: bool) -> dict[str, float]:
    """Operations per score element on each unit but HBM."""
    qk = max(16, case.D)  # the contraction of q k^T pads to 16, and free slots carry -lse, -delta and ones
    pv = 16 if case.D == 8 else max(8, case.D)  # a product's columns pad to 8; D = 8 takes 16 for the ones column
    free = case.D < 16
    rows = min(64, case.N)  # query rows that share one read of an operand from shared memory
    if backward:  # s, dp, dv, dk, dq in one pass; p and ds are packed, ds goes through shared memory once
        unit = dict(
            tensor=4.0 * qk + 6 * pv, fma=1.0 if free else 3.0, alu=1.0, shared=2 * (2 * qk + 3 * pv) / rows + 4
        )
    else:  # running max and half a pack; the row sum is free with a ones column
        unit = dict(tensor=2.0 * qk + 2 * pv, fma=1.0 if free else 2.0, alu=1.5, shared=2 * (qk + pv) / rows)
    unit |= dict(exp=1.0, gather=0.0)
    if case.form == "none":
        unit["fma"] += 0 if free else 1  # the scale
    elif case.form == "dense":
        unit["fma"] += 1
        unit["alu"] += 1  # bf16 to fp32
    elif case.form == "bucket":
        unit["fma"] += 1
        unit["alu"] += 1 + 2 / case.H  # address; the index is unpacked once for all heads
        unit["gather"] += 2 if backward else 1  # the table, and a private table of gradients
        unit["shared"] += 8 if backward else 4
    elif case.form == "projected":
        unit["fma"] += NUM_CHANNELS * (2 if backward else 1)
        unit["alu"] += NUM_CHANNELS / case.H
    unit["issue"] = unit["exp"] + unit["fma"] + unit["alu"] + unit["gather"]
    return unit


def hbm_bytes(case: Case, backward: bool) -> float:
    """Compulsory traffic: q, k, v, out, lse and the bias, and in backward the gradients."""
    size = case.dtype.itemsize
    heads = case.B * case.H
    rows = 2 * (case.M + case.N) * (2 if backward else 1)  # q, out, k, v, and their gradients
    bytes_ = heads * (rows * case.D * size + case.M * 4)  # lse is fp32
    data = {"dense": case.H * size, "bucket": 1, "projected": NUM_CHANNELS * size}
    bytes_ += data.get(case.form, 0) * case.B * case.M * case.N
    if backward:
        learned = {"dense": case.M * case.N * size, "bucket": NUM_BUCKETS * 4, "projected": NUM_CHANNELS * 4}
        bytes_ += learned.get(case.form, 0) * heads
    return bytes_
