"""What a ring of four ranks gains from sending while it computes, on a CPU.

    python -m bench.experiments.ring_overlap            # one rank, with messages that take a known time
    python -m bench.experiments.ring_overlap --link     # as root: four processes, each on a host of its own

`overlap` is the ring as it is; `in_turn` waits for every message where it is posted. Both compute the same bits, and
take turns.

One rank: the others are played by an exchange that hands it its own blocks ``delay`` after they were posted, and sleeps
until then, so that nothing but its own steps takes the processor. ``delay`` is the median time of a step, measured
first, forward and backward each with its own.

With steps of equal length the ideal is P / (2 P - 1) = 4/7 forward. Backward, P - 1 messages of gradients follow one
step behind, and the last of them has no step left to hide behind: (P + 1) / (3 P - 2) = 1/2.

Link: hosts are joined by links of MBIT (bench/network.py), processes have SHARE of a core, with one thread each. Times
are the slowest rank's, from barrier to barrier. The ideal is of what was measured apart: steps of c seconds without
messages, and messages of m seconds without steps, k and v as long as their gradients, on a link that two of them share:
in turn 4 c + 3 m forward and 4 c + 6 m backward; at once c + 3 max(c, m), and 3 max(c, m) + max(c, 2 m) + m.

Fixed: P = 4, B = 1, H = 8, N' = 4096, N_s = 0, D = 64, fp32, a bucket bias of 32 entries, no masks, no dropout, seed 0;
2 warm-up rounds, 11 rounds, 7 with the link.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import megagraph as mg
from bench import network
from bench.provenance import sized, write_rows
from megagraph.attention.comm import attend
from megagraph.attention.engines import choose
from megagraph.attention.exchange import GroupExchange
from megagraph.attention.operator import make_step

SEED, WARMUP_ROUNDS, ROUNDS = 0, 2, 11
WORLD_SIZE, H, N, D, NUM_BUCKETS = 4, 8, sized(4096, quick=512), 64, 32
MBIT, SHARE, LINK_ROUNDS, TIMEOUT = sized(100.0, quick=1000.0), 0.45, sized(7, quick=2), 1200.0
BED = network.Bed(nodes=WORLD_SIZE, mbit=MBIT, speeds=(SHARE,) * WORLD_SIZE)
IDEAL = {"forward": WORLD_SIZE / (2 * WORLD_SIZE - 1), "backward": (WORLD_SIZE + 1) / (3 * WORLD_SIZE - 2)}


class DelayedExchange:
    """Blocks arrive ``delay`` seconds after they were posted; ``in_turn``: nobody computes until they have."""

    def __init__(self, *, in_turn: bool = False) -> None:
        self.delay, self.in_turn = 0.0, in_turn

    def shift(self, blocks: list[Tensor], into: list[Tensor]) -> Callable[[], list[Tensor]]:
        arrival = time.perf_counter() + self.delay

        def wait() -> list[Tensor]:
            time.sleep(max(arrival - time.perf_counter(), 0.0))
            return blocks

        if self.in_turn:
            wait()
        return wait


class InTurn(GroupExchange):
    """Nobody computes until messages have arrived."""

    def shift(self, blocks: list[Tensor], into: list[Tensor]) -> Callable[[], list[Tensor]]:
        arrived = super().shift(blocks, into)()
        return lambda: arrived


class Rank:
    """One of four, with data of its own."""

    def __init__(self, rank: int = 0) -> None:
        torch.manual_seed(SEED + rank)
        self.layout = mg.NodeLayout(N, 0, rank, WORLD_SIZE)
        rows = self.layout.num_local
        *qkv, self.d_out = (torch.randn(1, H, rows, D) for _ in range(4))
        bias = mg.BucketBias(torch.randint(NUM_BUCKETS, (1, rows, N), dtype=torch.uint8), torch.randn(H, NUM_BUCKETS))
        self.inputs = [x.requires_grad_() for x in (*qkv, bias.table)]
        path = choose(None, qkv[0], ring=True)
        self.step = make_step(qkv[0], bias, None, None, 0.0, None, *path)

    def run(self, exchange: Any, begin: Callable[[str], None]) -> tuple[dict[str, float], list[Tensor]]:
        """Seconds of forward and of backward; out and the gradients. ``begin`` is called before each."""
        begin("forward")
        started = time.perf_counter()
        out, _ = attend("ring", exchange, [self.layout], [(self.step,)], [], self.inputs)
        seconds = {"forward": time.perf_counter() - started}
        begin("backward")
        started = time.perf_counter()
        gradients = torch.autograd.grad(out, self.inputs, self.d_out)
        return seconds | {"backward": time.perf_counter() - started}, [out, *gradients]


def measure() -> list[dict]:
    """A row for each direction: median and range of both ways, and of the ratio of a round."""
    rank, contenders = Rank(), {"overlap": DelayedExchange(), "in_turn": DelayedExchange(in_turn=True)}
    delays = dict.fromkeys(IDEAL, 0.0)

    def run(exchange: DelayedExchange) -> tuple[dict[str, float], list[Tensor]]:
        return rank.run(exchange, lambda direction: setattr(exchange, "delay", delays[direction]))

    alone = [run(contenders["overlap"])[0] for _ in range(WARMUP_ROUNDS + ROUNDS)][WARMUP_ROUNDS:]
    delays = {direction: float(np.median([row[direction] for row in alone])) / WORLD_SIZE for direction in IDEAL}

    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for round_ in range(WARMUP_ROUNDS + ROUNDS):
        results = {}
        for name in sorted(contenders, reverse=bool(round_ % 2)):
            taken, results[name] = run(contenders[name])
            if round_ >= WARMUP_ROUNDS:
                seconds[name].append(taken)
        assert all(map(torch.equal, results["overlap"], results["in_turn"])), "the two do not compute the same"

    return [
        {"direction": direction, "delay": delays[direction] * 1e3, "ideal_ratio": ideal} | _summary(seconds, direction)
        for direction, ideal in IDEAL.items()
    ]


def _summary(seconds: dict[str, list[dict[str, float]]], direction: str) -> dict[str, Any]:
    """Median and range of all ways, in ms, and of the ratio of a round."""
    row = {"P": WORLD_SIZE, "B": 1, "H": H, "N": N, "D": D, "form": "bucket", "dtype": "fp32", "unit": "ms"}
    times = {name: np.array([taken[direction] * 1e3 for taken in found]) for name, found in seconds.items()}
    ratios = times["overlap"] / times["in_turn"]
    for name, values in (times | {"ratio": ratios}).items():
        row[name] = {"median": float(np.median(values)), "range": [float(values.min()), float(values.max())]}
    row["ratio"]["of_medians"] = row["overlap"]["median"] / row["in_turn"]["median"]
    return row


def _ideals(step: dict[str, float], message: float) -> dict[str, float]:
    """At once over in turn, of seconds of a step and of a message apart."""
    c, m = step["forward"], message
    forward = (c + 3 * max(c, m)) / (4 * c + 3 * m)
    c = step["backward"]
    return {"forward": forward, "backward": (3 * max(c, m) + max(c, 2 * m) + m) / (4 * c + 6 * m)}


def _worker() -> None:
    """A process of the bed; the first writes bench/results/cpu/ring_overlap_link.json."""
    number = int(os.environ["RANK"])
    network.take_share(number)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    mesh, rank = init_device_mesh("cpu", (WORLD_SIZE,)), Rank(number)
    alone = DelayedExchange()
    contenders = {"overlap": GroupExchange(mesh), "in_turn": InTurn(mesh), "steps": alone}
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in (*contenders, "message")}
    block = torch.zeros(2, 1, H, rank.layout.block_size, D)
    for round_ in range(WARMUP_ROUNDS + LINK_ROUNDS):
        results, taken = {}, {}
        for name in sorted(contenders, reverse=bool(round_ % 2)):
            taken[name], results[name] = rank.run(contenders[name], lambda _: dist.barrier())
        assert all(map(torch.equal, results["overlap"], results["in_turn"])), "the two do not compute the same"
        dist.barrier()
        started = time.perf_counter()
        contenders["in_turn"].shift([block], [torch.empty_like(block)])
        taken["message"] = dict.fromkeys(IDEAL, time.perf_counter() - started)
        of_ranks: list[Any] = [None] * WORLD_SIZE
        dist.all_gather_object(of_ranks, taken)
        if round_ >= WARMUP_ROUNDS:
            for name, found in seconds.items():
                found.append({way: max(ranks[name][way] for ranks in of_ranks) for way in IDEAL})
    if number == 0:
        step = {way: float(np.median([row[way] for row in seconds["steps"]])) / WORLD_SIZE for way in IDEAL}
        ideals = _ideals(step, float(np.median([row["forward"] for row in seconds["message"]])))
        about = {"mbit": MBIT, "share": SHARE}
        rows = [about | {"direction": way, "ideal_ratio": ideals[way]} | _summary(seconds, way) for way in IDEAL]
        for row in rows:
            print(
                "{direction:8} steps {steps[median]:.0f} ms, a message {message[median]:.0f} ms: overlap "
                "{overlap[median]:.0f} ms, in turn {in_turn[median]:.0f} ms, ratio {ratio[of_medians]:.3f} "
                "({ratio[range][0]:.3f} to {ratio[range][1]:.3f}), ideal {ideal_ratio:.3f}".format(**row)
            )
        print(write_rows("ring_overlap_link", rows, folder="cpu"))
    dist.barrier()
    dist.destroy_process_group()


def main(link: bool = False, worker: bool = False) -> None:
    """Print the rows and write them to bench/results/cpu/ring_overlap.json, or ring_overlap_link.json.

    Args:
        link: hosts and a link between them, which needs root.
        worker: a process of theirs.
    """
    if worker:
        return _worker()
    if link:
        if (reason := network.refusal()) is not None:
            raise SystemExit(f"no hosts: {reason}")
        return network.run(BED, ("-m", "bench.experiments.ring_overlap", "--worker"), TIMEOUT)
    rows = measure()
    for row in rows:
        print(
            "{direction:8} delay {delay:.1f} ms: overlap {overlap[median]:.1f} ms, in turn {in_turn[median]:.1f} ms, "
            "ratio {ratio[of_medians]:.3f} ({ratio[range][0]:.3f} to {ratio[range][1]:.3f}), ideal {ideal_ratio:.3f}"
            "".format(**row)
        )
    print(write_rows("ring_overlap", rows, folder="cpu"))


if __name__ == "__main__":
    tyro.cli(main)
