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
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from megagraph import files
from megagraph.models.config import ModelConfig
from megagraph.planner.plan import Plan
from megagraph.planner.schedule import in_flight, simulate
from megagraph.planner.split import Floats, StageTables, gpipe_seconds, gpipe_tail

SCHEMA = 1
Terms = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What a step works on, the same for every plan; paper symbols in brackets.

    Args:
        batch_sequences: sequences of a global batch [B].
        num_nodes, num_super: regular and super nodes of a sequence [N', N_s].
        num_targets: rows of a sequence that are read out.
        feature_rows: distinct rows of raw features per sequence; ``None``: one for every node.
    """

    batch_sequences: int
    num_nodes: int
    num_super: int = 0
    num_targets: int = 1
    feature_rows: float | None = None

    def __post_init__(self) -> None:
        lows = {"batch_sequences": 1, "num_nodes": 1, "num_super": 0, "num_targets": 0}
        for name, low in lows.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
            if getattr(self, name) >= 1 << 31:
                raise ValueError(f"{name} must be below 2^31, got {getattr(self, name)}")
        if self.feature_rows is not None:
            check_number("feature_rows", self.feature_rows)

    @classmethod
    def from_json(cls, values: Any) -> Workload:
        """From the values of a JSON object; ValueError names a field that is not right."""
        if isinstance(values, dict):  # of a file written before, they may be there and say nothing
            values = {name: x for name, x in values.items() if x or name not in ("mean_nodes", "prefetch")}
        return files.typed(cls, values, "a workload")


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
    """

    origin: dict[str, str]
    seconds: dict[str, dict[str, float]]
    links: dict[str, dict[str, float]]
    memory: dict[str, float]
    stall_seconds: float
    ranges: dict[str, tuple[float, float]]
    held_out: dict[str, float]
    workload: Workload | None = None
    model: ModelConfig | None = None
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
        files.write_json(Path(path), asdict(self))

    @classmethod
    def load(cls, path: Path | str) -> CostModel:
        """Read a model.

        Raises:
            ValueError: the file is not as it was written, of another schema, or holds a coefficient that is not a
                number >= 0.
        """
        values = files.parse_json(Path(path), "a cost model", "run megagraph fit again")
        found = values.get("schema") if isinstance(values, dict) else None
        if found != SCHEMA:
            raise ValueError(
                f"{path} must hold a cost model of schema {SCHEMA}, got {found!r}; run megagraph fit again"
            )
        whole = dict(values)
        values.pop("paper", None)  # of files written before
        if values.pop("broken", None):
            raise ValueError(f"{path} has a break in layers, which cost models do without now; run megagraph fit again")
        names = {f.name for f in fields(cls)}
        if values.keys() - {"checksum"} != names:
            raise ValueError(
                f"{path} must hold the fields {sorted(names)}, lacks {sorted(names - set(values))} "
                f"and has unknown {sorted(values.keys() - names - {'checksum'})}"
            )
        values.pop("checksum", None)
        try:
            tables = {**values["seconds"], **{f"links.{k}": v for k, v in values["links"].items()}}
            tables |= {"memory": values["memory"], "stall": {"seconds": values["stall_seconds"]}}
            for table, coefficients in tables.items():
                for name, value in coefficients.items():
                    check_number(f"{path}: {table}.{name}", value)
            values["ranges"] = {name: (float(low), float(high)) for name, (low, high) in values["ranges"].items()}
            for name, kind in (("workload", Workload), ("model", ModelConfig)):
                try:
                    values[name] = values[name] and kind.from_json(values[name])
                except ValueError as error:
                    raise ValueError(f"expected a cost model whose {name} is right in {path}: {error}") from error
        except (TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"{path} does not hold what a cost model holds: {error}") from error
        files.check_values(whole, f"a cost model as it was written, got {path}", by_hand=True)
        return files.typed(cls, values, f"a cost model in {path}")

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
            "optimizer": dot(self.seconds.get("forward", {}), optimizer_terms(updated)),
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
        rows = math.ceil(given.num_nodes / plan.cp) + given.num_super
        targets = min(given.num_targets, math.ceil(given.num_nodes / plan.cp))
        forward = self._layer(config, plan, given, m, "forward", rows)
        backward = self._layer(config, plan, given, m, "backward", rows)
        last = [self._layer(config, plan, given, m, way, targets) for way in ("forward", "backward")]
        if plan.checkpoint:  # every layer is computed again before its backward pass
            backward += forward
            last[1] += last[0]
        feature_rows = m * (rows if given.feature_rows is None else given.feature_rows / plan.cp)
        embedding = embedding_terms(m, rows, config.dim, config.in_features, feature_rows)
        head = head_terms(m, targets, config.dim, config.num_classes)
        counts = np.arange(config.layers + 1, dtype=float)
        tables = []
        for way, layer, last_layer in (("forward", forward, last[0]), ("backward", backward, last[1])):
            coefficients = self.seconds.get(way, {})
            table = np.tile(layer * counts, (3, 1))
            first_extra, last_extra = dot(coefficients, embedding), dot(coefficients, head)
            for role in (0, 2):
                if role == 0:
                    table[role] += first_extra
                if role == 2 or plan.num_stages == 1:
                    table[role] += last_extra + last_layer - layer
            tables.append(np.maximum(table, 0.0))
        return StageTables(*tables)

    def extra_layers(self, config: ModelConfig, given: Workload) -> tuple[float, float]:
        """What the embedding and the read-out take beside the layers of their stage, in layers.

        The read-out's may be below 0, as the last layer computes the rows of its targets only.
        """
        tables = self.stage_tables(config, Plan(pp=2), given)
        first, layer, last = (tables.forward + tables.backward)[:, 1].tolist()
        return first / layer - 1, last / layer - 1

    def _layer(self, config: ModelConfig, plan: Plan, given: Workload, m: float, way: str, queries: float) -> float:
        """Seconds of one layer on the rows of one rank, its ring included."""
        seconds = dot(
            self.seconds.get(way, {}),
            layer_terms(m, math.ceil(given.num_nodes / plan.cp) + given.num_super, queries, config),
        )
        # zero-bubble asks for gradients of inputs, then of weights; attention computes all of them both times
        times = 2 if plan.schedule == "zero_bubble" and way == "backward" else 1
        return seconds + times * self._attention(config, plan, given, m, way, queries)

    def _attention(self, config: ModelConfig, plan: Plan, given: Workload, m: float, way: str, queries: float) -> float:
        coefficients = self.seconds.get(way, {})
        block = math.ceil(given.num_nodes / plan.cp)
        if plan.cp == 1 or plan.comm == "allgather":
            seconds = dot(
                coefficients, attention_terms(m, queries, given.num_nodes + given.num_super, config, ring=False)
            )
            if plan.cp > 1:
                hop = self.transfer_seconds(2 * m * block * config.dim * 4, plan.cp)
                seconds += (plan.cp - 1) * hop * (1 if way == "forward" else 2)
            return seconds
        local = dot(coefficients, attention_terms(m, queries, block + given.num_super, config, ring=True))
        visit = dot(coefficients, attention_terms(m, queries, block, config, ring=True))
        hop = self.transfer_seconds(2 * m * block * config.dim * 4, plan.cp)  # gradients travel in fp32, too
        if way == "forward":
            return local + (plan.cp - 1) * max(visit, hop)
        return local + (plan.cp - 1) * max(visit, 2 * hop) + hop

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
            for what is sent and received, on the first stage the raw features; "allocator" for what the process keeps
            of freed memory.
        """
        m = given.batch_sequences / (plan.dp * plan.num_microbatches)
        block = math.ceil(given.num_nodes / plan.cp)
        rows, columns = block + given.num_super, given.num_nodes + given.num_super
        hidden = 4.0 * m * rows * config.dim
        targets = min(given.num_targets, block)
        layer, last_layer = (
            dot(self.memory, kept_terms(m, rows, queries, columns, config)) for queries in (rows, targets)
        )
        if plan.cp > 1 and plan.comm == "allgather":  # k and v of the other ranks' rows are kept, too
            layer, last_layer = (kept + 8.0 * m * (columns - rows) * config.dim for kept in (layer, last_layer))
        # checkpointed: the inputs of all, and one layer that is computed again
        activations = counts * hidden + layer if plan.checkpoint else counts * layer
        activations = np.broadcast_to(activations, (plan.num_stages, counts.shape[1])).copy()
        activations[0] += dot(self.memory, embedding_kept_terms(m, rows, config))
        activations[-1] += dot(self.memory, head_kept_terms(m, rows, targets, config))
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
        boundary[0] += self._feature_bytes(config, plan, given)
        parts = {"parameters": 3 * parameters, "activations": activations, "boundary": boundary}
        return parts | {"allocator": (self._process_factor - 1) * sum(parts.values())}

    def shared_bytes(self, config: ModelConfig, plan: Plan, given: Workload) -> float:
        """What a rank holds once, however many stages and layers: the batch's data, workspace, ring buffers."""
        local = given.batch_sequences / plan.dp
        m = local / plan.num_microbatches
        block = math.ceil(given.num_nodes / plan.cp)
        rows, columns = block + given.num_super, given.num_nodes + given.num_super
        targets = min(given.num_targets, block)
        pair_bytes = 1 if config.bias == "bucket" else 4 * config.bias_size
        data = local * rows * columns * pair_bytes
        total = data + dot(self.memory, workspace_terms(m, rows, targets, config))
        if plan.cp > 1:
            block_bytes = 4.0 * m * block * config.dim
            if plan.comm == "allgather":
                total += 2 * plan.cp * block_bytes  # the gradients of k and v of all nodes
            else:
                total += 8 * block_bytes + 4.0 * m * rows * config.dim  # two visiting blocks each way, accumulator
        return total * self._process_factor

    @property
    def _process_factor(self) -> float:
        """Bytes that a process takes for every byte of its tensors; 1 where no row says so."""
        return self.memory.get("process.byte", 1.0)

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
        "kept.row": m * (rows + queries),
        "kept.head_row": m * queries * config.heads,
        "kept.score": m * queries * columns * config.heads,
    }


def embedding_kept_terms(m: float, rows: float, config: ModelConfig) -> Terms:
    return {"kept.embedding": m * rows * config.dim}


def head_kept_terms(m: float, rows: float, targets: float, config: ModelConfig) -> Terms:
    """The read-out's inputs and scores; where the last layer's rows are not one piece of memory, a copy of them."""
    return {
        "kept.head": m * targets * config.dim,
        "kept.class": m * targets * config.num_classes,
        "kept.slice": m * targets * config.dim if m > 1 and targets < rows else 0.0,
    }


def workspace_terms(m: float, rows: float, targets: float, config: ModelConfig) -> Terms:
    """What a layer needs while it runs, or the gradient of the loss."""
    return {
        "workspace.fixed": 1.0,
        "workspace.element": m * rows * config.dim,
        "workspace.ffn_element": m * rows * config.ffn_dim,
        "workspace.class": m * targets * config.num_classes,
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


def dot(coefficients: Mapping[str, float], terms: Terms) -> float:
    return sum(coefficients.get(name, 0.0) * value for name, value in terms.items())


def check_number(what: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{what} must be a number of at least 0, got {value!r}")
