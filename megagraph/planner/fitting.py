"""Coefficients of the cost model, from rows of what was measured, and how far off they are on rows held out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from megagraph.models.config import ModelConfig
from megagraph.planner.cost import CostModel
from megagraph.planner.memory import dense_bytes, feature_bytes, listed_bytes
from megagraph.planner.rows import FIELDS, Row, check_rows
from megagraph.planner.terms import (
    Terms,
    all_reduce_terms,
    as_launches,
    attention_terms,
    dot,
    embedding_kept_terms,
    embedding_terms,
    head_kept_terms,
    head_terms,
    kept_terms,
    layer_terms,
    listed_terms,
    optimizer_terms,
    stage_parameters,
    workspace_terms,
)
from megagraph.planner.workload import SUM_BYTES, Workload

ALIKE = 1.2  # ranks whose speeds differ by less are one kind of device
_ORIGIN = (
    *("device", "device_type", "impl", "dtype", "workers"),
    *("torch", "python", "commit", "sources", "ranks_per_node"),
)
COMPUTED = ("layers", "model", "embedding", "head", "attention", "ring", "optimizer")


def row_config(row: Row) -> ModelConfig:
    """The sizes of a model that a row's terms ask for."""
    return ModelConfig(
        in_features=row.get("in_features", 1),
        num_classes=row.get("num_classes", 1),
        dim=row["dim"],
        ffn_dim=row.get("ffn_dim", row["dim"]),
        heads=row["heads"],
        global_tokens=row.get("global_tokens", 0),
        bias=row["bias"] if row["bias"] == "projected" else "bucket",
        bias_size=max(int(row["bias_size"]), 1),
        convolution=bool(row.get("convolution")),
    )


def row_terms(row: Row) -> Terms:
    """The terms of the seconds of a row."""
    kind = row["kind"]
    if kind == "optimizer":
        return optimizer_terms(row["parameters"])
    if kind == "embedding":
        return embedding_terms(row["sequences"], row["rows"], row["dim"], row["in_features"], row["feature_rows"])
    if kind == "head":
        return head_terms(row["sequences"], row["targets"], row["dim"], row["num_classes"])
    m, config = row["sequences"], row_config(row)
    if kind == "ring":
        block = math.ceil(row["num_nodes"] / row["ranks"])
        rows = block + row["num_super"]
        local, visit = (attention_terms(m, rows, keys, config, ring=True) for keys in (rows, block))
        return {name: row["ranks"] * (x + (row["ranks"] - 1) * visit[name]) for name, x in local.items()}
    rows, columns = row["rows"], row["columns"]
    if kind == "attention":
        return attention_terms(m, rows, columns, config, ring=False)
    targets = rows if row["targets"] is None else row["targets"]

    def attention(queries: float) -> Terms:
        if not row.get("pairs"):
            return attention_terms(m, queries, columns, config, ring=False)
        block = rows - row["num_super"]
        return listed_terms(m, block, row["num_super"], row["pairs"], config, supers=queries > block)

    layers = row["layers"] - 1.0
    terms = _layered(
        layers, *(layer_terms(m, rows, queries, config) | attention(queries) for queries in (rows, targets))
    )
    if kind == "model":
        terms |= embedding_terms(m, rows, config.dim, config.in_features, row["feature_rows"])
        terms |= head_terms(m, targets, config.dim, config.num_classes)
    return terms


def fit(rows: Iterable[Row]) -> CostModel:
    """A cost model from rows of ``megagraph profile``, of a bench, or of both.

    Args:
        rows: dicts; ``FIELDS`` says what one of each kind holds, in seconds and bytes.

    Raises:
        ValueError: no rows, rows of several devices, a field that is missing, a number that is NaN or negative.

    Examples:
        >>> from megagraph.planner.rows import load_rows
        >>> rows = load_rows(Path("bench/results/cpu/real_plans/profile.json"))  # of a checkout
        >>> cost = mg.planner.fit(rows)
        >>> cost.held_out["memory_mape"] < 0.1
        True
        >>> cost.save("cost.json")
    """
    checked = check_rows(rows)
    computed, slowness = as_alike(row for row in checked if row["kind"] in COMPUTED)
    memory_rows = [row for row in checked if row["kind"] == "memory"]
    train, test = held_out_third(computed)
    held_out: dict[str, float] = {}
    if test and train:
        held_out |= time_errors(fit_seconds(train), test)
    memory = fit_memory(memory_rows)
    memory |= fit_process(memory, [row for row in checked if row["kind"] == "process"])
    seen, unseen = held_out_third(memory_rows)
    if seen and unseen:
        fitted = fit_memory(seen)
        predicted = [predict_peak(fitted, row) for row in unseen]
        measured = [row["peak_bytes"] for row in unseen]
        held_out |= {"memory_mape": mape(predicted, measured), "memory_r2": r_squared(predicted, measured)}
    if checked[0].get("device_type") == "cuda":
        memory["batches"] = 2.0  # the next one is copied there while one is used
    stalls = [row["seconds"] for row in checked if row["kind"] == "stall"]
    origin: dict[str, str] = {name: str(checked[0][name]) for name in _ORIGIN if name in checked[0]}
    return CostModel(
        origin=origin,
        seconds=fit_seconds(computed),
        links=_fit_links(checked),
        memory=memory,
        stall_seconds=float(np.median(stalls)) if stalls else 0.0,
        slowness=slowness,
        ranges=ranges_of(checked),
        held_out=held_out,
        workload=next((Workload.from_json(row["workload"]) for row in checked if "workload" in row), None),
        model=next((ModelConfig.from_json(row["model"]) for row in checked if "model" in row), None),
    )


def as_alike(computed: Iterable[Row]) -> tuple[list[Row], tuple[float, ...]]:
    """Rows as ranks that are alike would have them, and the slowness of each rank, by which its seconds are divided."""
    rows = list(computed)
    slowness = _slowness(rows)
    if slowness:
        # a row of a bench is of no rank
        rows = [
            {**row, "seconds": row["seconds"] / slowness[int(row["rank"])]} if "rank" in row else row for row in rows
        ]
    return rows, slowness


def _slowness(rows: Sequence[Row]) -> tuple[float, ...]:
    """How much longer than all on average every rank takes for the same; none where they differ by less than ALIKE."""
    ranks = 1 + max((int(row.get("rank", -1)) for row in rows), default=-1)
    same: dict[str, dict[int, float]] = {}
    for row in rows:
        what = {name: row.get(name) for name in (*FIELDS[row["kind"]], "kind", "pairs") if name != "seconds"}
        same.setdefault(json.dumps(what, sort_keys=True), {})[int(row.get("rank", -1))] = row["seconds"]
    of_all = [seconds for seconds in same.values() if len(seconds) == ranks and -1 not in seconds]
    whole = [[seconds[rank] for rank in range(ranks)] for seconds in of_all]
    if not whole or ranks < 2:
        return ()
    table = np.log(np.maximum(whole, 1e-12))
    factors = np.exp(np.median(table - table.mean(axis=1, keepdims=True), axis=0))
    return tuple(factors.tolist()) if factors.max() > ALIKE * factors.min() else ()


def held_out_third(rows: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Two thirds to fit and a random third (seed 0) to judge."""
    shuffled = np.random.default_rng(0).permutation(len(rows))
    third = set(shuffled[: len(rows) // 3].tolist())
    return [row for i, row in enumerate(rows) if i not in third], [row for i, row in enumerate(rows) if i in third]


def time_errors(seconds: dict[str, dict[str, float]], rows: Sequence[Row]) -> dict[str, float]:
    """MAPE, and R^2 of log time, on rows."""
    predicted = [predict_seconds(seconds, row) for row in rows]
    measured = [row["seconds"] for row in rows]
    logs = [np.log(np.maximum(values, 1e-12)) for values in (predicted, measured)]
    return {"time_mape": mape(predicted, measured), "time_r2_log": r_squared(*logs)}


def predict_seconds(seconds: Mapping[str, Mapping[str, float]], row: Row) -> float:
    """Seconds of what a row measured."""
    terms = row_terms(row)
    return sum(dot(seconds.get(way, {}), terms) for way in _ways(row))


def predict_peak(memory: Mapping[str, float], row: Row) -> float:
    """Peak bytes of a training step on one device, of what a memory row measured."""
    peak = max(dot(memory, _row_kept(row)), _parameter_bytes(row))
    return _known_bytes(row) + peak + dot(memory, _row_workspace(row))


def mape(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Mean of |predicted - measured| / measured."""
    a, b = np.asarray(predicted, float), np.asarray(measured, float)
    return float(np.mean(np.abs(a - b) / b))


def r_squared(predicted: Any, measured: Any) -> float:
    """1 - residual variance / variance."""
    a, b = np.asarray(predicted, float), np.asarray(measured, float)
    spread = float(((b - b.mean()) ** 2).sum())
    return 1.0 - float(((a - b) ** 2).sum()) / spread if spread else float("nan")


def _ways(row: Row) -> tuple[str, ...]:
    way = row.get("direction", "forward")
    return ("forward", "backward") if way == "forward_backward" else (way,)


def fit_seconds(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Coefficients of both directions at once: a row that timed both has the terms of both."""
    terms = [{(way, name): x for way in _ways(row) for name, x in row_terms(row).items()} for row in rows]
    values = [row["seconds"] for row in rows]
    flat = _least_squares(terms, values)
    if rows and rows[0].get("device_type") == "cuda":
        flat = _launched_ahead(terms, values, flat)
    seconds: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
    for (way, name), value in flat.items():
        seconds[way][name] = value
    return seconds


def _launched_ahead(
    terms: Sequence[Mapping[Any, float]], values: Sequence[float], summed: Mapping[Any, float]
) -> dict[Any, float]:
    """Rates where launches run ahead of the device: a row says what they take, or what the device takes.

    Rows are dealt to the longer of both, from the rates of their sum on, and either is fitted to its own, until none
    changes sides; of all turns the rates of least error are kept. What has no row keeps the rate of the sum.
    """

    def parts(row: Mapping[Any, float]) -> list[dict[Any, float]]:
        """Launches and work of either way."""
        found: dict[Any, dict[Any, float]] = {}
        for (way, name), value in row.items():
            found.setdefault((way, as_launches(name) != name), {})[way, name] = value
        return [found.get((way, launched), {}) for way in {way for way, _ in row} for launched in (True, False)]

    split = [parts(row) for row in terms]
    rates, sides = dict(summed), None
    best = math.inf, rates
    for _ in range(20):
        longer = [
            [max(pair, key=lambda part: dot(rates, part)) for pair in zip(of[::2], of[1::2], strict=True)]
            for of in split
        ]
        predicted = [sum(dot(rates, part) for part in row) for row in longer]
        best = min(best, (mape(predicted, np.maximum(values, 1e-12).tolist()), rates), key=lambda found: found[0])
        own = [{name: value for part in row for name, value in part.items()} for row in longer]
        if own == sides:
            break
        sides = own
        rates = dict(summed) | _least_squares(own, values)
    return {(way, as_launches(name)): rate for (way, name), rate in best[1].items()}


def _least_squares(
    terms: Sequence[Mapping[Any, float]], values: Sequence[float], *, power: float = 1.0, of: Sequence[float] = ()
) -> dict[Any, float]:
    """Non-negative coefficients of least error, relative to the values, or what these are ``of``, to a ``power``."""
    if not values:
        return {}
    from scipy.optimize import nnls  # half a second to import, which a search does not need

    names = sorted({name for row in terms for name in row})
    matrix = np.array([[row.get(name, 0.0) for name in names] for row in terms], dtype=float)
    whole = np.maximum(of or values, 1e-12)
    wanted, weights = np.asarray(values) if of else whole, whole**-power
    matrix *= weights[:, None]
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    solution, _ = nnls(matrix / scale, wanted * weights, maxiter=30 * matrix.shape[1])
    return {name: float(x / s) for name, x, s in zip(names, solution, scale, strict=True)}


def _fit_links(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Rates of every link, of long messages more than of short ones, which it may let through at another rate.

    A link may take some bytes at once, its burst, and send them later: what of it makes the least error.
    """
    links: dict[str, dict[str, float]] = {}
    for link in {row["link"] for row in rows if "link" in row}:
        own = [row for row in rows if row.get("link") == link]
        sums = [row for row in own if row["kind"] == "all_reduce"]
        links[link] = _least_squares(
            [all_reduce_terms(row["bytes"], row["ranks"]) for row in sums], [row["seconds"] for row in sums], power=0.5
        )
        for kind in ("transfer", "hop"):
            links[link] |= _fit_messages(kind, [row for row in own if row["kind"] == kind])
    return links


def _fit_messages(kind: str, rows: Sequence[Row]) -> dict[str, float]:
    seconds = np.array([row["seconds"] for row in rows])
    best: tuple[float, dict[str, float]] = float("inf"), {}
    for burst in (0.0, *(2.0**i for i in range(12, 18))):
        terms = [{f"{kind}.call": 1.0, f"{kind}.byte": max(0.0, row["bytes"] - burst)} for row in rows]
        rates = _least_squares(terms, seconds.tolist(), power=0.5)
        predicted = np.array([dot(rates, values) for values in terms])
        error = float((((predicted - seconds) ** 2) / np.maximum(seconds, 1e-12)).sum())
        if error < best[0] * (1 - 1e-3):
            best = error, rates | ({f"{kind}.burst": burst} if burst else {})
    return best[1]


def _row_kept(row: Row) -> Terms:
    m, rows, columns, config = row["sequences"], row["rows"], row["columns"], row_config(row)
    targets = rows if row["targets"] is None else row["targets"]
    mixed = _dtype(row) == "bf16"
    layers = _layered(
        row["layers"] - 1, *(kept_terms(m, rows, queries, columns, config, mixed=mixed) for queries in (rows, targets))
    )
    ends = embedding_kept_terms(m, rows, config, mixed=mixed) | head_kept_terms(m, rows, targets, config, mixed=mixed)
    return layers | ends


def _row_workspace(row: Row) -> Terms:
    targets = row["rows"] if row["targets"] is None else row["targets"]
    return workspace_terms(row["sequences"], row["rows"], targets, row_config(row))


def _layered(layers: float, layer: Terms, last: Terms) -> Terms:
    """The terms of some layers and of the model's last one, which computes the rows of its targets only."""
    return {name: layers * value + last[name] for name, value in layer.items()}


def _known_bytes(row: Row) -> float:
    """What needs no fit: parameters and their two moments, the batch's data."""
    listed, codes = row.get("pairs"), int(row.get("codes", 0))
    if listed:
        data = listed_bytes(row["rows"], row["num_super"], listed, row_config(row))
    else:
        data = dense_bytes(row["rows"], row["columns"], row_config(row), _dtype(row))
    features = feature_bytes(row["feature_rows"], row["in_features"], codes)
    return 3.0 * _parameter_bytes(row) + row["sequences"] * data + features


def _parameter_bytes(row: Row) -> float:
    count = stage_parameters(row_config(row), [int(row["layers"])], int(row.get("codes", 0)))[0]
    return float(SUM_BYTES[_dtype(row)] * count)


def _dtype(row: Row) -> str:
    return str(row.get("dtype", "fp32"))


def fit_memory(rows: Sequence[Row]) -> dict[str, float]:
    """What layers keep from what was kept; the workspace from what the peak has on top."""
    memory: dict[str, float] = _least_squares(
        [_row_kept(row) for row in rows], [max(row["kept_bytes"], 1.0) for row in rows]
    )
    full = [row for row in rows if row["kept_bytes"] > _parameter_bytes(row)]
    peaks = [row["peak_bytes"] for row in full]
    left = [peak - predict_peak(memory, row) for peak, row in zip(peaks, full, strict=True)]
    # weighed by the whole peak: a workspace that is small beside it does not matter
    return memory | _least_squares([_row_workspace(row) for row in full], left, of=peaks)


def fit_process(memory: Mapping[str, float], rows: Sequence[Row]) -> dict[str, float]:
    """How many bytes a process takes for every byte of its tensors, the median of the rows."""
    factors = [row["process_bytes"] / predict_peak(memory, row) for row in rows]
    return {"process.byte": max(1.0, float(np.median(factors)))} if factors else {}


def ranges_of(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """The least and the largest of every size that was measured."""
    values: dict[str, list[float]] = {}
    for row in rows:
        if row["kind"] == "ring":
            block = math.ceil(row["num_nodes"] / row["ranks"]) + row["num_super"]
            values.setdefault("tokens", []).append(row["sequences"] * block)
        elif row["kind"] in ("layers", "model", "attention"):
            values.setdefault("tokens", []).append(row["sequences"] * row["rows"])
            for name in ("columns", "dim", "ffn_dim", "heads"):
                if name in row:
                    values.setdefault(name, []).append(row[name])
        elif row["kind"] in ("transfer", "hop"):
            values.setdefault("transfer bytes", []).append(row["bytes"])
        elif row["kind"] == "all_reduce":
            values.setdefault("all-reduce ranks", []).append(row["ranks"])
    return {name: (float(min(x)), float(max(x))) for name, x in values.items()}
