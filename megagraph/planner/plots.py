"""Figures of a cost model and a search, drawn from their files alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megagraph.models.config import ModelConfig
from megagraph.planner.cost import CostModel
from megagraph.planner.fitting import (
    COMPUTED,
    as_alike,
    fit_memory,
    fit_seconds,
    held_out_third,
    mape,
    predict_peak,
    predict_seconds,
    r_squared,
)
from megagraph.planner.memory import shared_bytes, stage_bytes
from megagraph.planner.plan import Plan
from megagraph.planner.rows import Row
from megagraph.planner.scaling import Point
from megagraph.planner.searching import SearchResult
from megagraph.planner.workload import Workload


def _figure(columns: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * columns, 4), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _small_ticks(axis: Any) -> None:
    """Numbers of a logarithmic axis that do not overlap."""
    axis.tick_params(which="both", labelsize=7)
    axis.tick_params(axis="x", which="both", labelrotation=45)


def costmodel(cost: CostModel, rows: Sequence[Row], path: Path) -> None:
    """Predicted against measured, seconds and bytes, and latency against layers; a random third was held out.

    Seconds of ranks of unequal speed are those of their average, which coefficients are of.
    """
    figure, axes = _figure(3)
    computed = [row for row in as_alike(row for row in rows if row["kind"] in COMPUTED)[0] if row["seconds"] > 0]
    memory = [row for row in rows if row["kind"] == "memory"]
    for axis, part, unit in ((axes[0], computed, "seconds"), (axes[1], memory, "peak bytes")):
        seen, unseen = held_out_third(part)
        if not seen:
            axis.set(title=f"{unit}: no rows")
            continue
        seconds, sizes = (fit_seconds(seen), {}) if unit == "seconds" else ({}, fit_memory(seen))
        lows = []
        for name, rows_of, marker in (("fitted", seen, "."), ("held out", unseen, "x")):
            if not rows_of:
                continue
            measured = [row["seconds" if unit == "seconds" else "peak_bytes"] for row in rows_of]
            predicted = [
                predict_seconds(seconds, row) if unit == "seconds" else predict_peak(sizes, row) for row in rows_of
            ]
            if unit == "seconds":
                fitness = r_squared(np.log(np.maximum(predicted, 1e-12)), np.log(measured))
            else:
                fitness = r_squared(predicted, measured)
            of = " of log time" if unit == "seconds" else ""
            label = f"{name}: MAPE {mape(predicted, measured):.1%}, R$^2${of} {fitness:.3f}"
            axis.loglog(measured, predicted, marker, label=label)
            lows += [min(measured), max(measured)]
        axis.plot([min(lows), max(lows)], [min(lows), max(lows)], "k-", linewidth=0.8)
        axis.set(xlabel=f"measured {unit}", ylabel=f"predicted {unit}")
        axis.legend(fontsize=7)
        _small_ticks(axis)
    deep = [row for row in computed if "layers" in row]
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in deep:
        groups.setdefault((row["sequences"], row["rows"], row["dim"], row["heads"], row["direction"]), []).append(row)
    longest = sorted((g for g in groups.values() if len({r["layers"] for r in g}) > 1), key=len, reverse=True)[:8]
    for group in longest:
        group = sorted(group, key=lambda row: row["layers"])
        label = "b {sequences}, d {dim}, h {heads}".format(**group[0])
        axes[2].plot([r["layers"] for r in group], [r["seconds"] for r in group], ".-", linewidth=0.8, label=label)
    axes[2].set(xlabel="layers", ylabel="measured seconds")
    if longest:
        axes[2].legend(fontsize=7)
    else:
        axes[2].set_title("no rows that differ in layers alone")
    figure.savefig(path, dpi=120)


def pareto(result: SearchResult, path: Path) -> None:
    """Step time and peak memory of all candidates, coloured by what they cut, and the front.

    Of a candidate that was not run on paper a lower bound of its time is known, which may be below the front: pale.
    """
    figure, (axis,) = _figure(1)
    strategies: dict[str, dict[bool, list[tuple[float, float]]]] = {}
    timed = {candidate.plan: candidate for candidate in result.pareto}
    for candidate in result.candidates:
        plan, known = candidate.plan, timed.get(candidate.plan, candidate)
        if np.isfinite(known.step_seconds):
            cuts = [name for name in ("pp", "cp", "dp") if getattr(plan, name) > 1]
            points = strategies.setdefault(" + ".join(cuts) or "one device", {True: [], False: []})
            points[known.exact].append((known.step_seconds, known.peak_bytes / 2**30))
    for i, (name, points) in enumerate(sorted(strategies.items())):
        for exact, alpha in ((False, 0.2), (True, 1.0)):
            x, y = zip(*points[exact], strict=True) if points[exact] else ((), ())
            label = name if exact else None
            axis.plot(x, y, ".", color=f"C{i}", alpha=alpha, markersize=4, label=label)
    front = [(candidate.step_seconds, candidate.peak_bytes / 2**30) for candidate in result.pareto]
    axis.plot(*zip(*front, strict=True), "k.-", drawstyle="steps-post", linewidth=0.8, label="Pareto front")
    axis.set(xscale="log", yscale="log", ylabel="predicted peak GiB of a rank")
    axis.set_xlabel("predicted step seconds; pale: at least so many")
    axis.legend(fontsize=7)
    _small_ticks(axis)
    figure.savefig(path, dpi=120)


def scaling(points: Sequence[Point], path: Path) -> None:
    """Sequences a second of the best plan beside what as many alone would give, and what a step of it takes."""
    figure, (throughput, terms) = _figure(2)
    sizes = sorted({point.world_size for point in points})
    names = list(dict.fromkeys(name for point in points for name in point.terms))
    for kind, marker, shift in (("strong", "o-", -0.2), ("weak", "s--", 0.2)):
        found = [point for point in points if point.kind == kind and point.terms]
        if not found:
            continue
        own = [point.world_size for point in found]  # others may have no plan
        label = f"{kind}: batch of {found[0].sequences:,}" + (" and more" if kind == "weak" else "")
        throughput.plot(own, [point.throughput for point in found], marker, markersize=4, label=label)
        throughput.plot(own, [found[0].throughput * size / own[0] for size in own], "k:", linewidth=0.8)
        bottom, at = np.zeros(len(found)), np.array([sizes.index(size) for size in own]) + shift
        for i, name in enumerate(names):
            part = np.array([point.terms[name] / sum(point.terms.values()) for point in found])
            terms.bar(at, part, 0.35, bottom=bottom, color=f"C{i}", label=name)
            bottom += part
    labels = [f"{size:,}" for size in sizes]
    throughput.set(xlabel="devices", ylabel="predicted sequences a second", xscale="log", yscale="log")
    throughput.set_xticks(sizes, labels, fontsize=7)
    throughput.set_xticks([], minor=True)
    terms.set(xlabel="devices: strong left, weak right", ylabel="part of a step", ylim=(0, 1.35))
    terms.set_xticks(range(len(sizes)), labels, fontsize=7)
    if names:
        throughput.legend(fontsize=7)
        terms.legend(*_each_once(terms), fontsize=7, ncols=2, loc="upper center")
    else:
        figure.suptitle("no plan fits")
    figure.savefig(path, dpi=120)


def _each_once(axis: Any) -> tuple[list[Any], list[str]]:
    """Handles and labels of a legend, each label once."""
    handles = {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    return [*handles.values()], [*handles]


def stages(cost: CostModel, config: ModelConfig, plan: Plan, workload: Workload, path: Path) -> None:
    """What every stage of a pipeline needs, by what it is for."""
    figure, (axis,) = _figure(1)
    counts = np.array([[len(stage)] for stage in plan.stages(config.layers)], float)
    work = cost.rank_work(config, plan, workload)
    parts = stage_bytes(cost.memory, work, counts)
    shared = shared_bytes(cost.memory, work) / plan.stages_per_rank
    bottom = np.zeros(len(counts))
    for name, sizes in {**parts, "batch and workspace": np.full((len(counts), 1), shared)}.items():
        gib = sizes[:, 0] / 2**30
        axis.bar(range(len(counts)), gib, bottom=bottom, label=name)
        bottom += gib
    axis.set(xlabel="stage", ylabel="predicted GiB", title=f"layers {[int(c) for c in counts[:, 0]]}, {plan.schedule}")
    axis.set_xticks(range(len(counts)))
    figure.legend(fontsize=7, ncols=3, loc="outside lower center")  # bars may fill the panel
    figure.savefig(path, dpi=120)
