"""Which nodes a rank holds, and the shapes that do not fit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megagraph as mg


def layouts(num_nodes, num_super, world_size):
    return [mg.NodeLayout(num_nodes, num_super, rank, world_size) for rank in range(world_size)]


@given(st.integers(1, 12), st.integers(0, 3), st.integers(1, 5))
def test_every_node_is_owned_once_and_every_column_visits_once(num_nodes, num_super, world_size):
    ranks = layouts(num_nodes, num_super, world_size)
    owned = torch.cat([layout.local_to_global[layout.owned] for layout in ranks])
    assert sorted(owned.tolist()) == list(range(num_nodes + num_super))
    x = torch.arange(1.0, num_nodes + num_super + 1)  # 0 is padding
    shards = [layout.shard(x, 0) for layout in ranks]
    for layout, shard in zip(ranks, shards, strict=True):
        assert layout.num_local == len(shard) == -(-num_nodes // world_size) + num_super
        assert shard.tolist() == (layout.local_to_global + 1).tolist()
        real = layout.local_to_global >= 0
        assert torch.equal(layout.row_ids(torch.device("cpu"))[real], layout.local_to_global[real])
        seen = []
        for source in range(world_size):
            segments = layout.segments(source)
            assert len(segments) == (2 if source == layout.rank and num_super else 1)
            for key_start, column_start, length in segments:
                keys = shards[source][key_start : key_start + length]
                assert keys.tolist() == x[column_start : column_start + length].tolist()
                seen += keys.tolist()
        assert sorted(seen) == x.tolist()


def test_shard_sends_gradients_back():
    x = torch.randn(2, 7, 3, requires_grad=True)
    for layout in layouts(5, 2, 3):
        layout.shard(x, 1).sum().backward()
    assert x.grad[0, :, 0].tolist() == [1.0] * 5 + [3.0] * 2


def test_cuts_may_be_a_list():
    listed = mg.NodeLayout(6, 0, 0, 2, [0, 2, 6])
    assert {listed} == {mg.NodeLayout(6, 0, 0, 2, (0, 2, 6))}


BAD_LAYOUTS = {
    "no regular nodes": (dict(num_nodes=0, num_super=1), "expected num_nodes >= 1 and num_super >= 0, got 0 and 1"),
    "negative": (dict(num_nodes=3, num_super=-1), "expected num_nodes >= 1 and num_super >= 0, got 3 and -1"),
    "rank": (dict(num_nodes=3, num_super=0, rank=2, world_size=2), r"rank must be in 0\.\.world_size - 1 = 1, got 2"),
}


@pytest.mark.parametrize("case", BAD_LAYOUTS)
def test_bad_layout(case):
    arguments, message = BAD_LAYOUTS[case]
    with pytest.raises(ValueError, match=message):
        mg.NodeLayout(**arguments)


BAD_ROWS = {
    "shard": (lambda x: mg.NodeLayout(5, 2).shard(x, 1), r"expected N = 7 nodes along dim 1, got shape \(2, 6\)"),
    "gather": (lambda x: mg.NodeLayout(5, 2).gather(x, 1), r"expected this rank's S = 7 rows along dim 1"),
    "no mesh": (
        lambda x: mg.NodeLayout(5, 2, 1, 2).gather(x, 1),
        "the layout is that of rank 1 of 2, but this process is rank 0 of 1 in the mesh",
    ),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows(case):
    call, message = BAD_ROWS[case]
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2, 6))
