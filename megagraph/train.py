"""Training: the same numbers in one process and in many."""

from __future__ import annotations

import re
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megagraph import auto, files, plots
from megagraph.ablation import bias_effect
from megagraph.board import TensorBoard, WandB
from megagraph.config import AUTO, TrainConfig
from megagraph.data.ego import EgoBatches
from megagraph.data.structure import BiasChannels
from megagraph.epochs import Epochs
from megagraph.evaluate import (
    graph_facts,
    make_model,
    model_config_of,
    num_parameters,
    same_batches,
    same_graph,
    unread,
)
from megagraph.flags import in_words
from megagraph.history import History
from megagraph.models.config import ModelConfig
from megagraph.models.transformer import GraphTransformer
from megagraph.objective import of_the_majority
from megagraph.parallel.failure import current_phase, is_out_of_memory, phase
from megagraph.parallel.mesh import (
    all_gather,
    check_equal,
    check_same_run,
    checksums,
    found_everywhere,
    make_mesh,
    on_every_rank,
    on_one_process_first,
    on_rank_zero,
    own_device,
    process_group,
    rank,
    world_size,
)
from megagraph.parallel.pipeline import Pipeline
from megagraph.parallel.stop import Stop
from megagraph.planner.plan import Plan
from megagraph.progress import log
from megagraph.provenance import start_of_run
from megagraph.run import Run, State, is_restart, launch, restarted
from megagraph.timeline import bubble_in_theory
from megagraph.train_step import make_pipeline
from megagraph.weights import fill, read_weights


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of a run; what is said of validation and test nodes is that of the best validation epoch.

    Accuracies are of one class a node, F1 and average precision of several labels.

    Attributes:
        majority_accuracy: of always answering the largest class of the training nodes, on the test nodes.
        skipped_steps: those whose loss or gradient was not finite.
        epoch_seconds: median, training only.
        evaluation_seconds: median per epoch.
        sequence_nodes: N.
        peak_memory_bytes: of the device, of the process on a CPU; the largest of all processes.
        measured_step_seconds: median.
        bias_changed_classes: part of the validation and test nodes, by the last weights: see ``ablation.BiasEffect``.
        test_roc_auc: of two classes, or the mean over labels; so best_val_roc_auc.
        majority_micro_f1: of always giving the labels that half of the training nodes have.
        predicted_step_seconds: by ``--plan auto``.
        predicted_memory_bytes: without the program itself, which a CPU's peak contains.
        sampling_mass: part of PageRank on others that a target of ego batches samples from.
        power_scope: of the adjacency powers of a projected bias.
    """

    run: str
    test_accuracy: float | None = None
    best_val_accuracy: float | None = None
    best_epoch: int
    majority_accuracy: float | None = None
    epochs: int
    steps: int
    skipped_steps: int
    epoch_seconds: float
    evaluation_seconds: float
    preprocess_seconds: float
    sequence_nodes: int
    parameters: int
    peak_memory_bytes: int
    device: str
    measured_step_seconds: float
    bias_changed_classes: float | None = None
    bias_correlation: float | None = None
    bias_norm: float | None = None
    bias_start_norm: float | None = None
    test_roc_auc: float | None = None
    best_val_roc_auc: float | None = None
    test_micro_f1: float | None = None
    best_val_micro_f1: float | None = None
    majority_micro_f1: float | None = None
    test_macro_f1: float | None = None
    best_val_macro_f1: float | None = None
    test_average_precision: float | None = None
    best_val_average_precision: float | None = None
    predicted_step_seconds: float | None = None
    predicted_memory_bytes: int | None = None
    sampling_mass: float | None = None
    power_scope: str | None = None


class Trainer:
    """Train a model on one graph.

    Args:
        config: what, how and for how long.

    Examples:
        >>> small = {"layers": 1, "dim": 16, "heads": 2, "batching": "cluster", "sequence_nodes": 128}
        >>> summary = mg.Trainer(mg.TrainConfig(max_steps=2, out="runs/new", **small)).fit()  # a generated graph
        >>> summary.steps, summary.run
        (2, 'runs/new')
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self._predicted_bytes: float | None = None  # by --plan auto

    @classmethod
    def resume(cls, run: Path | str, **changes: Any) -> Trainer:
        """Go on with a run that was stopped, from its newest checkpoint.

        Args:
            run: its folder.
            changes: fields of the configuration that the numbers do not depend on, or more ``epochs`` or ``max_steps``.
                Another ``plan`` takes none of the other fields of the layout from the run.

        Raises:
            FileNotFoundError: ``run`` is not the folder of a run.
            ValueError: its configuration is damaged; ``fit`` refuses changes that the numbers depend on.
        """
        return cls(replace(Run.to_resume(run, new_plan="plan" in changes), **changes))

    def fit(self, data: Any = None) -> Summary:
        """Train, evaluate every epoch, and leave a run folder.

        Started by torchrun, the processes share the work as ``config.plan`` says; all of them return the summary, and
        rank 0 writes the folder. A run that is to be resumed and has finished already returns the summary that it has.

        Args:
            data: a ``Graph`` or ``torch_geometric.data.Data``; ``None`` loads ``config.dataset``.

        Returns:
            the summary, which is also in the run folder, as summary.json.

        Raises:
            ValueError: bad data, configuration or plan, on every process alike; nothing has been trained by then.
            FileExistsError, TimeoutError, OSError: the run folder is taken, in use, or cannot be written.
            FloatingPointError: the loss, gradients or weights are not finite.
            MemoryError: a process has run out of memory.
            Stopped: a signal came, or the time limit; a checkpoint has been written.
        """
        config = self.config
        with process_group(config.timeout), Stop(config.limit_seconds) as stop:
            check_same_run(config)
            launches, restarts = zip(*all_gather((launch(), is_restart())), strict=True)
            if any(restarts) and (again := on_rank_zero(lambda: restarted(config, launches))) is not None:
                config = replace(config, resume=AUTO, out=again)
            plan: Plan | None
            if config.plan != "auto":
                plan = config.parallel_plan()
            elif (plan := on_rank_zero(partial(_known_plan, config))) is not None:
                config = config.with_plan(plan)
            if plan is not None:
                plan.check(**config.sizes_of_plan, world_size=world_size())
            for board in (TensorBoard, WandB):
                if getattr(config, board.package):
                    on_rank_zero(board.check)
            device = own_device(config)
            run, state = _enter(config, launches)
            if state == "finished":
                return on_rank_zero(lambda: files.typed(Summary, run.summary, "the result of a run"))
            if config.tensorboard:
                run.boards.append(TensorBoard(run.folder))
            if config.wandb:
                run.boards.append(WandB(run.folder, run.id, config))
            with run.kept():
                try:
                    return self._fit(run, state, config, plan, device, data, stop)
                except KeyboardInterrupt as interrupt:
                    interrupt.run = run.folder  # type: ignore[attr-defined]
                    raise
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    raise MemoryError(_out_of_memory(error, config, device, self._predicted_bytes)) from error

    def _fit(
        self,
        run: Run,
        state: State,
        config: TrainConfig,
        plan: Plan | None,
        device: torch.device,
        data: Any,
        stop: Stop,
    ) -> Summary:
        phase("data")
        graph, split = same_graph(data, config)
        phase("build")
        started = time.perf_counter()
        builder = same_batches(config, graph)
        preprocess_seconds = time.perf_counter() - started
        predicted = None
        if plan is None:
            phase("profile")
            predicted = auto.choose(config, auto.measure(config, graph, builder, split.train, device), device)
            plan, self._predicted_bytes = predicted.plan, predicted.peak_bytes
            config = config.with_plan(plan)
        model_config = model_config_of(config, graph, builder)
        # all shapes and dtypes that ranks will send each other follow from these; nobody looks at them again
        contract = {"plan": plan, "model": model_config, "sequence_nodes": builder.sequence_nodes}
        # the last bits of the coarse adjacency are the processor's
        contract |= {"dtype": config.dtype, **checksums(builder.coarsening, leave=["adjacency"])}
        check_equal("what ranks hold and send", contract)
        fingerprint = on_one_process_first(graph.fingerprint)
        facts = graph_facts(config, data, graph, split, fingerprint)
        hosts = sorted(set(all_gather(socket.gethostname())))
        origin = {"hosts": hosts, "processes": world_size(), "data": asdict(facts)}
        note = partial(_note_start, run, state, config, plan, model_config, device, origin)
        if state == "started":  # noted once it goes on: nothing changes where it is refused
            on_rank_zero(lambda: run.check_resumable(model_config))
        else:
            on_rank_zero(note)
        pipeline, parameters = _make_pipeline(config, plan, state, model_config, device)
        if run.writes:
            log.info(
                f"{facts}\n"
                f"{config.model}: {parameters:,} parameters, sequences of N = {builder.sequence_nodes} nodes, on "
                f"{device}, plan {plan}; prepared in {preprocess_seconds:.1f} s; run folder {run.folder}"
            )
            if graph.split is not None and config.split == "random":
                log.info(f"the split is a random one; {graph.name} has one of its own, which --split public takes")
            for line in builder.notes(bubble_in_theory(plan)):
                log.info(line)
            if names := unread(config):
                how = f"{config.model} on {config.batching} batches, {config.bias_form} bias, plan {plan}"
                log.warning(f"nothing reads {', '.join(names)} here: {how}")

        epochs = Epochs(config, builder, graph, split, pipeline, run, stop, fingerprint)
        epochs.run_all(state, note)
        phase("evaluation")
        effect = bias_effect(pipeline, epochs.eval_loader, epochs.eval_nodes, epochs.classes, epochs.look_up)
        phase("save")
        if run.writes:
            if epochs.same_answer is not None:
                log.warning(epochs.same_answer)
            plots.curves([History.of(run)], run.folder / "curves.png")
        summary = Summary(
            run=str(run.folder),
            **epochs.results(),
            **asdict(effect),
            **of_the_majority(graph.labels, graph.num_classes, split),
            preprocess_seconds=preprocess_seconds,
            sequence_nodes=builder.sequence_nodes,
            parameters=parameters,
            peak_memory_bytes=max(all_gather(_peak_memory_bytes(device))),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            predicted_step_seconds=None if predicted is None else predicted.step_seconds,
            predicted_memory_bytes=None if predicted is None else int(predicted.peak_bytes),
            sampling_mass=on_rank_zero(lambda: builder.sampling_mass if isinstance(builder, EgoBatches) else None),
            power_scope=builder.structure.powers.scope if isinstance(builder.structure, BiasChannels) else None,
        )
        run.write_summary(asdict(summary))
        return summary


def _make_pipeline(
    config: TrainConfig, plan: Plan, state: State, model_config: ModelConfig, device: torch.device
) -> tuple[Pipeline, int]:
    """This rank's stages, and the parameters of the whole model."""
    mesh = make_mesh(plan, device)
    model = make_model(config, model_config, None if mesh is None else mesh["cp"])
    if config.weights is not None and (state == "new" or found_everywhere(config.weights)):
        model.to(config.parameter_dtype)
        read = on_every_rank(partial(_start_from, model, config.weights))
        check_equal("the weights to start from", {"checksum": read})
    parameters = num_parameters(model)
    return make_pipeline(model, plan, mesh, device, config), parameters


def _enter(config: TrainConfig, launches: Sequence[str | None]) -> tuple[Run, State]:
    """The run folder, locked by rank 0, which alone writes there."""
    own: list[Run] = []

    def enter() -> tuple[Path, str, State]:
        run, state = Run.enter(config, launches)
        own.append(run)
        return run.folder, run.id, state

    folder, id, state = on_rank_zero(enter)
    return (own[0] if own else Run(folder, id=id, writes=False)), state


def _known_plan(config: TrainConfig) -> Plan | None:
    """A run that goes on with ``--plan auto`` and as many processes as before keeps its plan, and so its numbers."""
    folder = config.out if config.resume == AUTO else config.resume
    if folder is None or not (folder / "config.json").is_file():
        return None
    before = Run.to_resume(folder).parallel_plan()
    return before if before.world_size == world_size() else None


def _note_start(
    run: Run,
    state: State,
    config: TrainConfig,
    plan: Plan,
    model_config: ModelConfig,
    device: torch.device,
    origin: dict[str, Any],
) -> None:
    """Note what will be trained, and where it comes from."""
    run.note_start(start_of_run(device) | origin, first=state == "new")
    run.forget_summary()  # before the rest: whoever is killed here leaves no result of another configuration
    run.write_config(config)
    run.write_plan(plan)
    run.write_model_config(model_config)


def _start_from(model: GraphTransformer, path: Path) -> str:
    """Fill a model with the weights of a file, and give its checksum."""
    fill(model, read_weights(path), path)
    return files.checksum(path)


def _out_of_memory(
    error: BaseException, config: TrainConfig, device: torch.device, predicted_bytes: float | None
) -> str:
    """Message of an error of memory: where, how much, and what can be done about it."""
    lines = str(error).strip().splitlines()
    what = lines[0] if lines else type(error).__name__
    own = not re.match(r"rank \d+: ", what)  # else on_every_rank has it from another one
    predicted = "" if predicted_bytes is None else f", where {in_words(predicted_bytes)} were predicted"
    size = f", at {in_words(_peak_memory_bytes(device))}{predicted}" if own else ""
    return (
        f"out of memory{f' on rank {rank()}' if own else ''} in {current_phase()}, plan {config.plan}{size}: {what}; "
        "less is taken by --checkpoint, by a smaller --batch-size or "
        f"--sequence-nodes (now {config.batch_size} and {config.sequence_nodes}), by more --microbatches in a pipeline "
        "or more cp in the plan, and by --plan auto --memory-gib, which predicts what fits"
    )


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows, where nothing else here needs it

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
