"""Real graphs as one sequence each, trained to the end on this machine: seconds, memory, accuracy.

    python -m bench.paper.whole_graphs --root DATA [--sets wordnet30 debian12]

``megagraph train`` in a process of its own, with the settings below, 60/20/20 by seed 0; the graph is loaded, cut into
clusters and its pairs are found in the same seconds. Allowed are ``MOST_SECONDS`` and ``MOST_BYTES`` (USS of the
process tree) on an idle machine. Rows go to bench/results/cpu/whole_graphs/SET.json.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import tyro

from bench.paper.trials import SETS, path_of
from bench.processes import run
from bench.provenance import PACKAGE, sized, write_rows

MOST_SECONDS, MOST_BYTES = 3600, 24 * 2**30
SETTINGS: dict[str, Any] = dict(
    batching="full",
    hops=1,
    top=0,
    propagate=2,
    super_nodes=257,
    layers=4,
    dim=128,
    ffn_dim=128,
    heads=8,
    epochs=sized(120, quick=2),
    learning_rate=3e-3,
    weight_decay=0.01,
    dropout=0.2,
    input_dropout=0.1,
    attention_dropout=0.1,
    seed=0,
    device="cpu",
)


def main(root: Path, sets: tuple[str, ...] = sized(("wordnet30", "debian12"), quick=("wordnet30",))) -> None:
    """Train, print the rows and write them."""
    for name in sets:
        with tempfile.TemporaryDirectory() as folder:
            given = SETTINGS | {"dataset": path_of(SETS[name].dataset, root), "out": Path(folder) / "run"}
            flags = [part for key, value in given.items() for part in (f"--{key.replace('_', '-')}", value)]
            _, took = run("-m", "megagraph", "train", *map(str, flags))
            summary = json.loads((Path(folder) / "run" / "summary.json").read_text(encoding="utf-8"))
        row = {"set": name, "unit": "s", "settings": SETTINGS, **took, "most_seconds": MOST_SECONDS}
        row |= {"most_bytes": MOST_BYTES, "summary": summary}
        print(json.dumps(row, indent=1), flush=True)
        write_rows(name, [row], folder="cpu/whole_graphs", children=PACKAGE)


if __name__ == "__main__":
    tyro.cli(main)
