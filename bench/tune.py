"""Choose tile sizes and write kernels/tiles.json anew.

    python -m bench.tune

For the GPU that is here by time: of the kernel alone, in forward and backward of 8 heads of 4,096 rows and keys. Where
there is none, by instructions per score of the inner loops; then the fewest registers. (An H200 often takes longest for
what has the fewest instructions, as few programs at once wait for memory together.) A candidate that takes more shared
memory than the architecture has is out, and so is one whose loops spill registers; where heads are wider than 64 and
all spill, a spill counts as eight instructions. For AMD, whose loops are not read, the first candidate with the fewest
spills.
"""

from __future__ import annotations

import itertools
import json
import math
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from operator import itemgetter
from typing import Any, get_args

import numpy as np
import torch
import triton
import tyro
from torch.profiler import ProfilerActivity, profile

from bench.compile_report import compile_variant, fixed_tiles, too_large
from bench.shapes import make_bias, make_inputs, square
from megagraph import biased_attention
from megagraph.kernels.launch import plans
from megagraph.kernels.tiles import SHARED_LIMIT, TABLE, Kernel, architecture
from megagraph.kernels.variants import Variant

HEAD_DIMS = (16, 32, 64, 128, 256)
FUNCTIONS = {"fwd": "step_fwd", "key": "key_pass"}
FORMS = ("none", "dense", "bucket")  # a projected bias is dense by then
FWD = {  # BLOCK_M, BLOCK_N, warps, stages; up to this head dim
    64: [
        *((128, 128, 8, 2), (128, 64, 4, 3), (128, 64, 4, 2), (128, 32, 4, 2)),
        *((64, 128, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2)),
    ],
    256: [(128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2)],
}
KEY = {  # BLOCK_M, BLOCK_N, warps, stages; up to this head dim
    64: [(128, 128, 8, 2), (128, 64, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 1), (64, 32, 4, 2)],
    256: [(128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (32, 32, 8, 2)],
}
# exact fp32 products run outside the tensor cores, with operands in registers: no search, but as few warps as do not
# spill, since each loads what it multiplies; up to this head dim
FP32 = {
    "fwd": {128: (32, 32, 8, 2), 256: (32, 16, 8, 1)},  # ``choose`` takes fewer warps where heads are narrow
    # 32 rows of 64 numbers would spill on sm_80
    "key": {32: (32, 32, 4, 1), 64: (16, 32, 4, 1), 128: (32, 32, 8, 2), 256: (32, 16, 8, 1)},
}


def searches() -> list[tuple[Kernel, str]]:
    """Which kernels serve which forms."""
    return list(itertools.product(get_args(Kernel), FORMS))


def variant_of(kernel: str, form: str, head_dim: int) -> Variant:
    """One that launches the kernel."""
    return Variant("fwd" if kernel == "fwd" else "bwd", form, head_dim=head_dim)


def candidates(kernel: str, head_dim: int) -> list[dict[str, int]]:
    sizes = next(sizes for most, sizes in (FWD if kernel == "fwd" else KEY).items() if head_dim <= most)
    return [*map(_tiles, sizes)]


def score(arch: str, kernel: str, form: str, head_dim: int, tiles: dict[str, int]) -> dict[str, Any] | None:
    """Rank of one candidate by what it compiles to, if it does."""
    try:
        row = compile_variant(arch, variant_of(kernel, form, head_dim), {kernel: tiles}, FUNCTIONS[kernel])
    except RuntimeError as error:  # of Triton, for some tiles on AMD
        print(f"{arch} {kernel} {form} {head_dim} {tiles}: {error}", flush=True)
        return None
    print(json.dumps([arch, kernel, form, head_dim, tiles, row]), flush=True)
    return rank(row, head_dim) | {"tiles": tiles}


def rank(row: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """``rank``, the lowest of which is best, or None if the candidate is out; ``why`` in words."""
    loops = [loop for loop in row["loops"] if not loop["masked"]]
    instructions, count = (sum(loop[name] for loop in loops) for name in ("instructions", "count"))
    spills = sum(loop["spills"] for loop in row["loops"]) if loops else row["spills"]
    resources = f"{spills} spills, {row['registers']} registers" if spills else f"{row['registers']} registers"
    if too_large([row]) or (loops and spills and head_dim <= 64):
        return {"rank": None, "why": f"{resources}, {row['shared']} bytes of shared memory"}
    if not loops:
        return {"rank": (spills, 0), "why": f"{resources}; not timed"}
    total = instructions + 8 * spills * instructions / count
    why = f"{instructions:.1f} instructions per score, {resources}; not timed"
    return {"rank": (round(total, 1), row["registers"]), "why": why}


def lowest(results: list[dict[str, Any]]) -> tuple[dict[str, int], str]:
    """The tiles to take, and why; the first of equals."""
    fits = [result for result in results if result["rank"] is not None]
    assert fits, f"none of these fits: {results}"
    best = min(fits, key=itemgetter("rank"))
    return best["tiles"], best["why"]


def fastest(kernel: Kernel, form: str, head_dim: int, results: list[dict[str, Any]]) -> tuple[dict[str, int], str]:
    """The tiles to take, and why; all are compiled by now."""
    times = [(microseconds(kernel, form, head_dim, result["tiles"]), result["tiles"]) for result in results]
    (best, tiles), (next_best, _) = sorted(times, key=itemgetter(0))[:2]
    if best == math.inf:
        return lowest(results)
    return tiles, f"{best:.1f} us, next best {next_best:.1f} us, on {torch.cuda.get_device_name()}"


def microseconds(kernel: Kernel, form: str, head_dim: int, tiles: dict[str, int]) -> float:
    """Median of the kernel alone on random inputs; infinite if it takes more memory than a program has."""
    case = square(1, 8, 4096, head_dim, form)
    inputs = make_inputs(case)
    leaves = [x.requires_grad_() for x in inputs.leaves]
    bias = make_bias(form, inputs.data, tuple(leaves[3:]))

    def launch() -> None:
        torch.autograd.grad(biased_attention(*leaves[:3], bias, impl="triton"), leaves, inputs.d_out)

    with fixed_tiles({kernel: tiles}):
        plans.clear()
        try:
            launch()
        except triton.runtime.errors.OutOfResources:
            return math.inf
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            for _ in range(7):
                launch()
            torch.cuda.synchronize()
    plans.clear()
    return float(np.median([event.device_time for event in recorded.events() if event.name == FUNCTIONS[kernel]]))


def main(archs: tuple[str, ...] = (), processes: int | None = None) -> None:
    """Search every kernel, form and head dim of the architectures; none named: the GPU's, or all of the table."""
    here = architecture() if torch.cuda.is_available() else None
    archs = archs or ((here,) if here else tuple(SHARED_LIMIT))
    jobs = [
        (arch, kernel, form, head_dim, tiles)
        for arch, (kernel, form), head_dim in itertools.product(archs, searches(), HEAD_DIMS)
        for tiles in candidates(kernel, head_dim)
    ]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        scores = list(pool.map(score, *zip(*jobs, strict=True)))
    rows = []
    for key, group in itertools.groupby(zip(jobs, scores, strict=True), key=lambda pair: pair[0][:4]):
        arch, kernel, form, head_dim = key
        results = [result for _, result in group if result is not None]
        timed = arch == here
        tiles, why = fastest(kernel, form, head_dim, results) if timed else lowest(results)
        rows.append(_row(arch, kernel, form, 2, head_dim, tiles, why))
    for arch, (kernel, form) in itertools.product(archs, searches()):
        for head_dim, sizes in FP32[kernel].items():
            why = "products outside the tensor cores; not timed"
            rows.append(_row(arch, kernel, form, 4, head_dim, _tiles(sizes), why))
    kept = [row for row in json.loads(TABLE.read_text(encoding="utf-8")) if row["arch"] not in archs]
    rows = sorted(kept + rows, key=itemgetter("arch"))
    TABLE.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")
    print(f"{len(rows)} rows in {TABLE}")


def _tiles(sizes: tuple[int, ...]) -> dict[str, int]:
    return dict(zip(("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"), sizes, strict=True))


def _row(arch, kernel, form, itemsize, head_dim, tiles, why) -> dict[str, Any]:
    key = {"arch": arch, "kernel": kernel, "form": form, "itemsize": itemsize, "head_dim": head_dim}
    return key | {"tiles": tiles, "why": why}


if __name__ == "__main__":
    tyro.cli(main)
