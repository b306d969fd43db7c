"""What pages say of depth, curves, heavy stages, and of what a rank holds; `bench/figures.py` looks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bench.paper.convergence import reached

At = Callable[[str], Any]  # what a file below bench/results holds
MIB, GIB = 2**20, 2**30


def by(rows: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """The one row with these values."""
    (found,) = (row for row in rows if all(row.get(name) == value for name, value in fields.items()))
    return found


NETWORKS = ("hierarchical", "gcn", "gcn-residual")


def of_depth(at: At, model: str) -> dict[int, tuple[list[float], float]]:
    """Test accuracies of every number of layers, in percent, and the most MiB of a step."""
    found: dict[int, tuple[list[float], float]] = {}
    for row in at("cpu/depth/series.json"):
        if row["model"] == model:
            tests, most = found.get(row["layers"], ([], 0.0))
            found[row["layers"]] = ([*tests, 100 * row["test"]], max(most, row["peak_bytes"] / MIB))
    return found


def depth(at: At) -> Iterator[str]:
    found = {model: of_depth(at, model) for model in NETWORKS}
    for layers in found["hierarchical"]:
        of = [found[model][layers] for model in NETWORKS]
        cells = [f"{np.mean(tests):.1f} ({min(tests):.1f} to {max(tests):.1f})" for tests, _ in of]
        yield f"| {layers} | {' | '.join(cells)} | {' | '.join(f'{most:.0f}' for _, most in of)} |"
    per_layer = [(of[32][1] - of[1][1]) / 31 for of in found.values()]
    yield "{:.1f} MiB a layer, of the GCNs {:.1f} and {:.1f}".format(*per_layer)
    (paper,) = at("cpu/depth/paper.json")
    text = "{:.1f} % of the test nodes at the best epoch on the validation nodes, of {} epochs and {} steps"
    yield text.format(100 * paper["test"], paper["epochs"], paper["steps"])


def heavy_first(at: At) -> dict[int, dict[str, dict[str, Any]]]:
    """By columns and split: MiB of the stages, and what the slowest takes, over that of even ones, of all rounds."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for row in at("cpu/pipeline_stages/heavy.json")[:-1]:
        slowest = np.max(row["cpu_seconds"], axis=0)
        of = found.setdefault(row["columns"], {"6,6,6,6": {"slowest": slowest}})
        ratio = np.quantile(slowest / of["6,6,6,6"]["slowest"], (0, 0.5, 1))
        mib = [size / MIB for size in row["peak_bytes"]]
        of[row["split"]] = {"MiB": mib, "slowest": slowest, "ratio": ratio, "planned": row["planned"]}
    return found


def heavy(at: At) -> Iterator[str]:
    found, last = heavy_first(at), at("cpu/pipeline_stages/heavy.json")[-1]
    for columns, of in found.items():
        cells = [", ".join(f"{size:.1f}" for size in of[split]["MiB"]) for split in ("6,6,6,6", "3,7,7,7")]
        low, middle, high = of["3,7,7,7"]["ratio"]
        planned = next(split for split, row in of.items() if row["planned"])
        yield f"| {columns:,} | {' | '.join(cells)} | {middle:.2f} ({low:.2f} to {high:.2f}) | {planned} |"
    starts = [*last["lightest_from"]]
    (place,) = (i for i, split in enumerate(last["lightest_from"].values()) if split == "3,7,7,7")
    yield f"less than even ones from {last['short_is_lighter_from']:,} columns on, and the least of all splits "
    yield f"from {int(starts[place]):,} up to {int(starts[place + 1]):,}"
    off = {row["columns"]: 100 * row["held_out"]["time_mape"] for row in at("cpu/pipeline_stages/heavy.json")[:-1]}
    yield "off by {:.0f}, {:.0f} and {:.0f} % on held-out rows".format(*off.values())
    yield f"4,7,7,6 takes {found[16384]['4,7,7,6']['ratio'][1]:.2f} of the even split"


def shared_sequence(at: At) -> Iterator[str]:
    """Bytes of ranks that share a sequence, counted (predicted)."""
    rows = at("cpu/plan_memory/sequence.json")

    def cell(row: dict[str, Any], name: str) -> str:
        return f"{row[f'{name}_bytes'] / MIB:.1f} ({row[f'predicted_{name}_bytes'] / MIB:.1f})"

    for row in rows:
        if row["bias"] == "bucket":
            other = by(rows, bias="projected", ranks=row["ranks"], comm=row["comm"])
            cells = [cell(row, "bias"), cell(other, "bias"), cell(row, "kept"), cell(row, "peak"), cell(other, "peak")]
            yield f"| {row['ranks']}{', ' + row['comm'] if row['ranks'] > 1 else ''} | {' | '.join(cells)} |"
    off = {
        name: [(abs(row[f"predicted_{name}_bytes"] / row[f"{name}_bytes"] - 1), row["comm"]) for row in rows]
        for name in ("bias", "kept", "peak")
    }
    most = {name: max(x for x, way in off[name] if way != "allgather") for name in off}
    assert most["kept"] < 1e-3, "the page says that it is exact"
    bias, peak = (f"{100 * most[name]:.1f} %" for name in ("bias", "peak"))
    yield f"what is kept exactly, data of the bias to {bias} and the peak to {peak}"
    yield f"but that of allgather up to {100 * max(off['peak'])[0]:.0f} % too low"
    assert max(off["peak"])[1] == "allgather", "the page says so"


CAP_MIB = 512  # of plan_memory's longest sequences


def below_and_beyond(at: At) -> dict[str, tuple[list[tuple[int, float]], list[tuple[int, float]]]]:
    """Lengths of sequences of each contender, with their MiB, up to the cap and beyond it."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in at("cpu/plan_memory/longest.json"):
        found.setdefault(row["what"], []).append((row["nodes"], max(row["rank_bytes"]) / MIB))
    return {
        name: ([p for p in points if p[1] <= CAP_MIB], [p for p in points if p[1] > CAP_MIB])
        for name, points in found.items()
    }


def longest(at: At) -> Iterator[str]:
    """Longest sequence of each contender below the cap and its MiB, and those of the next length."""
    for name, (below, beyond) in below_and_beyond(at).items():
        rest = f"{beyond[0][0]:,}: {beyond[0][1]:,.0f}" if beyond else "-"
        yield f"| {name} | {below[-1][0]:,} | {below[-1][1]:,.0f} | {rest} |"


def longest_claimed(at: At) -> Iterator[str]:
    nodes = [below[-1][0] for below, _ in below_and_beyond(at).values()]
    yield "at most {:,} nodes of eager ANS-GT, {:,} of ours, and {:,} over four ranks".format(*nodes[:2], nodes[-1])


def ablation(at: At) -> Iterator[str]:
    """GB of the fullest rank for the whole batch, counted and predicted."""
    rows = at("cpu/plan_memory/ablation.json")
    none = by(rows, what="none")
    for row in rows:
        most, predicted = max(row["batch_bytes"]), max(row.get("predicted_bytes", [0]))
        said = f"{predicted / 1e9:.2f}" if predicted else "-"
        part = most / none["batch_bytes"][0]
        yield f"| {row['what']} | {row['processes']} | {most / 1e9:.2f} | {said} | {part:.2f} |"
    checked = none["checked"]
    yield f"{100 * abs(checked['bytes'] / checked['line'] - 1):.1f} % off the line"
    off = {row["what"]: max(row["predicted_bytes"]) / max(row["batch_bytes"]) - 1 for row in rows[1:]}
    shared = max(abs(off[name]) for name in off if name[:2] in ("no", "pp", "cp", "dp"))
    yield f"within {100 * shared:.0f} % where ranks share in fp32, {-100 * off['recomputation']:.0f} % too low with "
    yield f"recomputation and {100 * off['16 bits']:.0f} % too high with 16 bits"


BOTH = ("ours", "eager")


def best_test(curve: list[list[float]]) -> float:
    """Percent of the test nodes at the best epoch on the validation nodes."""
    return 100 * max(curve, key=lambda point: point[1])[2]


def convergence(at: At) -> Iterator[str]:
    """A line a seed, and how often ours has been sooner."""
    rows, sooner = at("cpu/convergence/time.json"), 0
    for row in rows:
        curves = [row[f"{name}_curve"] for name in BOTH]
        near = max(val for _, val, _ in curves[1]) - 0.01
        until = [reached(curve, near) for curve in curves]
        cells = [f"{best_test(curve):.1f}" for curve in curves]
        cells += [f"{seconds:.0f}" for seconds in (*(curve[-1][0] for curve in curves), *until)]
        sooner += until[0] < until[1]
        yield f"| {row['seed']} | {' | '.join(cells)} |"
    yield f"Ours is there sooner with {sooner} of the {len(rows)} seeds"


def of_processes(at: At) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in at("cpu/convergence/processes.json"):
        found.setdefault(row["run"], []).append(row)
    return found


def tests_of(rows: list[dict[str, Any]]) -> list[float]:
    return [100 * row["test_accuracy"] for row in rows]


def points_apart(at: At) -> float:
    """Points between the mean accuracies of several processes and of one, at most."""
    found = of_processes(at)
    one = np.mean(tests_of(found["one process"]))
    return float(max(abs(np.mean(tests_of(found[name])) - one) for name in ("cp 2", "pp 2, dp 2")))


def layouts(at: At) -> Iterator[str]:
    """A line a layout."""
    found = of_processes(at)
    for name, rows in found.items():
        seconds = [row["curve"][-1][0] for row in rows]
        both = ((1, tests_of(rows)), (0, seconds))
        cells = [f"{x:.{n}f}" for n, of in both for x in (np.mean(of), min(of), max(of))]
        yield "| {} | {} | {} ({} to {}) | {} ({} to {}) |".format(name, rows[0]["processes"], *cells)
    curves = {name: [[point[1:] for point in row["curve"]] for row in rows] for name, rows in found.items()}
    assert curves["cp 2"] == curves["pp 2, dp 2"] == curves["one process"], "the page says so"
    yield f"accuracies of two and four are {points_apart(at):.2f} points from one process's"


def layouts_claimed(at: At) -> Iterator[str]:
    yield f"two and four processes are {points_apart(at):.2f} points from one"
    found = [np.mean(tests_of(of_processes(at)[name])) for name in ("one process", "TorchGT")]
    yield "ours is right on {:.1f} % of the test nodes, TorchGT's way on {:.1f} %".format(*found)


WAYS = ("ring", "allgather", "ulysses")


def ways(at: At) -> Iterator[str]:
    """A line for ranks and bias: seconds of a step, MiB that a rank sends in it, and MiB of its bias, by each way."""
    for row in at("cpu/halo/computers-dense.json"):
        of = [row[way] for way in WAYS]
        seconds = [f"{way['median']:.2f}" for way in of]
        mib = [f"{way[f'{what}_bytes'] / MIB:.1f}" for what in ("sent", "bias") for way in of]
        bias = "buckets" if row["kind"] == "bucket" else "4 channels"
        yield f"| {row['ranks']} | {bias} | {' | '.join([*seconds, *mib])} |"
    four = ("halo", *WAYS)
    for name in ("wordnet30", "debian12", "computers"):
        for row in at(f"cpu/halo/{name}.json")[1:]:
            seconds = [f"{row[way]['median']:.2f}" for way in four]
            mib = [f"{row[way][f'{what}_bytes'] / MIB:.0f}" for what in ("sent", "bias") for way in four]
            yield f"| {name} | {row['ranks']} | {' | '.join([*seconds, *mib])} |"
