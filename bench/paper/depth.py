"""Accuracy and memory against depth: HierarchicalGT beside GCNs, on Cora; and a training of the paper's own sizes.

    python -m bench.paper.depth series --root DATA     # every depth, model and seed that has no row yet
    python -m bench.paper.depth paper --root DATA      # 16 layers, as the paper sets its models
    python -m bench.paper.depth plot                   # from the rows alone

Series: all models see the whole graph in every step, so that an epoch is a step for each, and have EPOCHS of them; the
test nodes are those of the best epoch on the validation nodes (60/20/20 by seed). Memory is the peak of the bytes of
all tensors alive over two training steps, which counts what compiled loops and operators return, but no temporary
within one. A graph network is looked at every fourth epoch, ours after each.

Fixed before the rows: width 64. HierarchicalGT: FFN 64, 8 heads, pairs one hop apart, a super node and a global token,
rate 2e-3, decay 0.01, dropout 0.5. GCN: torch_geometric's, rate 0.01, decay 5e-4, dropout 0.5, plain as it was
published, and with batch normalisation and residual connections. Seeds 1 to 3, one thread.

Paper: ego sequences of 17 nodes, 16 layers, 8 heads, d = FFN = 64, 4 channels, a global token, batches of 1,024
targets, 100 epochs, rate 2e-4, decay 0.01, as Sec. IV-A says; what it does not say is as `megagraph train` has it, but
for one sequence a target in place of eight; seed 1.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

from bench.paper.baselines import train
from bench.paper.live_bytes import MIB, TRACKED_STEPS, LiveBytes, Rank
from bench.provenance import RESULTS, sized, write_rows
from bench.resume import resumable
from bench.tables import draw, save
from megagraph.config import TrainConfig
from megagraph.data.datasets import load_graph
from megagraph.evaluate import choose_split
from megagraph.train import Trainer

DEPTHS, SEEDS, EPOCHS = sized(((1, 2, 4, 8, 16, 32), (1, 2, 3), 100), quick=((1, 4), (1,), 4))
DATASET, METRIC = "cora", "accuracy"
OURS: dict[str, Any] = dict(
    dataset=DATASET, batching="full", hops=1, top=0, super_nodes=2, heads=8, dim=64, ffn_dim=64, epochs=EPOCHS,
    learning_rate=2e-3, weight_decay=0.01, dropout=0.5, input_dropout=0.5, attention_dropout=0.5, device="cpu",
)  # fmt: skip
PAPER: dict[str, Any] = dict(
    dataset=DATASET, layers=sized(16, quick=2), heads=8, dim=64, ffn_dim=64, channels=4, global_tokens=1, samples=1,
    batch_size=1024, epochs=sized(100, quick=2), learning_rate=2e-4, weight_decay=0.01, seed=1, device="cpu",
)  # fmt: skip
_GCN: dict[str, Any] = dict(hidden=64, learning_rate=0.01, weight_decay=5e-4, dropout=0.5)
GCNS = {"gcn": _GCN | dict(norm="none", residual=False), "gcn-residual": _GCN | dict(norm="batch", residual=True)}
MODELS = ("hierarchical", *GCNS)
NAMES = dict(zip(MODELS, ("HierarchicalGT", "GCN", "GCN, normalised, residual"), strict=True))
FOLDER = RESULTS / "cpu" / "depth"


def trained(given: dict[str, Any], root: Path) -> dict[str, Any]:
    """What a training of the package says at its end, and the peak of its steps."""
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(root=root, out=Path(folder) / "run", checkpoint_every=1 << 20, **given)
        graph = load_graph(config.dataset, root)
        peak = Rank(config, graph, choose_split(graph, config).train).peak_bytes()
        summary = Trainer(config).fit(graph)
    row = {"test": summary.test_accuracy, "best_val": summary.best_val_accuracy, "majority": summary.majority_accuracy}
    names = ("best_epoch", "epochs", "steps", "parameters", "sequence_nodes")
    return row | {name: getattr(summary, name) for name in names} | {"peak_bytes": peak}


def baseline(model: str, layers: int, seed: int, root: Path) -> dict[str, Any]:
    """What a training of a graph network says at its end, and the peak of its steps."""
    graph = load_graph(DATASET, root)
    split = choose_split(graph, TrainConfig(dataset=DATASET, seed=seed))

    def run(epochs: int) -> dict[str, Any]:
        given = GCNS[model] | {"layers": layers, "most_epochs": epochs}
        return train("gcn", graph, split, seed=seed, metric=METRIC, most_seconds=np.inf, **given)[0]

    with LiveBytes() as counted:
        run(TRACKED_STEPS)
    found = run(EPOCHS)
    del found["cpu_seconds"]
    return found | {"peak_bytes": counted.peak}


def missing(
    name: str, pieces: list[dict[str, Any]], again: bool, measure: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Add to the rows of a file those of these pieces that are not there, or are of other sources; or all ``again``."""
    path = FOLDER / f"{name}.json"
    rows = list(filter(resumable, json.loads(path.read_text()))) if path.exists() and not again else []
    for piece in pieces:
        if any(piece.items() <= row.items() for row in rows):
            continue
        row = piece | measure(piece) | {"unit": "fraction correct"}
        print(f"{piece}: test {row['test']:.4f}, {row['peak_bytes'] / MIB:.1f} MiB", flush=True)
        write_rows(name, [*rows, row], folder="cpu/depth")
        rows = json.loads(path.read_text())


def series(root: Path, again: bool = False) -> None:
    """Train what has no row, write bench/results/cpu/depth/series.json and series.svg."""
    torch.set_num_threads(1)
    pieces = [dict(seed=s, layers=n, model=model) for s in SEEDS for model in MODELS for n in DEPTHS]

    def measure(piece: dict[str, Any]) -> dict[str, Any]:
        if piece["model"] in GCNS:
            return baseline(piece["model"], piece["layers"], piece["seed"], root)
        return trained(OURS | {name: piece[name] for name in ("layers", "seed")}, root)

    missing("series", pieces, again, measure)
    plot()


def paper(root: Path, again: bool = False) -> None:
    """Train in the paper's configuration, write bench/results/cpu/depth/paper.json."""
    torch.set_num_threads(1)
    missing("paper", [{"settings": PAPER}], again, lambda _: trained(PAPER, root))


def plot() -> None:
    """Test accuracy with its spread over the seeds, and peak memory, over the layers."""
    rows = json.loads((FOLDER / "series.json").read_text())
    figure, panels = draw(7.5, 3.2, columns=2, sharey=False)
    for model, name in NAMES.items():
        of = {n: [row for row in rows if (row["model"], row["layers"]) == (model, n)] for n in DEPTHS}
        tests = [[100 * row["test"] for row in found] for found in of.values()]
        middle = np.array([np.mean(test) for test in tests])
        spread = [middle - [min(test) for test in tests], [max(test) for test in tests] - middle]
        panels[0].errorbar(DEPTHS, middle, spread, fmt=".-", capsize=2, label=name)
        panels[1].plot(DEPTHS, [max(row["peak_bytes"] for row in found) / MIB for found in of.values()], ".-")
    panels[0].set(ylabel="test accuracy, % (mean, least and most)")
    panels[1].set(ylabel="peak of live tensors of a step, MiB", yscale="log")
    for axes in panels:
        axes.set(xlabel="layers", xscale="log", xticks=DEPTHS, xticklabels=DEPTHS)
        axes.minorticks_off()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    save(figure, rows[0], FOLDER / "series.svg")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"series": series, "paper": paper, "plot": plot})
