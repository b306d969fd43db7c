"""What a plan will cost: seconds of a step and bytes of every stage, from measured rows (paper Sec. 3.3).

A cost is a sum of terms (multiply-adds of the projections, scores, bytes sent, ...), each times a coefficient that is
fitted to the rows of one device with non-negative least squares. The terms say how a cost grows, the rows how much.

    paper                      here
    b, N', N_s, S              sequences, num_nodes, num_super, rows
    d, d_ff, h, l              dim, ffn_dim, heads, layers
    t_fwd, t_bwd               layer_terms, times "forward", "backward"
    t_emb, t_proj              embedding_terms, head_terms
    t_p2p, t_allreduce         transfer, all_reduce
    c_mlp, c_attn              kept.element, kept.score
    gamma, l_break, c_break    Break
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from megagraph.models.config import ModelConfig
from megagraph.planner.plan import Plan
from megagraph.planner.schedule import in_flight, simulate
from megagraph.planner.split import Floats, StageTables, gpipe_seconds, gpipe_tail

SCHEMA = 1
Terms = dict[str, float]
Row = Mapping[str, Any]

_SHAPE = ("layers", "sequences", "rows", "columns", "dim", "ffn_dim", "heads", "bias", "bias_size", "targets")
FIELDS = {
    "layers": (*_SHAPE, "direction", "seconds"),
    "model": (*_SHAPE, "in_features", "num_classes", "feature_rows", "direction", "seconds"),
    "embedding": ("sequences", "rows", "dim", "in_features", "feature_rows", "direction", "seconds"),
    "head": ("sequences", "dim", "num_classes", "targets", "direction", "seconds"),
    "attention": ("sequences", "rows", "columns", "dim", "heads", "bias", "bias_size", "direction", "seconds"),
    "ring": (
        "sequences", "num_nodes", "num_super", "ranks", "dim", "heads", "bias", "bias_size", "direction", "seconds",
    ),
    "optimizer": ("parameters", "seconds"),
    "transfer": ("bytes", "link", "seconds"),
    "all_reduce": ("bytes", "ranks", "link", "seconds"),
    "stall": ("seconds",),
    "memory": (
        *_SHAPE, "in_features", "num_classes", "feature_rows", "global_tokens", "kept_bytes", "peak_bytes",
    ),
}  # fmt: skip
"""Fields of every kind of row. ``direction`` is forward, backward or forward_backward; ``link`` node or across;
``targets`` None where the last layer computes all rows; a ring row is the work of all its ranks, without messages."""

COMPUTED = ("layers", "model", "embedding", "head", "attention", "ring", "optimizer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What a step works on, the same for every plan; paper symbols in brackets.

    Args:
        batch_sequences: sequences of a global batch [B].
        num_nodes, num_super: largest numbers of regular and super nodes of a sequence [N', N_s], for memory.
        mean_nodes: regular nodes on average, for time; ``None``: always ``num_nodes``.
        num_targets: rows of a sequence that are read out.
        feature_rows: distinct rows of raw features per sequence; ``None``: one for every node.
        prefetch: batches that wait on the device beside the one that runs.
    """

    batch_sequences: int
    num_nodes: int
    num_super: int = 0
    mean_nodes: float | None = None
    num_targets: int = 1
    feature_rows: float | None = None
    prefetch: int = 0

    def __post_init__(self) -> None:
        lows = {"batch_sequences": 1, "num_nodes": 1, "num_super": 0, "num_targets": 0, "prefetch": 0}
        for name, low in lows.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")


@dataclass(frozen=True)
class Break:
    """Layers beyond ``constant / (sequences * rows * dim)`` take ``gamma`` times as long [c_break, gamma].

    The paper slows all layers down at once; here only those that no longer fit, so that time has no step.
    """

    constant: float
    gamma: float

    def effective(self, layers: float, volume: float) -> float:
        """Layers that would take as long without a break."""
        return layers + (self.gamma - 1) * max(0.0, layers - self.constant / volume)


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Fitted coefficients, where they come from, and how far they were off on rows they had not seen.

    Args:
        seconds: seconds per unit of every term of computing, per direction.
        links: per link class ("node", "across"), seconds per transfer and per byte, and the same of an all-reduce.
        memory: bytes per unit of every term of memory.
        stall_seconds: wait for the loader in every step.
        ranges: least and largest measured value of the sizes that the terms are made of.
        held_out: errors on a random third (seed 0) of the rows, fitted to the rest.
        workload, model: of the profile; what is searched for unless another one is given.
        paper: coefficients of the paper's memory form on the same rows, and its held-out error.
        broken: the break of latency in layers; ``None``: none was found that lowers the held-out error.
    """

    origin: dict[str, str]
    seconds: dict[str, dict[str, float]]
    links: dict[str, dict[str, float]]
    memory: dict[str, float]
    stall_seconds: float
    ranges: dict[str, tuple[float, float]]
    held_out: dict[str, float]
    broken: Break | None = None
    workload: Workload | None = None
    model: ModelConfig | None = None
    paper: dict[str, float] = field(default_factory=dict)
    schema: int = SCHEMA

    def profiled(self) -> tuple[ModelConfig, Workload]:
        """The model and the workload of the profile that was fitted.

        Raises:
            ValueError: the rows were of no profile.
        """
        if self.model is None or self.workload is None:
            raise ValueError("the rows of the cost model name no model; fit it to rows of megagraph profile")
        return self.model, self.workload

    # ---- files

    def save(self, path: Path | str) -> None:
        """Write the model as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> CostModel:
        """Read a model.

        Raises:
            ValueError: the file is not whole, of another schema, or holds a coefficient that is not a number >= 0.
        """
        try:
            values = json.loads(Path(path).read_text())
        except ValueError as error:
            raise ValueError(f"{path} is not a whole JSON file ({error}); run megagraph fit again") from error
        found = values.get("schema") if isinstance(values, dict) else None
        if found != SCHEMA:
            raise ValueError(
                f"{path} must hold a cost model of schema {SCHEMA}, got {found!r}; run megagraph fit again"
            )
        names = {f.name for f in fields(cls)}
        if set(values) != names:
            raise ValueError(
                f"{path} must hold the fields {sorted(names)}, lacks {sorted(names - set(values))} "
                f"and has unknown {sorted(set(values) - names)}"
            )
        try:
            tables = {**values["seconds"], **{f"links.{k}": v for k, v in values["links"].items()}}
            tables |= {"memory": values["memory"], "stall": {"seconds": values["stall_seconds"]}}
            for table, coefficients in tables.items():
                for name, value in coefficients.items():
                    _check_number(f"{path}: {table}.{name}", value)
            values["ranges"] = {name: (float(low), float(high)) for name, (low, high) in values["ranges"].items()}
            values["broken"] = None if values["broken"] is None else Break(**values["broken"])
            values["workload"] = None if values["workload"] is None else Workload(**values["workload"])
            values["model"] = None if values["model"] is None else ModelConfig(**values["model"])
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{path} does not hold what a cost model holds: {error}") from error
        return cls(**values)

    # ---- what the search asks

    def memory_bytes(self, config: ModelConfig, plan: Plan, workload: Workload | None = None) -> list[float]:
        """Peak bytes of every rank of a pipeline; with one stage a rank, of every stage."""
        given = self._workload(workload)
        counts = np.array([[len(stage)] for stage in plan.stages(config.layers)], float)
        stages = sum(self.stage_memory(config, plan, given, counts).values())
        shared = self.shared_bytes(config, plan, given)
        return (np.reshape(stages, (-1, plan.pp)).sum(axis=0) + shared).tolist()

    def step_seconds(self, config: ModelConfig, plan: Plan, workload: Workload | None = None) -> float:
        """Seconds of one training step."""
        return sum(self.explain(config, plan, workload).values())

    def explain(self, config: ModelConfig, plan: Plan, workload: Workload | None = None) -> dict[str, float]:
        """The terms of a step's seconds, which add up to it."""
        given = self._workload(workload)
        forward, backward = self.stage_seconds(config, plan, given)
        layers = [len(stage) for stage in plan.stages(config.layers)]
        return self.step_terms(config, plan, given, layers, forward, backward)

    def step_terms(
        self,
        config: ModelConfig,
        plan: Plan,
        given: Workload,
        layers: Sequence[int],
        forward: Sequence[float] | Floats,
        backward: Sequence[float] | Floats,
        *,
        closed_form: bool = False,
    ) -> dict[str, float]:
        """``explain`` from the seconds of the stages: GPipe exactly in closed form, others by running the schedule.

        ``closed_form`` estimates the others, too: 1F1B as GPipe, which it equals where stages are even, and
        interleaved stages with the bubble shared among a rank's stages.
        """
        transfer = self.boundary_seconds(config, plan, given)
        num, last = plan.num_microbatches, len(forward) - 1
        both = np.asarray(forward) + np.asarray(backward)
        compute = float(num * both.reshape(-1, plan.pp).sum(axis=0).max())
        if closed_form or plan.schedule == "gpipe":
            # a rank's stages share its time; between two micro-batches it needs all of them
            bubble = gpipe_seconds(forward, backward, num) - num * float(both.max())
            pipeline = compute + bubble / plan.stages_per_rank + 2 * last * transfer
            # stage i is done when the last micro-batch has come back to it
            b, hops = np.asarray(backward)[: plan.pp], np.arange(plan.pp)
            behind = gpipe_tail(b, num)
            ends = pipeline - (behind[0] - behind) - hops * transfer
        else:
            timeline = simulate(plan, list(forward), list(backward), transfer)
            pipeline, ends = timeline.seconds, np.asarray(timeline.rank_ends)
        counts = np.asarray(layers)
        parameters = stage_parameters(config, counts, False, False) * np.ones(len(counts))
        parameters[0] += stage_parameters(config, 0, True, False)
        parameters[-1] += stage_parameters(config, 0, False, True)
        parameters = parameters.reshape(-1, plan.pp).sum(axis=0)
        replicas = plan.cp * plan.dp
        reduced = ends
        if replicas > 1:
            link = self._link(replicas)
            per_byte, calls = link.get("all_reduce.byte", 0.0), link.get("all_reduce.call", 0.0)
            unit = all_reduce_terms(1.0, replicas)
            reduced = ends + calls * unit["all_reduce.call"] + per_byte * unit["all_reduce.byte"] * 4 * parameters
        updated = float(parameters.max()) / (replicas if plan.shard else 1)
        return {
            "slowest rank computes": compute,
            "bubble and transfers": pipeline - compute,
            "all-reduce": float(reduced.max() - pipeline),
            "optimizer": _dot(self.seconds.get("forward", {}), optimizer_terms(updated)),
            "loader stall": self.stall_seconds,
        }

    def bound_seconds(
        self, config: ModelConfig, plan: Plan, given: Workload, forward: Floats, backward: Floats
    ) -> float:
        """``step_seconds`` in closed form, from the seconds of the stages."""
        layers = plan.layers
        return sum(self.step_terms(config, plan, given, layers, forward, backward, closed_form=True).values())

    def stage_seconds(self, config: ModelConfig, plan: Plan, given: Workload) -> tuple[list[float], list[float]]:
        """Forward and backward seconds of one micro-batch on every stage."""
        tables = self.stage_tables(config, plan, given)
        counts = [len(stage) for stage in plan.stages(config.layers)]
        roles = [0 if i == 0 else 2 if i == len(counts) - 1 else 1 for i in range(len(counts))]
        forward, backward = (
            [float(table[role, count]) for role, count in zip(roles, counts, strict=True)]
            for table in (tables.forward, tables.backward)
        )
        return forward, backward

    def stage_tables(self, config: ModelConfig, plan: Plan, given: Workload) -> StageTables:
        """Seconds of one micro-batch on a first, middle and last stage of 0..L layers."""
        m = given.batch_sequences / (plan.dp * plan.num_microbatches)
        nodes = given.num_nodes if given.mean_nodes is None else given.mean_nodes
        rows = math.ceil(nodes / plan.cp) + given.num_super
        targets = min(given.num_targets, math.ceil(nodes / plan.cp))
        forward = self._layer(config, plan, given, m, nodes, "forward", rows)
        backward = self._layer(config, plan, given, m, nodes, "backward", rows)
        last = [self._layer(config, plan, given, m, nodes, way, targets) for way in ("forward", "backward")]
        if plan.checkpoint:  # every layer is computed again before its backward pass
            backward += forward
            last[1] += last[0]
        feature_rows = m * (rows if given.feature_rows is None else given.feature_rows / plan.cp)
        embedding = embedding_terms(m, rows, config.dim, config.in_features, feature_rows)
        head = head_terms(m, targets, config.dim, config.num_classes)
        counts = np.arange(config.layers + 1, dtype=float)
        if self.broken is not None:
            volume = m * rows * config.dim
            counts = np.array([self.broken.effective(count, volume) for count in counts])
        tables = []
        for way, layer, last_layer in (("forward", forward, last[0]), ("backward", backward, last[1])):
            coefficients = self.seconds.get(way, {})
            table = np.tile(layer * counts, (3, 1))
            first_extra, last_extra = _dot(coefficients, embedding), _dot(coefficients, head)
            for role in (0, 2):
                if role == 0:
                    table[role] += first_extra
                if role == 2 or plan.num_stages == 1:
                    table[role] += last_extra + last_layer - layer
            tables.append(np.maximum(table, 0.0))
        return StageTables(*tables)

    def _layer(
        self, config: ModelConfig, plan: Plan, given: Workload, m: float, nodes: float, way: str, queries: float
    ) -> float:
        """Seconds of one layer on the rows of one rank, its ring included."""
        coefficients = self.seconds.get(way, {})
        block = math.ceil(nodes / plan.cp)
        rows = block + given.num_super
        seconds = _dot(coefficients, layer_terms(m, rows, queries, config))
        comm = plan.comm
        if plan.cp == 1 or comm == "allgather":
            seconds += _dot(coefficients, attention_terms(m, queries, nodes + given.num_super, config, ring=False))
            if plan.cp > 1:
                hop = self.transfer_seconds(2 * m * block * config.dim * 4, plan.cp)
                seconds += (plan.cp - 1) * hop * (1 if way == "forward" else 2)
            return seconds
        local = _dot(coefficients, attention_terms(m, queries, rows, config, ring=True))
        visit = _dot(coefficients, attention_terms(m, queries, block, config, ring=True))
        hop = self.transfer_seconds(2 * m * block * config.dim * 4, plan.cp)  # gradients travel in fp32, too
        if way == "forward":
            return seconds + local + (plan.cp - 1) * max(visit, hop)
        return seconds + local + (plan.cp - 1) * max(visit, 2 * hop) + hop

    def boundary_seconds(self, config: ModelConfig, plan: Plan, given: Workload) -> float:
        """Seconds of one micro-batch's hidden states from a stage to the next [t_p2p(S_act)]."""
        if plan.pp == 1:
            return 0.0
        m = given.batch_sequences / (plan.dp * plan.num_microbatches)
        rows = math.ceil(given.num_nodes / plan.cp) + given.num_super
        return self.transfer_seconds(m * rows * config.dim * 4, plan.world_size)

    def transfer_seconds(self, size: float, span: int) -> float:
        """A message between two ranks that are up to ``span`` ranks apart."""
        link = self._link(span)
        return link.get("transfer.call", 0.0) + link.get("transfer.byte", 0.0) * size

    def _link(self, span: int) -> dict[str, float]:
        per_node = self.origin.get("ranks_per_node")
        across = per_node is not None and span > int(per_node)
        return self.links.get("across" if across else "node", {}) or self.links.get("node", {})

    # ---- memory

    def stage_memory(self, config: ModelConfig, plan: Plan, given: Workload, counts: Floats) -> dict[str, Floats]:
        """Bytes of every stage, by what they are for, without what a rank holds once.

        Args:
            counts: layers of every stage; [stages, C] or [1, C], for C loads of each.

        Returns:
            [stages, C] each: "parameters" and their moments, "activations" and gradients at their peak, "boundary"
            for what is sent and received, on the first stage the raw features.
        """
        m = given.batch_sequences / (plan.dp * plan.num_microbatches)
        block = math.ceil(given.num_nodes / plan.cp)
        rows, columns = block + given.num_super, given.num_nodes + given.num_super
        hidden = 4.0 * m * rows * config.dim
        targets = min(given.num_targets, block)
        layer, last_layer = (
            _dot(self.memory, kept_terms(m, rows, queries, columns, config)) for queries in (rows, targets)
        )
        # checkpointed: the inputs of all, and one layer that is computed again
        activations = counts * hidden + layer if plan.checkpoint else counts * layer
        activations = np.broadcast_to(activations, (plan.num_stages, counts.shape[1])).copy()
        activations[0] += hidden
        activations[-1] += 0.0 if plan.checkpoint else last_layer - layer
        parameters = np.broadcast_to(4.0 * stage_parameters(config, counts, False, False), activations.shape).copy()
        parameters[0] += 4.0 * stage_parameters(config, 0, True, False)
        parameters[-1] += 4.0 * stage_parameters(config, 0, False, True)
        replicas = plan.cp * plan.dp
        if plan.shard:
            parameters /= replicas
        gradients = parameters * (1 if plan.shard or replicas == 1 else 2)  # DDP holds buckets, too
        flight = np.array(in_flight(plan), float).T.reshape(-1, 1)
        if plan.schedule == "gpipe":  # the most activations come before the first gradient
            activations = np.maximum(flight * activations, (flight - 1) * activations + gradients)
        else:
            activations = flight * activations + gradients
        boundary = np.full_like(activations, 0.0 if plan.pp == 1 else hidden * plan.num_microbatches)
        if self.origin.get("device_type") != "cpu":
            boundary[0] += self._feature_bytes(config, plan, given) * (1 + given.prefetch)
        return {"parameters": 3 * parameters, "activations": activations, "boundary": boundary}

    def shared_bytes(self, config: ModelConfig, plan: Plan, given: Workload) -> float:
        """What a rank holds once, however many stages and layers: the batch's data, workspace, ring buffers."""
        local = given.batch_sequences / plan.dp
        m = local / plan.num_microbatches
        block = math.ceil(given.num_nodes / plan.cp)
        rows, columns = block + given.num_super, given.num_nodes + given.num_super
        pair_bytes = 1 if config.bias == "bucket" else 4 * config.bias_size
        data = local * rows * columns * pair_bytes
        if self.origin.get("device_type") == "cpu":  # every rank's loader builds them; a device gets what it reads
            data += self._feature_bytes(config, plan, given)
        total = data * (1 + given.prefetch) + _dot(self.memory, workspace_terms(m, rows, config))
        if plan.cp > 1:
            block_bytes = 4.0 * m * block * config.dim
            if plan.comm == "allgather":
                total += 4 * plan.cp * block_bytes  # k and v of all nodes, and their gradients
            else:
                total += 8 * block_bytes + 4.0 * m * rows * config.dim  # two visiting blocks each way, accumulator
        return total

    def _feature_bytes(self, config: ModelConfig, plan: Plan, given: Workload) -> float:
        rows = math.ceil(given.num_nodes / plan.cp) + given.num_super
        feature_rows = rows if given.feature_rows is None else given.feature_rows / plan.cp
        return given.batch_sequences / plan.dp * feature_rows * config.in_features * 4

    # ---- what was not measured

    def extrapolated(self, config: ModelConfig, plan: Plan, workload: Workload | None = None) -> list[str]:
        """Every size of this plan that lies outside the measured ones."""
        given = self._workload(workload)
        m = given.batch_sequences / (plan.dp * plan.num_microbatches)
        block = math.ceil(given.num_nodes / plan.cp)
        sizes = {
            "tokens": m * (block + given.num_super),
            "columns": given.num_nodes + given.num_super,
            "dim": config.dim,
            "ffn_dim": config.ffn_dim,
            "heads": config.heads,
        }
        if plan.pp > 1:
            sizes["transfer bytes"] = 4.0 * m * (block + given.num_super) * config.dim
        if plan.cp > 1:
            sizes["transfer bytes"] = 8.0 * m * block * config.dim
        if plan.cp * plan.dp > 1:
            sizes["all-reduce ranks"] = plan.cp * plan.dp
        found = []
        for name, value in sizes.items():
            if name not in self.ranges:
                found.append(f"{name} was not measured")
                continue
            low, high = self.ranges[name]
            if not low * (1 - 1e-9) <= value <= high * (1 + 1e-9):
                found.append(f"{name} = {value:,.0f} is outside the measured {low:,.0f}..{high:,.0f}")
        return found

    def _workload(self, workload: Workload | None) -> Workload:
        given = workload or self.workload
        if given is None:
            raise ValueError("the cost model's rows name no workload; pass workload=Workload(batch_sequences=..., ...)")
        return given


# ---- terms


def layer_terms(m: float, rows: float, queries: float, config: ModelConfig) -> Terms:
    """A layer but for its attention; keys and values of all rows, the rest for the queries only."""
    d = config.dim
    return {
        "layer.call": 1.0,
        "layer.product": m * (rows * 2 * d**2 + queries * (2 * d**2 + 2 * d * config.ffn_dim)),
        "layer.element": m * (rows + queries) * d,
        "layer.ffn_element": m * queries * config.ffn_dim,
    }


def attention_terms(m: float, queries: float, keys: float, config: ModelConfig, *, ring: bool) -> Terms:
    """One call of the fused step [t_step(S, n)]: ``queries`` rows against ``keys`` columns."""
    scores = m * queries * keys
    channels = config.bias_size if config.bias == "projected" else 1
    return {
        "attention.call": 1.0,
        "attention.score": scores * config.heads,
        "attention.product": scores * config.dim,
        "attention.bias": scores * channels,
        "attention.row": m * queries * config.heads,
        "attention.state": m * queries * config.dim if ring else 0.0,
    }


def embedding_terms(m: float, rows: float, dim: int, in_features: int, feature_rows: float) -> Terms:
    return {
        "embedding.call": 1.0,
        "embedding.product": feature_rows * in_features * dim,
        "embedding.element": m * rows * dim,
    }


def head_terms(m: float, targets: float, dim: int, num_classes: int) -> Terms:
    return {"head.call": 1.0, "head.product": m * targets * dim * num_classes, "head.element": m * targets * dim}


def optimizer_terms(parameters: float) -> Terms:
    return {"optimizer.call": 1.0, "optimizer.parameter": parameters}


def all_reduce_terms(size: float, ranks: int) -> Terms:
    """A ring all-reduce: every rank sends 2 (n - 1) / n of the message in 2 (n - 1) parts."""
    return {"all_reduce.call": 2.0 * (ranks - 1), "all_reduce.byte": 2 * (ranks - 1) / ranks * size}


def kept_terms(m: float, rows: float, queries: float, columns: float, config: ModelConfig) -> Terms:
    """What a layer keeps for backward; the scores only where an implementation stores them [c_attn]."""
    return {
        "kept.key": m * rows * config.dim,
        "kept.element": m * queries * config.dim,
        "kept.ffn_element": m * queries * config.ffn_dim,
        "kept.row": m * queries * config.heads,
        "kept.score": m * queries * columns * config.heads,
    }


def workspace_terms(m: float, rows: float, config: ModelConfig) -> Terms:
    """What a layer needs while it runs."""
    return {
        "workspace.fixed": 1.0,
        "workspace.element": m * rows * config.dim,
        "workspace.ffn_element": m * rows * config.ffn_dim,
    }


def stage_parameters(config: ModelConfig, layers: Any, first: bool, last: bool) -> Any:
    """Parameters of a stage of HierarchicalGT."""
    d, ffn = config.dim, config.ffn_dim
    attention = 4 * d * d + 3 * d
    feed_forward = 2 * d * ffn + ffn + d
    count = layers * (attention + feed_forward + 4 * d + config.heads * config.bias_size)
    if first:
        count += config.in_features * d + d + config.global_tokens * d
    if last:
        count += 2 * d + d * config.num_classes + config.num_classes
    return count


def _dot(coefficients: Mapping[str, float], terms: Terms) -> float:
    return sum(coefficients.get(name, 0.0) * value for name, value in terms.items())


# ---- rows


def check_rows(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The rows, if each has its fields and sensible numbers, all of one device.

    Raises:
        ValueError: names the row and field, expected and got.
    """
    checked = []
    devices = set()
    for index, row in enumerate(rows):
        kind = row.get("kind") if isinstance(row, Mapping) else None
        if kind not in FIELDS:
            raise ValueError(f"row {index} must have a kind of {sorted(FIELDS)}, got {kind!r}")
        for name in FIELDS[kind]:
            if name not in row:
                raise ValueError(f"row {index} ({kind}) must have the fields {list(FIELDS[kind])}, lacks {name!r}")
            value = row[name]
            if name in ("bias", "direction", "link") or (name == "targets" and value is None):
                continue
            _check_number(f"row {index} ({kind}): {name}", value)
        if "direction" in FIELDS[kind] and row["direction"] not in ("forward", "backward", "forward_backward"):
            raise ValueError(
                f"row {index} ({kind}): direction must be forward, backward or forward_backward, "
                f"got {row['direction']!r}"
            )
        checked.append(dict(row))
        devices.add(row.get("device"))
    if not checked:
        raise ValueError("expected rows to fit, got none; run megagraph profile")
    if len(devices) > 1:
        raise ValueError(
            f"rows must come from one device, got {sorted(map(str, devices))}; fit a model for each of them"
        )
    return checked


def _check_number(what: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{what} must be a number of at least 0, got {value!r}")


def bench_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the benches of attention as rows of this model, those of peers left out; other rows as they are."""
    made = []
    for row in rows:
        if not isinstance(row, dict) or "kind" in row or "contender" not in row:
            made.append(row)
            continue
        ours = str(row["contender"]).startswith("megagraph") and row.get("median") is not None
        if ours and row.get("form") in ("bucket", "projected") and row.get("dtype") == "float32":
            made.append(
                {
                    "kind": "attention",
                    "sequences": row["B"],
                    "rows": row["M"],
                    "columns": row["N"],
                    "dim": row["H"] * row["D"],
                    "heads": row["H"],
                    "bias": row["form"],
                    "bias_size": 4 if row["form"] == "projected" else 32,
                    "direction": row["direction"],
                    "seconds": row["median"],
                    "unit": row["unit"],
                    "device": row["device"],
                    "torch": row["torch"],
                    "commit": row["commit"],
                }
            )
    return made


def row_config(row: Row) -> ModelConfig:
    """The sizes of a model that a row's terms ask for."""
    return ModelConfig(
        in_features=row.get("in_features", 1),
        num_classes=row.get("num_classes", 1),
        layers=max(int(row.get("layers", 1)), 1),
        dim=row["dim"],
        ffn_dim=row.get("ffn_dim", row["dim"]),
        heads=row["heads"],
        global_tokens=row.get("global_tokens", 0),
        bias=row["bias"] if row["bias"] == "projected" else "bucket",
        bias_size=max(int(row["bias_size"]), 1),
    )


def row_terms(row: Row, broken: Break | None = None) -> Terms:
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
    layers = row["layers"] - 1.0
    if broken is not None:
        layers = broken.effective(row["layers"], m * rows * config.dim) - 1
    terms = _layered(
        layers,
        *(
            layer_terms(m, rows, queries, config) | attention_terms(m, queries, columns, config, ring=False)
            for queries in (rows, targets)
        ),
    )
    if kind == "model":
        terms |= embedding_terms(m, rows, config.dim, config.in_features, row["feature_rows"])
        terms |= head_terms(m, targets, config.dim, config.num_classes)
    return terms


# ---- the fit


def fit(rows: Iterable[Row], *, workload: Workload | None = None) -> CostModel:
    """A cost model from rows of ``megagraph profile``, of a bench, or of both; see ``FIELDS`` for what a row holds.

    Raises:
        ValueError: no rows, rows of several devices, a field that is missing, a number that is NaN or negative.
    """
    checked = check_rows(rows)
    given = next((Workload(**row["workload"]) for row in checked if "workload" in row), None)
    computed = [row for row in checked if row["kind"] in COMPUTED]
    memory_rows = [row for row in checked if row["kind"] == "memory"]
    train, test = held_out_third(computed)
    broken = _find_break(train, test)
    held_out: dict[str, float] = {}
    if test and train:
        held_out |= time_errors(fit_seconds(train, broken), test, broken)
    seen, unseen = held_out_third(memory_rows)
    if seen and unseen:
        fitted = fit_memory(seen)
        predicted = [predict_peak(fitted, row) for row in unseen]
        measured = [row["peak_bytes"] for row in unseen]
        held_out |= {"memory_mape": mape(predicted, measured), "memory_r2": r_squared(predicted, measured)}
    stalls = [row["seconds"] for row in checked if row["kind"] == "stall"]
    origin: dict[str, str] = {
        name: str(checked[0][name])
        for name in ("device", "device_type", "torch", "python", "commit", "ranks_per_node")
        if name in checked[0]
    }
    return CostModel(
        origin=origin,
        seconds=fit_seconds(computed, broken),
        links=_fit_links(checked),
        memory=fit_memory(memory_rows),
        stall_seconds=float(np.median(stalls)) if stalls else 0.0,
        ranges=_ranges(checked),
        held_out=held_out,
        broken=broken,
        workload=workload or given,
        model=next((ModelConfig(**row["model"]) for row in checked if "model" in row), None),
        paper=fit_paper(memory_rows),
    )


def held_out_third(rows: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Two thirds to fit and a random third (seed 0) to judge."""
    shuffled = np.random.default_rng(0).permutation(len(rows))
    third = set(shuffled[: len(rows) // 3].tolist())
    return [row for i, row in enumerate(rows) if i not in third], [row for i, row in enumerate(rows) if i in third]


def time_errors(seconds: dict[str, dict[str, float]], rows: Sequence[Row], broken: Break | None) -> dict[str, float]:
    """MAPE, and R^2 of log time, on rows."""
    predicted = [predict_seconds(seconds, row, broken) for row in rows]
    measured = [row["seconds"] for row in rows]
    logs = [np.log(np.maximum(values, 1e-12)) for values in (predicted, measured)]
    return {"time_mape": mape(predicted, measured), "time_r2_log": r_squared(*logs)}


def predict_seconds(seconds: Mapping[str, Mapping[str, float]], row: Row, broken: Break | None = None) -> float:
    """Seconds of what a row measured."""
    terms = row_terms(row, broken)
    return sum(_dot(seconds.get(way, {}), terms) for way in _ways(row))


def predict_peak(memory: Mapping[str, float], row: Row) -> float:
    """Peak bytes of a training step on one device, of what a memory row measured."""
    kept = _dot(memory, _row_kept(row)) + 4.0 * row["sequences"] * row["rows"] * row["dim"]
    parameters = 4.0 * stage_parameters(row_config(row), int(row["layers"]), True, True)
    peak = max(kept, parameters)
    return _known_bytes(row) + peak + _dot(memory, workspace_terms(row["sequences"], row["rows"], row_config(row)))


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


def fit_seconds(rows: Sequence[Row], broken: Break | None) -> dict[str, dict[str, float]]:
    """Coefficients of both directions at once: a row that timed both has the terms of both."""
    flat = _least_squares(
        [{(way, name): x for way in _ways(row) for name, x in row_terms(row, broken).items()} for row in rows],
        [row["seconds"] for row in rows],
    )
    seconds: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
    for (way, name), value in flat.items():
        seconds[way][name] = value
    return seconds


def _least_squares(terms: Sequence[Mapping[Any, float]], values: Sequence[float]) -> dict[Any, float]:
    """Non-negative coefficients of least relative error."""
    if not values:
        return {}
    from scipy.optimize import nnls  # half a second to import, which a search does not need

    names = sorted({name for row in terms for name in row})
    matrix = np.array([[row.get(name, 0.0) for name in names] for row in terms], dtype=float)
    weights = 1.0 / np.maximum(np.asarray(values, float), 1e-12)
    matrix *= weights[:, None]
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    solution, _ = nnls(matrix / scale, np.ones(len(values)), maxiter=30 * matrix.shape[1])
    return {name: float(x / s) for name, x, s in zip(names, solution, scale, strict=True)}


def _find_break(train: Sequence[Row], test: Sequence[Row]) -> Break | None:
    """The break that lowers the held-out error by at least a twentieth, or none."""
    deep = [row for row in train if row["kind"] in ("layers", "model")]
    if len({row["layers"] for row in deep}) < 3 or not test:
        return None
    volumes = [row["layers"] * row["sequences"] * row["rows"] * row["dim"] for row in deep]
    plain = time_errors(fit_seconds(train, None), test, None)["time_mape"]
    best, least = None, plain * 0.95
    for constant in np.quantile(volumes, (0.25, 0.5, 0.75)):
        for gamma in (1.1, 1.25, 1.5, 2.0):
            broken = Break(float(constant), gamma)
            error = time_errors(fit_seconds(train, broken), test, broken)["time_mape"]
            if error < least:
                best, least = broken, error
    return best


def _fit_links(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    links: dict[str, dict[str, float]] = {}
    for link in {row["link"] for row in rows if "link" in row}:
        own = [row for row in rows if row.get("link") == link]
        sent = [row for row in own if row["kind"] == "transfer"]
        reduced = [row for row in own if row["kind"] == "all_reduce"]
        links[link] = _least_squares(
            [{"transfer.call": 1.0, "transfer.byte": float(row["bytes"])} for row in sent],
            [row["seconds"] for row in sent],
        ) | _least_squares(
            [all_reduce_terms(row["bytes"], row["ranks"]) for row in reduced], [row["seconds"] for row in reduced]
        )
    return links


def _row_kept(row: Row) -> Terms:
    m, rows, columns, config = row["sequences"], row["rows"], row["columns"], row_config(row)
    targets = rows if row["targets"] is None else row["targets"]
    return _layered(row["layers"] - 1, *(kept_terms(m, rows, queries, columns, config) for queries in (rows, targets)))


def _layered(layers: float, layer: Terms, last: Terms) -> Terms:
    """The terms of some layers and of the model's last one, which computes the rows of its targets only."""
    return {name: layers * value + last[name] for name, value in layer.items()}


def _known_bytes(row: Row) -> float:
    """What needs no fit: parameters and their two moments, the batch's data."""
    config = row_config(row)
    pair_bytes = 1 if row["bias"] == "bucket" else 4 * row["bias_size"]
    data = row["sequences"] * row["rows"] * row["columns"] * pair_bytes + 4 * row["feature_rows"] * row["in_features"]
    return 12.0 * stage_parameters(config, int(row["layers"]), True, True) + data


def fit_memory(rows: Sequence[Row]) -> dict[str, float]:
    """What layers keep from what was kept; the workspace from what the peak has on top."""
    embedded = [4.0 * row["sequences"] * row["rows"] * row["dim"] for row in rows]
    memory: dict[str, float] = _least_squares(
        [_row_kept(row) for row in rows],
        [max(row["kept_bytes"] - known, 1.0) for row, known in zip(rows, embedded, strict=True)],
    )
    full = [row for row in rows if row["kept_bytes"] > 4 * stage_parameters(row_config(row), row["layers"], True, True)]
    over = [predict_peak(memory, row) for row in full]
    left = [(row, row["peak_bytes"] - known) for row, known in zip(full, over, strict=True)]
    if left:
        memory |= _workspace(left)
    return memory


def _workspace(left: Sequence[tuple[Row, float]]) -> dict[str, float]:
    """Non-negative, and weighed by the whole peak: a workspace that is small beside it does not matter."""
    from scipy.optimize import nnls

    names = ["workspace.fixed", "workspace.element", "workspace.ffn_element"]
    terms = [workspace_terms(row["sequences"], row["rows"], row_config(row)) for row, _ in left]
    weights = np.array([1.0 / row["peak_bytes"] for row, _ in left])
    matrix = np.array([[row[name] for name in names] for row in terms]) * weights[:, None]
    scale = np.linalg.norm(matrix, axis=0)
    solution, _ = nnls(matrix / scale, np.array([value for _, value in left]) * weights)
    return {name: float(x / s) for name, x, s in zip(names, solution, scale, strict=True)}


def fit_paper(rows: Sequence[Row]) -> dict[str, float]:
    """Held-out error of the paper's own memory form, fitted to the same rows: c_fp, c_mlp, c_attn, c_bias, c_feat.

    M = c_fp * parameters + l b S (c_mlp d + c_attn h N) + b S (c_bias l N + c_feat d_in), nothing on top.
    """
    if len(rows) < 6:
        return {}

    def terms(row: Row) -> Terms:
        tokens = row["sequences"] * row["rows"]
        d, ffn = row["dim"], row["ffn_dim"]
        extra = d * (row["in_features"] + row["num_classes"])
        return {
            "c_fp": row["layers"] * (4 * d * d + 2 * d * ffn) + extra,
            "c_mlp": row["layers"] * tokens * d,
            "c_attn": row["layers"] * tokens * row["heads"] * row["columns"],
            "c_bias": row["layers"] * tokens * row["columns"],
            "c_feat": tokens * row["in_features"],
        }

    seen, unseen = held_out_third(rows)
    coefficients = _least_squares([terms(row) for row in seen], [row["peak_bytes"] for row in seen])
    predicted = [_dot(coefficients, terms(row)) for row in unseen]
    measured = [row["peak_bytes"] for row in unseen]
    return coefficients | {"memory_mape": mape(predicted, measured), "memory_r2": r_squared(predicted, measured)}


def _ranges(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
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
        elif row["kind"] == "transfer":
            values.setdefault("transfer bytes", []).append(row["bytes"])
        elif row["kind"] == "all_reduce":
            values.setdefault("all-reduce ranks", []).append(row["ranks"])
    return {name: (float(min(x)), float(max(x))) for name, x in values.items()}
