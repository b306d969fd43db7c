"""Runs that stop and go on: what runs in processes of its own, or in every process of tests/ranks.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import megagraph as mg
from megagraph import epochs, files
from megagraph.checkpoint import Checkpoints
from megagraph.data.datasets import synthetic_graph
from megagraph.data.graph import Graph
from megagraph.parallel.mesh import rank
from megagraph.run import Run
from tests.parallel.cases import message_of

STOPS = (3, 8)  # steps; in the first epoch and in the second
EPOCHS = 2  # of runs that stop there
# a run goes through three plans: pipeline, ring and data parallel, other layers a stage, replicated and sharded
TWO_PROCESSES = (
    dict(plan="2,1,1", stage_layers="1,2", microbatches=2),
    dict(plan="1,2,1"),
    dict(plan="1,1,2", shard=True),
)
CHAINS: dict[tuple[int, str], tuple[dict[str, Any], ...]] = {
    (2, "features"): TWO_PROCESSES,
    (2, "learned"): TWO_PROCESSES,
    (4, "features"): (
        dict(plan="1,2,2", shard=True),
        dict(plan="2,1,2", stage_layers="2,1", microbatches=2),
        dict(plan="2,2,1", stage_layers="1,2", shard=True),
    ),
}


@cache
def graph() -> Graph:
    return synthetic_graph(num_nodes=100, num_classes=3, in_features=8, seed=0)


def config(out: Path, **changes: Any) -> mg.TrainConfig:
    """Six steps an epoch, three epochs, dropout on."""
    small = dict(
        layers=3,
        dim=16,
        ffn_dim=16,
        heads=2,
        samples=2,
        sample_nodes=6,
        channels=3,
        epochs=3,
        batch_size=10,
        learning_rate=1e-2,
        device="cpu",
        dtype="fp64",
        checkpoint_every=2,
        out=out,
    )
    return mg.TrainConfig(**(small | changes))


class Stopped(Exception):
    pass


@contextmanager
def stop_at(step: int | None):
    """Let a run stop as if killed, before a step: nothing is written any more."""
    real = epochs.Epochs._train_step

    def train_step(self, *arguments):
        if self.step == step:
            raise Stopped
        return real(self, *arguments)

    with patch.object(epochs.Epochs, "_train_step", train_step), suppress(Stopped):
        yield
    for thread in threading.enumerate():  # a process that is killed has none
        if thread.name.startswith("megagraph-checkpoint"):
            thread.join()


def outcome(run: Path) -> dict[str, Any]:
    """All that a run leaves behind, but for the times."""
    opened = Run.open(run)
    lines = [{k: v for k, v in line.items() if not k.endswith("seconds")} for line in opened.metrics()]
    return {"lines": lines, "weights": opened.weights()}


def chain(
    folder: Path, embedding: str, plans: tuple[dict[str, Any], ...], stops: tuple[int, ...] = STOPS
) -> dict[str, Any]:
    """A run that goes on under another plan after every stop."""
    run = folder / embedding
    for plan, stop in zip(plans, (*stops, None), strict=True):
        trainer = (
            mg.Trainer.resume(run, **plan)
            if run.exists()
            else mg.Trainer(config(run, embedding=embedding, epochs=EPOCHS, **plan))
        )
        with stop_at(stop):
            trainer.fit(graph())
    return outcome(run)


def same_plan(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run of four replicas, and one that is stopped and goes on: more than two summands have an order."""
    plan = dict(plan="1,2,2")
    mg.Trainer(config(folder / "whole", epochs=EPOCHS, **plan)).fit(graph())
    stopped = chain(folder, "features", (plan, plan), STOPS[1:])
    return outcome(folder / "whole"), stopped


def checkpoint_cases(world_size: int, folder: str) -> dict[str, Callable]:
    cases: dict[str, Callable] = {
        f"resume {embedding}": partial(chain, Path(folder), embedding, plans)
        for (processes, embedding), plans in CHAINS.items()
        if processes == world_size
    }
    if world_size == 2:
        cases["not shared"] = partial(not_shared, Path(folder) / "own")
        cases["another save"] = partial(not_shared, Path(folder) / "older", save="an older one")
    return cases | ({"resume same plan": partial(same_plan, Path(folder) / "same")} if world_size == 4 else {})


def not_shared(folder: Path, **begun: str) -> str:
    """Each rank has a disk of its own, and there a copy of the run, in which a save has begun."""
    own = folder / str(rank())
    (own / "step-000001").mkdir(parents=True)
    files.write_json(own / "step-000001" / "begun.json", {"run": ""} | begun)
    checkpoints = Checkpoints(own)
    checkpoints.save(1, small_state(), {})
    return message_of(checkpoints.wait)


def small_state(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {name: torch.full((200, 300), value) for name in ("a", "layers.0.b", "layers.0.c")}


def values(state: dict[str, torch.Tensor]) -> set[float]:
    """The distinct numbers in it."""
    return {float(x) for tensor in state.values() for x in tensor.unique()}


def save_until_killed(folder: Path, saved: Connection) -> None:
    """Go on from the newest checkpoint, if any, and write one after the other."""
    torch.set_num_threads(1)
    checkpoints, done = Checkpoints(folder), 0
    if folder.exists():
        _, progress = checkpoints.load(small_state())
        done = progress["step"]
    for step in count(done + 1):
        checkpoints.save(step, small_state(float(step)), {"step": step})
        checkpoints.wait()
        saved.send(step)
