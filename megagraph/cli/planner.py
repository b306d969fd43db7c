"""``megagraph profile``, ``fit`` and ``search``: from measurements of a machine to a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import filterfalse
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from megagraph import flags
from megagraph.cli.job import Job
from megagraph.config import TrainConfig
from megagraph.planner.plan import ScheduleName
from megagraph.planner.workload import Precision, Workload

if TYPE_CHECKING:
    from megagraph.planner.cost import CostModel
    from megagraph.planner.searching import Candidate, SearchResult

_MAX_SECONDS = 86400  # a day


def profile(
    config: TrainConfig,
    rows: Path = Path("profile.json"),
    cluster: Path = Path("cluster.json"),
    seconds: float = 60.0,
    cache: bool = True,
) -> Job:
    """Measure this machine for a model and a data set; under torchrun the links between processes, too.

    Args:
        rows: file to write, a JSON list.
        cluster: another one, which names what this runs on, for cost.json of ``megagraph fit`` beside it; one that is
            there stays as it is.
        seconds: about how long it may take.
        cache: read and keep profiles in ~/.cache/megagraph, by device, versions, model and workload.
    """

    if not 0 < seconds <= _MAX_SECONDS:
        raise ValueError(f"seconds must be above 0 and at most {_MAX_SECONDS}, got {seconds}")

    def job() -> None:
        from megagraph.auto import CACHE, measure, memory_bytes
        from megagraph.evaluate import same_batches, same_graph
        from megagraph.parallel.mesh import check_same_run, own_device, rank, world_size
        from megagraph.planner.cluster import Cluster, Nodes
        from megagraph.planner.rows import save_rows

        check_same_run(config)
        device = own_device(config)
        graph, split = same_graph(None, config)
        builder = same_batches(config, graph)
        measured = measure(config, graph, builder, split.train, device, seconds=seconds, cache=CACHE if cache else None)
        memory = memory_bytes(device)
        if rank() == 0:
            save_rows(rows, measured)
            print(f"{rows}: {len(measured)} rows of {measured[0]['device']}")
            if not cluster.exists():
                devices = int(measured[0]["ranks_per_node"])
                count = max(1, world_size() // devices)
                here = Nodes(count=count, devices=devices, cost=Path("cost.json"), memory_gib=memory / 2**30)
                Cluster(nodes=(here,)).save(cluster)
                print(f"{cluster}: {count} x {devices} of it, {memory / 2**30:.3g} GiB each")
            links = any(row["kind"] == "transfer" for row in measured)
            if not links:
                print("communication was not measured: this is one process; start it with torchrun to measure links")

    return Job(job, config.timeout, several=True)


def fit(
    rows: tyro.conf.Positional[tuple[Path, ...]],
    /,
    out: Path = Path("cost.json"),
    impl: str | None = None,
    dtype: Precision | None = None,
) -> Job:
    """Fit a cost model to rows of one device and say how far off it is on rows that were held out.

    Args:
        rows: files of ``megagraph profile`` and of the benches, JSON lists.
        out: file to write.
        impl, dtype: of the rows to fit, where files have rows of several.
    """

    def job() -> None:
        from megagraph.planner.fitting import fit as fit_rows

        _check_other(out, rows)
        cost = fit_rows(read_rows(rows, impl, dtype))
        cost.save(out)
        print(f"{out}: {describe(cost)}")

    return Job(job)


def _check_other(out: Path, read: tuple[Path, ...]) -> None:
    """Raise ValueError where a result would take the place of what it is made from."""
    if out.exists() and any(path.exists() and path.samefile(out) for path in read):
        raise ValueError(f"out must be another file than those that are read, got {out}")


def read_rows(paths: tuple[Path, ...], impl: str | None = None, dtype: str | None = None) -> list[dict[str, Any]]:
    """The rows of several files, or those of an implementation and a dtype; of those of a bench of attention the ones
    of the profile's.

    Raises:
        ValueError: a file is neither a JSON list nor pytest-benchmark's JSON, or a row is not as it was written.
    """
    from megagraph.planner.rows import bench_rows, load_rows

    rows: list[dict[str, Any]] = []
    for path in paths:
        rows += bench_rows(load_rows(path))

    def is_benched(row: Any) -> bool:
        return isinstance(row, dict) and row.get("kind") == "attention"

    asked = impl, dtype
    rows = [
        row
        for row in rows
        if not isinstance(row, dict)
        or all(given in (None, found) for given, found in zip(asked, _kind_of(row), strict=True))
    ]
    benched, others = filter(is_benched, rows), list(filterfalse(is_benched, rows))
    wanted = next((_kind_of(row) for row in others if isinstance(row, dict)), None)
    return others + [row for row in benched if not others or _kind_of(row) == wanted]


def _kind_of(row: dict[str, Any]) -> tuple[Any, Any]:
    return row.get("impl"), row.get("dtype", "fp32")


def describe(cost: CostModel) -> str:
    """How good the model is, in a few lines."""
    held = cost.held_out
    lines = [f"cost model of {cost.origin.get('device', 'an unnamed device')}"]
    if "time_mape" in held:
        lines.append(f"held out: time MAPE {held['time_mape']:.1%}, R^2 of log time {held['time_r2_log']:.3f}")
    if "memory_mape" in held:
        lines.append(f"held out: memory MAPE {held['memory_mape']:.2%}, R^2 {held['memory_r2']:.4f}")
    if not any(name.startswith("layer.") for rates in cost.seconds.values() for name in rates):
        lines.append("no layer was timed, and its projections are taken to be free")
    elif cost.model is not None and cost.workload is not None:
        first, last = cost.extra_layers(*cost.profiled())
        lines.append(f"the first stage does the work of {first:.2f} layers more, the last one of {last:+.2f}")
    if not cost.links:
        lines.append("communication was not measured, and is taken to be free")
    return "\n  ".join(lines)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a search is asked for, and where its answer goes.

    Args:
        world_size: processes; of a cluster all its devices, or its first ones.
        memory_gib: what a process may use; of a cluster as it says.
        pp, cp, dp, microbatches, schedule: fix a part of the plan.
        batch_sequences, layers: another batch or depth than the profile's.
        strict: refuse plans that need sizes outside the measured ones.
        explain: pp,cp,dp: print every term of the best plan with these degrees.
        out: plan file to write.
    """

    world_size: int | None = None
    memory_gib: float | None = None
    pp: int | None = None
    cp: int | None = None
    dp: int | None = None
    microbatches: int | None = None
    schedule: ScheduleName | None = None
    batch_sequences: int | None = None
    layers: int | None = None
    strict: bool = False
    explain: str | None = None
    out: Path | None = None


def search(cost: tyro.conf.Positional[Path], /, wanted: Annotated[Wanted, tyro.conf.arg(name="")]) -> Job:
    """Find the plan of least step time for a number of processes, from a cost model alone.

    Args:
        cost: file of ``megagraph fit``, or a cluster.json that names some.
    """

    def job() -> None:
        if wanted.out is not None:
            _check_other(wanted.out, (cost,))
        model, workload, result = run_search(cost, wanted)
        print(table(result))
        if wanted.explain is not None:
            print(explanation(cost, wanted, model, workload, result))
        if wanted.out is not None:
            result.best.plan.save(wanted.out)
            print(f"{wanted.out}: {result.best.plan}")

    return Job(job)


def run_search(path: Path, wanted: Wanted) -> tuple[CostModel, Workload, SearchResult]:
    """A search for the model and workload of the profile, or of another batch or depth.

    Raises:
        ValueError: a cost model does not say how many processes there are, or what they may use.
    """
    from megagraph.planner.cluster import Cluster, is_cluster
    from megagraph.planner.cost import CostModel
    from megagraph.planner.searching import search as search_plans

    if wanted.memory_gib is not None and not wanted.memory_gib > 0:
        raise ValueError(f"memory_gib must be above 0, got {wanted.memory_gib}")
    limits: float | list[float]
    if is_cluster(path):
        cluster = Cluster.load(path)
        world_size = cluster.world_size if wanted.world_size is None else wanted.world_size
        cost, limits = cluster.cost_model(world_size), cluster.memory_bytes(world_size)
        if wanted.memory_gib is not None:
            limits = wanted.memory_gib * 2**30
    elif wanted.world_size is None or wanted.memory_gib is None:
        raise ValueError(f"world_size and memory_gib must be given with a cost model, which is of one device: {path}")
    else:
        cost, world_size, limits = CostModel.load(path), wanted.world_size, wanted.memory_gib * 2**30
    if wanted.explain is not None:
        _check_explained(wanted, world_size)
    model, workload = cost.profiled()
    if wanted.batch_sequences is not None:
        if workload.pairs and wanted.batch_sequences > 1:
            raise ValueError(
                f"batch_sequences must be 1 for a profile of full batches, whose batch is the graph, got "
                f"{wanted.batch_sequences}"
            )
        workload = replace(workload, batch_sequences=wanted.batch_sequences)
    if wanted.layers is not None:
        model = replace(model, layers=wanted.layers)
    asked = {name: getattr(wanted, name) for name in ("pp", "cp", "dp", "schedule")}
    asked["num_microbatches"] = wanted.microbatches
    fixed = {name: value for name, value in asked.items() if value is not None}
    result = search_plans(cost, model, world_size, limits, workload=workload, fixed=fixed, strict=wanted.strict)
    return replace(cost, model=model), workload, result


def _check_explained(wanted: Wanted, world_size: int) -> None:
    """Raise ValueError for degrees that no plan of the search has."""
    assert wanted.explain is not None
    degrees = flags.integers("explain", wanted.explain, "pp,cp,dp, three numbers", 3)
    if math.prod(degrees) != world_size:
        raise ValueError(
            f"explain must name pp,cp,dp whose product is {world_size}, the processes, got {wanted.explain}"
        )
    for name, degree in zip(("pp", "cp", "dp"), degrees, strict=True):
        if (fixed := getattr(wanted, name)) not in (None, degree):
            raise ValueError(f"explain must have {name} = {fixed}, as --{name} says, got {wanted.explain}")


def table(result: SearchResult) -> str:
    """The ten fastest plans, the first ten of the front, and why others were not looked at."""
    lines = [f"{'':>10} {'step':>11} {'memory':>10}  plan"]
    possible = [c for c in result.candidates if c.pruned is None]
    for name, candidates in (("best", possible[:10]), ("front", result.pareto[:10])):
        lines += [_line(name if index == 0 else "", candidate) for index, candidate in enumerate(candidates)]
    reasons = sorted({c.pruned for c in result.candidates if c.pruned})
    counts = ", ".join(f"{reason} {sum(c.pruned == reason for c in result.candidates)}" for reason in reasons)
    lines.append(f"{len(result.candidates)} candidates; pruned: {counts or 'none'}")
    lines += [f"extrapolated: {what}" for what in result.best.extrapolated]
    return "\n".join(lines)


def _line(name: str, candidate: Candidate) -> str:
    seconds = f"{candidate.step_seconds:.4g}" if candidate.exact else f">= {candidate.step_seconds:.4g}"
    return f"{name:>10} {seconds:>9} s {flags.in_words(candidate.peak_bytes):>10}  {candidate.plan}"


def explanation(path: Path, wanted: Wanted, cost: CostModel, workload: Workload, result: SearchResult) -> str:
    """Every term of the best plan with the degrees to explain; of the search for ``wanted`` the rest is given."""
    pp, cp, dp = flags.integers("explain", str(wanted.explain), "pp,cp,dp, three numbers", 3)
    candidate = next((c for c in result.candidates if (c.plan.pp, c.plan.cp, c.plan.dp) == (pp, cp, dp)), None)
    if candidate is None:
        raise ValueError(f"no plan with pp,cp,dp = {wanted.explain} was looked at; fix less of the plan")
    if candidate.pruned is None:  # candidates are in the order of what may be bounds: another may be the best
        candidate = run_search(path, replace(wanted, pp=pp, cp=cp, dp=dp))[2].best
    plan, model = candidate.plan, cost.model
    assert model is not None
    lines = [str(plan)]
    if candidate.pruned is not None and not plan.layers:
        return f"{lines[0]}\n  pruned: {candidate.pruned}"
    terms = cost.explain(model, plan, workload)
    lines += [f"  {name:<24} {value:>10.4g} s" for name, value in terms.items()]
    lines += [f"  rank {i}: {flags.in_words(size)}" for i, size in enumerate(cost.memory_bytes(model, plan, workload))]
    lines += [f"  pruned: {candidate.pruned}"] if candidate.pruned else []
    lines += [f"  extrapolated: {what}" for what in cost.extrapolated(model, plan, workload)]
    return "\n".join(lines)
