"""Tile sizes of the attention kernels: the rows of tiles.json, and the one that fits a launch.

A row serves one architecture, kernel, form of bias and size of element, and head dims up to ``head_dim``; ``why`` says
what it was chosen by. ``python -m bench.tune`` writes the rows anew.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Literal

import triton

from megagraph.kernels.tile import INTERPRET

TABLE = Path(__file__).with_name("tiles.json")
SHARED_LIMIT = {  # bytes of shared memory that a program may use; no compiler checks
    "sm_80": 166_912,
    "sm_86": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
    "gfx942": 65_536,
}

Kernel = Literal["fwd", "key"]
SHORT, NARROW = 256, 16  # most rows and keys, widest heads where little is left of a tile


def architecture() -> str:
    """``"sm_90"``, as the active driver says; that of the table's rows where the kernels are interpreted."""
    if INTERPRET:
        return "sm_90"
    target = triton.runtime.driver.active.get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)


def _version(arch: str) -> int:
    return int(arch[3:], base=16)  # there is a gfx90a


def _nearest(arch: str) -> str:
    """This architecture, or its vendor's newest one of the table that is not newer: sm_89 takes the rows of sm_86."""
    names = sorted((name for name in SHARED_LIMIT if name[:3] == arch[:3]), key=_version)
    return [names[0], *(name for name in names if _version(name) <= _version(arch))][-1]


@functools.cache
def _rows(arch: str) -> list[dict]:
    return [row for row in json.loads(TABLE.read_text(encoding="utf-8")) if row["arch"] == _nearest(arch)]


@functools.lru_cache(maxsize=1024)
def choose(
    kernel: Kernel, form: str, itemsize: int, D: int, M: int, N: int, arch: str, tf32: bool = False
) -> dict[str, int]:
    """Tile sizes, warps and stages for M queries and at most N keys a segment.

    Small problems take small tiles, as what lies beyond M and N is computed and thrown away; 16 is the least that
    tl.dot takes. tf32: products of fp32 run in tensor cores.
    """
    fits = (
        row for row in _rows(arch) if (row["kernel"], row["form"], row["itemsize"]) == (kernel, form, min(itemsize, 4))
    )
    row = min((row for row in fits if row["head_dim"] >= D), key=lambda row: row["head_dim"])
    most = {"_M": max(16, triton.next_power_of_2(M)), "_N": max(16, triton.next_power_of_2(N))}
    tiles = {name: min(size, most.get(name[-2:], size)) for name, size in row["tiles"].items()}
    if kernel == "fwd":
        if M <= 192 and tiles["BLOCK_M"] > 64 and triton.cdiv(M, 64) % 2:  # half of the last tile would be empty
            tiles["BLOCK_M"] = 64
        tiles["num_stages"] = max(1, min(tiles["num_stages"], N // tiles["BLOCK_N"]))  # no more tiles to load ahead
        if tiles["BLOCK_M"] < 64:
            # of tensor cores four warps would share 16 rows, and compute the same; fp32 spills where they are few
            wide = max(tiles["BLOCK_N"], triton.next_power_of_2(D))
            numbers = 2048 if itemsize == 2 else 1024 if tf32 else 512  # of a warp
            tiles["num_warps"] = min(tiles["num_warps"], max(1, tiles["BLOCK_M"] * wide // numbers))
    elif max(M, N) <= SHORT and D <= NARROW and itemsize == 2:  # more programs at once hide more waiting
        tiles |= {"BLOCK_M": 16, "num_warps": 4 if tiles["BLOCK_N"] >= 64 else 1, "num_stages": 3 if N > 32 else 2}
    return tiles


MULTIPROCESSORS = 128  # about those of large GPUs


def heads_of_program(H: int, itemsize: int) -> int:
    """How many narrow heads share a program: all of a sequence, up to eight."""
    return min(8 if itemsize == 2 else 2, triton.next_power_of_2(H))


def padded_heads(H: int, itemsize: int, D: int) -> int:
    """H padded to whole programs of narrow heads; 0 where a program has one head."""
    group = heads_of_program(H, itemsize)
    return -(-H // group) * group if D <= NARROW else 0


def choose_narrow_fwd(H: int, itemsize: int, M: int, N: int) -> dict[str, int]:
    """Tiles of forward for narrow heads: a warp to each head, as two would compute the same; 64 scores to a thread.
    Four heads to a program, as more programs at once hide more waiting (measured on an H200).

    What a tile spends on itself weighs less where it has more keys; keys beyond the last whole tile are MASKED, at
    twice the cost. fp32 products run outside the tensor cores, with operands in registers.
    """
    group = min(4, heads_of_program(H, itemsize))
    block_m = min((16, 32), key=lambda e: -(-M // e) * e * (1.25 if e == 16 else 1.0))
    costs = {16: 1.3, 32: 1.1, 64: 1.0} if itemsize == 2 else {16: 1.2, 32: 1.0}
    block_n = min(costs, key=lambda e: N // e * e * costs[e] + -(-(N % e) // 16) * 16 * 2.0)
    stages = 2 if itemsize == 2 and N > 256 else 1
    return {"GROUP": group, "BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": group, "num_stages": stages}


@functools.lru_cache(maxsize=1024)
def choose_query(itemsize: int, D: int, M: int, block_n: int, N: int, arch: str) -> dict[str, int]:
    """Tiles of ``query_pass``, which does little but read ds: as many loads ahead as fit."""
    block_m, block_n, warps = (64, min(64, block_n), 4) if itemsize == 2 else (32, min(32, block_n), 8)
    if block_m > M:
        block_m, warps = max(16, triton.next_power_of_2(M)), 1
    row = block_m + max(16, triton.next_power_of_2(D))
    stages = min(_stages(itemsize, block_n * row, arch), max(1, N // block_n))
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps, "num_stages": stages}


@functools.lru_cache(maxsize=1024)
def choose_learned(H: int, itemsize: int, rows: int, block_n: int, N: int, arch: str) -> dict[str, int]:
    """Tiles of ``learned_pass``; up to eight heads share an index, a one-hot matrix or channels. rows: of channels that
    are loaded for each pair, 0 for a table."""
    group, block_m, block_n = heads_of_program(H, itemsize), 16, min(64, block_n)
    stages = _stages(itemsize, block_m * block_n * (group + rows), arch) if N > SHORT else 1
    warps = 1 if N <= 32 else 4
    return {"GROUP": group, "BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps, "num_stages": stages}


def _stages(itemsize: int, numbers: int, arch: str) -> int:
    """Stages of a loop that loads so many a time: up to three that fit in shared memory; one in fp32, in registers."""
    return max(1, min(3, SHARED_LIMIT[_nearest(arch)] // (itemsize * numbers))) if itemsize == 2 else 1


@functools.lru_cache(maxsize=1024)
def choose_pairs(form: str, H: int, itemsize: int, D: int) -> dict[str, int]:
    """Tiles of listed pairs, by what they compile to: no spills, then the fewest instructions. BLOCK_M rows of GROUP
    heads, which share the numbers of pairs, and BLOCK_N gathered ones at a time; ``pair_tiles`` has as many. More rows
    gather less and compute more: wider heads, of which bytes are more, take twice as many."""
    row = itemsize * max(16, triton.next_power_of_2(D))  # bytes
    group = 8 if row <= 32 else 4 if row <= 256 else 1
    if itemsize == 4 and row >= 64:
        group = min(group, 2)
    elif itemsize == 8:  # interpreted, where programs are what takes time
        group = 8
    group = min(group, triton.next_power_of_2(H))
    warps = 2 if itemsize == 2 and group == 2 else 4
    tall = itemsize == 2 and 32 < row <= 128 and form != "projected"
    block_n = 32 if row <= (64 if tall else 128) else 16
    return {"GROUP": group, "BLOCK_M": 32 if tall else 16, "BLOCK_N": block_n, "num_warps": warps, "num_stages": 1}


def has_halves(arch: str) -> bool:
    """Whether ``halves`` may use its assembly: compares of bf16 pairs came with compute capability 9."""
    return not INTERPRET and arch.startswith("sm_") and _version(arch) >= _version("sm_90")
