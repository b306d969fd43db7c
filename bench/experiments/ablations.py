"""What a part of the CPU path is worth: an epoch with it and without it, batch by batch in turn.

    python -m bench.experiments.ablations --root DATA

Parts: ``packing``, hidden states without the rows of padding; ``short``, sequences row by row with eight heads to a
vector (and packing, which needs it); ``reuse``, memory of large gradients kept for the next step, on one attention
with a dense bias, as no model here has one.

Fixed: Citeseer under the configuration, split, batches and seed of ``bench.paper.epoch_time``, 3 epochs after 5 warm-up
steps, the loader's time in both; ``reuse``: forward and backward of [1, 8, 2048, 8] with a dense plane per head, fp32,
21 rounds after 3.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
import tyro

import megagraph as mg
from bench.paper.epoch_time import ANS_GT, BATCH_SIZE, SEED, Contender, in_turn
from bench.provenance import write_rows
from megagraph.attention import engines, reuse
from megagraph.config import TrainConfig
from megagraph.data.batch import Batch
from megagraph.data.datasets import load_graph
from megagraph.data.loader import Loader
from megagraph.evaluate import batches, choose_split
from megagraph.models.config import ModelConfig
from megagraph.models.hierarchical import HierarchicalGT
from megagraph.models.transformer import GraphTransformer

ROUNDS, WARMUP_ROUNDS = 21, 3


@contextmanager
def without(part: str) -> Iterator[None]:
    """Meanwhile the part does nothing."""
    patches = {
        "packing": [patch.object(GraphTransformer, "_worth_packing", lambda *args: None)],
        "short": [
            patch.object(GraphTransformer, "_worth_packing", lambda *args: None),
            patch.object(engines.Blocked, "takes_short", lambda *args: False),
        ],
        "reuse": [patch.object(reuse, "empty_like", torch.empty_like)],
    }[part]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def epochs(part: str, root: Path) -> tuple[list[float], list[float]]:
    """Seconds of each epoch, with the part and without; both train alike."""
    config = TrainConfig(dataset="citeseer", root=root, seed=SEED, batch_size=BATCH_SIZE, **ANS_GT)
    graph = load_graph("citeseer", root)
    builder = batches(config, graph)
    model_config = ModelConfig(
        in_features=graph.in_features,
        num_classes=graph.num_classes,
        bias_size=builder.structure.size,
        dropout=0.1,
        input_dropout=0.1,
    )
    torch.manual_seed(SEED)
    has, lacks = (Contender(name, HierarchicalGT(model_config)) for name in ("with", "without"))
    lacks.model.load_state_dict(has.model.state_dict())
    loader = Loader(builder, choose_split(graph, config).train, batch_size=BATCH_SIZE, seed=SEED, shuffle=True)

    def train(contender: Contender, batch: Batch, step: int) -> None:
        if contender is has:
            contender.train_step(batch, step)
            return
        with without(part):
            contender.train_step(batch, step)

    seconds = [of_both for of_both, _ in in_turn((has, lacks), loader, train)]
    worst = max(
        (a - b).abs().max().item() for a, b in zip(has.model.parameters(), lacks.model.parameters(), strict=True)
    )
    print(f"{part}: weights differ by {worst:.1e} after {len(seconds)} epochs")
    return [of_one for of_one, _ in seconds], [of_other for _, of_other in seconds]


def dense() -> tuple[list[float], list[float]]:
    torch.manual_seed(SEED)
    q, k, v = (torch.randn(1, 8, 2048, 8, requires_grad=True) for _ in range(3))
    values = torch.randn(1, 8, 2048, 2048, requires_grad=True)

    def run() -> float:
        started = time.perf_counter()
        out = mg.biased_attention(q, k, v, mg.DenseBias(values))
        torch.autograd.grad(out, (q, k, v, values), out)
        return time.perf_counter() - started

    def run_without() -> float:
        with without("reuse"):
            return run()

    found: tuple[list[float], list[float]] = ([], [])
    for i in range(WARMUP_ROUNDS + ROUNDS):
        order: list[tuple[list[float], Callable[[], float]]] = [(found[0], run), (found[1], run_without)]
        for seconds, one in order if i % 2 else reversed(order):
            seconds.append(one())
    return found[0][WARMUP_ROUNDS:], found[1][WARMUP_ROUNDS:]


def main(root: Path) -> None:
    """Print and write the rows bench/results/DEVICE/ablations.json."""
    rows = []
    for part in ("packing", "short", "reuse"):
        has, lacks = dense() if part == "reuse" else epochs(part, root)
        ratios = [without_it / with_it for with_it, without_it in zip(has, lacks, strict=True)]
        row = {"part": part, "unit": "seconds without the part per second with it", "with": has, "without": lacks}
        rows.append(row | {"median": median(ratios), "range": [min(ratios), max(ratios)]})
        print(f"{part}: {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})", flush=True)
    print(write_rows("ablations", rows))


if __name__ == "__main__":
    tyro.cli(main)
