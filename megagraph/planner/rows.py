"""Rows of what was measured: the fields of each kind, their files, and rows of benches as such."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megagraph import files
from megagraph.planner.workload import NUMBER_BYTES, check_number

Row = Mapping[str, Any]

_SHAPE = ("layers", "sequences", "rows", "columns", "dim", "ffn_dim", "heads", "bias", "bias_size", "targets")
FIELDS = {
    "layers": (*_SHAPE, "direction", "seconds"),
    "model": (*_SHAPE, "in_features", "num_classes", "feature_rows", "direction", "seconds"),
    "embedding": ("sequences", "rows", "dim", "in_features", "feature_rows", "direction", "seconds"),
    "head": ("sequences", "dim", "num_classes", "targets", "direction", "seconds"),
    "attention": ("sequences", "rows", "columns", "dim", "heads", "bias", "bias_size", "direction", "seconds"),
    "ring": (
        "sequences",
        "num_nodes",
        "num_super",
        "ranks",
        "dim",
        "heads",
        "bias",
        "bias_size",
        "direction",
        "seconds",
    ),
    "optimizer": ("parameters", "seconds"),
    "transfer": ("bytes", "link", "seconds"),
    "hop": ("bytes", "link", "seconds"),
    "all_reduce": ("bytes", "ranks", "link", "seconds"),
    "stall": ("seconds",),
    "memory": (
        *_SHAPE,
        "in_features",
        "num_classes",
        "feature_rows",
        "global_tokens",
        "kept_bytes",
        "peak_bytes",
    ),
    "process": (*_SHAPE, "in_features", "num_classes", "feature_rows", "global_tokens", "process_bytes"),
}
"""Fields of every kind of row. ``direction`` is forward, backward or forward_backward; ``link`` node or across;
``targets`` None where the last layer computes all rows; a ring row is the work of all its ranks, without messages.
Rows of sequences whose pairs are listed have ``pairs`` and ``num_super``, too, and ``columns`` are those of a row on
average; ``convolution`` is 1 where layers have one. ``dtype`` is fp32 where a row does not say bf16 or fp64, ``codes``
the number of degrees with a vector of their own, ``rank`` which of several processes measured it."""

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float64": "fp64"}  # of benches, which time fp16, too
_TEXTS = {"bias", "direction", "link", "device", "impl", "dtype"}
_NUMBERS = {"pairs", "convolution", "codes", "rank", *(name for names in FIELDS.values() for name in names)} - _TEXTS
_ABOVE_ZERO = {"seconds", "ranks", "layers", "peak_bytes", "process_bytes"}  # errors are parts of what was measured


def check_rows(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The rows, if each has its fields and sensible numbers, all of one device.

    Raises:
        ValueError: names the row and field, expected and got.
    """
    checked = []
    origins = set()
    for index, row in enumerate(rows):
        kind = row.get("kind") if isinstance(row, Mapping) else None
        if not isinstance(kind, str) or kind not in FIELDS:
            raise ValueError(
                f"row {index} must have a kind of {sorted(FIELDS)}, got {kind!r}; rows that fit come from megagraph "
                "profile and from the benches of attention"
            )
        for name in FIELDS[kind]:
            if name not in row:
                raise ValueError(f"row {index} ({kind}) must have the fields {list(FIELDS[kind])}, lacks {name!r}")
        for name, value in row.items():
            if name in _NUMBERS and not (name == "targets" and value is None):
                check_number(f"row {index} ({kind}): {name}", value)
                if not value and name in _ABOVE_ZERO and name in FIELDS[kind] and kind != "stall":
                    raise ValueError(f"row {index} ({kind}): {name} must be above 0, got 0; leave the row out")
            elif name in _TEXTS and not isinstance(value, str) and value is not None:
                raise ValueError(f"row {index} ({kind}): {name} must be text, got {value!r}")
        if "direction" in FIELDS[kind] and row["direction"] not in ("forward", "backward", "forward_backward"):
            raise ValueError(
                f"row {index} ({kind}): direction must be forward, backward or forward_backward, "
                f"got {row['direction']!r}"
            )
        if row.get("dtype", "fp32") not in NUMBER_BYTES:
            raise ValueError(f"row {index} ({kind}): dtype must be one of {sorted(NUMBER_BYTES)}, got {row['dtype']!r}")
        for name in ("workload", "model"):
            if not isinstance(row.get(name, {}), Mapping):
                raise ValueError(f"row {index} ({kind}): {name} must be a JSON object, got {row[name]!r}")
        checked.append(dict(row))
        origins.add((row.get("device"), row.get("impl"), row.get("dtype", "fp32")))
    if not checked:
        raise ValueError(
            "expected rows to fit, got none, or rows of peers, dense biases, listed pairs or single ring steps only, "
            "which say nothing of a step; run megagraph profile"
        )
    if len(origins) > 1:
        raise ValueError(
            "rows must come from one device, one implementation of attention and one dtype, "
            f"got {sorted(' '.join(map(str, origin)) for origin in origins)}; fit a model for each of them, with "
            "megagraph fit --impl and --dtype where one file has several"
        )
    return checked


def save_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as a JSON list, each with its checksum."""
    files.write(path, json.dumps([files.add_checksum(dict(row)) for row in rows], indent=1) + "\n")


def load_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of ``save_rows``, of a bench, or of pytest-benchmark; the latter have no checksums.

    Raises:
        FileNotFoundError, ValueError: there is none, it is something else, or a row is not as it was written.

    Examples:
        >>> rows = load_rows(Path("bench/results/cpu/real_plans/profile.json"))  # of a checkout
        >>> cost = mg.planner.fit(rows)
    """
    found = files.parse_json(path, "rows", "run megagraph profile again")
    if isinstance(found, dict) and "benchmarks" in found:
        try:
            found = [benchmark["extra_info"] for benchmark in found["benchmarks"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} must hold benchmarks of pytest-benchmark with an extra_info each") from error
    if not isinstance(found, list):
        raise ValueError(
            f"{path} must hold a list of rows, or the benchmarks of pytest-benchmark, got {type(found).__name__}; "
            "megagraph profile writes one"
        )
    if any(isinstance(row, dict) and "checksum" in row for row in found):
        for index, row in enumerate(found):
            if not isinstance(row, dict):
                raise ValueError(f"row {index} of {path} must be a JSON object, got {row!r}")
            files.check_values(row, f"row {index} of {path} as it was written")
    return found


def bench_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the benches of attention as rows of this model, those of peers left out; other rows as they are."""
    made = []
    for row in rows:
        if not isinstance(row, dict) or "kind" in row or "contender" not in row:
            made.append(row)
            continue
        try:
            ours = row["contender"].startswith("megagraph") and row.get("median") is not None
            if ours and row.get("form") in ("bucket", "projected") and row.get("dtype") in _DTYPES:
                made.append(_attention_row(row))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"expected a row of a bench of attention, got {row}: {error!r}") from error
    return made


def _attention_row(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": "attention",
        "sequences": row["B"],
        "rows": row["M"],
        "columns": row["N"],
        "dim": row["H"] * row["D"],
        "heads": row["H"],
        "bias": row["form"],
        "bias_size": 4 if row["form"] == "projected" else 32,
        "impl": row["contender"].removeprefix("megagraph_"),
        "dtype": _DTYPES[row["dtype"]],
        "direction": row["direction"],
        "seconds": row["median"],
        "unit": row["unit"],
        "device": row["device"],
        "torch": row["torch"],
        "commit": row["commit"],
    }
