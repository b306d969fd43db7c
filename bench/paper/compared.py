"""What the rows of bench.paper.accuracy say of each other: `python -m bench.paper.compared` prints it, and writes it to
bench/results/cpu/accuracy/judgement.json, which docs/accuracy.md is held to.

Of every graph that has rows: the systems that have all their seeds, and others so far; ours against the same model with
the bias of other nodes; with a convolution against without, and there against the same with the bias of other nodes;
against GCN, and a GCN with labels among its input, too; and against the one of GCN, GraphSAGE and GAT that is best on
validation nodes, once all three have theirs.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable
from typing import Any

import numpy as np
import tyro

from bench.paper.accuracy import Piece, partitions_of, pieces, rows_of, settings_by
from bench.paper.trials import COMPARED, CONVOLVED, LABELLED, of_name
from bench.provenance import RESULTS, write_judgement
from megagraph.objective import roc_auc

FOLDER = RESULTS / "cpu" / "accuracy"
CLASSIC = ("gcn", "sage", "gat")
RESAMPLES = 1000


def is_done(name: str, system: str) -> bool:
    """Whether all that is reported of a system has been trained."""
    rows = rows_of(name)
    return all(any(map(piece.is_of, rows)) for piece in pieces(name) if piece.system == system and piece.trial is None)


def reported(name: str, system: str) -> dict[int, dict[str, Any]]:
    """``reported_of`` the rows of a set."""
    return reported_of(rows_of(name), system)


def reported_of(rows: list[dict[str, Any]], system: str) -> dict[int, dict[str, Any]]:
    """The rows of a system that are not of tuning, by seed; the last of each, which is of the trial chosen last.

    Of those whose steps are on partitions and those whose are not: which have more seeds, or as many and are better on
    validation nodes.
    """
    found: dict[int, dict[int, dict[str, Any]]] = {1: {}}
    for row in rows:
        if row["system"] == system and row["trial"] is None:
            found.setdefault(partitions_of(row), {})[row["seed"]] = row

    def merit(by_seed: dict[int, dict[str, Any]]) -> tuple[int, float]:
        return len(by_seed), _mean([*by_seed.values()], "best_val") if by_seed else 0.0

    return max(found.values(), key=merit)


def are_outdated(rows: list[dict[str, Any]]) -> bool:
    """Whether reports of a system are of other settings than those that its trials choose today."""
    first = rows[0]
    piece = Piece(first["set"], first["system"], None, first["seed"], partitions_of(first))
    now = settings_by(first["tuned_on"], piece)
    return any(row["settings"] != now for row in rows)


def difference(name: str, one: str, other: str) -> tuple[float, float, float] | None:
    """Mean of one - other over the seeds that both have, in points, and its 95 % interval by bootstrap over seeds and
    test nodes; ``None`` where they have none."""
    first, second = reported(name, one), reported(name, other)
    pairs = [(first[seed], second[seed]) for seed in sorted(first.keys() & second.keys())]
    if not pairs:
        return None
    rng = np.random.default_rng(0)
    values = [[measured_by(row) for row in pair] for pair in pairs]
    sizes = [row["test_nodes"] for row, _ in pairs]

    def mean(chosen: np.ndarray, nodes: list[np.ndarray]) -> float:
        return 100 * float(np.mean([values[i][0](at) - values[i][1](at) for i, at in zip(chosen, nodes, strict=True)]))

    def resampled() -> float:
        chosen = rng.integers(len(pairs), size=len(pairs))
        return mean(chosen, [rng.integers(sizes[i], size=sizes[i]) for i in chosen])

    low, high = np.percentile([resampled() for _ in range(RESAMPLES)], [2.5, 97.5])
    return mean(np.arange(len(pairs)), [np.arange(size) for size in sizes]), float(low), float(high)


def measured_by(row: dict[str, Any]) -> Callable[[np.ndarray], float]:
    """Accuracy or ROC AUC of some of the test nodes."""
    right = _bits(row["right"], row["test_nodes"])
    if "scores" not in row:
        return lambda nodes: float(right[nodes].mean())
    scores = np.frombuffer(b64decode(row["scores"]), "<f2").astype(np.float32)
    labels = _bits(row["labels"], row["test_nodes"]).astype(np.int64)
    return lambda nodes: roc_auc(np.stack([1 - scores, scores], axis=1), labels, nodes) or 0.0


def _bits(packed: str, count: int) -> np.ndarray:
    return np.unpackbits(np.frombuffer(b64decode(packed), np.uint8), count=count)


def compared(name: str) -> dict[str, Any]:
    """What a set shows: means and standard deviations in percent, minutes of one core a training, differences in points
    with a 95 % interval."""
    begun = {system: [*rows.values()] for system in of_name(name).systems if (rows := reported(name, system))}
    systems = {system: rows for system, rows in begun.items() if is_done(name, system)}
    found: dict[str, Any] = {"tests": {system: _spread(rows) for system, rows in systems.items()}}
    found["minutes"] = {system: _mean(rows, "cpu_seconds") / 60 for system, rows in systems.items()}
    found["so_far"] = {system: _spread(rows) for system, rows in begun.items() if system not in systems}
    found["partitions"] = {system: n for system, rows in systems.items() if (n := partitions_of(rows[0])) > 1}
    found["outdated"] = [system for system, rows in begun.items() if are_outdated(rows)]
    validation = {system: _mean(rows, "best_val") for system, rows in systems.items()}
    if {"megagraph", "megagraph-unbiased"} <= systems.keys():
        found["structure"] = _against(name, "megagraph-unbiased") | _learned(systems["megagraph"])
    if {"megagraph", *CONVOLVED} <= systems.keys():
        one, other = CONVOLVED
        found["convolution"] = _against(name, "megagraph", one)
        found["structure_beside_convolution"] = _against(name, other, one)
    if {"megagraph", "gcn", *LABELLED} <= systems.keys():
        found["labels"] = _against(name, "gcn", *LABELLED)
        found["gcn_with_labels"] = _against(name, *LABELLED)
    if {"megagraph", "gcn"} <= systems.keys():
        found["gcn"] = _against(name, "gcn")
    if {"megagraph", *CLASSIC} <= systems.keys():
        best = max(CLASSIC, key=validation.__getitem__)
        found["baseline"] = found["gcn"] if best == "gcn" else _against(name, best)
    return found


def _mean(rows: list[dict[str, Any]], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))


def _spread(rows: list[dict[str, Any]]) -> list[float]:
    deviation = np.std([row["test"] for row in rows], ddof=min(1, len(rows) - 1))
    return [100 * _mean(rows, "test"), 100 * float(deviation)]


def _against(name: str, other: str, one: str = "megagraph") -> dict[str, Any]:
    found = difference(name, one, other)
    assert found is not None, "both have all their seeds"
    return {"against": other, "points": found[0], "interval": list(found[1:])}


def _learned(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """How far the bias went from where it began, and what classes depend on it: least and most of the seeds."""
    return {
        name: [min(values), max(values)]
        for name in ("bias_changed_classes", "bias_correlation", "bias_norm", "bias_start_norm")
        for values in [[row[name] for row in rows]]
    }


def show(name: str, found: dict[str, Any]) -> None:
    """Print what a set shows, also of systems that lack a seed, and what ours is ahead by."""
    print(f"\n{name}")
    for system in of_name(name).systems:
        if not (rows := [*reported(name, system).values()]):
            continue
        mean, deviation = _spread(rows)
        on = f", steps on {n} partitions" if (n := partitions_of(rows[0])) > 1 else ""
        on += ", not those chosen today" if system in found["outdated"] else ""
        print(
            f"  {system:28} test {mean:5.2f} +- {deviation:4.2f} ({len(rows)} seeds), "
            f"validation {100 * _mean(rows, 'best_val'):5.2f}, settings of {rows[0]['tuned_on']}{on}"
        )
    verdicts = [found[kind] for kind in ("structure", "gcn", "gcn_with_labels", "baseline") if kind in found]
    for verdict in {verdict["against"]: verdict for verdict in verdicts}.values():
        _show_difference("megagraph", verdict)
    pairs = {"convolution": CONVOLVED[0], "structure_beside_convolution": CONVOLVED[0], "labels": LABELLED[0]}
    for kind, one in pairs.items():
        if kind in found:
            _show_difference(one, found[kind])


def _show_difference(one: str, verdict: dict[str, Any]) -> None:
    text = "  {} - {}: {:+.2f} [{:+.2f}, {:+.2f}] points"
    print(text.format(one, verdict["against"], verdict["points"], *verdict["interval"]))


def main() -> None:
    """Judge what there is."""
    others = sorted({path.stem for path in FOLDER.glob("*.jsonl")} - {*COMPARED})
    found = {name: compared(name) for name in (*COMPARED, *others)}
    for name, of_set in found.items():
        show(name, of_set)
    paths = [path for name in found if (path := FOLDER / f"{name}.jsonl").exists()]
    write_judgement(FOLDER / "judgement.json", found, *paths)


if __name__ == "__main__":
    tyro.cli(main)
