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


@pytest.mark.parametrize("arch", tiles.SHARED_LIMIT)
def test_small_problems_take_small_tiles(arch):
    for kernel, form, itemsize, D in LAUNCHES:
        small = tiles.choose(kernel, form, itemsize, D, 20, 5, arch)
        rows, keys = ([size for name, size in small.items() if name.endswith(axis)] for axis in ("_M", "_N"))
        assert max(rows) <= 32 and max(keys) == 16
