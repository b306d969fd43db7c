"""What the attention kernels compile to, without a GPU: registers, spills, shared memory, instructions per score.

    python -m bench.compile_report                                every variant: sm_80, sm_90, sm_100; some for gfx942
    python -m bench.compile_report --archs sm_90 --only defaults  what CI runs
    python -m bench.compile_report --archs sm_90 --only defaults --check   ... failing above bench/compile_budget.json
    python -m bench.compile_report --archs sm_90 --only defaults --write   ... as rows in bench/results/compile/

The launchers themselves are called, on CPU tensors, and what they launch is compiled: same arguments, specialisation
and binary as on the device. An inner loop is one that computes exponentials or products, or writes planes; its
instructions are counted in SASS and divided by the scores of its tile, per lane; the total is that of all kernels of
the variant, the gradient of a learned bias included. Bytes that a score takes from L2 follow from the tiles.
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
from typing import Any, Literal, NamedTuple

import torch
import tyro

from bench.provenance import write_rows
from bench.sass import read_cubin
from bench.shapes import NUM_BUCKETS, NUM_CHANNELS
from megagraph.attention.relation import Relation
from megagraph.attention.step import DeltaOf, Gradients, State, Step
from megagraph.kernels.variants import Variant, cover, defaults

BUDGET = Path(__file__).with_name("compile_budget.json")
CHECKED = ("sm_80", "sm_90", "sm_100")
LEAST_WARPS = 8  # of a multiprocessor, which hides latency by switching between them
BY_KEYS = ("key_pass",)  # kernels whose programs own keys; those of others own queries
B, H = 16, 8  # enough programs for the tiles of large problems
PAIRS_OF_A_ROW = 32
ROW_OF_VARIANT = ("kernel", "form", "dtype", "head_dim", "path", "learned_grad", "dropout")
REST_COLUMNS = 17  # of the second segment: super nodes, whose number is odd


class Launch(NamedTuple):
    """One that was compiled instead of started."""

    kernel: str
    binary: Any
    sizes: dict[str, Any]  # its keyword arguments
    programs: int
    arguments: tuple


class StubDriver:
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
    from megagraph.kernels import listed_attention as listed_kernels
    from megagraph.kernels.hidden_dropout import launch_hidden_dropout

    tf32, form = variant.dtype == "tf32", variant.form
    dtype = torch.float32 if tf32 else getattr(torch, variant.dtype)
    short, listed = variant.path == "short", variant.path == "listed"
    D, N = variant.head_dim, 32 if short else N
    if variant.kernel == "hidden_dropout":
        x, key = torch.empty(B, N, H * D, dtype=dtype), torch.empty(B, dtype=torch.int32)
        return partial(launch_hidden_dropout, x, key, None, 0.1)
    columns = N if variant.aligned or short else N - 1

    def rows(dtype=dtype):
        if variant.rows_first:
            return torch.empty(B, N, H, D, dtype=dtype).transpose(1, 2)
        return torch.empty(B, H, N, D, dtype=dtype)

    planes = (1, 1) if variant.plane == "shared" else (B, H)
    data, learned, mask = {
        "none": (None, None, None),
        "dense": (None, torch.empty(*planes, N, columns, dtype=dtype), None),
        "bucket": (torch.empty(B, N, columns, dtype=torch.uint8), torch.empty(H, NUM_BUCKETS), None),
        "projected": (
            torch.empty(B, NUM_CHANNELS, N, columns, dtype=dtype),
            torch.empty(H, NUM_CHANNELS),
            torch.empty(B, N, columns, dtype=torch.bool) if variant.padding else None,
        ),
    }[form]
    lists: dict[str, torch.Tensor] = {}
    if listed:
        pairs = N * PAIRS_OF_A_ROW
        data = {
            "bucket": torch.empty(pairs, dtype=torch.uint8),
            "projected": torch.empty(pairs, NUM_CHANNELS, dtype=dtype),
        }.get(form)
        learned, mask = torch.empty(pairs, H, dtype=dtype) if form == "dense" else learned, None
        starts, columns_of = torch.arange(N + 1) * PAIRS_OF_A_ROW, torch.arange(PAIRS_OF_A_ROW, dtype=torch.int32)
        lists = Relation.of_rows(starts, columns_of.repeat(N), N, 1).lists
        columns = N
    regular = columns - (0 if short else 32 if variant.aligned else REST_COLUMNS)
    segments = [(0, 0, regular), (regular, regular, columns - regular)]
    step = Step(
        engine="triton",
        short=False,
        form=form,
        data=data,
        learned=learned,
        bias_mask=mask,
        key_padding_mask=torch.empty(B, columns, dtype=torch.bool) if variant.padding else None,
        segments=[(0, 0, columns)] if listed and variant.step == "only" else segments[: 1 if short else 2],
        scale=D**-0.5,
        dropout_p=0.1 if variant.dropout else 0.0,
        dropout_key=torch.empty(B, dtype=torch.int32) if variant.dropout else None,
        row_ids=torch.empty(N, dtype=torch.int32) if variant.dropout else None,
        tf32=tf32,
        **lists,
    )
    m, l, lse, delta = (torch.empty(B, H, N) for _ in range(4))
    step_name = "only" if short else variant.step
    if variant.kernel == "fwd":
        state = State(first=False, last=False, m=m, l=l, acc=torch.empty(B, H, N, D), out=rows(), lse=lse)
        state = state.at(first=step_name in ("only", "first"), last=step_name in ("only", "last"))
        launch = listed_kernels.launch_pairs_fwd if listed else kernels.launch_step_fwd
        return partial(launch, rows(), rows(), rows(), step, state)
    d_learned = None
    if learned is not None and variant.learned_grad:
        own = form == "dense" and not listed and planes == (B, H)
        d_learned = torch.empty(learned.shape, dtype=dtype if own else torch.float32)
    accumulate = step_name != "only"
    dq, dk, dv = (rows(torch.float32 if accumulate else dtype) for _ in range(3))
    gradients = Gradients(
        d_out=rows(), lse=lse, delta=delta, dq=dq, dk=dk, dv=dv, d_learned=d_learned, accumulate=accumulate
    )
    of = None if accumulate else DeltaOf(out=rows(), d_lse=None)  # a ring makes delta once for all its steps
    launch_bwd = listed_kernels.launch_pairs_bwd if listed else kernels.launch_step_bwd
    return partial(launch_bwd, rows(), rows(), rows(), step, gradients, of)


@contextmanager
def fixed_tiles(tiles: dict[str, dict[str, int]]) -> Iterator[None]:
    """Launches of these kernels take these tiles instead of the table's; of listed pairs, "pairs", these sizes."""
    from megagraph.kernels import tiles as table

    choose, choose_pairs = table.choose, table.choose_pairs
    table.choose = lambda kernel, *args: tiles.get(kernel) or choose(kernel, *args)
    table.choose_pairs = lambda *args: choose_pairs(*args) | tiles.get("pairs", {})
    try:
        yield
    finally:
        table.choose, table.choose_pairs = choose, choose_pairs


@contextmanager
def compiled_launches(arch: str, only: str = "") -> Iterator[list[Launch]]:
    """Launches compile their kernels, whose names begin with ``only``, for ``arch``, and are kept."""
    import triton
    from triton.runtime.jit import JITFunction

    from megagraph.kernels.launch import plans

    kept: list[Launch] = []
    run = JITFunction.run

    def compile_(self, *args, grid, warmup, **kwargs):
        if not self.fn.__name__.startswith(only):
            return None
        binary = run(self, *args, grid=grid, warmup=True, **kwargs)
        kept.append(Launch(self.fn.__name__, binary, kwargs, grid[0], args))
        return binary

    driver = triton.runtime.driver
    active = driver._active
    try:
        driver.set_active(StubDriver(arch))
        plans.clear()  # they know nothing of this device
        JITFunction.run = compile_
        with triton.knobs.compilation.scope():
            # a cached binary names the source lines, and perhaps the folder, of another day
            triton.knobs.compilation.always_compile = True
            yield kept
    finally:
        JITFunction.run = run
        plans.clear()
        driver._active = active  # reset_active() raises where there is no GPU


def compile_variant(
    arch: str, variant: Variant, tiles: dict[str, dict[str, int]] | None = None, only: str = ""
) -> dict[str, Any]:
    """One row: resources of the variant's kernels, or of ``only`` one, and of their inner loops. ``tiles`` of some
    kernels instead of the table's."""
    started = time.perf_counter()
    with compiled_launches(arch, only) as launches, fixed_tiles(tiles or {}):
        prepare(variant)()
    kernels = [kernel_row(launch) for launch in launches]
    for kernel in kernels:
        if kernel["loops"]:
            kernel["l2_bytes"] = round(l2_bytes(kernel["kernel"], kernel["tiles"], variant.form, variant.head_dim), 2)
    loops = [loop for kernel in kernels for loop in kernel.pop("loops")]
    return {
        "arch": arch,
        "variant": variant.name,
        **{name: getattr(variant, name) for name in ROW_OF_VARIANT},
        "unit": "instructions per score and lane",
        "kernels": kernels,
        **{name: max(kernel[name] for kernel in kernels) for name in ("registers", "shared", "stack")},
        "spills": sum(kernel["spills"] for kernel in kernels),
        "loops": loops,
        "total": total(loops),
        "seconds": round(time.perf_counter() - started, 1),
    }


def kernel_row(launch: Launch) -> dict[str, Any]:
    """Resources of one kernel, and its loops over scores."""
    binary, sizes = launch.binary, launch.sizes
    row: dict[str, Any] = {
        "kernel": launch.kernel,
        "tiles": {
            key: size
            for key, size in sizes.items()
            if key in ("GROUP", "BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
        },
        "shared": binary.metadata.shared,
    }
    if "cubin" not in binary.asm:
        return row | _amd(binary.asm["amdgcn"]) | {"loops": []}
    resources, loops = read_cubin(binary.asm["cubin"])
    warps = binary.metadata.num_warps
    programs = programs_per_sm(binary.metadata.target.arch, resources["registers"], row["shared"], warps)
    row |= {"races": races(binary.asm["ttgir"]), "misfits": misfits(binary.asm["ttgir"])}
    row |= resources | {"programs_per_sm": programs, "warps_per_sm": programs * warps, "loops": []}
    by_exponentials = any(loop.count("MUFU.EX2") for loop in loops)
    for place, loop in enumerate(loops):
        scores = sizes["BLOCK_M"] * sizes["BLOCK_N"] * sizes.get("GROUP", 1) / (32 * warps)
        exponentials = loop.count("MUFU.EX2") / scores
        row["loops"].append(
            {
                "pass": launch.kernel,
                # a masked tile is narrower than the one that the launch names, and comes after it
                "masked": exponentials < 0.9 if by_exponentials else place > 0,
                "count": loop.count(),
                "instructions": round(loop.count() / scores, 2),
                "exponentials": round(exponentials, 2),
                "tensor_core": round(loop.count("HMMA", "HGMMA", "UTCHMMA", "UTCMMA") / scores, 3),
                "spills": loop.spills,
            }
        )
    return row


def races(ttgir: str) -> int:
    """Products that may still run (wgmma) when the memory that they read, of which there is one copy, is loaded."""
    copies = re.findall(r"(%\S+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<1x\d+x\d+x", ttgir)
    read = set(copies)
    for name, source in re.findall(r"(%\S+) = ttg\.memdesc_\w+ (%[\w#]+)", ttgir):  # in the order of the program
        if source in read:
            read.add(name)
    found = 0
    for name, operands in re.findall(r"(%\S+) = ttng\.warp_group_dot (.*?) :", ttgir):
        wait = re.search(rf"warp_group_dot_wait {re.escape(name)}\b.*?pendings = (\d+)", ttgir)
        if read & set(re.findall(r"%[\w#]+", operands)) and not (wait and wait[1] == "0"):
            found += 1
    return found


def misfits(ttgir: str) -> int:
    """Products of fewer numbers than their operands are laid out for, of which some are taken twice and some never."""
    operand = r"tt\.dot .*?: tensor<\d+(?:x\d+)*x(\d+)x\w+, #ttg\.dot_op<\{opIdx = 0, parent = #\w+, kWidth = (\d+)\}>>"
    return sum(4 * int(width) > int(numbers) for numbers, width in re.findall(operand, ttgir))


def l2_bytes(kernel: str, tiles: dict[str, int], form: str, head_dim: int) -> float:
    """A score in 16 bits: rows of the other operand that a tile reads, its bias, what it reads or writes of planes."""
    own, group = tiles["BLOCK_N" if kernel in BY_KEYS else "BLOCK_M"], tiles.get("GROUP", 1)
    channels = 2 * NUM_CHANNELS / (H if kernel == "project_pass" else group)
    bias = {"none": 0, "dense": 2, "bucket": 1 / group, "projected": channels}[form]
    if kernel in ("project_pass", "learned_pass", "plane_pass"):
        return 2 + bias
    if kernel == "query_pass":
        return 2 + 2 * head_dim / own  # ds and k
    if kernel in ("key_pass", "step_fwd") and form == "projected":
        bias = 2  # which is dense by then
    result = 2 * 2 * head_dim / own + bias
    if kernel == "key_pass":
        result += 2 * 4 / own + 2  # lse, delta; ds
    return result


def programs_per_sm(arch: int, registers: int, shared: int, warps: int) -> int:
    """How many programs a multiprocessor holds at once (CUDA C++ programming guide, compute capabilities)."""
    from megagraph.kernels.tiles import SHARED_LIMIT

    granted = math.ceil(registers / 8) * 8 * 32 * warps
    most_shared = SHARED_LIMIT.get(f"sm_{arch}", 101_376) + 1024  # each program takes 1 KiB more than it asks for
    return min(65_536 // granted, most_shared // (shared + 1024), (48 if arch in (86, 89, 120) else 64) // warps)


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
    shared memory than its architecture has, as it could not start there, and where a product may read what is loaded
    anew or has operands that are laid out for more numbers than it takes.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("unset TRITON_INTERPRET: the interpreter cannot compile")
    variants = {"defaults": defaults(), "cover": cover()}
    chosen = variants[only] if only else defaults() + cover()
    jobs = list(itertools.product(archs or CHECKED, dict.fromkeys(chosen)))
    if not archs and only != "cover":
        jobs += [("gfx942", variant) for variant in defaults() if variant.path == "short" or variant.head_dim == 64]
    started = time.perf_counter()
    rows = []
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for row in pool.map(compile_variant, *zip(*jobs, strict=True)):
            rows.append(row)
            print(_line(row), flush=True)
    print(f"{len(rows)} variants in {time.perf_counter() - started:.0f} s")
    if write:
        for arch in dict.fromkeys(arch for arch, _ in jobs):
            write_rows(arch, [row for row in rows if row["arch"] == arch], folder="compile", children=("kernels",))
    faults = too_large(rows) + wrong(rows) + (over_budget(rows) if check else [])
    sys.exit("\n".join(faults) or None)


def total(loops: Iterable[dict[str, Any]]) -> float:
    """Instructions per score of all programs: the first loop of each pass, as a masked one may follow."""
    counts: dict[str, float] = {}
    for loop in loops:
        if not loop["masked"]:
            counts.setdefault(loop["pass"], loop["instructions"])
    return round(sum(counts.values()), 2)


def _line(row: dict[str, Any]) -> str:
    loops = "; ".join(
        f"{loop['pass']}{' masked' if loop['masked'] else ''} {loop['instructions']:.1f}"
        + (f" SPILLS {loop['spills']}" if loop["spills"] else "")
        for loop in row["loops"]
    )
    return (
        f"{row['arch']} {row['variant']:45} {row['registers']:3} registers, {row['spills']:3} spills, "
        f"{row['shared']:6} B shared, {row['seconds']:4.1f} s: {loops}; {row['total']:.1f} in all; L2 bytes "
        + ", ".join(f"{kernel['l2_bytes']:.2f}" for kernel in row["kernels"] if "l2_bytes" in kernel)
    )


def too_large(rows: Iterable[dict[str, Any]]) -> list[str]:
    """What takes more shared memory than its architecture has, one sentence each."""
    from megagraph.kernels.tiles import SHARED_LIMIT

    return [
        f"{row['arch']} {row['variant']}: {row['shared']} bytes of shared memory, at most {limit}"
        for row in rows
        if row["shared"] > (limit := SHARED_LIMIT.get(row["arch"], math.inf))
    ]


def wrong(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Kernels whose products may read what is overwritten, or take numbers twice, one sentence each."""
    words = {"races": "read memory that is loaded anew", "misfits": "have operands laid out for more numbers"}
    return [
        f"{row['arch']} {row['variant']} {kernel['kernel']}: {kernel[name]} products {what}"
        for row in rows
        for kernel in row["kernels"]
        for name, what in words.items()
        if kernel.get(name)
    ]


def over_budget(rows: Iterable[dict[str, Any]]) -> list[str]:
    """What exceeds bench/compile_budget.json, one sentence each. The first entry that names a row's kernel, form, path
    and head dim holds for it; a ``pending`` one is not met yet, and says what is allowed until then."""
    budget = json.loads(BUDGET.read_text(encoding="utf-8"))
    faults = []
    for row in rows:
        where = f"{row['arch']} {row['variant']}"
        faults += [f"{where} {loop['pass']}: {loop['spills']} spills" for loop in row["loops"] if loop["spills"]]
        faults += [
            f"{where} {kernel['kernel']}: {kernel['warps_per_sm']} warps a multiprocessor, at least {LEAST_WARPS}"
            for kernel in row["kernels"]
            if kernel["programs_per_sm"] < 2 and kernel["warps_per_sm"] < LEAST_WARPS
        ]
        fits = (entry for entry in budget["totals"] if _holds(entry, row, budget["max_head_dim"]))
        if not (entry := next(fits, None)):
            continue
        most = entry.get("pending", entry["most"])
        if row["total"] > most:
            faults.append(f"{where}: {row['total']} instructions per score, at most {most}")
        elif "pending" in entry and row["total"] <= entry["most"]:
            faults.append(f"{where}: {row['total']} instructions per score, so {entry['most']} is no longer pending")
    return faults


def _holds(entry: dict[str, Any], row: dict[str, Any], max_head_dim: int) -> bool:
    same = all(entry[name] == row[name] for name in ("kernel", "form", "path"))
    dims = entry.get("head_dims")
    return (
        same
        and row["dtype"] == "bfloat16"
        and row["learned_grad"]
        and not row["dropout"]
        and (row["head_dim"] <= max_head_dim if dims is None else row["head_dim"] in dims)
    )


if __name__ == "__main__":
    tyro.cli(main)
