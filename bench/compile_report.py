"""What the attention kernels compile to, without a GPU: registers, spills, shared memory, instructions per score.

    python -m bench.compile_report                                every variant: sm_80, sm_90, sm_100; some for gfx942
    python -m bench.compile_report --archs sm_90 --only defaults  what CI runs
    python -m bench.compile_report --archs sm_90 --only defaults --check   ... failing above bench/compile_budget.json
    python -m bench.compile_report --archs sm_90 --only defaults --write   ... as rows in bench/results/compile/

The launchers themselves are called, on CPU tensors, with kernels whose launch is replaced by a compilation: same
arguments, same specialisation, same binary as on the device. An inner loop is one that computes exponentials;
its instructions are counted in SASS and divided by the scores of its tile, per lane. Beside them stands what the
gradient of a learned bias takes on top of backward without it: a bucket table has a loop of its own, a projection makes
that of the queries longer.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from bench.floors import instructions
from bench.provenance import write_rows
from megagraph.attention.step import Gradients, State, Step
from megagraph.kernels.variants import Variant, cover, defaults

BUDGET = Path(__file__).with_name("compile_budget.json")
CHECKED = ("sm_80", "sm_90", "sm_100")
B, H, CHANNELS, BUCKETS = 2, 8, 4, 32
REST_COLUMNS = 17  # of the second segment: super nodes, whose number is odd


class _Compiled:
    """Stands in for a kernel; a launch compiles it and keeps the binary."""

    def __init__(self, kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        def compile_(*args, **kwargs):
            self.binary = self.kernel.warmup(*args, grid=grid, **kwargs)
            self.sizes = kwargs

        return compile_


class _StubDriver:
    """Stands in for the GPU driver, which ``warmup`` asks for the target."""

    def __init__(self, arch: str) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", int(arch[3:]), 32) if arch.startswith("sm_") else GPUTarget("hip", arch, 64)
        self.device = int(re.sub(r"\D", "", arch))  # binaries are kept per device

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device=None):
        return 0


def prepare(variant: Variant, N: int = 1024) -> Callable[[], None]:
    """A launch of the variant's kernel on uninitialised tensors of the benchmarks' kind."""
    from megagraph.kernels import biased_attention as kernels
    from megagraph.kernels.hidden_dropout import launch_hidden_dropout

    dtype, form = getattr(torch, variant.dtype), variant.form
    short = variant.path == "short"
    D = min(variant.head_dim, 16) if short else variant.head_dim  # wider heads take the long path
    N = 32 if short else N
    if variant.kernel == "hidden_dropout":
        x, key = torch.empty(B, N, H * D, dtype=dtype), torch.empty(B, dtype=torch.int32)
        return partial(launch_hidden_dropout, x, torch.empty_like(x), 0.1, key, None)
    columns = N if variant.aligned or short else N - 1

    def rows(dtype=dtype):
        if variant.rows_first:
            return torch.empty(B, N, H, D, dtype=dtype).transpose(1, 2)
        return torch.empty(B, H, N, D, dtype=dtype)

    planes = (1, 1) if variant.plane == "shared" and not short else (B, H)
    data, learned, mask = {
        "none": (None, None, None),
        "dense": (None, torch.empty(*planes, N, columns, dtype=dtype), None),
        "bucket": (torch.empty(B, N, columns, dtype=torch.uint8), torch.empty(H, BUCKETS), None),
        "projected": (
            torch.empty(B, CHANNELS, N, columns, dtype=dtype),
            torch.empty(H, CHANNELS),
            torch.empty(B, N, columns, dtype=torch.bool) if variant.padding else None,
        ),
    }[form]
    regular = columns - (0 if short else 32 if variant.aligned else REST_COLUMNS)
    step = Step(
        engine="triton",
        short=short,
        form=form,
        data=data,
        learned=learned,
        bias_mask=mask,
        key_padding_mask=torch.empty(B, columns, dtype=torch.bool) if variant.padding else None,
        segments=[(0, 0, regular), (regular, regular, columns - regular)][: 1 if short else 2],
        scale=D**-0.5,
        dropout_p=0.1 if variant.dropout else 0.0,
        dropout_key=torch.empty(B, dtype=torch.int32) if variant.dropout else None,
        row_ids=torch.empty(N, dtype=torch.int32) if variant.dropout else None,
    )
    m, l, lse, delta = (torch.empty(B, H, N) for _ in range(4))
    step_name = "only" if short else variant.step
    if variant.kernel == "fwd":
        state = State(first=False, last=False, m=m, l=l, acc=torch.empty(B, H, N, D), out=rows(), lse=lse)
        state = state.at(first=step_name in ("only", "first"), last=step_name in ("only", "last"))
        return partial(kernels.launch_step_fwd, step, rows(), rows(), rows(), state)
    d_learned = None
    if learned is not None and variant.learned_grad:
        d_learned = torch.empty(learned.shape, dtype=dtype if form == "dense" and planes == (B, H) else torch.float32)
    accumulate = step_name != "only"
    dq, dk, dv = (rows(torch.float32 if accumulate else dtype) for _ in range(3))
    gradients = Gradients(
        d_out=rows(), lse=lse, delta=delta, dq=dq, dk=dk, dv=dv, d_learned=d_learned, accumulate=accumulate
    )
    return partial(kernels.launch_step_bwd, step, rows(), rows(), rows(), gradients)


@contextmanager
def fixed_tiles(tiles: dict[str, int] | None) -> Iterator[None]:
    """Launches take these tiles, unless None, instead of the table's."""
    from megagraph.kernels import tiles as table

    choose = table.choose
    if tiles is not None:
        table.choose = lambda *args: tiles
    try:
        yield
    finally:
        table.choose = choose


PASSES = {  # function of the inner loop: the keywords of the launch that size its tile
    "_fwd_tile": ("BLOCK_M", "BLOCK_N", None),
    "_key_tile": ("KEY_M", "KEY_N", None),
    "_query_tile": ("QUERY_M", "QUERY_N", None),
    "_table_tile": ("TABLE_M", "TABLE_N", "TABLE_H"),
    "short_fwd": ("BLOCK_M", "BLOCK_N", "GROUP"),
    "short_bwd": ("BLOCK_M", "BLOCK_N", "GROUP"),
}


def compile_variant(arch: str, variant: Variant, tiles: dict[str, int] | None = None) -> dict[str, Any]:
    """One row: resources of the kernel and of its inner loops. ``tiles`` instead of the table's."""
    import triton

    from bench.sass import read_cubin
    from megagraph.kernels import backward, forward, hidden_dropout, short

    module, name = {
        "fwd": (forward, "step_fwd"),
        "bwd": (backward, "step_bwd"),
        "hidden_dropout": (hidden_dropout, "hidden_dropout"),
    }[variant.kernel]
    if variant.path == "short":
        module, name = short, f"short_{variant.kernel}"
    kernel = getattr(module, name)
    driver = triton.runtime.driver
    active = driver._active
    stand_in = _Compiled(kernel)
    started = time.perf_counter()
    try:
        driver.set_active(_StubDriver(arch))
        setattr(module, name, stand_in)
        with fixed_tiles(tiles), triton.knobs.compilation.scope():
            # a cached binary names the source lines, and perhaps the folder, of another day
            triton.knobs.compilation.always_compile = True
            prepare(variant)()
    finally:
        setattr(module, name, kernel)
        driver._active = active  # reset_active() raises where there is no GPU
    binary, sizes = stand_in.binary, stand_in.sizes
    row: dict[str, Any] = {
        "arch": arch,
        "variant": variant.name,
        "form": variant.form,
        "head_dim": variant.head_dim,
        "unit": "instructions per score and lane",
        "tiles": {
            key: size
            for key, size in sizes.items()
            if key in ("GROUP", "num_warps", "num_stages") or key[-2:] in ("_H", "_M", "_N")
        },
        "shared": binary.metadata.shared,
    }
    if "cubin" not in binary.asm:
        return row | _amd(binary.asm["amdgcn"]) | {"loops": [], "seconds": time.perf_counter() - started}
    resources, loops = read_cubin(binary.asm["cubin"], tuple(PASSES))
    row |= resources | {"loops": []}
    for loop in loops:
        edge_m, edge_n, heads = PASSES[loop.function]
        scores = sizes[edge_m] * sizes[edge_n] * sizes.get(heads, 1) / (32 * sizes["num_warps"])
        exponentials = loop.count("MUFU.EX2") / scores
        row["loops"].append(
            {
                "pass": loop.function.strip("_"),
                # a masked tile is narrower than the one that the launch names
                "masked": exponentials < 0.9,
                "count": loop.count(),
                "instructions": round(loop.count() / scores, 2),
                "exponentials": round(exponentials, 2),
                "tensor_core": round(loop.count("HMMA", "HGMMA", "UTCHMMA", "UTCMMA") / scores, 3),
                "spills": loop.spills,
            }
        )
    return row | {"seconds": round(time.perf_counter() - started, 1)}


def compile_kernel(arch: str, kernel: str, form: str, head_dim: int, tiles: dict[str, int]) -> dict[str, Any]:
    """The default variant of a kernel with other tiles."""
    return compile_variant(arch, Variant(kernel, form, head_dim=head_dim), tiles)


def _amd(text: str) -> dict[str, int]:
    def field(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", text)
        return int(found[1]) if found else 0

    return {
        "registers": field("vgpr_count"),
        "stack": field("private_segment_fixed_size"),
        "spills": field("vgpr_spill_count"),
    }


def main(
    archs: tuple[str, ...] = (),
    only: Literal["defaults", "cover"] | None = None,
    check: bool = False,
    write: bool = False,
    processes: int | None = None,
) -> None:
    """Compile and print a table, none named: for sm_80, sm_90, sm_100 and, for information, some of gfx942.

    ``check``: compare with the budget; ``write``: to bench/results/compile/ARCH.json. Fails where a kernel needs more
    shared memory than its architecture has, as it could not start there.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("unset TRITON_INTERPRET: the interpreter cannot compile")
    variants = {"defaults": defaults(), "cover": cover()}
    chosen = variants[only] if only else defaults() + cover()
    jobs = list(itertools.product(archs or CHECKED, dict.fromkeys(chosen)))
    if not archs and only != "cover":
        jobs += [("gfx942", variant) for variant in defaults() if variant.path == "short" or variant.head_dim == 64]
    rows: dict[tuple[str, Variant], dict[str, Any]] = {}
    started = time.perf_counter()
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for job, row in zip(jobs, pool.map(compile_variant, *zip(*jobs, strict=True)), strict=True):
            arch, variant = job
            frozen = rows.get((arch, variant._replace(learned_grad=False)))
            rows[job] = row | {"learned_grad": learned_grad(row, frozen)}
            print(_line(rows[job]), flush=True)
    print(f"{len(rows)} kernels in {time.perf_counter() - started:.0f} s")
    if write:
        for arch in dict.fromkeys(arch for arch, _ in jobs):
            write_rows(arch, [row for row in rows.values() if row["arch"] == arch], folder="compile")
    faults = too_large(rows.values()) + (over_budget(rows.values()) if check else [])
    sys.exit("\n".join(faults) or None)


def learned_grad(row: dict[str, Any], frozen: dict[str, Any] | None) -> float | None:
    """Instructions per score of the gradient of a table or projection, the latter against the same kernel without."""
    counts = instructions(row)
    if row["form"] == "bucket":
        return counts.get("table_tile")
    if row["form"] == "projected" and "query_tile" in counts and frozen is not None:
        return round(counts["query_tile"] - instructions(frozen)["query_tile"], 2)
    return None


def _line(row: dict[str, Any]) -> str:
    loops = "; ".join(
        f"{loop['pass']}{' masked' if loop['masked'] else ''} {loop['instructions']:.1f}"
        + (f" SPILLS {loop['spills']}" if loop["spills"] else "")
        for loop in row["loops"]
    )
    learned = "" if row["learned_grad"] is None else f"; learned gradient {row['learned_grad']:.1f} on top"
    return (
        f"{row['arch']} {row['variant']:45} {row['registers']:3} registers, {row['spills']:3} spills, "
        f"{row['shared']:6} B shared, {row['seconds']:4.1f} s: {loops}{learned}"
    )


def too_large(rows: Iterable[dict[str, Any]]) -> list[str]:
    """What takes more shared memory than its architecture has, one sentence each."""
    from megagraph.kernels.tiles import SHARED_LIMIT

    return [
        f"{row['arch']} {row['variant']}: {row['shared']} bytes of shared memory, at most {limit}"
        for row in rows
        if row["shared"] > (limit := SHARED_LIMIT.get(row["arch"], math.inf))
    ]


def over_budget(rows: Iterable[dict[str, Any]]) -> list[str]:
    """What exceeds bench/compile_budget.json, one sentence each."""
    budget = json.loads(BUDGET.read_text(encoding="utf-8"))
    faults = []
    for row in rows:
        where = f"{row['arch']} {row['variant']}"
        counts = instructions(row) | {"learned_grad": row["learned_grad"]}
        allowed = budget["instructions"].get(row["form"], {}) if row["head_dim"] <= budget["max_head_dim"] else {}
        for name, most in allowed.items():
            if (counts.get(name) or 0) > most:
                faults.append(f"{where} {name}: {counts[name]} instructions per score, at most {most}")
        faults += [f"{where} {loop['pass']}: {loop['spills']} spills" for loop in row["loops"] if loop["spills"]]
    return faults


if __name__ == "__main__":
    tyro.cli(main)
