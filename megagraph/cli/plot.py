"""``megagraph plot`` and ``report``: figures and a page from the files of a run, or of the planner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from megagraph.cli.job import Changes, Job
from megagraph.cli.planner import Wanted, read_rows, run_search
from megagraph.planner.plan import Plan

if TYPE_CHECKING:
    from megagraph.models.config import ModelConfig
    from megagraph.planner.cost import CostModel
    from megagraph.planner.workload import Workload
    from megagraph.run import Run


def report(runs: tyro.conf.Positional[tuple[Path, ...]], /, *, out: Path = Path("report.html")) -> Job:
    """Write a page about a run, or about several beside each other: one HTML file that needs nothing else.

    Args:
        runs: run folders of ``megagraph train``, also of runs under way.
        out: file to write.
    """

    def job() -> None:
        from megagraph.report import report

        report(runs, out)
        print(out)

    return Job(job)


def _image(path: Path) -> Path:
    """The file of a figure, of a kind that matplotlib knows; to others it adds one, and writes over what is there."""
    from matplotlib.backend_bases import FigureCanvasBase

    if path.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        raise ValueError(f"out must end in .png, .svg, .pdf or another kind that matplotlib writes, got {path}")
    if path.is_dir():
        raise FileExistsError(f"expected a file, or nothing, at {path} to write it, got a folder; name another")
    return path


def plot_timeline(run: tyro.conf.Positional[Path], /, *, cost: Path | None = None, out: Path | None = None) -> Job:
    """Draw what every rank did in the steps that --trace recorded, and say how long its stages waited.

    Args:
        run: run folder of ``megagraph train --trace``.
        cost: file of ``megagraph fit``, of a profile with the run's flags; its prediction is drawn below.
        out: image to write; default RUN/timeline.png.
    """

    def job() -> None:
        from megagraph import plots, timeline
        from megagraph.planner import on_paper
        from megagraph.planner.cost import CostModel
        from megagraph.run import Run

        path = _image(run / "timeline.png" if out is None else out)
        opened = Run.of(run)
        opened.check_output(path)
        plan, spans = opened.config.parallel_plan(), timeline.read(run / "trace", opened.id)
        if (ranks := sorted({span.rank for span in spans})) != [*range(plan.world_size)]:
            raise ValueError(
                f"expected traces of the ranks 0..{plan.world_size - 1} in {run / 'trace'}, got {ranks}; trace the run "
                "again"
            )
        predicted = None
        if cost is not None:
            fitted = CostModel.load(cost)
            model, workload = _workload_of(opened, fitted, cost)
            predicted = on_paper.spans(fitted, model, plan, workload)
        plots.timeline(spans, path, predicted)
        print(path)
        if predicted is not None:
            print(
                f"a step of {workload.batch_sequences} sequences: {timeline.step_seconds(spans):.4g} s, "
                f"predicted {timeline.step_seconds(predicted):.4g} s"
            )
        if plan.pp > 1:
            measured, theory = timeline.measured_bubble(spans), timeline.bubble_in_theory(plan)
            said = "" if predicted is None else f", predicted {timeline.measured_bubble(predicted):.1%}"
            print(
                f"bubble of {plan.schedule}, {plan.pp} ranks x {plan.stages_per_rank} stages, "
                f"{plan.num_microbatches} micro-batches: measured {measured:.1%}{said}, in theory {theory:.1%}"
            )

    return Job(job)


def _workload_of(run: Run, fitted: CostModel, path: Path) -> tuple[ModelConfig, Workload]:
    """The profile's model and workload, with as many sequences as a step of the run; ValueError unless the run's."""
    from megagraph.history import graph_of

    config, facts = run.config, graph_of(run)
    model, workload = fitted.profiled()
    sizes = ("layers", "dim", "ffn_dim", "heads")
    own = {name: getattr(config, name) for name in (*sizes, "model", "dtype")}
    own["full batches"] = config.batching == "full"
    if config.partitions == 1:  # nobody has noted how large a part of a graph is
        most = {"ego": 1 + config.sample_nodes, "cluster": config.sequence_nodes}
        nodes = {batching: min(number, max(2, facts.nodes)) for batching, number in most.items()}
        own["nodes of a sequence"] = nodes.get(config.batching, facts.nodes)
    profiled = {name: getattr(model, name) for name in sizes} | {"model": workload.model, "dtype": workload.dtype}
    profiled |= {"full batches": workload.pairs > 0, "nodes of a sequence": workload.num_nodes}
    for name, value in own.items():
        if profiled[name] != value:
            raise ValueError(
                f"{path} was fitted for {name} = {profiled[name]}, and {run.folder} has {value}; profile it anew"
            )
    return model, replace(workload, batch_sequences=config.batch_sequences)


def plot_curves(runs: tyro.conf.Positional[tuple[Path, ...]], /, *, out: Path | None = None) -> Job:
    """Draw loss, validation and test scores and learning rate of a run, or of several in one figure.

    Args:
        runs: run folders of ``megagraph train``, also of runs under way.
        out: image to write; default RUN/curves.png, of several runs curves.png.
    """

    def job() -> None:
        from megagraph import plots
        from megagraph.history import History, names_of
        from megagraph.run import Run

        if not runs:
            raise ValueError("expected the folder of a run, or several, got none")
        path = _image(out or (runs[0] / "curves.png" if len(runs) == 1 else Path("curves.png")))
        opened = [Run.of(run) for run in runs]
        for run in opened:
            run.check_output(path, own="curves.png")
        plots.curves([History.of(run, name) for run, name in zip(opened, names_of(runs), strict=True)], path)
        print(path)

    return Job(job)


def plot_bias(run: tyro.conf.Positional[Path], /, *, out: Path | None = None) -> Job:
    """Draw the learned part of the attention bias by distance or channel, layer and head, beside where it started.

    Args:
        run: run folder of ``megagraph train``.
        out: image to write; default RUN/bias.png.
    """

    def job() -> None:
        from megagraph import plots
        from megagraph.run import Run

        opened = Run.open(run)
        path = _image(run / "bias.png" if out is None else out)
        opened.check_output(path)
        plots.bias_of(opened, path)
        print(path)

    return Job(job)


def plot_attention(
    run: tyro.conf.Positional[Path],
    /,
    *,
    out: Path | None = None,
    changes: tyro.conf.OmitArgPrefixes[Changes] = Changes(),
) -> Job:
    """Draw where the attention of a run goes: the share of each distance, by layer and head.

    Args:
        run: run folder of ``megagraph train``.
        out: image to write; default RUN/attention.png.
    """

    def job() -> None:
        from megagraph import plots
        from megagraph.focus import attention_focus
        from megagraph.run import Run

        path = _image(run / "attention.png" if out is None else out)
        Run.open(run).check_output(path)
        focus = attention_focus(run, **changes.given())
        plots.attention(focus.shares, focus.kinds, path)
        print(path)

    return Job(job)


def plot_costmodel(
    cost: tyro.conf.Positional[Path], /, *, rows: tuple[Path, ...], out: Path = Path("costmodel.png")
) -> Job:
    """Draw predicted against measured time and memory, fitted and held-out rows apart.

    Args:
        cost: file of ``megagraph fit``.
        rows: the files that were fitted.
        out: image to write.
    """

    def job() -> None:
        from megagraph.planner import plots
        from megagraph.planner.cost import CostModel
        from megagraph.planner.fitting import ranges_of
        from megagraph.planner.rows import check_rows

        _image(out)
        fitted = CostModel.load(cost)
        found = check_rows(read_rows(rows, *(fitted.origin.get(name) for name in ("impl", "dtype"))))
        for part, own, other in (
            ("device", fitted.origin.get("device"), found[0].get("device")),
            ("sizes", fitted.ranges, ranges_of(found)),
        ):
            if own != other:
                raise ValueError(
                    f"rows must be those that {cost} was fitted to, with the {part} {own}, got {other}; name their "
                    "files, or fit these anew"
                )
        plots.costmodel(fitted, found, out)
        print(out)

    return Job(job)


def plot_pareto(
    cost: tyro.conf.Positional[Path],
    /,
    *,
    world_size: int | None = None,
    memory_gib: float | None = None,
    out: Path = Path("pareto.png"),
) -> Job:
    """Draw step time and memory of all plans of a search.

    Args:
        cost: file of ``megagraph fit``, or a cluster.json that names some.
        world_size: processes; of a cluster all its devices, or its first ones.
        memory_gib: what a process may use; of a cluster as it says.
        out: image to write.
    """

    def job() -> None:
        from megagraph.planner import plots

        _image(out)
        _, _, result = run_search(cost, Wanted(world_size=world_size, memory_gib=memory_gib))
        plots.pareto(result, out)
        print(out)

    return Job(job)


def plot_scaling(
    cluster: tyro.conf.Positional[Path], /, *, world_sizes: tuple[int, ...] = (), out: Path = Path("scaling.png")
) -> Job:
    """Draw what the best plan for more and more devices of a cluster makes of them, and say what binds it.

    Args:
        cluster: a cluster.json, as ``megagraph profile`` leaves it.
        world_sizes: devices; default one node, and twice as many each time.
        out: image to write.
    """

    def job() -> None:
        from megagraph.planner import plots
        from megagraph.planner.cluster import Cluster
        from megagraph.planner.scaling import default_sizes, scaling

        _image(out)
        given = Cluster.load(cluster)
        points, first = [], dict[str, float]()
        for point in scaling(given, world_sizes or default_sizes(given)):
            points.append(point)
            each = point.throughput / point.world_size
            efficiency = each / first.setdefault(point.kind, each) if each else 0.0
            said = point.best
            if not isinstance(said, str):
                name, part = point.binds
                said = f"{said.step_seconds:.4g} s, {efficiency:.0%} of ideal, {name} {part:.0%}; {said.plan}"
            print(f"{point.kind:>6} {point.world_size:>6,} devices, {point.sequences:,} sequences: {said}", flush=True)
        plots.scaling(points, out)
        print(out)

    return Job(job)


def plot_stages(
    cost: tyro.conf.Positional[Path], plan: tyro.conf.Positional[Path], /, *, out: Path = Path("stages.png")
) -> Job:
    """Draw the memory of every stage of a plan.

    Args:
        cost: file of ``megagraph fit``.
        plan: file of ``megagraph search --out``, or plan.json of a run.
        out: image to write.
    """

    def job() -> None:
        from megagraph.planner import plots
        from megagraph.planner.cost import CostModel

        _image(out)
        fitted = CostModel.load(cost)
        model, workload = fitted.profiled()
        given, batch = Plan.load(plan), workload.batch_sequences
        given.check(world_size=given.world_size, num_layers=model.layers, heads=model.heads, batch_sequences=batch)
        plots.stages(fitted, model, given, workload, out)
        print(out)

    return Job(job)


def plot(
    job: tyro.conf.OmitSubcommandPrefixes[
        tyro.conf.OmitArgPrefixes[
            Annotated[Any, tyro.conf.subcommand("timeline", constructor=plot_timeline)]
            | Annotated[Any, tyro.conf.subcommand("curves", constructor=plot_curves)]
            | Annotated[Any, tyro.conf.subcommand("bias", constructor=plot_bias)]
            | Annotated[Any, tyro.conf.subcommand("attention", constructor=plot_attention)]
            | Annotated[Any, tyro.conf.subcommand("costmodel", constructor=plot_costmodel)]
            | Annotated[Any, tyro.conf.subcommand("pareto", constructor=plot_pareto)]
            | Annotated[Any, tyro.conf.subcommand("scaling", constructor=plot_scaling)]
            | Annotated[Any, tyro.conf.subcommand("stages", constructor=plot_stages)]
        ]
    ],
) -> Job:
    """Figures of runs and of the planner, from their files; of attention from its graph, too."""
    return job
