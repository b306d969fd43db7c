"""How full tiles of listed pairs are on real graphs, and what binds a layer of them on an H200, by a model.

    python -m bench.pair_tiles --root DATA [--sets computers pubmed]

Pairs are those within one hop, as ``--batching full --hops 1 --top 0`` cuts and orders them; heads are 8 of 16, then of
64 numbers in bf16, the bias is a table. A pair that exists costs what its tiles compute: instructions in SASS a
computed pair (the kernels are compiled here, nothing runs) times computed pairs an existing one, and bytes of rows that
tiles gather. Beside tiles of 16, 32 and 64 rows stands a walk of lists, a row at a time, with all its heads on the
tensor cores: its instructions are those of bench/results/compile/list_walk.json, of kernels that tiles took the place
of.

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
from bench.provenance import RESULTS, from_rows, write_rows
from bench.sparse_attention import graph_of
from megagraph.data.full import FullBatches
from megagraph.evaluate import batches
from megagraph.kernels.variants import Variant

SETS = ("citeseer", "pubmed", "computers", "tolokers", "wordnet30", "debian12")
HEIGHTS, HEADS = (16, 32, 64), 8
WIDTHS = {16: 32, 64: 16}  # gathered rows of a tile, by numbers of a head
WALK = RESULTS / "compile" / "list_walk.json"


def instructions(height: int, head_dim: int) -> dict[str, float]:
    """A computed pair of a head, of tiles of so many rows, and spills in loops."""
    size = {"pairs": {"BLOCK_M": height, "BLOCK_N": WIDTHS[head_dim]}}
    variants = {name: Variant(name, "bucket", head_dim=head_dim, path="listed") for name in ("fwd", "bwd")}
    rows = {name: compile_variant("sm_90", variant, size) for name, variant in variants.items()}
    spills = sum(loop["spills"] for row in rows.values() for loop in row["loops"])
    return {name: row["total"] for name, row in rows.items()} | {"spills": spills}


def of_tiles(starts: np.ndarray, columns: np.ndarray, height: int, width: int) -> tuple[float, float]:
    """Computed pairs, and gathered rows, for each that exists."""
    blocks = np.repeat(np.arange(len(starts) - 1), np.diff(starts)) // height
    named = np.unique(blocks * np.int64(len(starts)) + columns) // len(starts)
    in_tiles = -(-np.bincount(named) // width) * width
    return in_tiles.sum() * height / len(columns), len(named) / len(columns)


def of_lists(starts: np.ndarray, at_once: int) -> float:
    """Computed pairs for each that exists, where a list takes so many at a time."""
    return (-(-np.diff(starts) // at_once) * at_once).sum() / starts[-1]


def cost(
    pairs: int, computed: float, gathered: float, counts: dict[str, float], head_dim: int, number_bytes: float
) -> dict[str, Any]:
    """Cost of a layer: rows of k and v forward and by row, of q and d_out with lse and delta by key."""
    rates, row = RATES[DEVICE], 2 * HEADS * head_dim  # bytes
    bytes_ = {"fwd": gathered * 2 * row + number_bytes, "bwd": gathered * (4 * row + 8 * HEADS) + 2 * number_bytes}
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


def walks(head_dim: int) -> dict[int, dict[str, float]]:
    """Instructions of the walk of lists, by how many pairs it takes at a time."""
    rows = json.loads(WALK.read_text(encoding="utf-8"))
    rows = [row for row in rows if (row["form"], row["head_dim"]) == ("bucket", head_dim)]
    return {n: {row["kernel"]: row["total"] for row in rows if row["pairs_at_once"] == n} for n in (16, 32)}


def layouts(
    starts: np.ndarray, columns: np.ndarray, head_dim: int, compiled: dict[int, dict[str, float]]
) -> list[dict[str, Any]]:
    """What a layer takes by each of them."""
    pairs, rows = len(columns), []
    for height, counts in compiled.items():
        computed, gathered = of_tiles(starts, columns, height, WIDTHS[head_dim])
        of_pairs = cost(pairs, computed, gathered, counts, head_dim, computed + 4 * computed / height)
        rows.append({"layout": f"tiles of {height}", "a_computed_pair": counts, **of_pairs})
    walk = [cost(pairs, of_lists(starts, n), 1.0, counts, head_dim, 5.0) for n, counts in walks(head_dim).items()]
    return [*rows, {"layout": "lists", **min(walk, key=lambda row: row["issue_ms"])}]


def _line(row: dict[str, Any]) -> str:
    passes = "; ".join(
        f"{name} {row['instructions'][name]:6.1f} instructions, {row['bytes'][name]:5.0f} bytes"
        for name in row["bytes"]
    )
    spills = " SPILLS" if row.get("a_computed_pair", {}).get("spills") else ""
    return (
        f"  {row['layout']:12} computed {row['computed']:5.1f}, gathered {row['gathered_rows']:.2f}; {passes}; issue "
        f"{row['issue_ms']:.3f} ms, L2 {row['l2_ms']:.3f} ms: {row['binds']}{spills}"
    )


def main(root: Path, sets: tuple[str, ...] = SETS) -> None:
    """Count, print a table, and write the rows."""
    compiled = {D: {height: instructions(height, D) for height in HEIGHTS} for D in WIDTHS}
    for name in sets:
        builder = batches(CONFIG, graph_of(name, root))
        assert isinstance(builder, FullBatches)
        relation, found = builder.structure.relation, []
        starts, columns = relation.row_starts.numpy(), relation.columns.numpy()
        for head_dim, counts in compiled.items():
            print(f"{name}: {len(starts) - 1:,} nodes, {len(columns):,} pairs, heads of {head_dim}")
            rows = layouts(starts, columns, head_dim, counts)
            for row in rows:
                row |= {"set": Path(name).name, "pairs": len(columns), "head_dim": head_dim}
                row |= {"from_rows": from_rows(WALK)}
                row["unit"] = "instructions and bytes an existing pair"
                print(_line(row))
            print(f"  least: {min(rows, key=lambda row: row['ms'])['layout']}")
            found += rows
        write_rows(Path(name).name, found, folder="compile/pair_tiles")


if __name__ == "__main__":
    tyro.cli(main)
