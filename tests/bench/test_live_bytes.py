"""Bytes of tensors alive are those of storages that a test makes by hand, and so are those of a process."""

from __future__ import annotations

import torch

from bench.paper.live_bytes import MIB, LiveBytes
from bench.processes import forget_peak, peak_resident

NUMBERS = MIB // 4  # fp32, of a MiB


def test_a_storage_counts_once_and_while_it_lives():
    with LiveBytes(torch.empty(3)) as counted:
        assert counted.live == 0  # nobody holds what was given
        x = torch.ones(NUMBERS)
        half = x[: NUMBERS // 2]
        x += 1
        assert counted.live == counted.peak == MIB
        y = x * 2
        assert counted.live == 2 * MIB
        del x, y
        assert counted.live == MIB  # of which a view holds all
        del half
    assert counted.live == 0 and counted.peak == 2 * MIB


def test_what_is_given_counts_from_the_start():
    x = torch.ones(NUMBERS)
    with LiveBytes(x, x[1:]) as counted:
        assert counted.live == MIB


def test_a_storage_that_is_emptied_in_place_is_no_part_of_the_peak():
    with LiveBytes() as counted:
        x = torch.ones(NUMBERS)
        x.untyped_storage().resize_(0)
        y = torch.ones(NUMBERS)
        assert counted.peak == MIB
        x.untyped_storage().resize_(MIB)
        x.fill_(1)
        assert counted.peak == 2 * MIB
        del y


def test_parts_of_a_sparse_matrix_count():
    starts, places, values = torch.arange(101), torch.arange(100), torch.ones(100)
    by_row = torch.sparse_csr_tensor(starts, places, values)
    by_column = torch.sparse_csc_tensor(starts.clone(), places.clone(), values.clone())
    with LiveBytes(by_row) as counted:
        assert counted.live == 201 * 8 + 100 * 4
    with LiveBytes(by_row, by_column) as counted:
        assert counted.live == 2 * (201 * 8 + 100 * 4)


def test_a_peak_of_a_process_is_of_what_comes_after():
    x = torch.ones(200 * NUMBERS)
    del x
    before = forget_peak()
    assert peak_resident() - before < 10 * MIB
    x = torch.ones(50 * NUMBERS)
    del x
    assert 45 * MIB < peak_resident() - before < 60 * MIB
