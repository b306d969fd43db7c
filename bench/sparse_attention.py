"""Attention along the edges of real graphs on a CPU, beside message passing, in one run.

    python -m bench.sparse_attention --root DATA [--only computers pubmed]
    python -m bench.sparse_attention --blocks       # an existing pair beside one of the dense path

Every contender gets q, k, v, the pairs (both directions of every edge, and each node with itself), a bucket for each
pair and a table, and returns out and the gradients of q, k, v and the table; there are no projections.
``transformer_conv`` is that of torch_geometric, whose edge features reach keys and values alike: each head has one more
channel, where q is 1, k and v are 0, and the edge feature is the bias, and that channel of the result is dropped.
``message_passing`` is attention alone by ``torch_geometric.utils.softmax`` and ``index_add``. Values are compared with
message passing in fp64 first; then the contenders take turns. Seconds are those of all cores (process time).

Peaks are of a process for each contender: the most that forward and backward add to what was there before, less the
result and the gradients.

Blocks: of 8,192 nodes every 64 attend to a random quarter, 16th and 64th of all blocks of 64; the dense path gets the
same pairs, all others masked, and the results are compared. Asked: CPU seconds an existing pair at most MOST_OF_DENSE
times those of a pair of the dense path.

Fixed: fp32, seed 0, d = 128, 8 heads, 32 buckets drawn at random, nodes in the order of METIS clusters of 64, 2
warm-up rounds, 7 rounds.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor, nn
from torch_geometric.nn import TransformerConv
from torch_geometric.utils import softmax

import megagraph as mg
from bench.processes import forget_peak, peak_resident
from bench.provenance import PACKAGE, write_rows
from bench.resume import merged
from megagraph.attention.fields import MASKED_BUCKET
from megagraph.data.coarsen import partition
from megagraph.data.datasets import load_graph
from megagraph.data.graph import Graph

SEED, HEADS, DIM, BUCKETS, CLUSTER, WARMUP_ROUNDS, ROUNDS = 0, 8, 128, 32, 64, 2, 7
HEAD_DIM = DIM // HEADS
NODES, BLOCK, PARTS, MOST_OF_DENSE = 8192, 64, (4, 16, 64), 2.0
SETS = {
    "wordnet30": "wordnet30/raw/wordnet30.npz",
    "debian12": "debian12/raw/debian12.npz",
    "computers": "computers",
    "pubmed": "pubmed",
}

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, v [V, d], table [H, R]
Attend = Callable[[Inputs], Tensor]


def graph_of(name: str, root: Path) -> Graph:
    """The graph of a set here, or of another name or path that ``load_graph`` knows."""
    dataset = SETS.get(name, name)
    return load_graph(str(root / dataset) if dataset.endswith(".npz") else dataset, root)


def edges_of(name: str, root: Path) -> tuple[Tensor, int]:
    """Query and key of every pair, int64 [2, E], by query and key; and the number of nodes."""
    graph = graph_of(name, root)
    order = np.argsort(partition(graph, graph.num_nodes // CLUSTER), kind="stable")
    place = np.argsort(order)
    edges = graph.adjacency.tocoo()
    own = np.arange(graph.num_nodes)
    rows, columns = np.concatenate([place[edges.row], own]), np.concatenate([place[edges.col], own])
    by_row = np.lexsort((columns, rows))
    return torch.from_numpy(np.stack([rows[by_row], columns[by_row]])), graph.num_nodes


def ours(edges: Tensor, buckets: Tensor, num_nodes: int) -> Attend:
    starts = torch.searchsorted(edges[0], torch.arange(num_nodes + 1))
    return with_buckets(torch.sparse_csr_tensor(starts, edges[1], buckets, size=(num_nodes, num_nodes)))


def with_buckets(index: Tensor) -> Attend:
    """Ours, with a bucket of all pairs or of listed ones."""
    bias = mg.BucketBias(index, torch.zeros(HEADS, BUCKETS))  # once a graph

    def attend(inputs: Inputs) -> Tensor:
        q, k, v = (x.view(1, -1, HEADS, HEAD_DIM).transpose(1, 2) for x in inputs[:3])
        out = mg.biased_attention(q, k, v, replace(bias, table=inputs[3]))
        return out.transpose(1, 2).reshape(-1, DIM)

    return attend


def message_passing(edges: Tensor, buckets: Tensor, num_nodes: int) -> Attend:
    buckets = buckets.long()

    def attend(inputs: Inputs) -> Tensor:
        q, k, v = (x.view(-1, HEADS, HEAD_DIM) for x in inputs[:3])
        return along_edges(q, k, v, inputs[3].t()[buckets], *edges).flatten(1)

    return attend


def along_edges(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Attention [V, H, D] of pairs with a bias [E, H], by message passing alone."""
    scores = (q[rows] * k[columns]).sum(dim=-1) * q.shape[-1] ** -0.5 + bias
    p = softmax(scores, rows, num_nodes=len(q))
    return torch.zeros_like(q).index_add(0, rows, p.unsqueeze(-1) * v[columns])


class _Slice(nn.Module):
    """In place of a projection."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__()
        self.start, self.stop = start, stop

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.start : self.stop]


def transformer_conv(edges: Tensor, buckets: Tensor, num_nodes: int) -> Attend:
    wide = HEAD_DIM + 1
    width = HEADS * wide
    conv = TransformerConv(width, wide, heads=HEADS, edge_dim=width, root_weight=False, bias=False)
    conv.lin_query, conv.lin_key, conv.lin_value = _Slice(0, width), _Slice(0, width), _Slice(width, 2 * width)
    conv.lin_edge = nn.Identity()
    towards, buckets = edges.flip(0), buckets.long()  # from the key to the query

    def extended(x: Tensor, last: float) -> Tensor:
        return nn.functional.pad(x.view(-1, HEADS, HEAD_DIM), (0, 1), value=last).flatten(1)

    def attend(inputs: Inputs) -> Tensor:
        q, k, v, table = inputs
        query = extended(q * (wide / HEAD_DIM) ** 0.5, wide**0.5)
        features = nn.functional.pad(table.t()[buckets].unsqueeze(-1), (HEAD_DIM, 0)).flatten(1)
        out = conv((torch.cat([extended(k, 0.0), extended(v, 0.0)], dim=1), query), towards, features)
        return out.view(-1, HEADS, wide)[..., :HEAD_DIM].flatten(1)

    return attend


CONTENDERS = {"ours": ours, "message_passing": message_passing, "transformer_conv": transformer_conv}


def problem(name: str, root: Path) -> tuple[Tensor, Tensor, int, Inputs, Tensor]:
    """Edges, buckets, number of nodes, q, k, v and table, and the gradient of out."""
    edges, num_nodes = edges_of(name, root)
    torch.manual_seed(SEED)
    buckets = torch.randint(BUCKETS, (edges.shape[1],), dtype=torch.uint8)
    *qkv, d_out = (torch.randn(num_nodes, DIM) for _ in range(4))
    return edges, buckets, num_nodes, (*qkv, torch.randn(HEADS, BUCKETS)), d_out


def run(attend: Attend, inputs: Inputs, d_out: Tensor) -> list[Tensor]:
    """out and the gradients of q, k, v and the table."""
    given = [x.detach().requires_grad_() for x in inputs]
    out = attend(given)
    return [out.detach(), *torch.autograd.grad(out, given, d_out)]


def relative_error(got: list[Tensor], want: list[Tensor]) -> float:
    return max(((x - y).abs().max() / y.abs().max()).item() for x, y in zip(got, want, strict=True))


def peak(name: str, root: Path, contender: str) -> None:
    """Print the bytes that one forward and backward add, less what they return."""
    edges, buckets, num_nodes, inputs, d_out = problem(name, root)
    few = torch.tensor([[0, 1, 1], [1, 0, 1]])  # compiles, imports, starts threads
    small = tuple(x[:2].clone() for x in inputs[:3])
    run(CONTENDERS[contender](few[:, [0, 1, 2]], buckets[:3], 2), (*small, inputs[3]), d_out[:2].clone())
    attend = CONTENDERS[contender](edges, buckets, num_nodes)
    before = forget_peak()
    results = run(attend, inputs, d_out)
    print(peak_resident() - before - sum(x.numel() * x.itemsize for x in results))


def measure(name: str, root: Path) -> dict[str, Any]:
    edges, buckets, num_nodes, inputs, d_out = problem(name, root)
    exact = message_passing(edges, buckets, num_nodes)
    want = run(exact, tuple(x.double() for x in inputs), d_out.double())
    contenders = {key: make(edges, buckets, num_nodes) for key, make in CONTENDERS.items()}
    errors = {key: relative_error(run(attend, inputs, d_out), want) for key, attend in contenders.items()}
    del want
    assert max(errors.values()) < 1e-4, f"the contenders do not compute the same: {errors}"
    seconds: dict[str, list[float]] = {key: [] for key in contenders}
    order = list(contenders)
    for round_ in range(WARMUP_ROUNDS + ROUNDS):
        for key in order[round_ % 3 :] + order[: round_ % 3]:
            started = time.process_time()
            run(contenders[key], inputs, d_out)
            if round_ >= WARMUP_ROUNDS:
                seconds[key].append(time.process_time() - started)
    row: dict[str, Any] = {"set": name, "nodes": num_nodes, "pairs": edges.shape[1], "unit": "CPU seconds"}
    row |= {"dim": DIM, "heads": HEADS, "dtype": "fp32", "relative_error": errors}
    for key, values in seconds.items():
        row[key] = {"median": float(np.median(values)), "range": [min(values), max(values)]}
        command = [sys.executable, "-m", "bench.sparse_attention", "--root", str(root), "--only", name, "--peak", key]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        row[key]["peak_bytes"] = int(told)
    faster = min(order[1:], key=lambda key: row[key]["median"])
    ratios = np.divide(seconds[faster], seconds["ours"])
    row["ratio"] = {"to": faster, "median": float(np.median(ratios)), "range": [ratios.min(), ratios.max()]}
    row["peak_ratio"] = row["ours"]["peak_bytes"] / min(row[key]["peak_bytes"] for key in order[1:])
    return row


def measure_blocks(part: int) -> dict[str, Any]:
    """Listed pairs and the dense path, where one block in ``part`` attends."""
    torch.manual_seed(SEED)
    *qkv, d_out = (torch.randn(NODES, DIM) for _ in range(4))
    inputs = (*qkv, torch.randn(HEADS, BUCKETS))
    index = torch.full((NODES, NODES), MASKED_BUCKET, dtype=torch.uint8)
    for block in range(NODES // BLOCK):
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        columns = torch.randperm(NODES // BLOCK)[: NODES // BLOCK // part, None] * BLOCK + torch.arange(BLOCK)
        index[rows, columns.flatten()] = torch.randint(BUCKETS, (BLOCK, columns.numel()), dtype=torch.uint8)
    edges = (index != MASKED_BUCKET).nonzero().t()
    both = {"listed": ours(edges, index[tuple(edges)], NODES), "dense": with_buckets(index[None])}
    error = relative_error(*(run(attend, inputs, d_out) for attend in both.values()))
    assert error < 1e-4, f"the two do not compute the same: {error:.1e}"
    seconds: dict[str, list[float]] = {key: [] for key in both}
    for round_ in range(WARMUP_ROUNDS + ROUNDS):
        for key in both if round_ % 2 else reversed(both):
            started = time.process_time()
            run(both[key], inputs, d_out)
            if round_ >= WARMUP_ROUNDS:
                seconds[key].append(time.process_time() - started)
    pairs = {"listed": edges.shape[1], "dense": NODES**2}
    row: dict[str, Any] = {"nodes": NODES, "part": part, "pairs": pairs["listed"], "unit": "CPU seconds"}
    row |= {"dim": DIM, "heads": HEADS, "dtype": "fp32", "relative_error": error, "seconds": seconds}
    ratios = np.divide(seconds["listed"], seconds["dense"]) * pairs["dense"] / pairs["listed"]
    return row | {"of_dense": {"median": float(np.median(ratios)), "range": [ratios.min(), ratios.max()]}}


def main(root: Path | None = None, only: tuple[str, ...] = tuple(SETS), blocks: bool = False) -> None:
    """Print the rows and write them to bench/results/cpu/sparse_attention.json, of blocks to sparse_blocks.json."""
    rows = []
    if blocks:
        for part in PARTS:
            rows.append(measure_blocks(part))
            of = rows[-1]["of_dense"]
            said = "holds" if of["median"] <= MOST_OF_DENSE else "FAILS"
            print(f"1 / {part}: a pair takes {of['median']:.2f} times one of the dense path", end="")
            print(f" ({of['range'][0]:.2f} to {of['range'][1]:.2f}), at most {MOST_OF_DENSE}: {said}", flush=True)
        print(write_rows("sparse_blocks", rows, children=PACKAGE))
        return
    if root is None:
        raise SystemExit("expected --root, the folder of the raw data sets, or --blocks")
    for name in only:
        row = measure(name, root)
        rows.append(row)
        print(
            f"{name}: {row['nodes']:,} nodes, {row['pairs']:,} pairs: "
            + ", ".join(f"{key} {row[key]['median']:.3f} s {row[key]['peak_bytes'] / 1e6:.0f} MB" for key in CONTENDERS)
            + "; {to} / ours {median:.1f} ({range[0]:.1f} to {range[1]:.1f})".format(**row["ratio"])
            + f", peak {row['peak_ratio']:.2f} of theirs",
            flush=True,
        )
    print(write_rows("sparse_attention", merged("sparse_attention", rows, "set"), children=PACKAGE))


if __name__ == "__main__":
    if "--peak" in sys.argv:  # of one contender, in a process of its own
        arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
        peak(arguments["--only"], Path(arguments["--root"]), arguments["--peak"])
    else:
        tyro.cli(main)
