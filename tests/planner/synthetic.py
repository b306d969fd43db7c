"""Rows of a machine that follows the terms exactly, with coefficients that are known."""

from __future__ import annotations

from itertools import product
from typing import Any

from megagraph.planner.fitting import _known_bytes, _row_kept, _row_workspace, row_terms
from megagraph.planner.terms import all_reduce_terms, dot

FORWARD = {
    "layer.call": 1e-4,
    "layer.product": 5e-11,
    "layer.element": 2e-9,
    "layer.ffn_element": 3e-9,
    "attention.call": 5e-5,
    "attention.score": 1e-9,
    "attention.product": 6e-11,
    "attention.state": 1e-9,
    "embedding.call": 1e-5,
    "embedding.product": 6e-11,
    "embedding.element": 1e-9,
    "head.call": 1e-5,
    "head.product": 7e-11,
    "optimizer.call": 1e-5,
    "optimizer.parameter": 1e-9,
}
BACKWARD = {name: 2.5 * value for name, value in FORWARD.items() if not name.startswith("optimizer")}
LINK = {
    "transfer.call": 5e-5,
    "transfer.byte": 1e-9,
    "hop.call": 7e-5,
    "hop.byte": 2e-9,
    "all_reduce.call": 5e-5,
    "all_reduce.byte": 1e-9,
}
MEMORY = {
    "kept.key": 8.0,
    "kept.element": 32.0,
    "kept.ffn_element": 8.0,
    "kept.row": 8.0,
    "kept.head_row": 4.0,
    "kept.embedding": 4.0,
    "kept.head": 8.0,
    "kept.class": 4.0,
    "kept.slice": 4.0,
    "workspace.element": 16.0,
    "workspace.fixed": 1e6,
}
WORKLOAD = dict(batch_sequences=64, num_nodes=512, num_super=16, num_targets=512)


def rows() -> list[dict[str, Any]]:
    """A small design of sizes, every kind of row."""
    made: list[dict[str, Any]] = []
    sizes = product((1, 2, 8), (64, 256, 528), ((32, 4), (64, 8), (128, 8)), (0.5, 1, 2))
    for index, (m, nodes, (dim, heads), wide) in enumerate(sizes):
        base = dict(sequences=m, rows=nodes, dim=dim, direction=("forward", "backward")[index % 2])
        shape = base | dict(
            layers=1 + index % 4, columns=nodes, ffn_dim=int(dim * wide), heads=heads, bias="bucket", bias_size=8
        )
        data = dict(in_features=16 * (1 + index % 3), num_classes=4 + index % 5, feature_rows=m * nodes)
        made += [
            shape | dict(kind="layers", targets=(None, 1)[index // 2 % 2]),
            base | data | dict(kind="embedding"),
            base | dict(kind="head", targets=1 + index % 7, num_classes=4 + index % 5),
            shape | dict(kind="attention"),
            shape | dict(kind="ring", ranks=2 + index % 3, num_nodes=nodes, num_super=index % 5),
            shape | data | dict(kind="memory", targets=1, global_tokens=1),
        ]
    made += [dict(kind="optimizer", parameters=n) for n in (10**4, 10**5, 10**6)]
    for size in (1e3, 1e5, 1e7, 1e9):
        made += [dict(kind=kind, bytes=size, link="node") for kind in ("transfer", "hop")]
        made += [dict(kind="all_reduce", bytes=size, ranks=ranks, link="node") for ranks in (2, 8, 1024)]
    made.append(dict(kind="stall", seconds=2e-3))
    for row in made:
        row |= dict(device="paper", unit="s")
        if row["kind"] in ("transfer", "hop"):
            row["seconds"] = dot(LINK, {f"{row['kind']}.call": 1.0, f"{row['kind']}.byte": row["bytes"]})
        elif row["kind"] == "all_reduce":
            row["seconds"] = dot(LINK, all_reduce_terms(row["bytes"], row["ranks"]))
        elif row["kind"] == "memory":
            kept = dot(MEMORY, _row_kept(row))
            work = dot(MEMORY, _row_workspace(row))
            parameters = (_known_bytes(row | dict(feature_rows=0, rows=0))) / 3
            row |= dict(kept_bytes=kept, peak_bytes=_known_bytes(row) + max(kept, parameters) + work)
        elif row["kind"] != "stall":
            coefficients = BACKWARD if row.get("direction") == "backward" else FORWARD
            row["seconds"] = dot(coefficients, row_terms(row))
    made[0]["workload"] = WORKLOAD
    return made
