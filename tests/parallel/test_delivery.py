"""Batches that one rank of a node builds for the stages there are those that each would have built.

And on their way to a GPU.
"""

from __future__ import annotations

from contextlib import contextmanager
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from megagraph.parallel.delivery import copied_ahead
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


def test_a_batch_is_used_when_it_is_there_and_its_memory_is_kept_until_then(monkeypatch):
    events = []
    own = Mock(record_event=lambda: events.append("recorded") or "there")
    used = Mock(wait_event=lambda event: events.append(f"until {event}"))

    @contextmanager
    def stream(given):
        assert given is own
        events.append("beside:")
        yield

    def put(batch):
        events.append(f"put {batch}")
        on_gpu = Mock(is_cuda=True, record_stream=lambda by: events.append(f"keep {batch}") if by is used else None)
        on_host = Mock(is_cuda=False, record_stream=lambda _: events.append("not on a GPU"))
        return Mock(memory=lambda: [on_gpu, on_host], number=batch)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: own)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: used)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    for batch in copied_ahead([0, 1, 2], put, torch.device("cuda")):
        events.append(f"use {batch.number}")
    assert events == [
        *("put 0", "beside:", "put 1", "recorded", "use 0", "until there", "keep 1"),
        *("beside:", "put 2", "recorded", "use 1", "until there", "keep 2", "use 2"),
    ]
