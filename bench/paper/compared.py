"""What the rows of bench.paper.accuracy say of each other: `python -m bench.paper.compared` writes them to
bench/results/cpu/accuracy/judgement.json, which docs/accuracy.md is held to.

Of every graph: the systems that have all their seeds; ours against the same model with the bias of other nodes; and
against the one of GCN, GraphSAGE and GAT that is best on validation nodes, once all three have theirs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tyro

from bench.paper.accuracy import difference, is_done, partitions_of, reported
from bench.paper.trials import COMPARED, SETS
from bench.provenance import RESULTS, write_judgement

FOLDER = RESULTS / "cpu" / "accuracy"
CLASSIC = ("gcn", "sage", "gat")


def compared(name: str) -> dict[str, Any]:
    """Of a set: means and standard deviations in percent, minutes of one core a training, differences in points with a
    95 % interval."""
    systems = {system: [*reported(name, system).values()] for system in SETS[name].systems if is_done(name, system)}
    found: dict[str, Any] = {"tests": {system: _spread(rows) for system, rows in systems.items()}}
    found["minutes"] = {system: _mean(rows, "cpu_seconds") / 60 for system, rows in systems.items()}
    found["partitions"] = {system: n for system, rows in systems.items() if (n := partitions_of(rows[0])) > 1}
    validation = {system: _mean(rows, "best_val") for system, rows in systems.items()}
    if {"megagraph", "megagraph-unbiased"} <= systems.keys():
        found["structure"] = _against(name, "megagraph-unbiased") | _learned(systems["megagraph"])
    if {"megagraph", *CLASSIC} <= systems.keys():
        found["baseline"] = _against(name, max(CLASSIC, key=validation.__getitem__))
    return found


def _mean(rows: list[dict[str, Any]], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))


def _spread(rows: list[dict[str, Any]]) -> list[float]:
    deviation = np.std([row["test"] for row in rows], ddof=min(1, len(rows) - 1))
    return [100 * _mean(rows, "test"), 100 * float(deviation)]


def _against(name: str, other: str) -> dict[str, Any]:
    found = difference(name, "megagraph", other)
    assert found is not None, "both have all their seeds"
    return {"against": other, "points": found[0], "interval": list(found[1:])}


def _learned(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """How far the bias went from where it began, and what classes depend on it: least and most of the seeds."""
    return {
        name: [min(values), max(values)]
        for name in ("bias_changed_classes", "bias_correlation", "bias_norm", "bias_start_norm")
        for values in [[row[name] for row in rows]]
    }


def main() -> None:
    """Judge what there is."""
    found = {name: compared(name) for name in COMPARED}
    paths = [path for name in COMPARED if (path := FOLDER / f"{name}.jsonl").exists()]
    write_judgement(FOLDER / "judgement.json", found, *paths)


if __name__ == "__main__":
    tyro.cli(main)
