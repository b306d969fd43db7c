"""What a ring gains from sending while it computes: one rank of four, on a CPU, with messages that take a known time.

    python -m bench.experiments.ring_overlap

The other ranks are played by an exchange that hands a rank its own blocks ``delay`` after they were posted, and sleeps
until then, so that nothing but the rank's own steps takes the processor. ``delay`` is the median time of a step,
measured first, forward and backward each with its own. ``overlap`` is the ring as it is; ``in_turn`` waits for every
message where it is posted. Both compute the same bits, and take turns.

With steps of equal length the ideal is P / (2 P - 1) = 4/7 forward. Backward, P - 1 messages of gradients follow one
step behind, and the last of them has no step left to hide behind: (P + 1) / (3 P - 2) = 1/2.

Fixed: P = 4, B = 1, H = 8, N' = 4096, N_s = 0, D = 64, fp32, a bucket bias of 32 entries, no masks, no dropout, seed 0;
2 warm-up rounds, 11 rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

import megagraph as mg
from bench.provenance import write_rows
from megagraph.attention.comm import attend
from megagraph.attention.engines import choose
from megagraph.attention.operator import make_step

SEED, WARMUP_ROUNDS, ROUNDS = 0, 2, 11
WORLD_SIZE, H, N, D, NUM_BUCKETS = 4, 8, 4096, 64, 32
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


class Rank:
    """Rank 0 of four, with data of its own."""

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        self.layout = mg.NodeLayout(N, 0, 0, WORLD_SIZE)
        rows = self.layout.num_local
        *qkv, self.d_out = (torch.randn(1, H, rows, D) for _ in range(4))
        bias = mg.BucketBias(torch.randint(NUM_BUCKETS, (1, rows, N), dtype=torch.uint8), torch.randn(H, NUM_BUCKETS))
        self.inputs = [x.requires_grad_() for x in (*qkv, bias.table)]
        path = choose(None, qkv[0], ring=True)
        self.step = make_step(qkv[0], bias, None, None, 0.0, None, *path)

    def run(self, exchange: DelayedExchange, delays: dict[str, float]) -> tuple[dict[str, float], list[Tensor]]:
        """Seconds of forward and of backward; out and the gradients."""
        exchange.delay = delays["forward"]
        started = time.perf_counter()
        out, _ = attend("ring", exchange, [self.layout], [(self.step,)], [], self.inputs)
        computed = time.perf_counter()
        exchange.delay = delays["backward"]
        gradients = torch.autograd.grad(out, self.inputs, self.d_out)
        return {"forward": computed - started, "backward": time.perf_counter() - computed}, [out, *gradients]


def measure() -> list[dict]:
    """A row for each direction: median and range of both ways, and of the ratio of a round."""
    rank, contenders = Rank(), {"overlap": DelayedExchange(), "in_turn": DelayedExchange(in_turn=True)}
    no_delay = dict.fromkeys(IDEAL, 0.0)
    alone = [rank.run(contenders["overlap"], no_delay)[0] for _ in range(WARMUP_ROUNDS + ROUNDS)][WARMUP_ROUNDS:]
    delays = {direction: float(np.median([row[direction] for row in alone])) / WORLD_SIZE for direction in IDEAL}

    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for round_ in range(WARMUP_ROUNDS + ROUNDS):
        results = {}
        for name in sorted(contenders, reverse=bool(round_ % 2)):
            taken, results[name] = rank.run(contenders[name], delays)
            if round_ >= WARMUP_ROUNDS:
                seconds[name].append(taken)
        assert all(map(torch.equal, results["overlap"], results["in_turn"])), "the two do not compute the same"

    rows = []
    for direction, ideal in IDEAL.items():
        row = {"P": WORLD_SIZE, "B": 1, "H": H, "N": N, "D": D, "form": "bucket", "dtype": "fp32", "unit": "ms"}
        row |= {"direction": direction, "delay": delays[direction] * 1e3, "ideal_ratio": ideal}
        times = {name: np.array([taken[direction] * 1e3 for taken in seconds[name]]) for name in contenders}
        ratios = times["overlap"] / times["in_turn"]
        for name, values in (times | {"ratio": ratios}).items():
            row[name] = {"median": float(np.median(values)), "range": [float(values.min()), float(values.max())]}
        row["ratio"]["of_medians"] = row["overlap"]["median"] / row["in_turn"]["median"]
        rows.append(row)
    return rows


def main() -> None:
    """Print the rows and write them to bench/results/cpu/ring_overlap.json."""
    rows = measure()
    for row in rows:
        print(
            "{direction:8} delay {delay:.1f} ms: overlap {overlap[median]:.1f} ms, in turn {in_turn[median]:.1f} ms, "
            "ratio {ratio[of_medians]:.3f} ({ratio[range][0]:.3f} to {ratio[range][1]:.3f}), ideal {ideal_ratio:.3f}"
            "".format(**row)
        )
    print(write_rows("ring_overlap", rows, folder="cpu"))


if __name__ == "__main__":
    main()
