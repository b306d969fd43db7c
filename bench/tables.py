"""Tables and plots from the rows of a folder alone.

python -m bench.tables FOLDER           # plots land beside the rows
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

import tyro

PREDICTED = Path(__file__).parent / "results" / "compile" / "predicted.json"

Row = dict[str, Any]
_CASE = ("series", "B", "H", "M", "N", "D", "form", "dtype", "num_super")  # a shape may be in several series


def load(folder: Path) -> list[Row]:
    """The rows of every file that holds a list of them."""
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    rows = [row for content in files if isinstance(content, list) for row in content]
    return rows + _backward(rows)


def _backward(rows: list[Row]) -> list[Row]:
    """Backward alone, forward + backward less forward, where there is a floor to compare it with."""
    both, forward = (
        {(_case(row), row["contender"]): row for row in _timed(rows, direction=direction)}
        for direction in ("forward_backward", "forward")
    )
    result = []
    for key, row in both.items():
        if key in forward and row.get("floor") is not None:
            first = forward[key]
            less = {name: row[name] - first[name] for name in ("median", "floor") if first.get(name)}
            result.append(row | less | {"direction": "backward"})
    return result


def _timed(rows: Iterable[Row], **fields: Any) -> list[Row]:
    """Rows that have a time and these values."""
    return [row for row in rows if "median" in row and all(row.get(name) == value for name, value in fields.items())]


def _case(row: Row) -> tuple:
    return tuple(row.get(name) for name in _CASE)


_median = itemgetter("median")


def _ours(row: Row) -> bool:
    return row["contender"].startswith("megagraph")


def markdown(head: list[str], body: list[list[str]]) -> str:
    """A table; nothing without lines."""
    if not body:
        return ""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"


def _words(name: str) -> str:
    return name.replace("_backward", " + backward").replace("_", " ")


def _shape(row: Row) -> str:
    return f"{row['B']}, {row['H']}, {row['N']}, {row['D']}"


def five_shapes(rows: list[Row], predicted: Iterable[Row] = ()) -> str:
    """The fastest of ours against the floor, what was ``predicted`` before it was measured, and the fastest peer."""
    rows = _timed(rows, series="shapes")
    expected = {(_shape(row), row["form"], row["direction"]): row for row in predicted}
    body = []
    for case, direction in product(dict.fromkeys(map(_case, rows)), ("forward", "backward", "forward_backward")):
        here = sorted(_timed(rows, direction=direction), key=_median)
        here = [row for row in here if _case(row) == case]
        ours, peer = (next((row for row in here if _ours(row) == mine), None) for mine in (True, False))
        if ours is None:
            continue
        cells = [_shape(ours), ours["form"], _words(direction), _ms(_median(ours)), _words(ours["contender"])]
        floor, guess = ours.get("floor"), expected.get((_shape(ours), ours["form"], direction))
        cells += ["-", "-"] if floor is None else [f"{floor / _median(ours):.0%}", f"{_median(ours) / floor:.2f}"]
        if guess is None:
            cells += ["-"] * 4
        else:
            cells += [_ms(guess["full"]), _ms(guess["likely"]), guess["binds"]]
            cells += [f"{_median(ours) / guess['likely']:.2f}"]
        if peer is None:
            cells += ["-"] * 3
        else:
            cells += [_words(peer["contender"]), _ms(_median(peer)), f"{_median(peer) / _median(ours):.2f}"]
        body.append(cells)
    head = ["B, H, N, D", "bias", "direction", "ours, ms", "which", "of floor", "x floor"]
    head += ["predicted for an H200, ms", "likely, ms", "binds", "x likely", "best peer", "ms", "faster"]
    return markdown(head, body)


def ring(rows: list[Row]) -> str:
    """A rank's steps against one call on the same rows and columns."""
    calls = {(_case(row), row["direction"]): row for row in _timed(rows, contender="one_call")}
    body = []
    for steps in _timed(rows, contender="ring_steps"):
        call = calls.get((_case(steps), steps["direction"]))
        if call is not None:
            times = [_ms(_median(steps)), _ms(_median(call)), f"{_median(steps) / _median(call):.2f}"]
            nodes = f"{steps['N'] - steps['num_super']}, {steps['num_super']}, {steps['D']}"
            body.append([nodes, steps["form"], str(steps["P"]), _words(steps["direction"]), *times])
    return markdown(["N', N_s, D", "bias", "P", "direction", "steps, ms", "one call, ms", "ratio"], body)


def kernels(rows: list[Row]) -> str:
    """Times of every choice of tiles for every case and kernel, the fastest first."""
    rows = sorted(_timed(rows, series="tiles"), key=lambda row: (*map(str, _case(row)), row["kernel"], _median(row)))
    body = []
    for row in rows:
        sizes = ", ".join(map(str, row["tiles"].values()))
        body.append([_shape(row), row["form"], row["kernel"], sizes, _ms(_median(row))])
    return markdown(["B, H, N, D", "bias", "kernel", "tiles, warps, stages", "ms"], body)


def per_contender(rows: list[Row], field: str, unit: float, series: str) -> str:
    """One field of every contender in forward + backward, a line per case; what ran nowhere has no column."""
    rows = [row for row in _timed(rows, series=series, direction="forward_backward") if row.get(field) is not None]
    names = list(dict.fromkeys(row["contender"] for row in rows))
    body = []
    for case in dict.fromkeys(map(_case, rows)):
        of_case = {row["contender"]: row for row in rows if _case(row) == case}
        first = next(iter(of_case.values()))
        body.append([_shape(first), first["form"]])
        body[-1] += [f"{of_case[name][field] / unit:.3g}" if name in of_case else "-" for name in names]
    return markdown(["B, H, N, D", "bias", *names], body)


def refusals(rows: list[Row]) -> str:
    """Why a contender has no time."""
    counts = Counter((row["contender"], row["refusal"]) for row in rows if row.get("refusal"))
    body = [[name, reason.replace("|", "/"), str(count)] for (name, reason), count in sorted(counts.items())]
    return markdown(["contender", "refuses", "rows"], body)


def origin(rows: list[Row]) -> str:
    """Device, versions and commit; more than one where rows of several runs lie together."""
    names = ("device", "torch", "triton", "commit", "date")
    return "\n".join(sorted({" · ".join(f"{name} {row[name]}" for name in names) for row in rows}))


def plot_time_against_n(rows: list[Row], path: Path) -> None:
    """Forward + backward of every contender over N, both axes logarithmic."""
    rows = _timed(rows, series="N", direction="forward_backward")
    if not rows:
        return
    figure, axes = draw(5.5, 4)
    for name in dict.fromkeys(row["contender"] for row in rows):
        points = sorted((row["N"], row["median"] * 1e3) for row in rows if row["contender"] == name)
        width = 2.5 if name.startswith("megagraph") else 1.2
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=width, label=_words(name))
    first = rows[0]
    what = f"B = {first['B']}, H = {first['H']}, D = {first['D']}, {first['form']} bias, {first['dtype']}"
    sizes = sorted({row["N"] for row in rows})
    axes.set(xscale="log", yscale="log", xlabel="N", ylabel="forward + backward, ms", title=what)
    axes.set_xticks(sizes, labels=map(str, sizes))
    axes.minorticks_off()
    axes.legend(frameon=False)
    save(figure, first, path)


def plot_fraction_of_floor(rows: list[Row], path: Path) -> None:
    """The best of ours at the five shapes, forward and backward."""
    best: dict[tuple, Row] = {}
    for row in _timed(rows, series="shapes"):
        key = (*_case(row), row["direction"])
        if _ours(row) and row.get("floor") and row["direction"] != "forward_backward":
            best[key] = min(row, best.get(key, row), key=_median)
    if not best:
        return
    figure, axes = draw(7, 4.5)
    cases = list(dict.fromkeys(map(_case, best.values())))
    for offset, direction in ((-0.2, "forward"), (0.2, "backward")):
        bars = [row for row in best.values() if row["direction"] == direction]
        places = [cases.index(_case(row)) + offset for row in bars]
        axes.barh(places, [row["floor"] / row["median"] for row in bars], height=0.38, label=direction)
    labels = {_case(row): f"{_shape(row)}, {row['form']}" for row in best.values()}
    axes.set_yticks(range(len(cases)), labels=[labels[case] for case in cases])
    axes.set(xlim=(0, 1), xlabel="floor / time")
    axes.invert_yaxis()
    axes.legend(frameon=False)
    save(figure, next(iter(best.values())), path)


def draw(width: float, height: float, *, columns: int = 1, sharey: bool = True):
    """A figure without a display, and its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(ncols=columns, sharey=sharey)


def save(figure, row: Row, path: Path) -> None:
    """Write a figure, with the origin of its rows."""
    import matplotlib

    figure.supxlabel(f"{row['device']}, torch {row['torch']}, commit {row['commit']}", fontsize=8, color="gray")
    with matplotlib.rc_context({"svg.hashsalt": "megagraph", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})  # the same rows give the same file


def main(folder: tyro.conf.Positional[Path]) -> None:
    """Print the tables, the five shapes last; write the plots.

    Args:
        folder: of the rows.
    """
    rows = load(folder)
    if not rows:
        raise SystemExit(f"expected a folder with lists of rows in files *.json, got {folder}")
    plot_time_against_n(rows, folder / "time_against_n.svg")
    plot_fraction_of_floor(rows, folder / "fraction_of_floor.svg")
    tables = {"Refused": refusals(rows)}
    for series in ("N", "D", "H", "form"):
        tables[f"Forward + backward over {series}, ms"] = per_contender(rows, "median", 1e-3, series)
    tables["Kept for backward beyond the inputs, MiB"] = per_contender(rows, "saved_bytes", 2**20, "shapes")
    tables["Peak of forward + backward, MiB"] = per_contender(rows, "peak_bytes", 2**20, "shapes")
    tables["A rank's ring steps"] = ring(rows)
    tables["Kernels by their tiles"] = kernels(rows)
    tables["Listed pairs, forward + backward, ms"] = per_contender(rows, "median", 1e-3, "pairs")
    predicted = json.loads(PREDICTED.read_text(encoding="utf-8"))
    tables["Five shapes"] = five_shapes(rows, predicted)
    print(origin(rows))
    for title, table in tables.items():
        if table:
            print(f"\n## {title}\n\n{table}")


if __name__ == "__main__":
    tyro.cli(main)
