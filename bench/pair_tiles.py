"""How full tiles of listed pairs are on real graphs, and what binds a layer of them on an H200, by a model.

    python -m bench.pair_tiles --root DATA [--sets computers pubmed]

Pairs are those within one hop, as ``--batching full --hops 1 --top 0`` cuts and orders them; heads are 8 of 16 numbers
in bf16, the bias is a table. A pair that exists costs what its tiles compute: instructions in SASS a computed pair (the
kernels are compiled here, nothing runs) times computed pairs an existing one, and bytes of rows that tiles gather.
Beside tiles of 16, 32 and 64 rows stands a walk of lists, a row at a time, with all its heads on the tensor cores: its
instructions are those of bench/results/compile/list_walk.json, of kernels that tiles took the place of.

Seconds of forward and backward are of one layer, as if one unit alone worked: issue of instructions, at ``LIKELY`` of
all slots as in ``bench.predict``, or L2, from where every gathered row is read once a tile. Rows of a set go to
bench/results/compile/pair_tiles/SET.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from bench.compile_report import compile_variant
from bench.floors import RATES
from bench.halo import CONFIG
from bench.predict import DEVICE, L2, LIKELY
from bench.provenance import RESULTS, write_rows
from bench.sparse_attention import graph_of
from megagraph.data.full import FullBatches
from megagraph.evaluate import batches
from megagraph.kernels import tiles
from megagraph.kernels.variants import Variant

SETS = ("citeseer", "pubmed", "computers", "tolokers", "wordnet30", "debian12")
HEIGHTS, WIDTH, HEADS, HEAD_DIM = (16, 32, 64), 32, 8, 16
ROW = 2 * HEADS * HEAD_DIM  # bytes


def instructions(height: int) -> dict[str, float]:
    """A computed pair of a head, of tiles of so many rows."""
    chosen = tiles.choose_pairs
    tiles.choose_pairs = lambda *of: {**chosen(*of), "BLOCK_M": height, "BLOCK_N": WIDTH}  # type: ignore[assignment]
    try:
        variants = {name: Variant(name, "bucket", head_dim=HEAD_DIM, path="listed") for name in ("fwd", "bwd")}
        rows = {name: compile_variant("sm_90", variant) for name, variant in variants.items()}
    finally:
        tiles.choose_pairs = chosen
    return {name: row["total"] for name, row in rows.items()} | {"spills": sum(row["spills"] for row in rows.values())}


def of_tiles(starts: np.ndarray, columns: np.ndarray, height: int) -> tuple[float, float]:
    """Computed pairs, and gathered rows, for each that exists."""
    blocks = np.repeat(np.arange(len(starts) - 1), np.diff(starts)) // height
    named = np.unique(blocks * np.int64(len(starts)) + columns) // len(starts)
    in_tiles = -(-np.bincount(named) // WIDTH) * WIDTH
    return in_tiles.sum() * height / len(columns), len(named) / len(columns)


def of_lists(starts: np.ndarray, at_once: int) -> float:
    """Computed pairs for each that exists, where a list takes so many at a time."""
    return (-(-np.diff(starts) // at_once) * at_once).sum() / starts[-1]


def cost(pairs: int, computed: float, gathered: float, counts: dict[str, float], number_bytes: float) -> dict[str, Any]:
    """Of a layer: rows of k and v forward and by row, of q and d_out with lse and delta by key."""
    rates = RATES[DEVICE]
    bytes_ = {"fwd": gathered * 2 * ROW + number_bytes, "bwd": gathered * (4 * ROW + 8 * HEADS) + 2 * number_bytes}
    issue = sum(counts[name] for name in bytes_) * computed * pairs * HEADS / (LIKELY * rates.issue)
    l2 = sum(bytes_.values()) * pairs / L2
    return {
        "computed": round(computed, 2),
        "gathered_rows": round(gathered, 3),
        "instructions": {name: round(counts[name] * computed, 1) for name in bytes_},
        "bytes": {name: round(size, 1) for name, size in bytes_.items()},
        "issue_ms": round(1e3 * issue, 4),
        "l2_ms": round(1e3 * l2, 4),
        "binds": "issue" if issue > l2 else "l2",
        "ms": round(1e3 * max(issue, l2), 4),
    }


def walks() -> dict[int, dict[str, float]]:
    """Instructions of the walk of lists, by how many pairs it takes at a time."""
    rows = json.loads((RESULTS / "compile" / "list_walk.json").read_text(encoding="utf-8"))
    rows = [row for row in rows if (row["form"], row["head_dim"]) == ("bucket", HEAD_DIM)]
    return {n: {row["kernel"]: row["total"] for row in rows if row["pairs_at_once"] == n} for n in (16, 32)}


def main(root: Path, sets: tuple[str, ...] = SETS) -> None:
    """Count, print a table, and write the rows."""
    compiled, lists = {height: instructions(height) for height in HEIGHTS}, walks()
    for name in sets:
        builder = batches(CONFIG, graph_of(name, root))
        assert isinstance(builder, FullBatches)
        relation = builder.structure.relation
        starts, columns = relation.row_starts.numpy(), relation.columns.numpy()
        pairs = len(columns)
        rows: list[dict[str, Any]] = []
        for height, counts in compiled.items():
            computed, gathered = of_tiles(starts, columns, height)
            of_pairs = cost(pairs, computed, gathered, counts, computed + 4 * computed / height)
            rows.append({"layout": f"tiles of {height}", "a_computed_pair": counts, **of_pairs})
        walk = [cost(pairs, of_lists(starts, n), 1.0, counts, 5.0) for n, counts in lists.items()]
        rows.append({"layout": "lists", **min(walk, key=lambda row: row["issue_ms"])})
        print(f"{name}: {len(starts) - 1:,} nodes, {pairs:,} pairs")
        for row in rows:
            row |= {"set": Path(name).name, "pairs": pairs, "unit": "instructions and bytes an existing pair"}
            print(
                f"  {row['layout']:12} computed {row['computed']:5.1f}, gathered {row['gathered_rows']:.2f}; forward "
                f"{row['instructions']['fwd']:6.1f} instructions, {row['bytes']['fwd']:5.0f} bytes; backward "
                f"{row['instructions']['bwd']:6.1f}, {row['bytes']['bwd']:5.0f}; issue {row['issue_ms']:.3f} ms, L2 "
                f"{row['l2_ms']:.3f} ms: {row['binds']}"
            )
        best = min(rows, key=lambda row: row["ms"])
        print(f"  best: {best['layout']}")
        write_rows(Path(name).name, rows, folder="compile/pair_tiles")


if __name__ == "__main__":
    tyro.cli(main)
