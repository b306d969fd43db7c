"""Batches that one rank of a node builds for the stages there are those that each would have built."""

from __future__ import annotations

import numpy as np
import pytest

from tests import ranks
from tests.parallel.cases import BATCHINGS, DELIVERED, case_name

# ranks of a group by (pp, dp, cp), of nodes of 2, 1 and 2, 4 and 4 processes; of three stages the first is alone
GROUPS = {
    (2, 1, 1): [[0, 1]] * 2,
    (3, 1, 1): [[0], [1, 2], [1, 2]],
    (2, 1, 2): [[0, 2], [1, 3]] * 2,
    (2, 2, 1): [[0, 2], [1, 3]] * 2,
}


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("layout", [ranks.param(int(np.prod(layout)), layout) for layout in DELIVERED])
def test_delivered_batches_are_those_built_here(layout, batching):
    name = case_name(layout, batching, "delivered")
    for rank, result in enumerate(ranks.results(int(np.prod(layout)))):
        got, members = result[name], GROUPS[layout][rank]
        assert got["ranks"] == members
        if len(members) > 1:
            assert got["builds"] == (rank == members[0])
            assert got["lengths"][0] == got["lengths"][1] >= 3
            assert len(got["equal"]) == 2 * got["lengths"][0] and all(got["equal"])
