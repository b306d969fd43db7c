"""What README and the pages say that rows say: each sentence with its figures as the rows have them now.

A page function yields pieces of its page; `wrong` finds those that do not stand there. Where rows change, so must the
page: a piece says what to write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.paper.figures import (
    BOTH,
    GIB,
    MIB,
    WAYS,
    At,
    ablation,
    best_test,
    by,
    convergence,
    depth,
    heavy,
    heavy_first,
    layouts,
    layouts_claimed,
    longest,
    longest_claimed,
    of_depth,
    shared_sequence,
    ways,
)
from bench.paper.trials import CONVOLVED, LABELLED

SHAPES = ((8192, 8, 32, 8), (256, 32, 144, 4), (1, 8, 8192, 8), (1, 8, 8192, 64), (4, 16, 2048, 32))
FORMS = ("dense", "bucket", "projected")
PEERS = {"sdpa_efficient": "SDPA efficient", "flex_attention": "FlexAttention", "jax_cudnn": "JAX, cuDNN"}


def best(rows: list[dict[str, Any]], ours: bool, shape: tuple[int, ...], form: str, direction: str) -> dict[str, Any]:
    """The fastest of ours, or of the peers, at one of the five shapes."""
    here = [row for row in rows if row["series"] == "shapes" and (row["form"], row["direction"]) == (form, direction)]
    here = [row for row in here if tuple(row[name] for name in "BHND") == shape and "median" in row]
    return min((r for r in here if r["contender"].startswith("megagraph") == ours), key=lambda row: row["median"])


def readme(at: At) -> Iterator[str]:
    shape, rows = (1, 8, 8192, 64), at("h200/attention.json")
    ours, peer = (1e3 * best(rows, mine, shape, "bucket", "forward_backward")["median"] for mine in (True, False))
    yield f"| {ours:.2f} ms; fastest peer, SDPA, {peer:.1f} ms |"
    ratio = by(at("cpu/attention.json"), form="bucket", N=2048)["eager_ratio"]
    yield "| {of_medians:.1f} times faster than eager PyTorch ({range[0]:.1f} to {range[1]:.1f}) |".format(**ratio)
    (epoch,) = at("cpu/epoch_time/citeseer.json")
    yield f"| {median(epoch['ours_epoch_seconds']):.1f} s, {epoch['ratio_median']:.2f} times less than eager ANS-GT |"
    sets = at("cpu/accuracy/judgement.json")
    yield "| {} points of test accuracy, or of ROC AUC, on {}".format(*worth(sets))
    text = "right on {:.1f} % of Cora's test nodes and a GCN on {:.1f} %, on Computers {:.1f} and {:.1f} %"
    text += ", on wordnet30, the largest, {:.1f} and {:.1f} %, {:.1f} % with labels as input, which ours has there"
    graphs, systems = ("cora", "computers", "wordnet30"), ("megagraph", "gcn")
    right = [sets[name]["tests"][system][0] for name in graphs for system in systems]
    yield text.format(*right, sets["wordnet30"]["tests"][LABELLED[0]][0])
    beds = [row for row in at("cpu/cluster/judgement.json").values() if "MAPE" in row]
    low, *_, high = sorted(row["Spearman of predicted and measured"] for row in beds)
    regret = max(row["chosen / fastest"] for row in beds) - 1
    chosen = "the fastest was chosen" if regret == 0 else f"the chosen one within {100 * regret:.0f} % of the fastest"
    yield f"rank correlation {low:.2f} to {high:.2f}; {chosen}"
    (deep,) = at("nvidia-h200/step_memory.json")
    ours, eager = (
        f"{1e3 * median(deep['seconds'][name]):.0f} ms and {deep['peak_bytes'][name] / GIB:.1f} GiB"
        for name in ("ours bf16 replayed", "eager bf16 replayed")
    )
    yield f"| {ours}; eager ANS-GT {eager} |"
    kills = at("cpu/restarts.json")
    yield f"{sum(row['holds'] for row in kills)} of {len(kills)} runs went on to the same bits"
    yield f"{by(at('cpu/package.json'), what='megagraph')['value']:.0f} MB with torch"


SYSTEMS = {
    "megagraph": "HierarchicalGT",
    "megagraph-unbiased": "the same, its bias of other nodes",
    "graphormer": "Graphormer, with our settings",
    "gcn": "GCN",
    "sage": "GraphSAGE",
    "gat": "GAT",
    "cluster-gcn": "Cluster-GCN",
    "sgformer": "SGFormer",
    "polynormer": "Polynormer",
    "gps": "GraphGPS",
    "nodeformer": "NodeFormer",
}

SETS = {
    "cora": "Cora",
    "citeseer": "Citeseer",
    "pubmed": "PubMed",
    "computers": "Computers",
    "tolokers": "tolokers",
    "wordnet30": "wordnet30",
    "debian12": "debian12",
}

# by the authors; of SGFormer on another split than the public one
PUBLISHED = {
    "gcn": {"cora": " (81.5)", "citeseer": " (70.3)", "pubmed": " (79.0)"},
    "gat": {"cora": " (83.0)", "citeseer": " (72.5)", "pubmed": " (79.0)"},
    "sage": {"cora": "", "citeseer": "", "pubmed": ""},
    "sgformer": {"cora": " (84.5)", "citeseer": " (72.6)", "pubmed": " (80.3)"},
}


def _of_seeds(judged: dict[str, Any], system: str) -> str:
    return "{:.1f} ± {:.1f}".format(*judged["tests"][system])


def _difference(judged: dict[str, Any]) -> str:
    return "{:+.2f} [{:.2f}, {:.2f}]".format(judged["points"], *judged["interval"])


def worth(sets: dict[str, Any]) -> tuple[str, str]:
    """By how many points structure pays, and on how many graphs."""
    pays = [structure["points"] for name in SETS if (structure := sets[name]["structure"])["interval"][0] > 0]
    return f"{min(pays):.1f} to {max(pays):.1f}", f"{len(pays)} of {len(SETS)} graphs"


def accuracy(at: At) -> Iterator[str]:
    yield from tuned_alike(at)
    yield from convergence(at)
    yield from layouts(at)
    yield from depth(at)


def tuned_alike(at: At) -> Iterator[str]:
    sets = at("cpu/accuracy/judgement.json")
    for system, called in SYSTEMS.items():
        yield f"| {called} | {' | '.join(_of_seeds(sets[name], system) for name in ('cora', 'citeseer'))} |"
    for name, called in SETS.items():
        ours, other = (_of_seeds(sets[name], system) for system in ("megagraph", "megagraph-unbiased"))
        structure = sets[name]["structure"]
        changed = " to ".join(f"{100 * value:.1f}" for value in structure["bias_changed_classes"])
        correlation = " to ".join(f"{value:.2f}" for value in structure["bias_correlation"])
        yield f"| {called} | {ours} | {other} | {_difference(structure)} | {changed} | {correlation} |"
    yield f"Structure in the bias pays on {worth(sets)[1]}"
    for name in (name for name in SETS if "convolution" in sets[name]):
        ours, convolved, other = (_of_seeds(sets[name], system) for system in ("megagraph", *CONVOLVED))
        adds, worth_beside = (_difference(sets[name][kind]) for kind in ("convolution", "structure_beside_convolution"))
        yield f"| {SETS[name]} | {ours} | {convolved} | {adds} | {other} | {worth_beside} |"
    intervals = []
    for name, called in SETS.items():
        if (baseline := sets[name].get("baseline")) is not None:
            cells = " | ".join(_of_seeds(sets[name], system) for system in ("megagraph", "gcn", "sage", "gat"))
            yield f"| {called} | {cells} | {_difference(baseline)}, {SYSTEMS[baseline['against']]} |"
            intervals.append(baseline["interval"])
    beside_gcn = {called: found["gcn"] for name, called in SETS.items() if "gcn" in (found := sets[name])}
    yield "Less a GCN alone: " + ", ".join(f"{called} {_difference(gcn)}" for called, gcn in beside_gcn.items())
    ahead, behind = sum(low > 0 for low, _ in intervals), sum(high < 0 for _, high in intervals)
    for name in ("wordnet30", "debian12"):
        steps = sets[name]["partitions"]
        *others, last = (SYSTEMS[system] for system in ("megagraph", "gcn", "sage", "gat") if system in steps)
        yield f"{name}'s {', '.join(others)} and {last} took steps on {steps['megagraph']} partitions"
    yield f"By these intervals ours is ahead on {ahead} and behind on {behind} of the {len(intervals)}"
    outdated = [called for name, called in SETS.items() if "megagraph" in sets[name]["outdated"]]
    if outdated:
        yield f"Ours on {' and '.join(outdated)} has settings that were chosen before"
    for name in (name for name in SETS if "labels" in sets[name]):
        ours, gcn, labelled = (_of_seeds(sets[name], system) for system in ("megagraph", "gcn", *LABELLED))
        differences = " | ".join(_difference(sets[name][kind]) for kind in ("labels", "gcn_with_labels"))
        yield f"| {SETS[name]} | {ours} | {gcn} | {labelled} | {differences} |"
    for system, published in PUBLISHED.items():
        cells = [_of_seeds(sets[f"{name}-public"], system) + own for name, own in published.items()]
        yield f"| {SYSTEMS[system]} | {' | '.join(cells)} |"


def speed(at: At) -> Iterator[str]:
    (epoch,) = at("cpu/epoch_time/citeseer.json")
    yield f"takes {median(epoch['ours_epoch_seconds']):.1f} s on 2 cores"
    yield "**{ratio_median:.2f} times less** ({ratio_range[0]:.2f} to {ratio_range[1]:.2f} over".format(**epoch)
    yield f"gradient of the input projection agree to {_power(epoch['relative_difference'])}."
    rows = at("cpu/attention.json")
    for B, H, N, D in ((1, 8, 2048, 64), (64, 32, 144, 4), (256, 8, 32, 8)):
        ratios = [by(rows, form=form, B=B, N=N)["eager_ratio"] for form in ("bucket", "projected", "dense")]
        texts = ["{of_medians:.1f} x{} ({range[0]:.1f} to {range[1]:.1f})"] * 3
        more = (" faster" if B == 1 else "", "", "")
        yield f"| {B}, {H}, {N}, {D} | " + " | ".join(
            t.format(m, **r) for t, m, r in zip(texts, more, ratios, strict=True)
        )
    rows = at("cpu/sparse_attention.json")
    low, *_, high = sorted(row["ratio"]["median"] for row in rows)
    yield f"takes {low:.1f} to {high:.0f} times less processor time"
    low, *_, high = sorted(row["peak_ratio"] for row in rows)
    yield f"{low:.2f} to {high:.2f} of the memory"
    parts = [row["of_dense"]["median"] for row in at("cpu/sparse_blocks.json")]
    yield "takes {:.1f}, {:.1f} and {:.1f} times a pair of the dense path".format(*parts)
    forward, backward = (by(at("cpu/ring_overlap.json"), direction=name) for name in ("forward", "backward"))
    text = "{:.2f} of the time of waiting for each message (medians; {:.2f} to {:.2f} over 11 rounds, ideal {:.2f})"
    yield text.format(forward["ratio"]["of_medians"], *forward["ratio"]["range"], forward["ideal_ratio"])
    text = "{:.2f} ({:.2f} to {:.2f}, ideal {:.2f})"
    yield "backward " + text.format(
        backward["ratio"]["of_medians"], *backward["ratio"]["range"], backward["ideal_ratio"]
    )
    forward, backward = (by(at("cpu/ring_overlap_link.json"), direction=name) for name in ("forward", "backward"))
    steps, message = forward["steps"]["median"] / forward["P"], forward["message"]["median"]
    assert message > steps, "the page says that a message takes longer"
    yield f"links of {forward['mbit']:.0f} Mbit/s"
    text = "forward {:.2f} ({:.2f} to {:.2f} over 7 rounds, ideal {:.2f})"
    yield text.format(forward["ratio"]["of_medians"], *forward["ratio"]["range"], forward["ideal_ratio"])
    text = "backward {:.2f} ({:.2f} to {:.2f}, ideal {:.2f}), the ideals"
    yield text.format(backward["ratio"]["of_medians"], *backward["ratio"]["range"], backward["ideal_ratio"])
    halos = {name: at(f"cpu/halo/{name}.json") for name in ("wordnet30", "debian12", "computers")}
    most = [max(rows[0]["ranks_4"]["halo"]) for rows in halos.values()]
    yield f"at most {most[0]:.3f} ({0.75:.2f} in a ring), of debian12's {most[1]:.2f}, of Computers' {most[2]:.2f}"
    parts = [
        row["halo"]["median"] / row["allgather"]["median"] for rows in halos.values() for row in [by(rows, ranks=4)]
    ]
    yield "a step of four processes takes {:.2f}, {:.2f} and {:.2f} of one with gathered keys".format(*parts)
    stages = at("cpu/pipeline_stages/stages.json")

    def of(split: str, schedule: str) -> tuple[float, float]:
        here = [row for row in stages if (row["split"], row["schedule"]) == (split, schedule)]
        return max(row["peak_bytes"] for row in here) / MIB, here[0]["median"]

    (even, s0), (short, s1), (even_1f1b, s2), (short_1f1b, s3) = (
        of(split, schedule) for schedule in ("gpipe", "1f1b") for split in ("6,6,6,6", "3,7,7,7")
    )
    yield f"({even:.1f} MiB, {short:.1f} MiB with 3,7,7,7)"
    yield f"({even_1f1b:.1f} to {short_1f1b:.1f} MiB). Step time, medians of 6: {s0:.2f} and {s1:.2f} s under GPipe"
    yield f"{s2:.2f} and {s3:.2f} s under 1F1B"
    yield from heavy(at)
    yield from gpu(at)
    yield from deep_step(at)
    yield from large(at)


def gpu(at: At) -> Iterator[str]:
    rows = at("h200/attention.json")
    for shape in SHAPES:
        for form in FORMS:
            forward, both = (best(rows, True, shape, form, name) for name in ("forward", "forward_backward"))
            peer = best(rows, False, shape, form, "forward_backward")
            ours = f"{1e3 * forward['median']:.2f} | {1e3 * both['median']:.2f}"
            theirs = f"{1e3 * peer['median']:.3g} {PEERS[peer['contender']]}"
            more = {"bucket": ", 32 entries", "projected": ", 4 channels"} if shape == SHAPES[0] else {}
            start = ", ".join(map(str, shape)) + " " if form == "dense" else ""
            floor = f"{100 * both['floor'] / both['median']:.0f} % | {both['peak_bytes'] / MIB:.0f} |"
            yield f"| {start}| {form}{more.get(form, '')} | {ours} | {theirs} | {floor}"
    called = [best(rows, True, shape, form, "forward_backward") for shape in SHAPES for form in FORMS]
    low, *_, high = sorted(1e3 * row["host_median"] for row in called if row["median"] < 1e-3)
    yield f"less than 1 ms, a call from an idle device takes {low:.1f} to {high:.1f} ms"
    rows = [row for row in at("h200/pairs.json") if row["direction"] == "forward_backward"]
    ours, theirs = ([r for r in rows if r["contender"] == name] for name in ("listed_pairs", "message_passing"))
    times = [f"{1e3 * row['median']:.2g}" if row["M"] > 2e5 else f"{1e3 * row['median']:.2f}" for row in ours]
    ratios = [f"{other['median'] / row['median']:.0f}" for row, other in zip(ours, theirs, strict=False)]
    yield "listed pairs take {}, {} and {} ms, message passing {}, {} and {} times as long".format(*times[:3], *ratios)
    yield f"on 306,128 nodes with 8.1 million pairs {times[3]} ms"
    rows, found = at("h200/ring.json"), {}
    for direction in ("forward", "forward_backward"):
        pairs: dict[tuple[Any, ...], dict[str, float]] = {}
        for row in rows:
            if row["direction"] == direction:
                case = tuple(row[name] for name in ("N", "num_super", "D", "form", "P"))
                pairs.setdefault(case, {})[row["contender"]] = row["median"]
        ratios = sorted(pair["ring_steps"] / pair["one_call"] for pair in pairs.values())
        found[direction] = f"{ratios[0]:.2f} to {ratios[-1]:.2f} times"
    yield f"take {found['forward']} one call forward, {found['forward_backward']} forward and backward"


def deep_step(at: At) -> Iterator[str]:
    """Steps of 16 layers on a GPU, and what one costs the host."""
    (row,) = at("nvidia-h200/step_memory.json")
    for name, replayed, words in (
        ("ours", "", "HierarchicalGT"),
        ("ours", " replayed", "the same, replayed"),
        ("eager", "", "eager ANS-GT"),
        ("eager", " replayed", "the same, replayed"),
    ):
        cells = []
        for kind in (f"{name}{precision}{replayed}" for precision in ("", " tf32", " bf16")):
            if kind not in row["seconds"]:
                cells.append("-")
                continue
            low, middle, high = (1e3 * x for x in np.quantile(row["seconds"][kind], (0, 0.5, 1)))
            cells.append(f"{middle:.0f} ms ({low:.0f} to {high:.0f}), {row['peak_bytes'][kind] / MIB:,.0f} MiB")
        yield f"| {words} | {' | '.join(cells)} |"
    yield "{:.2f} of the time of eager ANS-GT in bf16, {:.2f} of its replayed steps".format(*replayed_parts(row))
    yield f"16 sequences are {_power(row['difference']['ours'])} from those of eager ANS-GT in fp32"
    off = {name: 100 * x for name, x in row["difference"].items()}
    text = "in bf16 {ours bf16:.1f} % (eager ANS-GT {eager bf16:.1f} %), in TF32 {ours tf32:.2f} % (eager ANS-GT "
    yield text.format(**off) + "{:.2f} %)".format(off["eager tf32"])
    ends = [
        100 * median(row["errors"][f"{who} bf16"]) for row in at("cpu/step_errors.json") for who in ("ours", "eager")
    ]
    yield "{:.2f} % with 16 layers (eager ANS-GT {:.2f} %) and {:.2f} % with 32 ({:.2f} %".format(*ends)
    (host,) = at("cpu/step_host.json")
    ours, eager = (median(host["seconds"][name]) for name in ("ours", "eager"))
    yield f"costs the host {ours / eager:.1f} times what eager ANS-GT's does"
    yield f"with {host['calls']['ours']} operators instead of {host['calls']['eager']:,}"


def _power(x: float) -> str:
    """One digit and a power of ten."""
    return f"{x:.0e}".replace("e-0", "e-")


def replayed_parts(row: dict[str, Any]) -> list[float]:
    """Parts of eager ANS-GT's time, called and replayed, that our replayed step in bf16 takes."""
    names = ("ours bf16 replayed", "eager bf16", "eager bf16 replayed")
    ours, called, again = (median(row["seconds"][name]) for name in names)
    return [ours / called, ours / again]


def large(at: At) -> Iterator[str]:
    (generated,), (found,), (metis,) = (at(f"cpu/products_size/{x}.json") for x in ("generate", "propagation", "metis"))
    yield f"in {generated['seconds']:.0f} s and {generated['peak_uss_bytes'] / GIB:.1f} GiB"
    cut = "{parts:,} clusters in {seconds:.0f} s and {size:.1f} GiB, the largest {balance:.2f} times the mean, "
    parts = {"seconds": found["partition_seconds"], "size": found["peak_uss_bytes"] / GIB}
    yield cut.format(**found["clusters"], **parts) + f"{100 * found['clusters']['edge_cut']:.1f} % of the edges cut"
    between = generated["edges_between_blocks"] / generated["edges"]
    size = f"{metis['peak_uss_bytes'] / GIB:.1f} GiB and {metis['partition_seconds'] / 60:.0f} minutes"
    yield f"(METIS {100 * metis['clusters']['edge_cut']:.1f} % in {size}; {100 * between:.1f} % between the blocks"
    warm, cold = at("cpu/products_size/first-step.json")
    most = max(row["peak_uss_bytes"] for row in (warm, cold)) / 1e9
    yield f"{warm['step_1_seconds']:.0f} s after its start ({cold['step_1_seconds']:.0f} s where Numba compiles first; "
    yield f"{most:.1f} GB of private memory at the peak"
    (steps,) = at("cpu/products_size/train.json")
    yield "holds {:.0f} MB after 20 steps, {:.0f} MB after 100".format(
        *(steps[f"step_{n}_uss_bytes"] / 1e6 for n in (20, 100))
    )
    lists, plain, kept, *_ = at("cpu/products_size/full.json")
    size = lists["peak_uss_bytes"] / 1e9
    yield f"has {lists['pairs'] / 1e6:.0f} million pairs, found in {lists['prepare_seconds']:.0f} s and {size:.1f} GB"
    yield f"where the next start has them in {lists['prepare_again_seconds']:.0f} s"
    yield f"has made its first step {plain['step_1_seconds']:.0f} s after its start"
    sizes = [row["peak_uss_bytes"] / 1e9 for row in (plain, kept)]
    yield f"in {sizes[0]:.1f} GB, and {kept['step_1_seconds']:.0f} s in {sizes[1]:.1f} GB with"
    (ego,), (cluster,) = at("cpu/data/ego.json"), at("cpu/data/cluster.json")
    yield f"one core samples {round(ego['wall']['median'], -2):,.0f} sequences"
    yield f"of a sequence of 8,192 nodes in {cluster['wall']['median']:.2f} s"
    powers = {row["case"]: row["cpu"]["median"] / row["batches"] for row in at("cpu/data/powers.json")}
    yield "15 nodes take {ego-pubmed:.2f} CPU seconds on PubMed and {ego-computers:.2f} on Computers".format(**powers)
    yield "a sequence of 1,024 nodes {cluster-pubmed:.2f} and {cluster-computers:.2f} (".format(**powers)
    rows = at("cpu/data/throughput.json")
    text = "{0[median]:.2f} of the speed of batches made before ({0[min]:.2f} to {0[max]:.2f} over five rounds), with "
    text += "clusters at {1[median]:.2f} ({1[min]:.2f} to {1[max]:.2f}); it waits {2:.0f} and {3:.0f} ms a step"
    yield text.format(*rows, *(1e3 * row["stall_seconds"]["median"] for row in rows))


def plans(at: At) -> Iterator[str]:
    found = at("cpu/cost_model/judgement.json")
    for name, where in (("random third", "a random third"), ("l >= 24", "24 layers and more"), ("d = 128", "d = 128")):
        error, fit = found[f"{name}: time MAPE"], found[f"{name}: R^2 of log time"]
        yield f"| {where} | {100 * error:.1f} % | {fit:.3f}"
    yield f"MemTracker | a random third | {100 * found['random third: memory MAPE']:.2f} % | "
    theirs = found["the paper's form, memory_mape"]
    yield f"by the paper's own form | a random third | {100 * theirs:.1f} % | "
    yield f"predicted to {100 * found['process USS: MAPE']:.1f} % of what"
    yield "the model is {:.1f} % off on Graphormer's seconds and {:.2f} % on its bytes".format(*of_another_kind(at))
    found = at("cpu/real_plans/judgement.json")
    yield f"{found['plans']:.0f} plans of two processes"
    rho, odd = found["Spearman of predicted and measured"], found["Spearman of odd and even rounds"]
    yield f"measured {rho:.2f} (of odd and even rounds: {odd:.2f}), MAPE {100 * found['MAPE']:.0f} %"
    yield f"{100 * (found['chosen / best of the top five'] - 1):.1f} % of the best of the fastest five"
    yield f"Peak memory is off by at most {100 * found['largest error of peak memory']:.1f} %"
    beds = {
        "2x1-16": "2 x 1, 16 Mbit/s",
        "2x2-20": "2 x 2, 20 Mbit/s",
        "2x2-50": "2 x 2, 50 Mbit/s",
        "2x1-50-half": "2 x 1, 50 Mbit/s, one process at half speed",
    }
    judged = at("cpu/cluster/judgement.json")
    for name, words in beds.items():
        found = judged[name]
        error = f"{100 * found['MAPE']:.{1 if found['MAPE'] < 0.1 else 0}f} %"
        rest = f"{found['chosen / fastest']:.2f} | {found['slowest / fastest']:.0f} |"
        yield f"| {words} | {found['Spearman of predicted and measured']:.2f} | {error} | {rest}"
    rows = at("cpu/cluster/2x1-50-half.json")
    (chosen,) = (row for row in rows if row["chosen"])
    even = [row for row in rows if not row["shares"] and set(row["layers"]) in (set(), {2}, {4})]
    gains = [
        min(map(seconds, even)) / seconds(chosen)
        for seconds in (lambda row: median(row["measured_seconds"]), lambda row: row["predicted_seconds"])
    ]
    first, second = chosen["shares"]
    yield f"deals {first} and {second} of 16 sequences: {gains[0]:.2f}x as fast as the best plan with equal"
    yield f"layers, predicted {gains[1]:.2f}x."
    times = {row["name"]: median(row["measured_seconds"]) for row in at("cpu/cluster/2x2-20.json")}
    (chosen,) = (row["name"] for row in at("cpu/cluster/2x2-20.json") if row["chosen"])
    second = min(time for name, time in times.items() if name != chosen)
    yield f"({chosen}), {second / times[chosen]:.2f}x as fast as the next"
    found = at("cpu/pareto/judgement.json")
    yield f"four processes {found['plans']:.0f} plans are ranked right ({found['Spearman of seconds']:.2f}) and their "
    yield f"bytes are within {100 * found['largest error of bytes']:.1f} %"
    yield from shared_sequence(at)
    yield from longest(at)
    yield from ablation(at)
    times = [row["median"] for row in at("cpu/search-times.json")]
    yield "takes {:.1f} s for 96 layers on 1,024 processes, {:.1f} s for 512 layers, {:.0f} s for 96".format(*times)
    large = by(at("cpu/search-times.json"), processes=5040)
    text = "of {:,} candidates; to look at all of them, for a list, {:.0f} s more"
    yield text.format(large["candidates"], median(large["list_seconds"]))


def of_another_kind(at: At) -> list[float]:
    return [100 * at("cpu/transfer/judgement.json")[f"{what} MAPE"] for what in ("time", "memory")]


def claims(at: At) -> Iterator[str]:
    GB = 1e9
    yield "predict Graphormer's seconds to {:.1f} % and its bytes to {:.2f} %".format(*of_another_kind(at))
    first = max(row["peak_uss_bytes"] for row in at("cpu/products_size/first-step.json"))
    yield f"256 super nodes, in {first / GB:.1f} GB"
    yield from longest_claimed(at)
    for nodes, text in (
        (145, "{:.1f} instead of {:.1f} GB, {:.0f} % less, in {:.1f} times less time"),
        (33, "of 33 nodes {2:.0f} % less, in {3:.1f} times less time"),
    ):
        deep = by(at("cpu/step_memory.json"), nodes=nodes, sequences=256)
        ours, eager = (deep["peak_bytes"][name] for name in ("ours", "eager"))
        times = [median(deep["seconds"][name]) for name in ("ours", "eager")]
        yield text.format(ours / GB, eager / GB, 100 * (1 - ours / eager), times[1] / times[0])
    (deep,) = at("nvidia-h200/step_memory.json")
    ours, eager = (deep["peak_bytes"][name] for name in ("ours", "eager"))
    times = [median(deep["seconds"][name]) for name in ("ours", "eager")]
    text = (
        "on an H200 {:.1f} of {:.1f} GB, {:.0f} % less, in {:.2f} times the time, and in bf16 as a CUDA graph in {:.2f}"
    )
    yield text.format(ours / GB, eager / GB, 100 * (1 - ours / eager), times[0] / times[1], replayed_parts(deep)[0])
    here, rows = {"N": 2048, "direction": "forward_backward"}, at("cpu/attention/attention.json")
    ours, eager = (by(rows, contender=name, **here)["saved_bytes"] / MIB for name in ("megagraph_blocked", "eager"))
    yield f"it keeps {eager:.0f} MiB for backward"
    yield f"ours keeps {ours:.1f} MiB there"
    shared = [by(at("cpu/plan_memory/sequence.json"), bias="projected", ranks=n, comm="ring") for n in (1, 2, 4)]
    yield "{:.1f}, {:.1f} and {:.1f} MiB of 4 channels".format(*(row["bias_bytes"] / MIB for row in shared))
    table = {row["what"]: max(row["batch_bytes"]) / 1e9 for row in at("cpu/plan_memory/ablation.json")}
    text = (
        "eager ANS-GT, which keeps its scores, {:.1f} GB, ours {:.2f}, with recomputation {:.2f}, with CP = 2 {:.2f} GB"
    )
    yield text.format(*(table[name] for name in ("eager ANS-GT", "none", "recomputation", "cp 2")))
    words = {"hierarchical": "HierarchicalGT", "gcn": "a GCN", "gcn-residual": "residual connections"}
    for model, name in words.items():
        ends = [np.mean(of_depth(at, model)[layers][0]) for layers in (1, 2, 32)]
        yield name + " {:.1f} % with 1 layer, {:.1f} with 2, {:.1f} with 32".format(*ends)
    (paper,) = at("cpu/depth/paper.json")
    yield f"{100 * paper['test']:.1f} % on Cora after {paper['epochs']} epochs, which are {paper['steps']} steps"
    right = "{:.1f}, {:.1f} and {:.1f} %"
    ours, eager = ([best_test(row[f"{name}_curve"]) for row in at("cpu/convergence/time.json")] for name in BOTH)
    yield f"are {right.format(*ours)} of ours, {right.format(*eager)} of eager ANS-GT's"
    (gaps,) = at("cpu/search-gaps.json")
    assert gaps["missed"] == 0 and max(gaps["gaps"]) == 0.0, "the page says that none is behind"
    yield f"in {gaps['problems']} smaller problems with {gaps['plans']:,} plans"
    cuts = [at(f"cpu/products_size/{name}.json")[0]["clusters"]["edge_cut"] for name in ("propagation", "metis")]
    yield "cuts {:.1f} % of the edges of a graph of Products' size, METIS {:.1f} %".format(*(100 * cut for cut in cuts))
    yield f"{round(at('cpu/data/ego.json')[0]['wall']['median'], -2):,.0f} sequences a second"
    received = max(at("cpu/halo/wordnet30.json")[0]["ranks_4"]["halo"])
    sent = [by(at("cpu/halo/computers-dense.json"), ranks=4, kind="bucket")[way]["sent_bytes"] / MIB for way in WAYS]
    yield "a rank of four sends {:.1f} MiB a step in a ring, {:.1f} by allgather and {:.1f} by ulysses".format(*sent)
    yield f"a rank of four receives at most {received:.3f}, in a ring {0.75:.2f}"
    ring = by(at("cpu/ring_overlap.json"), direction="forward")
    yield f"as long as a step {ring['ratio']['of_medians']:.2f}, ideal {ring['ideal_ratio']:.2f}"
    link = [by(at("cpu/ring_overlap_link.json"), direction=name) for name in ("forward", "backward")]
    text = "forward {:.2f} of the time of waiting for each message, ideal {:.2f}, backward {:.2f}, ideal {:.2f}"
    yield text.format(*(x for row in link for x in (row["ratio"]["of_medians"], row["ideal_ratio"])))
    even, short = heavy_first(at)[4096]["6,6,6,6"], heavy_first(at)[4096]["3,7,7,7"]
    text = "{:.1f}, {:.1f}, {:.1f} and {:.1f} MiB"
    more = 100 * (even["MiB"][0] / even["MiB"][1] - 1)
    yield f"{text.format(*even['MiB'])} when even, {more:.0f} % more in the first"
    yield f"{text.format(*short['MiB'])} with 3,7,7,7"
    few = heavy_first(at)[602]
    yield f"{few['6,6,6,6']['MiB'][0]:.1f} MiB when even and {max(few['3,7,7,7']['MiB']):.1f} MiB with 3,7,7,7"
    yield f"takes {short['ratio'][1]:.2f} times the even split's there"
    stages = at("cpu/pipeline_stages/stages.json")
    even_1f1b, short_1f1b = (
        [row["peak_bytes"] / MIB for row in stages if (row["split"], row["schedule"]) == (split, "1f1b")]
        for split in ("6,6,6,6", "3,7,7,7")
    )
    yield f"is {max(even_1f1b):.1f} MiB, of 3,7,7,7 {max(short_1f1b):.1f} MiB"
    beds = {name: found for name, found in at("cpu/cluster/judgement.json").items() if "MAPE" in found}
    half = beds["2x1-50-half"]
    assert half["chosen / fastest"] == 1.0, "the page says that the fastest was chosen"
    yield f"rank correlation {half['Spearman of predicted and measured']:.2f}, MAPE {100 * half['MAPE']:.1f} %"
    low, *_, high = sorted(row["Spearman of predicted and measured"] for row in beds.values())
    errors = sorted(100 * row["MAPE"] for row in beds.values())
    yield f"measured {low:.2f} to {high:.2f}, MAPE {errors[0]:.1f} to {errors[-1]:.0f} %"
    low, *_, high = sorted(row["chosen / fastest"] for row in beds.values())
    two, four = at("cpu/real_plans/judgement.json"), at("cpu/pareto/judgement.json")
    yield f"chosen / fastest {low:.2f} to {high:.2f} on four beds"
    yield f"rank correlation {two['Spearman of predicted and measured']:.2f} over {two['plans']:.0f} plans of two"
    yield f"{four['Spearman of seconds']:.2f} over plans of four (`cpu/pareto/judgement.json`), whose seconds are "
    yield f"seconds are {100 * four['MAPE of seconds']:.0f} % off"
    yield f"at most {100 * four['largest error of bytes']:.1f} % for plans of four processes"
    cost = at("cpu/cost_model/judgement.json")
    bytes_of = [f"{cost[name]:.3f}" for name in ("random third: memory R^2", "the paper's form, memory_r2")]
    off, form = 100 * cost["random third: memory MAPE"], 100 * cost["the paper's form, memory_mape"]
    yield f"{off:.2f} % off on held-out sizes"
    yield f"{form:.1f} % off on the held-out third"
    yield f"{off:.2f} % and {bytes_of[0]}, with the paper's own form {form:.1f} % and {bytes_of[1]}"
    yield f"of three whole processes {100 * cost['process USS: MAPE']:.1f} %"
    fit = cost["random third: R^2 of log time"]
    yield f"MAPE {100 * cost['random third: time MAPE']:.1f} % on a held-out third, R^2 of logs {fit:.3f}"
    series: dict[tuple[int, ...], dict[int, float]] = {}
    for row in at("cpu/cost_model/time.json"):
        series.setdefault((row["sequences"], row["heads"], row["dim"]), {})[row["layers"]] = row["seconds"]
    ratios = [(of[32] - of[16]) / 16 / ((of[8] - of[2]) / 6) for of in series.values()]
    yield f"takes {median(ratios):.2f} times one between the 2nd and the 8th, the median of {len(ratios)} series"
    stalls = [1e3 * row["stall_seconds"]["median"] for row in at("cpu/data/throughput.json")]
    yield "{:.0f} and {:.0f} ms a step, medians".format(*stalls)
    search = {(row["layers"], row["processes"]): row["median"] for row in at("cpu/search-times.json")}
    text = "{:.2f} s for 32 layers on 4 processes, {:.1f} s for 96 on 1,024, {:.1f} s for 512 on 1,024"
    yield text.format(*(search[case] for case in ((32, 4), (96, 1024), (512, 1024))))
    yield from front(at)
    yield from layouts_claimed(at)
    sets = at("cpu/accuracy/judgement.json")
    said, there = ({name: _of_seeds(sets[of], name) for name in SYSTEMS} for of in ("cora", "citeseer"))
    yield "It pays by {} points on {}".format(*worth(sets))
    yield f"As a data set: {there['megagraph']} %, five splits"
    yield f"As a data set: {_of_seeds(sets['computers'], 'megagraph')} %, five splits"
    for name in ("megagraph", "gcn", "cluster-gcn", "gps", "nodeformer"):
        yield f"{said[name]} % on Cora, {there[name]} % on Citeseer"
    yield f"HierarchicalGT has {said['megagraph']} % and Graphormer with the same settings {said['graphormer']} %"
    yield f"tuned like ours: {said['sage']} % on Cora"
    yield f"on Cora: {said['sgformer']} and {said['polynormer']} %"
    losses = max(row["difference"] for row in at("cpu/step_losses.json"))
    yield f"a relative {losses:.0e} in fp64"
    (epoch,) = at("cpu/epoch_time/citeseer.json")
    yield f"takes ours {epoch['ratio_median']:.2f} times less"
    pairs: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in at("cpu/attention/ring.json"):
        pairs.setdefault((row["N"], row["form"], row["direction"]), {})[row["contender"]] = row["median"]
    low, *_, high = sorted(pair["ring_steps"] / pair["one_call"] for pair in pairs.values())
    yield f"takes {low:.1f} to {high:.1f} times one call on the same rows and columns"
    ours, peer = (
        best(at("h200/attention.json"), mine, (1, 8, 8192, 64), "bucket", "forward_backward") for mine in (True, False)
    )
    text = "{:.2f} ms and {:.0f} MiB, PyTorch's memory-efficient attention, which wants the bias as a matrix, "
    text += "{:.1f} ms and {:,.0f} MiB"
    yield text.format(*(x for row in (ours, peer) for x in (1e3 * row["median"], row["peak_bytes"] / MIB)))


def front(at: At) -> Iterator[str]:
    """Plans of four processes: which kinds lie on the front, the fastest of a kind, and its lightest."""
    plans, letters = at("cpu/pareto/plans.json"), ("pp", "cp", "dp")
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in plans:
        kinds.setdefault(" + ".join(name.upper() for name in letters if row[name] > 1), []).append(row)
    least = {name: min(max(row["predicted_bytes"]) for row in rows) / MIB for name, rows in kinds.items()}
    fastest = {name: min(rows, key=lambda row: row["predicted_seconds"]) for name, rows in kinds.items()}
    ahead = [row for row in plans if row.get("front")]
    pure = sum(row in kinds["DP"] for row in ahead)
    assert fastest["DP"] is min(plans, key=lambda row: row["predicted_seconds"]), "the page says that it is the fastest"
    assert any(row["layers"] == [3, 5] for row in ahead), "the page says that it is on the front"
    yield f"{len(plans)} plans of four processes on a CPU"
    yield f"of the {len(ahead)} on the predicted front {pure} are pure DP"
    measured = median(fastest["DP"]["measured_seconds"])
    yield f"{fastest['DP']['predicted_seconds']:.2f} s predicted, {measured:.2f} s measured; the fastest CP + DP is "
    yield f"the fastest CP + DP is predicted to take {fastest['CP + DP']['predicted_seconds']:.2f} s"
    names = sorted(least, key=least.__getitem__)
    yield "Least memory, predicted: " + ", ".join(f"{name} {least[name]:.1f}" for name in names) + " MiB"


def reliability(at: At) -> Iterator[str]:
    for name, words in (("restarts", "without loader workers"), ("restarts_signals", "five layouts")):
        rows = at(f"cpu/{name}.json")
        yield f"{words} | {len(rows)} | {sum(not row['holds'] for row in rows)} |"
    for name, words in (("damage", "reads"), ("damage_numbers", "--numbers`"), ("damage_bad_input", "--bad-input`")):
        (row,) = at(f"cpu/{name}.json")
        yield f"{words} | {row['cases']:,} | {len(row['faults'])} |"
    grown, _ = at("cpu/soak.json")
    text = "grow by {:.2f} and {:.2f} MiB in 1,000 steps (95 % intervals {:.4f} to {:.4f} and {:.4f} to {:.4f};"
    yield text.format(*grown["uss_slope"], *(x[rank] for rank in (0, 1) for x in (grown["low"], grown["high"])))
    (save,) = at("cpu/saves.json")
    yield f"{save['held_per_copy']:.2f} times a copy of the state, {100 * save['held_per_whole']:.0f} % of the whole"


def processes(at: At) -> Iterator[str]:
    yield from ways(at)
    rows = at("cpu/failures.json")
    yield f"In all {len(rows)} runs"
    for kind, words in (("raise", "raises"), ("kill", "is killed"), ("hang", "hangs"), ("stop", "is stopped")):
        low, *_, high = sorted(row["rank_seconds"] for row in rows if row["kind"] == kind)
        last = max(row["launcher_seconds"] for row in rows if row["kind"] == kind)
        yield f"| {words} | {low:.1f} to {high:.1f} s | {'at most ' if kind == 'raise' else ''}{last:.1f} s |"


def training(at: At) -> Iterator[str]:
    two = [by(at("cpu/data/packing.json"), case=name) for name in ("computers", "debian12")]
    kept = [100 * row["median"] for row in two] + [100 * row["random"]["median"] for row in two]
    text = (
        "{:.0f} % of the edges of Computers and {:.0f} % of debian12's within a sequence ({:.0f} and {:.0f} % at random"
    )
    yield text.format(*kept)
    sets = at("cpu/accuracy/judgement.json")
    (of_one, one), (of_other, other) = (
        (sets[name]["tests"]["megagraph"][0], sets[name]["minutes"]["megagraph"]) for name in ("computers", "wordnet30")
    )
    yield f"{of_one:.1f} % of the test nodes after {one:.1f} minutes of one core"
    yield f"{of_other:.1f} % after {other:.1f}"


def gpus(at: At) -> Iterator[str]:
    rows = at("nvidia-h200/runs.json")
    one = by(rows, run="cora, one process")["losses"]
    off = [
        max(abs(a - b) / abs(b) for a, b in zip(row["losses"], one, strict=True))
        for row in rows
        if row["processes"] > 1
    ]
    yield f"at most {max(off):.1e} from those of one"
    exact, rounded = (100 * by(rows, run=name)["test_accuracy"] for name in ("citeseer", "citeseer, 16 bits"))
    yield f"Citeseer {exact:.1f} % in fp32 and {rounded:.1f} % in bf16"


PAGES: dict[str, Callable[[At], Iterator[str]]] = {
    "README.md": readme,
    "docs/accuracy.md": accuracy,
    "docs/claims.md": claims,
    "docs/gpu.md": gpus,
    "docs/plans.md": plans,
    "docs/processes.md": processes,
    "docs/reliability.md": reliability,
    "docs/speed.md": speed,
    "docs/training.md": training,
}


def reader(root: Path) -> At:
    """What reads the rows of a checkout."""

    def at(name: str) -> Any:
        text = (root / "bench" / "results" / name).read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()] if name.endswith(".jsonl") else json.loads(text)

    return at


def wrong(root: Path) -> list[str]:
    """What pages of a checkout should say by its rows, and do not."""
    read, found = reader(root), []
    for name, pieces in PAGES.items():
        text = " ".join((root / name).read_text(encoding="utf-8").split())
        files: list[str] = []

        def at(file: str, files: list[str] = files) -> Any:
            files.append(file)
            return read(file)

        try:
            found += [f"{name}: expected {piece!r}, as its rows say" for piece in pieces(at) if not stands(piece, text)]
        except Exception as error:  # whatever the page wants of rows, these lack it
            found.append(
                f"{name}: bench/results/{''.join(files[-1:])} is not as it needs it: {type(error).__name__}: {error}"
            )
    return found


def stands(piece: str, text: str) -> bool:
    """Whether a piece is in a text, where its numbers begin and end with it."""
    return re.search(rf"(?<![\d.,]){re.escape(piece.strip())}(?!\d|[.,]\d)", text) is not None
