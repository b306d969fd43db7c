"""Accuracy on real graphs, all systems tuned alike: ours with and without structure in its bias, Graphormer, GCN,
GraphSAGE, GAT, SGFormer, Polynormer; on two graphs Cluster-GCN, GraphGPS and NodeFormer, too, and on two ours with a
convolution beside attention, with and without structure in its bias.

    python -m bench.paper.accuracy plan                             # what is to be trained, and the hours it may take
    python -m bench.paper.accuracy tuned --root DATA                # what the tuned graphs are like
    python -m bench.paper.accuracy run --root DATA [--minutes 20]   # trains what has no row yet, and stops in time
    python -m bench.paper.compared                                  # what the rows say

Every system has six trials on each of four graphs (``bench/paper/trials.py``), and the same CPU seconds a training. The
trial that is best on the validation nodes of tuning is then trained on other seeds, whose test nodes are reported. A
graph that nobody tuned on takes, for every system, the settings of the tuned one nearest to it (``likeness``), whose
data need not be there. A row is one training, in bench/results/cpu/accuracy/SET.jsonl; it counts as long as its
settings are those of today, also where sources have changed since. Several processes may run at once, each with its
own ``--part``.
"""

from __future__ import annotations

import json
import tempfile
import time
from base64 import b64encode
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

from bench.paper.baselines import EVERY, train
from bench.paper.trials import (
    BASELINES,
    COMPARED,
    CONVOLVED,
    LABELLED,
    MORE_BASELINES,
    OURS,
    PARTITIONED,
    SETS,
    TRIALS,
    TUNING_SEED,
    leader,
    of_name,
    path_of,
)
from bench.provenance import RESULTS, append_row, write_rows
from megagraph.config import TrainConfig
from megagraph.data.datasets import load_graph
from megagraph.data.full import PIECES
from megagraph.data.graph import Graph, Split
from megagraph.evaluate import batches, choose_split, class_probabilities, make_loader, open_run
from megagraph.train import Trainer

FOLDER = "accuracy"
TUNED = "tuned"  # the file that says what these are like
SYSTEMS = (*BASELINES, *OURS, *MORE_BASELINES, *CONVOLVED, *LABELLED)


@dataclass(frozen=True)
class Piece:
    """One training: a trial of tuning, or a seed of the report."""

    set: str
    system: str
    trial: int | None
    seed: int
    partitions: int = 1

    def is_of(self, row: dict[str, Any]) -> bool:
        return (row["set"], row["system"], row["trial"], row["seed"], partitions_of(row)) == (
            self.set, self.system, self.trial, self.seed, self.partitions,
        )  # fmt: skip


def partitions_of(row: dict[str, Any]) -> int:
    """Number of partitions that a training took its steps on."""
    return row["settings"].get("partitions", 1)


def pieces(name: str) -> list[Piece]:
    """All of a set, tuning first. ``FOLLOWERS`` have no trials of their own."""
    chosen = of_name(name)
    tuned = [system for system in chosen.systems if chosen.tuned and system in TRIALS]
    trials = [
        Piece(name, system, trial, seed)
        for seed in chosen.tuning_seeds
        for system in tuned
        for trial in range(len(TRIALS[system]))
    ]
    seeds = range(TUNING_SEED + 1, TUNING_SEED + 1 + chosen.seeds)
    steps = {system: (1, chosen.partitions) for system in PARTITIONED if chosen.partitions > 1}
    steps |= {system: (chosen.labelled_partitions,) for system in LABELLED}
    return trials + [
        Piece(name, system, None, seed, partitions)
        for system in chosen.systems
        for partitions in steps.get(system, (1,))
        for seed in seeds
    ]


def rows_of(name: str) -> list[dict[str, Any]]:
    path = RESULTS / "cpu" / FOLDER / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@cache
def graph_of(name: str, root: Path, seed: int) -> tuple[Graph, Split]:
    """A set and its split number ``seed``."""
    chosen = of_name(name)
    dataset = path_of(chosen.dataset, root)
    graph = load_graph(dataset, root, seed)
    return graph, choose_split(graph, TrainConfig(dataset=dataset, root=root, seed=seed, split=chosen.split))


def likeness(name: str, root: Path) -> np.ndarray:
    """What graphs are compared by: log10 of nodes and of mean degree, and twice the adjusted homophily.

    Homophily (Platonov et al., 2023) is that of the edges between training nodes of the tuning seed.
    """
    graph, split = graph_of(name, root, TUNING_SEED)
    known = np.zeros(graph.num_nodes, bool)
    known[split.train] = True
    edges = graph.adjacency.tocoo()
    inside = known[edges.row] & known[edges.col]
    ends = graph.labels[edges.row[inside]], graph.labels[edges.col[inside]]
    expected = np.square(np.bincount(ends[0], minlength=graph.num_classes) / max(len(ends[0]), 1)).sum()
    homophily = ((ends[0] == ends[1]).mean() - expected) / (1 - expected)
    return np.array([np.log10(graph.num_nodes), np.log10(graph.num_edges / graph.num_nodes), 2 * homophily])


@cache
def nearest(name: str, root: Path) -> str:
    """The tuned set whose settings a set takes: itself, where it was tuned."""
    if of_name(name).tuned:
        return name
    rows = json.loads((RESULTS / "cpu" / FOLDER / f"{TUNED}.json").read_text())
    own, of_tuned = likeness(name, root), {row["set"]: row["likeness"] for row in rows}
    return min(of_tuned, key=lambda other: float(np.linalg.norm(of_tuned[other] - own)))


def settings_of(piece: Piece, root: Path) -> tuple[dict[str, Any] | None, str]:
    """Settings of a piece, ``None`` while tuning is not done, and the name of the set that they were tuned on."""
    of = piece.set if piece.trial is not None else nearest(piece.set, root)
    return settings_by(of, piece), of


def settings_by(of: str, piece: Piece) -> dict[str, Any] | None:
    """Settings of a piece, tuned on ``of``; ``None`` while that is not done."""
    system, changes = leader(piece.system)
    if piece.trial is not None:
        return TRIALS[system][piece.trial]
    if (best := best_trial(of, system)) is None:
        return None
    settings = TRIALS[system][best] | changes
    if piece.partitions > 1:
        settings = settings | {"partitions": piece.partitions} | ({"evaluate_every": EVERY} if system in OURS else {})
    return settings


def best_trial(name: str, system: str) -> int | None:
    """By the mean over tuning seeds of the best validation, of those within the CPU seconds; ``None`` while any has no
    row, or none is within them."""
    rows, values = rows_of(name), {trial: [] for trial in range(len(TRIALS[system]))}
    for piece in pieces(name):
        if piece.system == system and piece.trial is not None:
            tried = (row for row in rows if piece.is_of(row) and row["settings"] == TRIALS[system][piece.trial])
            if (row := next(tried, None)) is None:
                return None
            # a baseline looks at its clock after an epoch
            within = row["cpu_seconds"] <= 1.1 * of_name(name).most_seconds
            values[piece.trial].append(row["best_val"] if within else float("-inf"))
    best = max(values, key=lambda trial: np.mean(values[trial]))
    return best if np.isfinite(np.mean(values[best])) else None


def ours(piece: Piece, settings: dict[str, Any], graph: Graph, split: Split, root: Path) -> dict[str, Any]:
    """One run of the package, and what it says of the test nodes where it is reported."""
    chosen = of_name(piece.set)
    model: dict[str, Any] = {"model": "graphormer"} if piece.system == "graphormer" else {}
    epochs = chosen.epochs if piece.partitions == 1 else chosen.partition_epochs
    model |= {"epochs": epochs, "checkpoint_every": epochs * piece.partitions}
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            **dict(dataset=path_of(chosen.dataset, root), root=root, seed=piece.seed, out=Path(folder) / "run"),
            **dict(split=chosen.split, metric=chosen.metric, device="cpu", **settings | model),  # as baselines
        )
        summary = Trainer(config).fit(graph)
        seconds = time.process_time() - started
        roc = chosen.metric == "roc_auc"
        row = {
            "best_val": summary.best_val_roc_auc if roc else summary.best_val_accuracy,
            "test": summary.test_roc_auc if roc else summary.test_accuracy,
            "best_epoch": summary.best_epoch,
            "epochs": summary.epochs,
            "cpu_seconds": round(seconds, 1),
            "sequence_nodes": summary.sequence_nodes,
            "parameters": summary.parameters,
            "power_scope": summary.power_scope,
        }
        row |= {key: getattr(summary, key) for key in vars(summary) if key.startswith("bias_")}
        if piece.trial is None:
            opened = open_run(config.out, graph, {})
            loader = make_loader(opened.config, batches(opened.config, graph), split.test)
            row |= outcome(class_probabilities(opened.pipeline, loader), graph, split, chosen.metric)
    return row


def outcome(probabilities: np.ndarray, graph: Graph, split: Split, metric: str) -> dict[str, Any]:
    """What is kept of test nodes: which are right; for ROC AUC also probabilities of class 1 in fp16, and labels."""
    scores, labels = probabilities[split.test], graph.labels[split.test]
    found = {"test_nodes": len(labels), "right": _packed(np.packbits(scores.argmax(axis=1) == labels))}
    if metric == "roc_auc":
        found |= {"scores": _packed(scores[:, -1].astype("<f2")), "labels": _packed(np.packbits(labels == 1))}
    return found


def _packed(array: np.ndarray) -> str:
    return b64encode(array.tobytes()).decode()


def run_piece(piece: Piece, settings: dict[str, Any], of: str, root: Path) -> dict[str, Any]:
    chosen = of_name(piece.set)
    graph, split = graph_of(piece.set, root, piece.seed)
    system, _ = leader(piece.system)
    if system in OURS:
        row = ours(piece, settings, graph, split, root)
    else:
        given = {name: value for name, value in settings.items() if name != "partitions"}
        if piece.partitions > 1:  # dealt out anew every epoch, as ours are
            given |= {"clusters": PIECES * piece.partitions, "clusters_together": PIECES}
        row, probabilities = train(
            system, graph, split, seed=piece.seed, metric=chosen.metric, most_seconds=chosen.most_seconds, **given
        )
        if piece.trial is None:
            row |= outcome(probabilities, graph, split, chosen.metric)
    unit = "area under the ROC curve" if chosen.metric == "roc_auc" else "fraction correct"
    origin = {"set": piece.set, "system": piece.system, "trial": piece.trial, "seed": piece.seed, "unit": unit}
    return origin | {"split": chosen.split, "tuned_on": of, "settings": settings} | row


def run(
    root: Path,
    sets: tuple[str, ...] = COMPARED,
    systems: tuple[str, ...] = SYSTEMS,
    minutes: float = 20.0,
    part: str = "0/1",
) -> None:
    """Train what has no row, until the time is over.

    Args:
        root: folder of the raw data sets.
        sets, systems: which of them; a set is one of the plan or any data set of ``megagraph train``.
        minutes: nothing is begun that may end later than this.
        part: i/n, every n-th piece from the i-th on.
    """
    if unknown := sorted({*systems} - {*SYSTEMS}):
        raise SystemExit(f"expected --systems of {', '.join(SYSTEMS)}, got {', '.join(unknown)}")
    own, _, parts = (int(word) if word.isdecimal() else -1 for word in part.partition("/"))
    if not 0 <= own < parts:
        raise SystemExit(f"expected --part i/n with 0 <= i < n, as 0/2 and 1/2, got {part}")
    torch.set_num_threads(1)
    ends = time.monotonic() + 60 * minutes
    waiting: dict[tuple[str, str], list[str]] = {}
    for number, piece in enumerate(piece for name in sets for piece in pieces(name) if piece.system in systems):
        if number % parts != own:
            continue
        settings, of = settings_of(piece, root)
        if settings is None:
            waiting.setdefault((piece.set, of), []).append(piece.system)
            continue
        if any(row["settings"] == settings for row in filter(piece.is_of, rows_of(piece.set))):
            continue
        if time.monotonic() + of_name(piece.set).most_seconds > ends:
            break
        row = run_piece(piece, settings, of, root)
        append_row(f"{FOLDER}/{piece.set}", row)
        what = f"seed {piece.seed}" if piece.trial is None else f"trial {piece.trial}"
        print(
            f"{piece.set} {piece.system} {what}: validation {row['best_val']:.4f}, test {row['test']:.4f}, "
            f"{row['cpu_seconds']:.0f} CPU s",
            flush=True,
        )
    for (name, of), systems in waiting.items():
        print(f"{name}: {', '.join(dict.fromkeys(systems))} cannot be reported before they are tuned: run --sets {of}")


def plan() -> None:
    """What there is to train, and the hours that it takes at most."""
    total = 0.0
    for name, chosen in SETS.items():
        own = pieces(name)
        hours = len(own) * chosen.most_seconds / 3600
        total += hours
        done = sum(any(map(piece.is_of, rows_of(name))) for piece in own)
        print(f"{name:16} {len(own):4} trainings, at most {hours:5.1f} h of one core, {done} have a row")
    print(f"all of them at most {total:.1f} h of one core, {total / 2:.1f} h of two")


def tuned(root: Path) -> None:
    """Write what the tuned graphs are like, by which another one is compared to them.

    Args:
        root: folder of the raw data sets.
    """
    unit = "log10 of nodes, log10 of mean degree, 2 x homophily"
    names = [name for name, chosen in SETS.items() if chosen.tuned and chosen.systems != BASELINES]
    rows = [{"set": name, "unit": unit, "likeness": likeness(name, root).tolist()} for name in names]
    print(write_rows(f"{FOLDER}/{TUNED}", rows, folder="cpu"))


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"plan": plan, "tuned": tuned, "run": run})
