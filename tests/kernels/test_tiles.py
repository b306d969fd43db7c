"""The table of tile sizes."""

from __future__ import annotations

from itertools import product

import pytest

pytest.importorskip("triton", reason="triton has wheels for Linux only")

from megagraph.kernels import tiles
from megagraph.kernels.variants import FORMS

LAUNCHES = [
    *product(("fwd", "key", "query"), FORMS, (2, 4), (1, 16, 64, 65, 256)),
    *product(("learned",), ("bucket", "projected"), (2, 4), (1, 16, 64, 65, 256)),
]


def chosen(arch: str) -> list[dict[str, int]]:
    return [tiles.choose(kernel, form, itemsize, D, 4096, 4096, arch) for kernel, form, itemsize, D in LAUNCHES]


@pytest.mark.parametrize(
    ("arch", "named"),
    [("sm_89", "sm_86"), ("sm_103", "sm_100"), ("sm_121", "sm_120"), ("sm_75", "sm_80"), ("gfx90a", "gfx942")],
)
def test_a_gpu_without_rows_takes_those_of_the_nearest_of_its_vendor(arch, named):
    assert chosen(arch) == chosen(named)
    assert all(chosen(other) != chosen(named) for other in tiles.SHARED_LIMIT if other != named)


def test_narrow_heads_take_tiles_that_waste_little():
    edges = {
        (M, N): tuple(tiles.choose_narrow_fwd(8, 2, M, N)[name] for name in ("BLOCK_M", "BLOCK_N"))
        for M, N in ((8192, 8192), (256, 144), (32, 32), (17, 96), (48, 48), (5, 3))
    }
    assert list(edges.values()) == [(32, 64), (32, 64), (32, 32), (32, 32), (16, 16), (16, 16)], edges
    assert [tiles.padded_heads(H, 2, D) for H, D in ((3, 16), (9, 4), (8, 8), (8, 17))] == [4, 16, 8, 0]


@pytest.mark.parametrize("arch", tiles.SHARED_LIMIT)
def test_small_problems_take_small_tiles(arch):
    for kernel, form, itemsize, D in LAUNCHES:
        small = tiles.choose(kernel, form, itemsize, D, 20, 5, arch)
        rows, keys = ([size for name, size in small.items() if name.endswith(axis)] for axis in ("_M", "_N"))
        assert max(rows) <= 32 and max(keys) == 16


def test_few_key_tiles_take_programs_of_four_heads():
    def chosen(B: int, H: int, N: int, form: str = "bucket") -> tuple[int, ...]:
        tiles_of = tiles.choose_narrow(form, B, H, 2, 8, N, N, True, "sm_90")
        return tuple(tiles_of[name] for name in ("GROUP", "BLOCK_M", "BLOCK_N", "num_warps", "num_stages"))

    assert chosen(1, 8, 8192) == chosen(4, 16, 2048) == (8, 16, 64, 8, 1)
    assert chosen(1, 8, 8128) == chosen(1, 8, 2048) == chosen(256, 32, 144) == (4, 32, 32, 4, 1)
    assert chosen(1, 3, 8192) == (4, 16, 64, 8, 1)  # one program has all heads
    assert [chosen(1, 8, 8192, form) for form in ("none", "dense")] == [(8, 32, 64, 8, 1), (8, 16, 64, 8, 2)]


def test_short_forward_takes_fewer_warps_and_stages():
    def chosen(M: int, N: int, D: int) -> tuple[int, ...]:
        return tuple(tiles.choose("fwd", "dense", 2, D, M, N, "sm_90").values())

    assert chosen(8192, 8192, 8) == (128, 64, 4, 3)
    assert chosen(144, 144, 8) == (64, 64, 4, 2)
    assert chosen(32, 32, 8) == (32, 32, 1, 1)
    assert chosen(32, 32, 256)[2] == 4  # one warp would hold all of a wide row
