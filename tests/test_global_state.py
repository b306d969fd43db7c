"""What torch keeps for the whole process is the caller's: its random numbers."""

from __future__ import annotations

import pytest
import torch

import megagraph as mg
from megagraph.ablation import evaluate
from megagraph.dry_run import dry_run
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
