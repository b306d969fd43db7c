"""Memory and time of a training step of a deep model, beside eager ANS-GT of the same weights.

    python -m bench.paper.step_memory steps                  # both on one random batch of every size
    python -m bench.paper.step_memory host                   # what a step costs whoever starts its kernels
    python -m bench.paper.step_memory losses --root DATA     # both trained on the same batches of real graphs, in fp64
    python -m bench.paper.step_memory errors                 # what bf16 costs both in accuracy, over several draws

Steps: each contender is a process of its own, which reads its resident set before the model is made, but after a step
of a small one, and the highest since then at the end. They make steps in turn, ROUNDS after two to warm up. Asked at
the first size: memory at most MEMORY of the eager model's, time at most TIME (medians). Where there is a GPU they run
on it, one after the other, in bf16 too, the first model also with steps replayed as CUDA graphs, and the peak
is that of CUDA's allocator, all tensors; a contender may run out of memory. Before, loss and input gradient of 16
sequences are compared without dropout, in the median over DRAWS of weights and inputs: they are at most CLOSE from the
eager model's in fp32, in bf16 at most ROUNDED times as far as the eager model's in bf16, in TF32 as in TF32.
Errors: the same alone, of both models that a GPU is asked for, on any device.
Host: two sequences of nine nodes, so that nothing computes long and a step is as long as it takes to call its
operators; both in one process, HOST_ROUNDS steps in turn; and how many operators a step calls. Asked: at most HOST of
the eager model's time. Without a GPU: its kernels are compiled and launched into nothing, and what of a step is not
ours runs on the CPU, which takes less for a call than to start a kernel would.
Losses: LOSS_STEPS steps without dropout; the largest relative difference is at most LOSS.

Fixed: 16 layers, 8 heads, d = ffn = 64, 4 channels and a global token (the paper's Fig. on memory), fp32, dropout 0.1
of hidden states and scores, 2 threads, seed 0; on a GPU 32 layers, 32 heads, d = ffn = 128, too (its ablation); for
losses 4 layers of 64, batches of 32 targets, AdamW, 2e-4.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing as mp
import tyro
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bench.host import stub_driver
from bench.paper.epoch_time import Contender, EagerANSGT, compare
from bench.paper.live_bytes import MIB
from bench.processes import forget_peak, peak_resident
from bench.provenance import PACKAGE, sized, write_rows
from bench.resume import merged
from bench.shapes import DEVICE
from megagraph.attention.bias import aligned_rows
from megagraph.attention.dropout import dropout_keys
from megagraph.config import TrainConfig
from megagraph.data.datasets import load_graph
from megagraph.data.loader import Loader
from megagraph.evaluate import batches, choose_split
from megagraph.models.config import ModelConfig
from megagraph.models.hierarchical import HierarchicalGT
from megagraph.objective import loss_sum
from megagraph.parallel.captured import CapturedSteps

MODELS = {"cpu": ((16, 8, 64),), "cuda": ((16, 8, 64), (32, 32, 128))}  # layers, heads, d
FULL = {"cpu": ((145, 256), (145, 64), (33, 256), (289, 64)), "cuda": ((145, 256),)}  # nodes and sequences
SIZES = sized(FULL[DEVICE], quick=((145, 8),))
CONTENDERS = {"cpu": ("ours", "eager"), "cuda": ("ours", "eager", "ours bf16", "eager bf16")}
TF32 = {"cpu": (), "cuda": ("ours tf32", "eager tf32")}
REPLAYED = {"cpu": (), "cuda": tuple(f"{name} replayed" for name in (*CONTENDERS["cuda"], *TF32["cuda"]))}
ROUNDS, LOSS_STEPS, HOST_ROUNDS, DRAWS = sized((5, 20, 40, 5), quick=(1, 5, 3, 1))
WARM_UP = 2
MEMORY, TIME, HOST, LOSS, CLOSE, ROUNDED, SEED = 0.25, 0.5, 1.2, 1e-9, 1e-3, 2.0, 0
FEATURES, CLASSES, CHANNELS = 64, 8, 4
RATES = {"dropout": 0.1, "input_dropout": 0.1, "attention_dropout": 0.1}


def config(layers: int, **options: Any) -> ModelConfig:
    sizes = {"layers": layers, "dim": 64, "ffn_dim": 64, "heads": 8, "bias": "projected", "bias_size": CHANNELS + 1}
    sizes |= {"in_features": FEATURES, "num_classes": CLASSES}
    return ModelConfig(**(sizes | options))


class Named(Contender):
    """A contender by its name, which says in which precision it computes, and whether as a CUDA graph."""

    def __init__(self, name: str, model: nn.Module) -> None:
        super().__init__(name, model)
        self._captured = CapturedSteps(self._loss_of, list(model.parameters())) if "replayed" in name else None

    def scores(self, batch: Any, step: int) -> Tensor:
        with self._precision():
            return super().scores(batch, step)

    def _precision(self) -> torch.autocast:
        torch.set_float32_matmul_precision("high" if "tf32" in self.name else "highest")  # until another one's scores
        return torch.autocast(DEVICE, torch.bfloat16, enabled="bf16" in self.name)

    def _loss_of(self, labels: Tensor, dropout_key: Tensor, **inputs: Tensor) -> Tensor:
        with self._precision():
            if isinstance(self.model, EagerANSGT):
                scores = self.model(SimpleNamespace(**inputs))
            else:
                scores = self.model(**inputs, dropout_key=dropout_key)
        return loss_sum(scores, labels)

    def gradients(self, batch: Any, step: int) -> Tensor:
        if self._captured is None:
            return super().gradients(batch, step)
        inputs = batch.model_inputs(dropout_keys(SEED, step, batch.sequence_ids))
        return self._captured(batch.num_targets, inputs | {"labels": batch.labels})


def random_batch(nodes: int, sequences: int, name: str = "ours", seed: int = SEED) -> Any:
    """What both models read of a batch; the last node is the global token."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {
        "features": torch.randn(sequences * (nodes - 1), FEATURES, generator=generator),
        "node_index": torch.arange(sequences * (nodes - 1)).view(sequences, nodes - 1),
        "structure": torch.rand(sequences, CHANNELS + 1, nodes, nodes, generator=generator),
        "key_padding_mask": torch.zeros(sequences, nodes, dtype=torch.bool),
    }
    labels = torch.randint(0, CLASSES, (sequences, 1), generator=generator)
    if "bf16" in name:
        inputs["structure"] = inputs["structure"].bfloat16()
    inputs = {field: x.to(DEVICE) for field, x in inputs.items()}
    inputs["structure"] = aligned_rows(inputs["structure"])
    return SimpleNamespace(
        **inputs,
        labels=labels.to(DEVICE),
        num_targets=sequences,
        sequence_ids=torch.arange(sequences),
        model_inputs=lambda key: inputs | {"dropout_key": key.to(DEVICE)},
    )


def contender(name: str, given: ModelConfig, seed: int = SEED) -> Contender:
    torch.manual_seed(seed)
    model = HierarchicalGT(given)
    if name.startswith("ours"):
        return Named(name, model.to(DEVICE))
    eager = EagerANSGT(given)
    eager.take(model)
    return Named(name, eager.to(DEVICE))


class Steps:
    """Those of a contender, one after the other, and the most memory that they take."""

    def __init__(self, name: str, sizes: tuple[int, ...], nodes: int, sequences: int) -> None:
        layers, heads, dim = sizes
        widths = {"heads": heads, "dim": dim, "ffn_dim": dim}
        torch.set_num_threads(2)
        contender(name, config(1, **widths, **RATES)).train_step(random_batch(9, 2, name), 0)  # loads what is compiled
        self._before = self._bytes_before()
        self._own = contender(name, config(layers, **widths, **RATES))
        self._batch, self._step = random_batch(nodes, sequences, name), 0

    def seconds(self) -> float | None:
        """Seconds of the next step; ``None`` where there is not enough memory."""
        try:
            self._own.train_step(self._batch, self._step)
        except torch.OutOfMemoryError:
            return None
        self._step += 1
        return self._own.seconds[-1]

    def peak_bytes(self) -> int:
        return (torch.cuda.max_memory_allocated() if DEVICE == "cuda" else peak_resident()) - self._before

    @staticmethod
    def _bytes_before() -> int:
        if DEVICE == "cpu":
            return forget_peak()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()


def _worker(pipe: Connection, *given: Any) -> None:
    steps = Steps(*given)
    while pipe.recv():
        pipe.send(steps.seconds())
    pipe.send(steps.peak_bytes())


def differences(sizes: tuple[int, ...], names: tuple[str, ...]) -> dict[str, list[float]]:
    """Errors of loss and input gradient, relative to the eager model's in fp32: one a draw of weights and inputs."""
    layers, heads, dim = sizes
    given, found = config(layers, heads=heads, dim=dim, ffn_dim=dim), {name: [] for name in names if name != "eager"}
    for seed in range(DRAWS):
        exact, batch = contender("eager", given, seed), random_batch(145, 16, seed=seed)
        for name, values in found.items():
            values.append(compare(contender(name, given, seed), exact, batch))
    return found


def close(found: dict[str, list[float]]) -> bool:
    """Whether the models compute the same, in the median: ours in 16 bits or TF32 with at most twice the error of the
    eager model in them."""
    middle = {name: median(values) for name, values in found.items()}
    rounded = [kind for kind in ("bf16", "tf32") if f"ours {kind}" in middle]
    return middle["ours"] <= CLOSE and all(middle[f"ours {x}"] <= ROUNDED * middle[f"eager {x}"] for x in rounded)


def errors() -> None:
    """Errors of models of 16 and 32 layers in bf16, beside the eager model's; print, and write
    bench/results/DEVICE/step_errors.json."""
    rows = []
    for sizes in MODELS["cuda"]:
        found = differences(sizes, ("ours", "ours bf16", "eager bf16"))
        rows.append(dict(zip(("layers", "heads", "dim"), sizes, strict=True)) | {"unit": "relative", "errors": found})
        text = ", ".join(f"{name} {median(x):.1e} [{min(x):.1e}, {max(x):.1e}]" for name, x in found.items())
        print(f"{sizes[0]} layers, {sizes[1]} heads, d = {sizes[2]}: {text}: {'holds' if close(found) else 'FAILS'}")
    write_rows("step_errors", rows, children=PACKAGE)


def measure(
    names: tuple[str, ...], sizes: tuple[int, ...], nodes: int, sequences: int
) -> dict[str, tuple[list[float], int | None]]:
    """Seconds of each contender's steps and its peak bytes; ``None`` where it runs out of memory."""
    taken = _taken_alone if DEVICE == "cuda" else _taken_in_turn
    found = {}
    for name, (seconds, peak) in taken(names, sizes, nodes, sequences).items():
        spent = [x for x in seconds[WARM_UP:] if x is not None]
        found[name] = (spent, peak if len(spent) == ROUNDS else None)
    return found


def _taken_alone(names: tuple[str, ...], *given: Any) -> dict[str, tuple[list[float | None], int]]:
    found = {}
    for name in names:
        steps = Steps(name, *given)
        found[name] = ([steps.seconds() for _ in range(WARM_UP + ROUNDS)], steps.peak_bytes())
        del steps
    return found


def _taken_in_turn(names: tuple[str, ...], *given: Any) -> dict[str, tuple[list[float | None], int]]:
    pipes, processes, spawn = {}, [], mp.get_context("spawn")
    for name in names:
        pipes[name], other = spawn.Pipe()
        processes.append(spawn.Process(target=_worker, args=(other, name, *given), daemon=True))
        processes[-1].start()
        other.close()
    seconds: dict[str, list[float | None]] = {name: [] for name in pipes}
    for _ in range(WARM_UP + ROUNDS):
        for name, pipe in pipes.items():
            pipe.send(True)
            seconds[name].append(pipe.recv())
    found = {}
    for name, pipe in pipes.items():
        pipe.send(False)
        found[name] = (seconds[name], pipe.recv())
    for process in processes:
        process.join()
    return found


def steps(sizes: tuple[tuple[int, int], ...] = SIZES) -> None:
    """Measure, print, and write bench/results/DEVICE/step_memory.json, beside rows of other sizes."""
    rows = []
    for (layers, heads, dim), (nodes, sequences) in product(MODELS[DEVICE], sizes):
        apart = differences((layers, heads, dim), CONTENDERS[DEVICE] + TF32[DEVICE])
        assert close(apart), f"off by {apart}"
        off = {name: median(values) for name, values in apart.items()}
        names = CONTENDERS[DEVICE] + (() if rows else REPLAYED[DEVICE])
        found = measure(names, (layers, heads, dim), nodes, sequences)
        seconds, peaks = ({name: of[i] for name, of in found.items()} for i in (0, 1))
        row = {"layers": layers, "heads": heads, "dim": dim, "nodes": nodes, "sequences": sequences, "unit": "s"}
        rows.append(row | {"seconds": seconds, "peak_bytes": peaks, "difference": off})
        print(f"{layers} layers, {heads} heads, d = {dim}, N = {nodes}, {sequences} sequences")
        for name, peak in peaks.items():
            took = "no memory" if peak is None else f"{peak / MIB:.0f} MiB, {median(seconds[name]):.3f} s"
            print(f"  {name}: {took}")
        if peaks["eager"]:  # which may not fit
            parts = {
                "memory": (peaks["ours"] / peaks["eager"], MEMORY),
                "time": (median(seconds["ours"]) / median(seconds["eager"]), TIME),
            }
            for what, (part, most) in parts.items():
                verdict = "" if len(rows) > 1 else f", at most {most}: {'holds' if part <= most else 'FAILS'}"
                print(f"  {what} {part:.3f} of the eager model's{verdict}")
        case = ("layers", "heads", "dim", "nodes", "sequences")
        write_rows("step_memory", merged("step_memory", rows, *case), children=PACKAGE)


class _Calls(TorchDispatchMode):
    """Counts operators, but for views, which start nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _launch_into_nothing() -> None:
    """From here on models take the kernels of a GPU."""
    os.environ.pop("TRITON_INTERPRET", None)
    stub_driver()
    from megagraph.attention import context_parallel, hidden, operator
    from megagraph.kernels import biased_attention, hidden_dropout  # noqa: F401  ask what TRITON_INTERPRET is now
    from megagraph.models import layers, transformer

    os.environ["TRITON_INTERPRET"] = "1"  # takes tensors of the CPU, from here on
    operator.check_values = lambda step: None  # reads none of a GPU
    choose = context_parallel.choose
    context_parallel.choose = lambda impl, q, **about: choose(impl or "triton", q, **about)

    def drop(x: Tensor, p: float, key: Tensor | None, *_: Any) -> Tensor:
        return x if key is None or p == 0.0 else hidden._dropped(hidden._hidden_dropout, x, p, key, None)

    layers.hidden_dropout = transformer.hidden_dropout = drop


def host() -> None:
    """Measure, print, and write bench/results/cpu/step_host.json."""
    _launch_into_nothing()
    torch.set_num_threads(1)
    pair, batch = [contender(name, config(16, **RATES)) for name in ("ours", "eager")], random_batch(9, 2)
    calls = {}
    for each in pair:
        each.train_step(batch, 0)
        each.train_step(batch, 1)
        with _Calls() as counted:
            each.train_step(batch, 2)
        calls[each.name] = dict(counted.found.most_common())
        each.seconds.clear()
    for step in range(HOST_ROUNDS):
        for each in pair:
            each.train_step(batch, 3 + step)
    ours, eager = (median(each.seconds) for each in pair)
    sums = {name: sum(found.values()) for name, found in calls.items()}
    print(f"ours {ours * 1e3:.1f} ms and {sums['ours']} operators, eager {eager * 1e3:.1f} ms and {sums['eager']}")
    print(
        f"time {ours / eager:.2f} of the eager model's, at most {HOST}: {'holds' if ours <= HOST * eager else 'FAILS'}"
    )
    seconds = {each.name: each.seconds for each in pair}
    write_rows("step_host", [{"unit": "s", "seconds": seconds, "calls": sums, "operators": calls}], folder="cpu")


def losses(root: Path, datasets: tuple[str, ...] = sized(("cora", "computers"), quick=("cora",))) -> None:
    """Train both, print the largest difference, and write bench/results/cpu/step_losses.json, beside others'."""
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
            each.model.to("cpu", torch.float64)
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
    write_rows("step_losses", merged("step_losses", rows, "dataset", folder="cpu"), folder="cpu")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"steps": steps, "host": host, "losses": losses, "errors": errors})
