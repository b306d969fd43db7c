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
