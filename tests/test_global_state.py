"""What torch keeps for the whole process is the caller's: its random numbers, its default dtype, whether gradients are
made."""

from __future__ import annotations

import pytest
import torch

import megagraph as mg
from megagraph.ablation import evaluate
from megagraph.dry_run import dry_run
from megagraph.run import Run
from tests.checkpoint_cases import config, graph


@pytest.mark.parametrize("batching", ["ego", "cluster", "full"])
def test_nobody_else_s_random_numbers_are_drawn(tmp_path, batching):
    own = config(tmp_path / "run", epochs=1, batching=batching)
    calls = {
        "fit": lambda: mg.Trainer(own).fit(graph()),
        "resume": lambda: mg.Trainer.resume(tmp_path / "run", epochs=2).fit(graph()),
        "predict": lambda: mg.predict(tmp_path / "run", graph()),
        "evaluate": lambda: evaluate(tmp_path / "run", graph(), ["bias"]),
        "dry_run": lambda: dry_run(own, graph()),
    }
    torch.manual_seed(5)
    before, changed = torch.get_rng_state(), []
    for name, call in calls.items():
        call()
        if not torch.equal(torch.get_rng_state(), before):
            changed.append(name)
            torch.set_rng_state(before)
    assert not changed


@pytest.mark.parametrize(
    "changes",
    [{}, {"embedding": "learned"}, {"batching": "full", "label_input": 0.5}],
    ids=["features", "learned", "labels"],
)
def test_numbers_do_not_depend_on_the_default_dtype(tmp_path, changes):
    weights, probabilities = [], []
    for dtype in (torch.float32, torch.float64):
        run = tmp_path / str(dtype)
        torch.set_default_dtype(dtype)
        try:
            mg.Trainer(config(run, epochs=1, dtype="fp32", **changes)).fit(graph())
            probabilities.append(torch.from_numpy(mg.predict(run, graph())))
        finally:
            torch.set_default_dtype(torch.float32)
        weights.append(Run.open(run).weights())
    assert all(torch.equal(weights[1][name], x) for name, x in weights[0].items())
    assert torch.equal(*probabilities)


def test_a_caller_without_gradients_may_train(tmp_path):
    """As from a callback of another training's evaluation."""
    with torch.no_grad():
        mg.Trainer(config(tmp_path / "without", epochs=1)).fit(graph())
        assert not torch.is_grad_enabled()
    mg.Trainer(config(tmp_path / "with", epochs=1)).fit(graph())
    got, want = (Run.open(tmp_path / name).weights() for name in ("without", "with"))
    assert all(torch.equal(got[name], x) for name, x in want.items())
