"""Every rank learns of an error that happened on one, and of a plan that does not fit."""

from __future__ import annotations

import re

import pytest

from tests import ranks
from tests.parallel.cases import BAD_PLANS


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("equal", "no error"),
        (
            "different",
            "ValueError: the configuration must be the same on every rank, but layers is 0 on rank 0 and 1 on rank 1",
        ),
        ("fails on the last", "OSError: rank 2: the disk is full"),
        ("fails everywhere", "OSError: the disk is full"),
        ("rank zero", "done on rank 0"),
        ("rank zero fails", "OSError: rank 0: the disk is full"),
    ],
)
def test_all_ranks_agree(case, expected):
    assert [result[case] for result in ranks.results(3)] == [expected] * 3


def test_what_fails_nowhere_returns():
    assert [result["fails nowhere"] for result in ranks.results(3)] == [f"done on rank {rank}" for rank in range(3)]


@pytest.mark.parametrize("case", BAD_PLANS)
def test_bad_plan(case):
    messages = [result[case] for result in ranks.results(2)]
    assert messages[0] == messages[1]
    assert re.search(BAD_PLANS[case][1], messages[0]), messages[0]
