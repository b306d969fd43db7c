"""Memory and time of a training step of a deep model, beside eager ANS-GT of the same weights.

    python -m bench.paper.step_memory steps                  # both on one random batch of every size
    python -m bench.paper.step_memory losses --root DATA     # both trained on the same batches of real graphs, in fp64

Steps: each contender is a process of its own, which reads its highest resident set before the model is made, but after
a step of a small one, and at the end. They make steps in turn, ROUNDS after one to warm up. Asked at the first size:
memory at most MEMORY of the eager model's, time at most TIME (medians).
Losses: LOSS_STEPS steps without dropout; the largest relative difference is at most LOSS.

Fixed: 16 layers, 8 heads, d = ffn = 64, 4 channels and a global token (the paper's Fig. on memory), fp32, dropout 0.1
of hidden states and scores, 2 threads, seed 0; for losses 4 layers of 64, batches of 32 targets, AdamW, 2e-4.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing as mp
import tyro

from bench.paper.epoch_time import Contender, EagerANSGT
from bench.processes import peak_resident
from bench.provenance import PACKAGE, sized, write_rows
from megagraph.config import TrainConfig
from megagraph.data.datasets import load_graph
from megagraph.data.loader import Loader
from megagraph.evaluate import batches, choose_split
from megagraph.models.config import ModelConfig
from megagraph.models.hierarchical import HierarchicalGT

SIZES = sized(((145, 256), (145, 64), (33, 256), (289, 64)), quick=((145, 8),))  # nodes and sequences
ROUNDS, LOSS_STEPS = sized((5, 20), quick=(1, 5))
MEMORY, TIME, LOSS, SEED = 0.25, 0.5, 1e-9, 0
FEATURES, CLASSES, CHANNELS = 64, 8, 4


def config(layers: int, **options: Any) -> ModelConfig:
    sizes = {"layers": layers, "dim": 64, "ffn_dim": 64, "heads": 8, "bias": "projected", "bias_size": CHANNELS + 1}
    sizes |= {"in_features": FEATURES, "num_classes": CLASSES}
    return ModelConfig(**(sizes | options))


def random_batch(nodes: int, sequences: int) -> Any:
    """What both models read of a batch; the last node is the global token."""
    generator = torch.Generator().manual_seed(SEED)
    inputs = {
        "features": torch.randn(sequences * (nodes - 1), FEATURES, generator=generator),
        "node_index": torch.arange(sequences * (nodes - 1)).view(sequences, nodes - 1),
        "structure": torch.rand(sequences, CHANNELS + 1, nodes, nodes, generator=generator),
        "key_padding_mask": torch.zeros(sequences, nodes, dtype=torch.bool),
    }
    return SimpleNamespace(
        **inputs,
        labels=torch.randint(0, CLASSES, (sequences, 1), generator=generator),
        num_targets=sequences,
        sequence_ids=torch.arange(sequences),
        model_inputs=lambda key: inputs | {"dropout_key": key},
    )


def contender(name: str, given: ModelConfig) -> Contender:
    torch.manual_seed(SEED)
    model = HierarchicalGT(given)
    if name == "ours":
        return Contender(name, model)
    eager = EagerANSGT(given)
    eager.take(model)
    return Contender(name, eager)


def _worker(pipe: Connection, name: str, nodes: int, sequences: int) -> None:
    torch.set_num_threads(2)
    rates = {"dropout": 0.1, "input_dropout": 0.1, "attention_dropout": 0.1}
    contender(name, config(1, **rates)).train_step(random_batch(9, 2), 0)  # loads what is compiled
    before = peak_resident()
    own, batch = contender(name, config(16, **rates)), random_batch(nodes, sequences)
    step = 0
    while pipe.recv():
        own.train_step(batch, step)
        pipe.send(own.seconds[-1])
        step += 1
    pipe.send(peak_resident() - before)


def steps(sizes: tuple[tuple[int, int], ...] = SIZES) -> None:
    """Measure, print, and write bench/results/cpu/step_memory.json."""
    rows = []
    for nodes, sequences in sizes:
        pipes, processes, spawn = {}, [], mp.get_context("spawn")
        for name in ("ours", "eager"):
            pipes[name], other = spawn.Pipe()
            processes.append(spawn.Process(target=_worker, args=(other, name, nodes, sequences), daemon=True))
            processes[-1].start()
            other.close()
        seconds: dict[str, list[float]] = {name: [] for name in pipes}
        for turn in range(ROUNDS + 1):
            for name, pipe in pipes.items():
                pipe.send(True)
                spent = pipe.recv()
                if turn:
                    seconds[name].append(spent)
        peaks = {}
        for name, pipe in pipes.items():
            pipe.send(False)
            peaks[name] = pipe.recv()
        for process in processes:
            process.join()
        row = {"nodes": nodes, "sequences": sequences, "unit": "s", "seconds": seconds, "peak_bytes": peaks}
        rows.append(row)
        parts = {
            "memory": (peaks["ours"] / peaks["eager"], MEMORY),
            "time": (median(seconds["ours"]) / median(seconds["eager"]), TIME),
        }
        print(
            f"N = {nodes}, {sequences} sequences: ours {peaks['ours'] / 2**20:.0f} MiB, {median(seconds['ours']):.2f} s"
        )
        for what, (part, most) in parts.items():
            verdict = "" if len(rows) > 1 else f", at most {most}: {'holds' if part <= most else 'FAILS'}"
            print(f"  {what} {part:.3f} of the eager model's{verdict}")
        write_rows("step_memory", rows, folder="cpu", children=PACKAGE)


def losses(root: Path, datasets: tuple[str, ...] = sized(("cora", "computers"), quick=("cora",))) -> None:
    """Train both, print the largest difference, and write bench/results/cpu/step_losses.json."""
    rows = []
    for dataset in datasets:
        options = TrainConfig(dataset=dataset, root=root, seed=SEED, layers=4, dim=64, ffn_dim=64)
        graph = load_graph(dataset, root)
        builder = batches(options, graph)
        given = config(
            4,
            in_features=graph.in_features,
            num_classes=graph.num_classes,
            bias_size=builder.structure.size,
            **{name: 0.0 for name in ("dropout", "input_dropout", "attention_dropout")},
        )
        pair = [contender(name, given) for name in ("ours", "eager")]
        for each in pair:
            each.model.double()
        loader = Loader(builder, choose_split(graph, options).train, batch_size=32, seed=SEED, shuffle=True)
        found: list[list[float]] = [[], []]
        for step, batch in enumerate(loader.epoch(0)):
            if step == LOSS_STEPS:
                break
            batch = batch.map(lambda x: x.double() if x.is_floating_point() else x)
            for each, values in zip(pair, found, strict=True):
                values.append(each.loss(batch, step).item())
                each.train_step(batch, step)
        off = max(abs(a - b) / abs(b) for a, b in zip(*found, strict=True))
        print(
            f"{dataset}: {len(found[0])} losses, from {found[0][0]:.4f} to {found[0][-1]:.4f}; {off:.1e} apart, ",
            end="",
        )
        print(f"at most {LOSS}: {'holds' if off <= LOSS else 'FAILS'}")
        rows.append({"dataset": dataset, "ours": found[0], "eager": found[1], "difference": off, "unit": "loss"})
    write_rows("step_losses", rows, folder="cpu")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"steps": steps, "losses": losses})
