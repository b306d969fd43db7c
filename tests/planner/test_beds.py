"""What was measured on hosts that a slow link joins, beside what the planner predicts from their profiles."""

from __future__ import annotations

import pytest

from bench.paper.cluster import BEDS, CORRELATION, FOLDER, MAPE, REGRET, predicted_anew, verdict
from bench.provenance import rows_of
from megagraph.planner import fit, plots


@pytest.mark.parametrize("bed", BEDS)
def test_plans_are_ranked_as_they_were_measured(bed):
    found = verdict(predicted_anew(bed))[1]
    assert found["Spearman of predicted and measured"] >= CORRELATION
    assert found["MAPE"] <= MAPE
    assert found["chosen / fastest"] <= REGRET


def test_the_figure_of_unequal_ranks_says_what_fit_says(tmp_path, monkeypatch):
    rows = rows_of(FOLDER / "2x1-50-half-profile.json")
    cost, figure = fit(rows), plots._figure(3)
    monkeypatch.setattr(plots, "_figure", lambda columns: figure)
    plots.costmodel(cost, rows, tmp_path / "costmodel.png")
    said = [text.get_text() for text in figure[1][0].get_legend().get_texts()]
    assert cost.slowness and f"held out: MAPE {cost.held_out['time_mape']:.1%}, " in said[1]
    assert f"of log time {cost.held_out['time_r2_log']:.3f}" in said[1]
    assert figure[1][2].get_title() == "no rows that differ in layers alone"  # no empty panel without a word
