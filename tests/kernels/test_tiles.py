"""The table of tile sizes."""

from __future__ import annotations

from itertools import product

import pytest

pytest.importorskip("triton", reason="triton has wheels for Linux only")

from megagraph.kernels import tiles

LAUNCHES = list(product(("fwd", "key"), ("none", "dense", "bucket"), (2, 4), (1, 16, 64, 65, 256)))


def chosen(arch: str) -> list[dict[str, int]]:
    found = [tiles.choose(kernel, form, itemsize, D, 4096, 4096, arch) for kernel, form, itemsize, D in LAUNCHES]
    found += [tiles.choose_query(2, D, 4096, 64, 4096, arch) for D in (64, 128, 256)]
    return found + [tiles.choose_learned(8, 2, rows, 64, 4096, arch) for rows in (0, 16)]


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


def test_backward_of_short_sequences_takes_narrow_tiles():
    def chosen(M: int, N: int, D: int, form: str = "bucket") -> tuple[int, ...]:
        return tuple(tiles.choose("key", form, 2, D, M, N, "sm_90").values())

    assert chosen(8192, 8192, 8) == chosen(257, 257, 8) == chosen(144, 144, 64) == (64, 64, 4, 3)
    assert chosen(144, 144, 8) == (16, 64, 4, 3)
    assert chosen(32, 32, 8) == (16, 32, 1, 2)


def test_loads_ahead_fit_in_shared_memory():
    assert tiles.choose_query(2, 64, 8192, 64, 8192, "sm_90") == dict(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=3)
    assert tiles.choose_query(2, 256, 8192, 64, 8192, "sm_86")["num_stages"] == 2
    assert tiles.choose_query(2, 256, 8192, 64, 100, "sm_90")["num_stages"] == 1  # there is one tile
    assert tiles.choose_query(2, 8, 20, 64, 8192, "sm_90")["BLOCK_M"] == 32
    assert [tiles.choose_learned(8, 2, 0, 64, N, "sm_90")["num_warps"] for N in (32, 144)] == [1, 4]
    assert [tiles.choose_learned(H, 2, 0, 64, 8192, "sm_90")["GROUP"] for H in (1, 3, 32)] == [1, 4, 8]
    for arch, stages in (("sm_90", 3), ("sm_80", 3), ("sm_86", 2), ("gfx942", 1)):  # channels beside ds
        assert tiles.choose_learned(8, 2, 16, 128, 8192, arch) == dict(
            GROUP=8, BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=stages
        )


def test_short_forward_takes_fewer_warps_and_stages():
    def chosen(M: int, N: int, D: int) -> tuple[int, ...]:
        return tuple(tiles.choose("fwd", "dense", 2, D, M, N, "sm_90").values())

    assert chosen(8192, 8192, 8) == (128, 64, 4, 3)
    assert chosen(144, 144, 8) == (64, 64, 4, 2)
    assert chosen(32, 32, 8) == (32, 32, 1, 1)
    assert chosen(32, 32, 256)[2] == 4  # one warp would hold all of a wide row


def test_fp32_takes_as_many_warps_as_hold_its_tiles():
    """Exact products are made of registers, those of TF32 in tensor cores, whose warps would compute the same."""

    def warps(kernel: tiles.Kernel, D: int, tf32: bool = False) -> int:
        return tiles.choose(kernel, "dense", 4, D, 8192, 8192, "sm_90", tf32)["num_warps"]

    assert [warps("fwd", D) for D in (32, 64, 128, 256)] == [2, 4, 8, 8]
    assert [warps("fwd", D, tf32=True) for D in (32, 64, 128, 256)] == [1, 2, 4, 8]
    assert [warps("key", D) for D in (8, 64, 128)] == [4, 4, 8]
