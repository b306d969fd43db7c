"""Accuracy against time on Citeseer: ours, eager ANS-GT and TorchGT; and of one, two and four processes.

    python -m bench.paper.convergence time --root DATA        # ours and eager ANS-GT, on the same batches
    python -m bench.paper.convergence processes --root DATA   # trainings by the command line, TorchGT's among them
    python -m bench.paper.convergence judge                   # what is asked, from the rows alone, and the figure

Time: both start from the same weights, compute the same without dropout (loss and input gradient, to CLOSE), take the
same batches in turn and are evaluated after every epoch, which counts for neither; a curve is validation and test
accuracy over the seconds of its own steps and of the loader. Said: when each has first got to NEAR below the eager
model's best validation accuracy. Asked: ours sooner, for every seed.
Processes: seconds are those of training, start and evaluation left out; processes have two cores together, so that more
of them show what sharing the work costs. Asked: test accuracies, means over the seeds, at most POINTS from one
process's (paper, Sec. IV-B). TorchGT is Graphormer on METIS clusters whose rows two processes share by heads.

Fixed before the rows: ego sequences of ANS-GT's configuration (bench.paper.epoch_time) but one a target, batches of 32,
AdamW at 2e-4, dropout 0.1, EPOCHS epochs, seeds 0 to 2, 60/20/20 by seed, fp32; time: two threads.
"""

from __future__ import annotations

import json
import tempfile
import time as clock
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

from bench.paper.device_runs import run_of, verdict
from bench.paper.epoch_time import ANS_GT, BATCH_SIZE, Contender, EagerANSGT, compare
from bench.provenance import PACKAGE, RESULTS, sized, write_judgement, write_rows
from bench.tables import draw, markdown, save
from megagraph.config import TrainConfig
from megagraph.data.datasets import load_graph
from megagraph.evaluate import batches, choose_split, make_loader, model_config_of
from megagraph.models.hierarchical import HierarchicalGT

EPOCHS, SEEDS, STEPS = sized((15, (0, 1, 2), None), quick=(2, (0,), 8))
DATASET, NEAR, POINTS, CLOSE = "citeseer", 0.01, 0.002, 1e-4
CONFIG: dict[str, Any] = dict(ANS_GT, samples=1, batch_size=BATCH_SIZE, dropout=0.1, input_dropout=0.1)
_FLAGS = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in CONFIG.items())
_OURS = f"--dataset ROOT:{DATASET} {_FLAGS} --epochs {EPOCHS} --learning-rate 2e-4"
_TORCHGT = (
    f"--dataset ROOT:{DATASET} --model graphormer --batching cluster --sequence-nodes 512 --batch-size 1 "
    f"--layers 4 --dim 128 --ffn-dim 128 --heads 8 --epochs {sized(60, quick=2)} --plan 1,2,1 --comm ulysses"
)
RUNS = {  # processes, and flags
    "one process": (1, _OURS),
    "cp 2": (2, f"{_OURS} --plan 1,2,1"),
    "pp 2, dp 2": (4, f"{_OURS} --plan 2,1,2 --microbatches 2"),
    "TorchGT": (2, _TORCHGT),
}
FOLDER = RESULTS / "cpu" / "convergence"
NAMES = {"ours": "ours", "eager": "eager ANS-GT", "TorchGT": "TorchGT, two processes"}


def _accuracies(
    contender: Contender, loader: Any, labels: np.ndarray, val: np.ndarray, test: np.ndarray
) -> list[float]:
    """Accuracies of the validation and the test nodes."""
    right = np.zeros(len(labels))
    contender.model.eval()
    with torch.no_grad():
        for step, batch in enumerate(loader.epoch(0)):
            real = (batch.target_nodes >= 0).numpy()
            nodes = batch.target_nodes.numpy()[real]
            right[nodes] = contender.scores(batch, step).argmax(dim=-1).numpy()[real] == labels[nodes]
    contender.model.train()
    return [float(right[part].mean()) for part in (val, test)]


def curves(seed: int, root: Path) -> dict[str, list[tuple[float, float, float]]]:
    """Curves of both models: seconds, validation and test accuracy after each epoch."""
    config = TrainConfig(dataset=DATASET, root=root, seed=seed, **CONFIG)
    graph = load_graph(DATASET, root)
    builder, split = batches(config, graph), choose_split(graph, config)
    given = replace(model_config_of(config, graph, builder), bias_unit=(), bias_start=())  # ANS-GT has neither
    torch.manual_seed(seed)
    ours, eager = Contender("ours", HierarchicalGT(given)), Contender("eager", EagerANSGT(given))
    eager.model.take(ours.model)
    loader = make_loader(config, builder, split.train, shuffle=True)
    off = compare(ours, eager, next(iter(loader.epoch(0))))
    assert off < CLOSE, f"the two models do not compute the same: {off:.1e}"
    asked = make_loader(config, builder, np.concatenate([split.val, split.test]))
    found: dict[str, list[tuple[float, float, float]]] = {"ours": [], "eager": []}
    step, loading = 0, 0.0
    for epoch in range(EPOCHS):
        waiting = clock.perf_counter()
        for batch in islice(loader.epoch(epoch), STEPS):
            loading += clock.perf_counter() - waiting
            for each in (ours, eager) if step % 2 else (eager, ours):
                each.train_step(batch, step)
            step += 1
            waiting = clock.perf_counter()
        for each in (ours, eager):
            val, test = _accuracies(each, asked, graph.labels, split.val, split.test)
            found[each.name].append((loading + sum(each.seconds), val, test))
    return found


def time(root: Path) -> None:
    """Train both, write bench/results/cpu/convergence/time.json."""
    torch.set_num_threads(2)
    rows = []
    for seed in SEEDS:
        found = curves(seed, root)
        rows.append({"seed": seed, "unit": "s"} | {f"{name}_curve": curve for name, curve in found.items()})
        print(
            f"seed {seed}: " + ", ".join(f"{name} {c[-1][0]:.1f} s, test {c[-1][2]:.4f}" for name, c in found.items())
        )
    write_rows("time", rows, folder="cpu/convergence")


def processes(root: Path) -> None:
    """Train with every layout, write bench/results/cpu/convergence/processes.json."""
    rows = []
    for name, (count, flags) in RUNS.items():
        for seed in SEEDS:
            with tempfile.TemporaryDirectory() as folder:
                row = run_of(count, f"{flags} --seed {seed}", root.resolve(), Path(folder) / "run")
            rows.append({"run": name, "seed": seed} | row)
            print(f"{name}, seed {seed}: test {row['test_accuracy']:.4f}, {row['curve'][-1][0]:.1f} s", flush=True)
    write_rows("processes", rows, folder="cpu/convergence", children=PACKAGE)


def reached(curve: list[list[float]], least: float) -> float:
    """Seconds until validation accuracy was ``least``, which may be never."""
    return next((seconds for seconds, val, _ in curve if val >= least), np.inf)


def judge() -> None:
    """Print, write judgement.json and curves.svg."""
    paths = [FOLDER / "time.json", FOLDER / "processes.json"]
    pairs, runs = (json.loads(path.read_text()) for path in paths)
    body, ratios = [], []
    for row in pairs:
        least = max(val for _, val, _ in row["eager_curve"]) - NEAR
        ours, eager = (reached(row[f"{name}_curve"], least) for name in ("ours", "eager"))
        ratios.append(eager / ours)
        body.append([str(row["seed"]), f"{100 * least:.1f}", f"{ours:.1f}", f"{eager:.1f}"])
    print(markdown(["seed", "validation, %", "ours, s", "eager, s"], body))
    sooner = all(ratio > 1 for ratio in ratios)
    print(f"ours sooner, for every seed: {verdict(sooner)}")
    tests = {name: [row["test_accuracy"] for row in runs if row["run"] == name] for name in RUNS}
    means = {name: float(np.mean(found)) for name, found in tests.items()}
    for name, found in tests.items():
        print(f"{name}: test {100 * means[name]:.2f} % ({100 * min(found):.2f} to {100 * max(found):.2f})")
    off = {name: abs(means[name] - means["one process"]) for name in ("cp 2", "pp 2, dp 2")}
    for name, points in off.items():
        print(
            f"{name}: {100 * points:.2f} points from one process, at most {100 * POINTS}: {verdict(points <= POINTS)}"
        )
    write_judgement(FOLDER / "judgement.json", {"sooner": ratios, "means": means, "off": off}, *paths)
    _plot(pairs, runs)


def _plot(pairs: list[dict[str, Any]], runs: list[dict[str, Any]]) -> None:
    """Validation accuracy over seconds, a line a seed."""
    of = {name: [row[f"{name}_curve"] for row in pairs] for name in ("ours", "eager")}
    of["TorchGT"] = [row["curve"] for row in runs if row["run"] == "TorchGT"]
    figure, axes = draw(5.0, 3.2)
    for i, (name, found) in enumerate(of.items()):
        for j, curve in enumerate(found):
            seconds, val, _ = zip(*curve, strict=True)
            axes.plot(seconds, [100 * x for x in val], f"C{i}", alpha=0.8, label=NAMES[name] if j == 0 else None)
    axes.set(xlabel="seconds of training", ylabel="validation accuracy, %", xscale="log")
    axes.legend(frameon=False, loc="lower right")
    save(figure, pairs[0], FOLDER / "curves.svg")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"time": time, "processes": processes, "judge": judge})
