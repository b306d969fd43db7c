"""What was measured on hosts that a slow link joins, beside what the planner predicts from their profiles."""

from __future__ import annotations

import pytest

from bench.paper.cluster import BEDS, CORRELATION, MAPE, REGRET, predicted_anew, verdict


@pytest.mark.parametrize("bed", BEDS)
def test_plans_are_ranked_as_they_were_measured(bed):
    found = verdict(predicted_anew(bed))[1]
    assert found["Spearman of predicted and measured"] >= CORRELATION
    assert found["MAPE"] <= MAPE
    assert found["chosen / fastest"] <= REGRET
