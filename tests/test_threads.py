"""Chunks of items in threads."""

from __future__ import annotations

import signal

import numpy as np
import pytest
import torch

from megagraph import threads


@pytest.fixture(params=["torch's team", "a pool"])
def team(request, monkeypatch):
    if request.param == "a pool":
        monkeypatch.setattr(threads, "_libgomp", lambda: None)


@pytest.mark.usefixtures("team")
@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("costs", [[], [3], [1] * 50, [0, 0, 90, 0, 1, 1], [0] * 4, list(range(40))], ids=str)
def test_every_item_in_one_chunk(costs, num_threads):
    chunks = []
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        threads.in_threads(lambda *chunk: chunks.append(chunk), np.array(costs), 1)
    finally:
        torch.set_num_threads(before)
    ids = [chunk for chunk, _, _ in chunks]
    assert len(set(ids)) == len(ids) and max(ids) < threads.CHUNKS * num_threads
    assert [i for _, first, last in sorted(chunks) for i in range(first, last)] == list(range(len(costs)))


@pytest.mark.usefixtures("team")
def test_an_error_in_a_thread_is_raised():
    def run(chunk, first, last):
        if last == 40:
            raise KeyboardInterrupt("in the last chunk")

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyboardInterrupt, match="in the last chunk"):
            threads.in_threads(run, np.ones(40), 1)
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("team")
@pytest.mark.skipif(not hasattr(signal, "SIGVTALRM"), reason="needs a timer that sends signals")
def test_no_interrupt_is_lost():
    """Wherever one arrives; the threads hold the GIL, so that the main one often waits for it where it begins."""
    sent, raised, num_threads = [], 0, torch.get_num_threads()

    def interrupt(*_):
        sent.append(1)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, interrupt)
    torch.set_num_threads(2)
    try:
        for i in range(120):
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.001 + 0.0137 * i % 0.01)
            try:
                while len(sent) == i:
                    threads.in_threads(lambda *_: sum(range(3000)), np.ones(8), 1)
            except KeyboardInterrupt:
                raised += 1
    finally:
        signal.signal(signal.SIGVTALRM, before)
        torch.set_num_threads(num_threads)
    assert raised == len(sent) == 120
