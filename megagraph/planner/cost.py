"""A fitted cost model: its file, and what a plan will cost by it, seconds of a step and bytes of every rank.

A cost is a sum of terms (multiply-adds of the projections, scores, bytes sent, ...), each times a coefficient that is
fitted to the rows of one device with non-negative least squares. The terms say how a cost grows, the rows how much
(paper Sec. 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache, cached_property
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megagraph import files
from megagraph.models.config import ModelConfig
from megagraph.planner.links import Links, ranks_of
from megagraph.planner.memory import shared_bytes, stage_bytes
from megagraph.planner.plan import Across, Plan
from megagraph.planner.seconds import pipeline_bound, pipeline_least, pipeline_seconds, stage_tables
from megagraph.planner.simulate import Timeline, simulate
from megagraph.planner.split import Floats, StageTables
from megagraph.planner.terms import dot, optimizer_terms, stage_parameters
from megagraph.planner.workload import RankWork, Workload, check_number

SCHEMA = 1


class Replica(NamedTuple):
    """Seconds of a micro-batch on every stage, and when each of these works ends."""

    forward: list[float]
    backward: list[float]
    timeline: Timeline


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Fitted coefficients, where they come from, and how far they were off on rows they had not seen.

    Args:
        seconds: seconds per unit of every term of computing, per direction.
        links: per link class ("node", "across"), seconds per transfer and per byte, and the same of an all-reduce.
        memory: bytes per unit of every term of memory.
        stall_seconds: wait for a batch of ``workload`` from the loader's ``origin["workers"]`` where nothing else is
            done meanwhile.
        slowness: of every rank that was measured, how much longer than ``seconds`` it takes; none: all are alike.
        ranges: least and largest measured value of the sizes that the terms are made of.
        held_out: errors on a random third (seed 0) of the rows, fitted to the rest.
        workload, model: of the profile; what is searched for unless another one is given.

    Examples:
        A file of a checkout, fitted on two processes of a CPU.

        >>> cost = mg.planner.CostModel.load("bench/results/cpu/real_plans/cost.json")
        >>> model, workload = cost.profiled()
        >>> plan = mg.Plan(dp=2)
        >>> cost.step_seconds(model, plan) == sum(cost.explain(model, plan).values())
        True
        >>> len(cost.memory_bytes(model, plan))  # one stage
        1
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
    slowness: tuple[float, ...] = ()
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
            FileNotFoundError: there is no such file.
            ValueError: the file is not as it was written, of another schema, or holds a coefficient that is not a
                number >= 0.
        """
        values = files.parse_json(Path(path), "a cost model", "run megagraph fit again")
        found = values.get("schema") if isinstance(values, dict) else None
        if isinstance(values, list):
            raise ValueError(f"{path} must hold a cost model, got a list, as megagraph profile leaves; fit it first")
        if found != SCHEMA:
            raise ValueError(
                f"{path} must hold a cost model of schema {SCHEMA}, got {found!r}; run megagraph fit again"
            )
        whole = dict(values)
        values.pop("paper", None)  # of files written before
        if values.pop("broken", None):
            raise ValueError(f"{path} has a break in layers, which cost models do without now; run megagraph fit again")
        names = {f.name for f in fields(cls)}
        values.setdefault("slowness", [])  # of files written before
        if values.keys() - {"checksum"} != names:
            raise ValueError(
                f"{path} must hold the fields {sorted(names)}, lacks {sorted(names - set(values))} "
                f"and has unknown {sorted(values.keys() - names - {'checksum'})}"
            )
        values.pop("checksum", None)
        try:
            tables = {**values["seconds"], **{f"links.{k}": v for k, v in values["links"].items()}}
            tables |= {"memory": values["memory"], "stall": {"seconds": values["stall_seconds"]}}
            tables["slowness"] = {str(rank): value for rank, value in enumerate(values["slowness"])}
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
        made = files.typed(cls, values, f"a cost model in {path}")
        for name, low in (("workers", 0), ("ranks_per_node", 1)):
            given = made.origin.get(name, "1")
            if not (given.isdecimal() and len(given) < 10 and int(given) >= low):
                raise ValueError(f"{path}: origin.{name} must be an integer of at least {low}, got {given!r}")
        return made

    # ---- what a plan will cost

    def memory_bytes(self, config: ModelConfig, plan: Plan, workload: Workload | None = None) -> list[float]:
        """Peak bytes of every rank of a pipeline; with one stage a rank, of every stage."""
        work = self.rank_work(config, plan, workload)
        counts = np.array([[len(stage)] for stage in plan.stages(config.layers)], float)
        stages = sum(stage_bytes(self.memory, work, counts).values())
        return (np.reshape(stages, (-1, plan.pp)).sum(axis=0) + shared_bytes(self.memory, work)).tolist()

    def step_seconds(self, config: ModelConfig, plan: Plan, workload: Workload | None = None) -> float:
        """Seconds of one training step."""
        return sum(self.explain(config, plan, workload).values())

    def explain(self, config: ModelConfig, plan: Plan, workload: Workload | None = None) -> dict[str, float]:
        """The terms of a step's seconds, which add up to it."""
        work = self.rank_work(config, plan, workload)
        tables = self.stage_tables(work)
        layers = [len(stage) for stage in plan.stages(config.layers)]
        return self.step_terms(work, layers, tables)

    def extra_layers(self, config: ModelConfig, given: Workload) -> tuple[float, float]:
        """What the embedding and the read-out take beside the layers of their stage, in layers.

        The read-out's may be below 0, as the last layer computes the rows of its targets only.
        """
        tables = self.stage_tables(RankWork.of(config, Plan(pp=2), given))
        first, layer, last = (tables.forward + tables.backward)[:, 1].tolist()
        return first / layer - 1, last / layer - 1

    def extrapolated(self, config: ModelConfig, plan: Plan, workload: Workload | None = None) -> list[str]:
        """Every size of this plan that lies outside the measured ones."""
        work = self.rank_work(config, plan, workload)
        sizes = [
            ("tokens", work.sequences * work.rows),
            ("columns", work.columns),
            ("dim", config.dim),
            ("ffn_dim", config.ffn_dim),
            ("heads", config.heads / (plan.cp if work.by_heads else 1)),
        ]
        if plan.pp > 1:
            sizes.append(("transfer bytes", work.hidden_bytes))
        if plan.cp > 1:
            gradients = work.gradients_of_keys * (work.halo_bytes if plan.comm == "halo" else work.block_bytes)
            sizes.append(("transfer bytes", work.head_bytes if work.by_heads else gradients))
        if plan.cp * plan.dp > 1:
            sizes.append(("all-reduce ranks", plan.cp * plan.dp))
        found = []
        if self.slowness and len(self.slowness) != plan.world_size:
            found.append("ranks of unequal speed were measured, and not these")
        if self._links.spans_nodes(plan.world_size) and not self.links.get("across"):
            found.append("links between nodes were not measured")
        for name, value in sizes:
            if name not in self.ranges:
                found.append(f"{name} was not measured")
                continue
            low, high = self.ranges[name]
            if not low * (1 - 1e-9) <= value <= high * (1 + 1e-9):
                found.append(f"{name} = {value:,.0f} is outside the measured {low:,.0f}..{high:,.0f}")
        return list(dict.fromkeys(found))

    # ---- the same from what a rank holds, which a search computes once

    def workload_of(self, workload: Workload | None) -> Workload:
        """The workload that is given, or the profile's."""
        given = workload or self.workload
        if given is None:
            raise ValueError("the cost model's rows name no workload; pass workload=Workload(batch_sequences=..., ...)")
        return given

    def rank_work(self, config: ModelConfig, plan: Plan, workload: Workload | None = None) -> RankWork:
        """What a rank holds."""
        return RankWork.of(config, plan, self.workload_of(workload))

    def stage_tables(self, work: RankWork, slowness: float = 1.0) -> StageTables:
        """Seconds of one micro-batch on a first, middle and last stage of 0..L layers."""
        seconds = self.seconds
        if slowness != 1.0:
            seconds = {way: {name: slowness * x for name, x in rates.items()} for way, rates in seconds.items()}
        return stage_tables(seconds, self._links, work)

    def step_terms(
        self, work: RankWork, layers: Sequence[int], tables: StageTables, *, on_paper: bool = True
    ) -> dict[str, float]:
        """``explain`` from the seconds of stages; what it gives at least, where the pipeline does not run on paper."""
        plan = work.plan
        passes = []
        for sequences, slowness in self._different_replicas(work):
            largest = sequences == work.batch_sequences
            own = work if largest else work.of_sequences(sequences)
            passes.append(self._passes(own, layers, tables if largest else self.stage_tables(own), slowness, on_paper))
        compute, pipeline = (max(seconds) for seconds in list(zip(*passes, strict=True))[:2])
        ends = np.max([ends for *_, ends in passes], axis=0)
        parameters = stage_parameters(work.config, layers, work.codes).reshape(-1, plan.pp).sum(axis=0)
        calls, per_byte = self._links.all_reduce(plan)
        # begins when a rank has all of its gradients
        reduced = float((ends + calls + per_byte * work.sum_bytes * parameters).max())
        most = float(parameters.max())
        terms = {
            "slowest rank computes": compute,
            "bubble and transfers": pipeline - compute,
            "all-reduce": max(0.0, reduced - pipeline),
            "parameter gathers": self._sharding(work, max(layers), most),
            "optimizer": self._optimizer(work, most),
        }
        return terms | {"loader stall": self._stall(work, sum(terms.values()))}

    def _replicas(self, work: RankWork) -> list[tuple[int, tuple[float, ...]]]:
        """Sequences of every replica, and slowness of each rank of its pipeline."""
        plan = work.plan
        # without shares, who has one sequence less does not matter
        dealt = plan.sequences(work.whole_batch) if plan.shares else plan.dp * [work.batch_sequences]
        return list(zip(dealt, self._slowness(plan), strict=True))

    def _different_replicas(self, work: RankWork) -> set[tuple[int, tuple[float, ...]]]:
        plan = work.plan
        if plan.shares or self.knows_ranks(plan):
            return set(self._replicas(work))
        return {(work.batch_sequences, plan.pp * (1.0,))}  # a search asks this of plans with thousands of replicas

    def _passes(
        self,
        work: RankWork,
        layers: Sequence[int],
        tables: StageTables,
        slowness: tuple[float, ...],
        on_paper: bool = True,
    ) -> tuple[float, float, Floats]:
        """Seconds of a replica: its slowest rank computes, the whole pipeline, and when each rank is done."""
        plan = work.plan
        forward, backward = self._stages(work, layers, tables, slowness)
        if on_paper:
            seconds, ends = pipeline_seconds(plan, forward, backward, **self._ways(work))
        else:
            seconds, ends = pipeline_least(plan, forward, backward, self._links.boundaries(plan, work.hidden_bytes))
        compute = plan.num_microbatches * float((forward + backward).reshape(-1, plan.pp).sum(axis=0).max())
        return compute, seconds, ends

    def _stages(
        self, work: RankWork, layers: Sequence[int], tables: StageTables, slowness: tuple[float, ...]
    ) -> tuple[Floats, Floats]:
        """Seconds of a micro-batch forward and backward on every stage of a replica."""
        forward, backward = tables.stages(layers)
        of_stages = np.tile(slowness, work.plan.stages_per_rank)
        for factor in set(slowness) - {1.0}:
            slower = self.stage_tables(work, factor).stages(layers)
            forward, backward = (
                np.where(of_stages == factor, own, usual)
                for own, usual in zip(slower, (forward, backward), strict=True)
            )
        return forward, backward

    def _ways(self, work: RankWork) -> dict[str, Any]:
        """What messages of a pipeline take, as of :func:`simulate`."""
        wires = self._links.boundaries(work.plan, work.hidden_bytes)
        return {"wires": wires, "behind_data": self._gloo, "pipelines": self._links.groups(work.plan)}

    def replicas_on_paper(self, config: ModelConfig, plan: Plan, workload: Workload | None = None) -> list[Replica]:
        """What every dp replica does in a step."""
        whole = self.rank_work(config, plan, workload)
        layers = [len(stage) for stage in plan.stages(config.layers)]
        replicas = []
        for sequences, slowness in self._replicas(whole):
            work = whole if sequences == whole.batch_sequences else whole.of_sequences(sequences)
            seconds = self._stages(work, layers, self.stage_tables(work), slowness)
            forward, backward = (way.tolist() for way in seconds)
            replicas.append(Replica(forward, backward, simulate(plan, forward, backward, **self._ways(work))))
        return replicas

    def best_shares(self, work: RankWork, layers: Sequence[int], most: int) -> tuple[int, ...]:
        """Sequences of every replica that make the slowest as fast as can be, at least one and at most ``most`` in a
        micro-batch; so many must be room for all.

        One more in each micro-batch goes to who is done first with it: exact, as more never take less time.
        """
        num, replicas = work.plan.num_microbatches, self._slowness(work.plan)
        seconds: dict[tuple[int, tuple[float, ...]], float] = {}

        def ends(which: int, sequences: int) -> float:
            key = sequences, replicas[which]
            if key not in seconds:
                own = work.of_sequences(num * sequences)
                seconds[key] = self._passes(own, layers, self.stage_tables(own), replicas[which])[1]
            return seconds[key]

        counts = [1] * len(replicas)  # of a micro-batch
        next_ends = [(ends(which, 2), which) for which in range(len(replicas)) if most > 1]
        heapify(next_ends)
        for _ in range(-(-work.whole_batch // num) - len(replicas)):
            which = heappop(next_ends)[1]
            counts[which] += 1
            if counts[which] < most:
                heappush(next_ends, (ends(which, counts[which] + 1), which))
        shares = [num * count for count in counts]
        full = [which for which, count in enumerate(counts) if count > 1]
        if full:  # where a batch is no multiple of its micro-batches the slowest has what there is
            shares[max(full, key=lambda which: ends(which, counts[which]))] -= sum(shares) - work.whole_batch
        return tuple(shares)

    def unequal(self, plan: Plan) -> bool:
        """Whether the replicas of a plan were measured to be of unequal speed."""
        return plan.dp > 1 and self.knows_ranks(plan) and len(set(self._slowness(plan))) > 1

    def step_bound(self, work: RankWork, tables: StageTables, layers: Sequence[int] = ()) -> float:
        """Seconds of a step at least, however the layers are split; closer under GPipe with its split of least time."""
        return self.bound_with(work, self.passes_bound(work, tables, layers))

    def passes_bound(self, work: RankWork, tables: StageTables, layers: Sequence[int] = ()) -> float:
        """Seconds of the passes and the sum of gradients at least, whether or not parameters are sharded."""
        plan = work.plan
        fastest = min(self.slowness) if self.knows_ranks(plan) else 1.0
        tables = tables if fastest == 1.0 else self.stage_tables(work, fastest)
        wires = self._links.boundaries(plan, work.hidden_bytes)
        first, whole = _parameters(work.config, work.codes)
        calls, per_byte = self._links.all_reduce(plan)
        # the last micro-batch comes back to the first stage, which has a layer at least
        reduced = calls + per_byte * work.sum_bytes * (first if plan.pp > 1 else whole)
        return pipeline_bound(plan, tables, work.config.layers, wires, layers) + reduced

    def bound_with(self, work: RankWork, passes: float) -> float:
        """Seconds of a step at least, where those of :meth:`passes_bound` are known."""
        most = _parameters(work.config, work.codes)[1] / work.plan.pp
        sharding = self._sharding(work, math.ceil(work.config.layers / work.plan.num_stages), most)
        seconds = passes + sharding + self._optimizer(work, most)
        return seconds + self._stall(work, seconds)

    def mappings(self, world_size: int) -> tuple[Across, ...]:
        """Ways to lay a plan of so many ranks out that may differ: over nodes, and over ranks of unequal speed."""
        return ("pp", "dp") if self._links.spans_nodes(world_size) or len(self.slowness) == world_size else ("pp",)

    def knows_ranks(self, plan: Plan) -> bool:
        """Whether each rank of a plan was measured, as they differ."""
        return len(self.slowness) == plan.world_size

    def _slowness(self, plan: Plan) -> list[tuple[float, ...]]:
        """Slowness of each rank of every replica's pipeline: that of the slowest of its ring."""
        if not self.knows_ranks(plan):
            return plan.dp * [plan.pp * (1.0,)]
        slowest = np.asarray(self.slowness)[ranks_of(plan)].max(axis=2)
        return list(map(tuple, slowest.T.tolist()))

    @property
    def _gloo(self) -> bool:
        return self.origin.get("device_type", "cpu") == "cpu"

    def _sharding(self, work: RankWork, layers: int, parameters: float) -> float:
        """What sharding sends beside an all-reduce, of the rank that has the most."""
        plan = work.plan
        if not plan.shard:
            return 0.0
        calls, per_byte = self._links.all_reduce(plan)
        # every layer gathers its parameters, without a pipeline for every micro-batch, and again backward; each is half
        # of an all-reduce, and so is the sum of gradients over NCCL, where gloo sums them for all ranks
        gathers, times = (2, plan.num_microbatches) if plan.pp == 1 else (1, 1)
        halves = times * (gathers + (2 if self._gloo else 1)) - 2
        units = layers * plan.stages_per_rank + 1
        return halves / 2 * (per_byte * work.sum_bytes * parameters + units * calls)

    def _optimizer(self, work: RankWork, parameters: float) -> float:
        updated = parameters / (work.plan.cp * work.plan.dp if work.plan.shard else 1)
        return dot(self.seconds.get("forward", {}), optimizer_terms(updated))

    def _stall(self, work: RankWork, others: float) -> float:
        """What a step waits for the loader of a replica, which builds its sequences, ahead if it has workers."""
        measured = work.whole_batch if self.workload is None else self.workload.batch_sequences
        building = self.stall_seconds * work.batch_sequences / measured
        return max(0.0, building - others) if int(self.origin.get("workers", 0)) else building

    @cached_property
    def _links(self) -> Links:
        per_node = self.origin.get("ranks_per_node")
        own = self.origin.get("links_of") == "device"
        return Links(self.links, None if per_node is None else int(per_node), own)


@cache
def _parameters(config: ModelConfig, codes: int) -> tuple[float, float]:
    """Parameters of a first stage of one layer, and of all stages."""
    first, rest = stage_parameters(config, [1.0, config.layers - 1.0], codes).tolist()
    return first, first + rest
