"""How long our compiled kernels should take on an H200, and what binds them: written down before one measures it.

    python -m bench.predict              the five shapes, three forms, as rows in bench/results/compile/predicted.json

The launchers are called on untouched CPU tensors and what they launch is compiled; nothing runs. The time of a kernel
is that of its busiest unit, as if the units worked at once and nothing waited:

    issue    instructions in SASS, of a program that ends and of its loops, by the programs of the busiest SM
    exp      exponentials                       tensor   products; mma.sync reaches part of what wgmma does
    l1       bytes between registers and L1 or shared memory, without bank conflicts
    l2       what tiles read of their operands and write of parts, a score at a time
    hbm      every tensor that a kernel reads or writes, once

Kernels follow each other with a gap, and the host's time is a bound of its own. ``full`` takes every issue slot, as
the peer's floor takes all of HBM; ``likely`` takes what a good kernel gets of them. The peer is fused attention that
reads a dense bias in bf16, which it has to build, and writes its gradient, which has to be summed.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import tyro

import megagraph as mg
from bench.compile_report import BY_KEYS, Launch, compiled_launches, l2_bytes, programs_per_sm
from bench.floors import HERTZ, RATES, SMS, Rates, floor, hbm_bytes
from bench.provenance import RESULTS, from_rows, write_rows
from bench.sass import read_cubin
from bench.shapes import FORMS, NUM_BUCKETS, NUM_CHANNELS, SHAPES, Case, square
from megagraph.attention.bias import Bias
from megagraph.attention.operator import make_step
from megagraph.attention.step import DeltaOf, Gradients, State

DEVICE = "NVIDIA H200"
LIKELY = 0.7  # of the issue slots
L2 = 5.5e12  # bytes a second, assumed: no figure of the vendor's
MMA_SYNC = 0.63  # of wgmma's rate (arXiv:2402.13499, section 5.3)
HOST = RESULTS / "cpu" / "host.json"
GAP = 1.5e-6  # seconds from kernel to kernel in one stream, assumed


def launches(case: Case, backward: bool) -> list[Launch]:
    """Launches of one call, compiled."""
    from megagraph.kernels import biased_attention as kernels

    B, H, N, D = case.B, case.H, case.N, case.D
    dtype = torch.bfloat16

    def rows() -> torch.Tensor:
        return torch.empty(B, N, H, D, dtype=dtype).transpose(1, 2)

    bias: Bias | None = {
        "none": lambda: None,
        "dense": lambda: mg.DenseBias(torch.empty(B, H, N, N, dtype=dtype)),
        "bucket": lambda: mg.BucketBias(torch.empty(B, N, N, dtype=torch.uint8), torch.empty(H, NUM_BUCKETS)),
        "projected": lambda: mg.ProjectedBias(
            torch.empty(B, NUM_CHANNELS, N, N, dtype=dtype), torch.empty(H, NUM_CHANNELS)
        ),
    }[case.form]()
    q, k, v, out = rows(), rows(), rows(), rows()
    step = make_step(q, bias, None, None, 0.0, None, "triton", False).but(segments=[(0, 0, N)])
    lse = torch.empty(B, H, N)
    with compiled_launches(RATES[DEVICE].arch) as found:
        if not backward:
            kernels.launch_step_fwd(q, k, v, step, State(first=True, last=True, out=out, lse=lse))
            return found
        d_learned = None if bias is None else torch.empty_like(bias.learned)
        gradients = Gradients(
            d_out=rows(),
            lse=lse,
            delta=torch.empty_like(lse),
            dq=rows(),
            dk=rows(),
            dv=rows(),
            d_learned=d_learned,
            accumulate=False,
        )
        kernels.launch_step_bwd(q, k, v, step, gradients, DeltaOf(out=out, d_lse=None))
    return found


def trips(launch: Launch, case: Case) -> tuple[float, float]:
    """How often a program of the launch runs its loop over whole tiles, and the one over what is left, on average."""
    own, other = launch.sizes["BLOCK_M"], launch.sizes["BLOCK_N"]
    if launch.kernel == "project_pass":
        return case.H, 0.0
    if launch.kernel not in BY_KEYS:
        return _keys(launch, case) // other, math.ceil(_keys(launch, case) % other / 16)
    own, other = other, own
    whole, tiles = case.M // own, math.ceil(case.M / own)  # a program whose keys are fewer masks all queries
    rest = whole * math.ceil(case.M % other / 16) + (tiles - whole) * math.ceil(case.M / 16)
    return whole * (case.M // other) / tiles, rest / tiles


def _keys(launch: Launch, case: Case) -> int:
    """Number of keys of a launch, which may be one of several."""
    segments = getattr(launch.arguments[0], "segments", None)
    return case.N if segments is None else int(segments[:, 2].sum())


def _tensors(arguments: Any) -> dict[int, int]:
    """Bytes behind each pointer."""
    if isinstance(arguments, torch.Tensor):
        strides = zip(arguments.shape, arguments.stride(), strict=True)
        return {arguments.data_ptr(): (1 + sum((n - 1) * step for n, step in strides)) * arguments.itemsize}
    found: dict[int, int] = {}
    for x in arguments if isinstance(arguments, tuple) else ():
        for pointer, size in _tensors(x).items():
            found[pointer] = max(size, found.get(pointer, 0))
    return found


def kernel_row(launch: Launch, case: Case, rates: Rates) -> dict[str, Any]:
    """Seconds of every unit, and what the SMs hold."""
    binary, programs = launch.binary, launch.programs
    resources, loops = read_cubin(binary.asm["cubin"])
    warps = binary.metadata.num_warps
    held = programs_per_sm(90, resources["registers"], binary.metadata.shared, warps)
    counts = trips(launch, case) if loops else ()
    runs = list(zip(loops, counts, strict=False))
    busiest = math.ceil(programs / SMS)  # programs of one SM
    of_program = {
        "issue": warps * (resources["once"] + sum(n * loop.count() for loop, n in runs)) / 4,
        "exp": warps * sum(n * loop.count("MUFU") for loop, n in runs) * 2,
        "l1": warps * sum(n * loop.moved for loop, n in runs) * 32 / 128,
    }
    seconds = {unit: busiest * cycles / HERTZ for unit, cycles in of_program.items()}
    seconds["tensor"] = 0.0
    for loop, n in runs:
        sync, warp_group = loop.products(warps)
        seconds["tensor"] += n * programs * (sync / MMA_SYNC + warp_group) / rates.tensor
    from_l2 = l2_bytes(launch.kernel, launch.sizes, case.form, case.D) if loops else 0.0
    seconds["l2"] = from_l2 * case.elements * _keys(launch, case) / case.N / L2
    seconds["hbm"] = sum(_tensors(launch.arguments).values()) / rates.hbm
    return {
        "kernel": launch.kernel,
        "programs": programs,
        "programs_per_sm": held,
        "warps_per_sm": min(held, busiest) * warps,
        "waves": programs / (SMS * held),
        "l2_bytes": round(from_l2, 2),
        "seconds": seconds,
    }


def least(kernel: dict[str, Any], share: float) -> tuple[float, str]:
    """Seconds of the busiest unit, with a share of the issue slots, and its name."""
    seconds = kernel["seconds"] | {"issue": kernel["seconds"]["issue"] / share}
    unit = max(seconds, key=seconds.__getitem__)
    return seconds[unit], unit


def peer_seconds(case: Case, backward: bool, rates: Rates) -> float:
    """A fused kernel's floor that reads a dense bias, and what a compact one costs it."""
    dense = case if case.form == "none" else replace(case, form="dense")
    found = floor(dense, "backward" if backward else "forward", rates)
    assert found is not None
    if case.form in ("none", "dense"):
        return found.seconds
    return max(found.seconds, (hbm_bytes(dense, backward) + 2 * case.elements) / rates.hbm)


def host_seconds(case: Case, backward: bool) -> float:
    """Median over shapes, as measured on the machine of the rows."""
    rows = json.loads(HOST.read_text(encoding="utf-8"))
    direction = "backward" if backward else "forward"
    of_form = [r["new"]["median"] for r in rows if r["form"] == case.form and r["direction"] == direction]
    return float(np.median(of_form)) * 1e-6


def predict(case: Case, backward: bool) -> dict[str, Any]:
    """One row."""
    rates = RATES[DEVICE]
    kernels = [kernel_row(launch, case, rates) for launch in launches(case, backward)]
    if backward and case.form in ("bucket", "projected"):  # torch sums what programs leave, and adds it
        partials = sum(kernel["programs"] for kernel in kernels if kernel["kernel"] == "learned_pass")
        moved = partials * 8 * NUM_BUCKETS * 4
        units = dict.fromkeys(kernels[0]["seconds"], 0.0) | {"hbm": moved / rates.hbm}
        kernels.append({"kernel": "sum of partials", "seconds": units})
        kernels.append({"kernel": "addition", "seconds": dict.fromkeys(units, 0.0)})
    row = {"case": str(case), **case.fields(), "direction": "backward" if backward else "forward", "unit": "s"}
    for name, share in (("full", 1.0), ("likely", LIKELY)):
        row[name] = sum(least(kernel, share)[0] for kernel in kernels) + GAP * (len(kernels) - 1)
    slowest = max(kernels, key=lambda kernel: least(kernel, LIKELY)[0])
    row["binds"] = f"{slowest['kernel']}: {least(slowest, LIKELY)[1]}"
    row["host"] = host_seconds(case, backward)
    found = floor(case, row["direction"], rates)
    row |= {"floor": found and found.seconds, "peer": peer_seconds(case, backward, rates), "kernels": kernels}
    return row | {"predicted_for": DEVICE, "from_rows": from_rows(HOST)}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, in milliseconds."""
    lines = ["| B, H, N, D | bias | direction | full | likely | binds | host | floor | peer | peer / full |"]
    lines.append("|---" * 10 + "|")
    for row in rows:
        names = ("full", "likely", "host", "floor", "peer")
        full, likely, host, floor_, peer = (f"{row[name] * 1e3:.3f}" for name in names)
        shape = f"{row['B']}, {row['H']}, {row['N']}, {row['D']}"
        ratio = f"{row['peer'] / row['full']:.2f}"
        cells = [shape, row["form"], row["direction"], full, likely, row["binds"], host, floor_, peer, ratio]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Compile, print the table, write the rows."""
    rows = []
    for shape in SHAPES["cuda"]:
        for form in FORMS:
            case = replace(square(*shape, form), dtype=torch.bfloat16)
            rows += [predict(case, backward) for backward in (False, True)]
    print(table(rows))
    print(write_rows("predicted", rows, folder="compile"))


if __name__ == "__main__":
    tyro.cli(main)
