"""The experiments as a page: tables and figures of their rows alone, each with its command, device and commit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.paper.compared import reported_of
from bench.paper.experiments import EXPERIMENTS
from bench.provenance import rows_of
from bench.tables import markdown

Row = dict[str, Any]
MIB = 2**20
_BOTH = ("ours", "eager")
PLAN = ("predicted_seconds", "measured_seconds", "measured_bytes")


HEAD = """# Results, experiment by experiment

Made from rows alone: every command with what is in its rows, medians, in brackets the least and the most, and below
that their files, with where they were measured. [The paper, claim by claim](claims.md) says what they show,
[rows](rows.md) which of them today's code has left behind."""
QUICK = """# Quick results

Of small settings, which say that every path runs, and nothing else."""


def having(name: str) -> Callable[[list[Row]], list[Row]]:
    return lambda rows: [row for row in rows if name in row]


def reported(rows: list[Row]) -> list[Row]:
    """Trainings that are reported, as docs/accuracy.md has them; not of tuning, or of settings given up."""
    by_system: dict[tuple[str, str], list[Row]] = {}
    for row in having("system")(rows):
        by_system.setdefault((row["set"], row["system"]), []).append(row)
    return [row for (_, system), found in by_system.items() for row in reported_of(found, system).values()]


class Shown(NamedTuple):
    """Lines are groups of rows that agree in ``by``, columns what was measured in them; a dot goes into a table."""

    by: tuple[str, ...]
    values: tuple[str, ...]
    kept: Callable[[list[Row]], list[Row]] = list


SHOWN = {
    "accuracy": Shown(("set", "split", "system"), ("test", "best_val"), reported),
    "epoch": Shown(("dataset",), ("ours_epoch_seconds", "eager_epoch_seconds", "ratio")),
    "memory": Shown(
        ("device", "nodes", "sequences"),
        tuple(f"{what}.{who}{bits}" for bits in ("", " bf16") for what in ("seconds", "peak_bytes") for who in _BOTH),
    ),
    "losses": Shown(("dataset",), ("difference",)),
    "rounding": Shown(("device", "layers"), ("errors.ours bf16", "errors.eager bf16")),
    "convergence": Shown((), (), lambda rows: []),  # curves; docs/accuracy.md has what they say
    "processes": Shown(("run", "processes"), ("test_accuracy", "best_val_accuracy")),
    "depth": Shown(("model", "layers"), ("test", "best_val", "peak_bytes"), having("model")),
    "sequence-memory": Shown(
        ("bias", "ranks", "comm"),
        tuple(f"{said}{name}_bytes" for name in ("bias", "kept", "peak") for said in ("", "predicted_")),
    ),
    "ablation": Shown(("what", "processes"), ("batch_bytes", "predicted_bytes")),
    "longest": Shown(("what", "nodes"), ("rank_bytes",)),
    "cost-model": Shown(("layers", "heads"), ("kept_bytes", "peak_bytes", "seconds")),
    "transfer": Shown(("network", "layers"), ("peak_bytes", "seconds")),
    "device-steps": Shown(("case",), (*PLAN, "predicted_bytes", "kernel_seconds")),
    "device-runs": Shown(("run", "processes"), ("test_accuracy", "steps", "peak_memory_bytes")),
    "stages": Shown(("schedule", "split", "stage"), ("step_seconds", "peak_bytes")),
    "heavy-stages": Shown(("columns", "split"), ("peak_bytes",), having("columns")),
    "whole-graphs": Shown(("set",), ("seconds", "peak_uss_bytes", "summary.test_accuracy")),
    "plans": Shown(("name",), PLAN, having("measured_seconds")),
    "cluster": Shown(("bed", "name"), PLAN, having("measured_seconds")),
    "pareto": Shown(("name",), PLAN, having("measured_seconds")),
}
PRODUCTS = Shown(
    ("step", "checkpoint"), ("seconds", "step_1_seconds", "step_100_seconds", "peak_uss_bytes", "extrapolated_bytes")
)


def page(results: Path, link: str, head: str = HEAD) -> str:
    """All experiments with rows below ``results``, to which ``link`` leads from the page."""
    parts = [head]
    found_by = {
        name: sorted(path for pattern in experiment.rows for path in results.glob(pattern))
        for name, experiment in EXPERIMENTS.items()
    }
    named = {path.with_suffix(".svg") for files in found_by.values() for path in files}  # each stands by its own rows
    placed: set[Path] = set()
    for name, experiment in EXPERIMENTS.items():
        files = found_by[name]
        rows = {path.relative_to(results).as_posix(): rows_of(path) for path in files}
        parts += _section(name, experiment.what, rows)
        folders = sorted({path.parent for path in files if path.parent.parent != results})
        for judgement in (found for folder in folders for found in sorted(folder.glob("judgement.json"))):
            parts.append(_judged(json.loads(judgement.read_text(encoding="utf-8"))))
        for figure in (found for folder in folders for found in sorted(folder.glob("*.svg"))):
            if figure in placed or (figure in named and figure.with_suffix(".json") not in files):
                continue
            placed.add(figure)
            parts.append(f"![{experiment.what}]({link}/{figure.relative_to(results).as_posix()})")
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(name: str, what: str, rows: dict[str, list[Row]]) -> list[str]:
    """Lines of an experiment, before its judgement and figures."""
    shown = SHOWN.get(name, PRODUCTS)
    kept = shown.kept([row for found in rows.values() for row in found])
    lines = [f"- {_origin(file, found)}" for file, found in rows.items()] or ["No rows yet."]
    return [
        f"## {what[0].upper()}{what[1:]}",
        f"`python -m bench.paper {name}`",
        _table(kept, shown),
        "\n".join(lines),
    ]


def _table(rows: list[Row], shown: Shown) -> str:
    if not rows:
        return ""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(str(_at(row, name)) for name in shown.by), []).append(row)
    numbers = {
        name: [[number for row in group for number in _numbers(_at(row, name))] for group in groups.values()]
        for name in shown.values
    }
    numbers = {name: cells for name, cells in numbers.items() if any(cells)}
    columns = [*zip(*([_cell(name, cell) for cell in cells] for name, cells in numbers.items()), strict=True)]
    head = [*(name.replace("_", " ") for name in shown.by), *map(_head, numbers), "rows"]
    body = [[*key, *cells, str(len(groups[key]))] for key, cells in zip(groups, columns, strict=True)]
    return markdown(head, body)


def _judged(found: dict[str, Any]) -> str:
    """A line for each part of a judgement, or for all of it."""
    parts = {name: part for name, part in found.items() if isinstance(part, dict) and name != "from_rows"}
    parts = {name: part for name, part in parts.items() if all(map(_numbers, part.values()))} or {"": found}
    fields = list(dict.fromkeys(name for part in parts.values() for name in part if _numbers(part[name])))
    body = [
        [name, *(_short(part[field]) if field in part else "-" for field in fields)] for name, part in parts.items()
    ]
    return markdown(["judged", *fields], body if fields else [])


def _at(row: Any, name: str) -> Any:
    """A field, or what ends a dotted name; of one that is kept as its median and range these three."""
    if f"{name}_range" in row:
        return [*row[f"{name}_range"], row[f"{name}_median"]]
    for part in name.split("."):
        row = row.get(part) if isinstance(row, dict) else None
    return row


def _numbers(value: Any) -> list[float]:
    """Those that a value holds, which is one, or a list."""
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]


def _head(name: str) -> str:
    """With the unit, which ends the names of fields."""
    for part, unit in (("seconds", "s"), ("bytes", "MiB")):
        if part in name:
            return f"{' '.join(name.replace(part, '').replace('_', ' ').replace('.', ' ').split()) or 'time'}, {unit}"
    return name.replace("_", " ").replace(".", " ")


def _cell(name: str, numbers: list[float]) -> str:
    """The median, and the least and the most where there are several."""
    if not numbers:
        return "-"
    scale = MIB if "bytes" in name else 1
    low, middle, high = (_short(number / scale) for number in (min(numbers), median(numbers), max(numbers)))
    return middle if low == high else f"{middle} ({low} to {high})"


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def _origin(file: str, rows: list[Row]) -> str:
    def each(name: str) -> str:
        return ", ".join(sorted({str(row[name]) for row in rows if name in row}))

    marks = [mark for mark in ("quick", "generated") if any(row.get(mark) for row in rows)]
    words = [
        f"`{file}`, {len(rows)} row{'s' * (len(rows) > 1)}",
        each("device"),
        f"torch {each('torch')}",
        f"commit {each('commit')}",
    ]
    return ", ".join([*words, *marks])
