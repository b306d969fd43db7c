"""Training: the same numbers in one process and in many."""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function
from tqdm import tqdm

from megagraph import auto, plots
from megagraph.attention.dropout import dropout_keys
from megagraph.attention.module import BiasedRingAttention
from megagraph.checkpoint import Checkpoints, TrainingState
from megagraph.config import TrainConfig
from megagraph.data.batch import Batch, ClusterBatches, EgoBatches, Share
from megagraph.data.datasets import Graph, Split
from megagraph.evaluate import (
    accuracy,
    as_graph,
    batches,
    choose_split,
    class_probabilities,
    make_loader,
    make_model,
)
from megagraph.models.transformer import GraphTransformer
from megagraph.parallel.embedding import NodeTable
from megagraph.parallel.failure import phase
from megagraph.parallel.mesh import (
    all_gather,
    check_equal,
    make_mesh,
    on_every_rank,
    on_one_process_first,
    on_rank_zero,
    process_group,
    rank,
    replicas_of,
    sum_over_ranks,
    world_size,
)
from megagraph.parallel.pipeline import Pipeline, Stage
from megagraph.parallel.replicate import clip_gradients, gather_tensors, replicate
from megagraph.planner.plan import Plan
from megagraph.run import Run
from megagraph.timeline import STEP, recorder


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of a run; test accuracy is that of the best validation epoch."""

    run: str
    test_accuracy: float
    best_val_accuracy: float
    best_epoch: int
    majority_accuracy: float  # of always answering the largest class of the training nodes, on the test nodes
    epochs: int
    steps: int
    epoch_seconds: float  # median, training only
    evaluation_seconds: float  # median per epoch
    preprocess_seconds: float
    sequence_nodes: int  # N
    parameters: int
    peak_memory_bytes: int  # of the device, of the process on a CPU; the largest of all processes
    device: str
    measured_step_seconds: float  # median
    predicted_step_seconds: float | None = None  # by --plan auto
    predicted_memory_bytes: int | None = None  # without the program itself, which a CPU's peak contains


class Trainer:
    """Train a model on one graph.

    Example: ``summary = Trainer(TrainConfig(dataset="cora", root=Path("data"))).fit()``
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    @classmethod
    def resume(cls, run: Path | str, **changes: Any) -> Trainer:
        """Go on with a run that was stopped, from its newest checkpoint.

        Args:
            run: its folder.
            changes: fields of the configuration that the numbers do not depend on. Another ``plan`` takes none of the
                other fields of the layout from the run.

        Raises:
            FileNotFoundError: ``run`` is not the folder of a run.
            ValueError: the run has finished; ``fit`` refuses changes that the numbers depend on.
        """
        return cls(replace(Run.to_resume(run, new_plan="plan" in changes), **changes))

    def fit(self, data: Any = None) -> Summary:
        """Train, evaluate every epoch, and leave a run folder.

        Started by torchrun, the processes share the work as ``config.plan`` says; all of them return the summary, and
        rank 0 writes the folder.

        Args:
            data: a ``Graph`` or ``torch_geometric.data.Data``; ``None`` loads ``config.dataset``.

        Raises:
            ValueError: bad data, configuration or plan, on every process alike; nothing has been trained by then.
            FileExistsError, OSError: the run folder is taken, or cannot be written.
        """
        config = self.config
        with process_group(config.timeout):
            check_equal("the configuration", config.shared_fields())
            if config.plan != "auto":
                config.parallel_plan().check(
                    world_size=world_size(), num_layers=config.layers, batch_sequences=config.batch_sequences
                )
            elif (out := config.out) is not None:
                on_rank_zero(lambda: Run.check_free(out))
            device = on_every_rank(config.torch_device)
            if device.type == "cuda":
                torch.cuda.set_device(device)
            check_equal("the device", {"type": device.type})
            phase("data")
            graph = on_one_process_first(lambda: as_graph(data, config))
            split = on_every_rank(lambda: choose_split(graph, config))
            check_equal("the graph", _checksums(graph) | _checksums(split))
            return _fit(config, device, graph, split)


def _fit(config: TrainConfig, device: torch.device, graph: Graph, split: Split) -> Summary:
    def enter() -> Path:
        return Run.create(config) if config.resume is None else Run.resume(config)

    run = None if config.plan == "auto" else Run(on_rank_zero(enter), writes=rank() == 0)
    phase("build")
    started = time.perf_counter()
    builder = on_every_rank(lambda: batches(config, graph))
    preprocess_seconds = time.perf_counter() - started
    predicted = None
    if run is None:
        phase("profile")
        config, predicted = auto.choose(config, auto.measure(config, graph, builder, split.train, device), device)
        run = Run(on_rank_zero(enter), writes=rank() == 0)
    plan = config.parallel_plan()
    learned = config.embedding == "learned"
    model_config = config.model_config(
        in_features=builder.num_rows if learned else graph.in_features,
        num_classes=graph.num_classes,
        bias_size=builder.structure.size,
        graph_checksum=graph.checksum() if learned else 0,
    )
    # all shapes and dtypes that ranks will send each other follow from these; nobody looks at them again
    contract: dict[str, Any] = {
        "plan": plan,
        "model": model_config,
        "sequence_nodes": builder.sequence_nodes,
        "dtype": config.dtype,
    }
    contract |= {"torch": str(torch.__version__), **_checksums(builder.coarsening)}
    check_equal("what ranks hold and send", contract)
    if config.resume is None:
        run.write_model_config(model_config)
    else:
        on_rank_zero(lambda: run.check_model_config(model_config))
    mesh = make_mesh(plan, device)
    torch.manual_seed(config.seed)
    model = make_model(config, model_config, None if mesh is None else mesh["cp"])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    parameters += builder.num_rows * config.dim if learned else 0
    pipeline = make_pipeline(model, plan, mesh, device, config)
    del model  # and with it the other ranks' stages
    if run.writes:
        print(
            f"{graph.name}: {graph.num_nodes:,} nodes, {graph.num_edges // 2:,} edges, {graph.in_features} features, "
            f"{graph.num_classes} classes; "
            f"{len(split.train)} nodes to train, {len(split.val)} to validate, {len(split.test)} to test\n"
            f"{config.model}: {parameters:,} parameters, sequences of N = {builder.sequence_nodes} nodes, on {device}"
            f"{'' if mesh is None else f', {plan.pp} x {plan.cp} x {plan.dp} processes (pp, cp, dp)'}; "
            f"prepared in {preprocess_seconds:.1f} s",
            file=sys.stderr,
        )
        if isinstance(builder, ClusterBatches):
            print(builder.quality, file=sys.stderr)

    epochs = _Epochs(config, builder, graph, split, pipeline, run)
    if config.resume is not None:
        epochs.resume()
    while not epochs.finished:
        epochs.run()
    history = epochs.history
    best = max(history, key=itemgetter("val_accuracy"))  # the first of equals
    if epochs.profiler is not None:
        epochs.profiler.stop()
    phase("save")
    if run.writes:
        plots.curves(run.metrics(), run.folder / "curves.png")
    majority = np.bincount(graph.labels[split.train]).argmax()
    summary = Summary(
        run=str(run.folder),
        test_accuracy=best["test_accuracy"],
        best_val_accuracy=best["val_accuracy"],
        best_epoch=best["epoch"],
        majority_accuracy=float((graph.labels[split.test] == majority).mean()),
        epochs=len(history),
        steps=epochs.step,
        epoch_seconds=float(np.median([epoch["train_seconds"] for epoch in history])),
        evaluation_seconds=float(np.median([epoch["evaluation_seconds"] for epoch in history])),
        preprocess_seconds=preprocess_seconds,
        sequence_nodes=builder.sequence_nodes,
        parameters=parameters,
        peak_memory_bytes=max(all_gather(_peak_memory_bytes(device))),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        measured_step_seconds=float(np.median(epochs.step_seconds)),
        predicted_step_seconds=None if predicted is None else predicted.step_seconds,
        predicted_memory_bytes=None if predicted is None else int(predicted.peak_bytes),
    )
    run.write_summary(asdict(summary))
    run.remove_checkpoints()
    return summary


def make_pipeline(
    model: GraphTransformer, plan: Plan, mesh: DeviceMesh | None, device: torch.device, config: TrainConfig
) -> Pipeline:
    """This rank's stages of a model under a plan, gradients summed over their replicas."""
    for module in model.modules():
        if isinstance(module, BiasedRingAttention):
            module.comm = plan.comm
    own = plan.stages(model.config.layers)[0 if mesh is None else mesh.get_local_rank("pp") :: plan.pp]
    stages = [Stage(model, layers, autocast=config.dtype == "bf16", checkpoint=plan.checkpoint) for layers in own]
    for stage in stages:
        stage.to(device, config.parameter_dtype)
    table = None
    if config.embedding == "learned" and stages[0].first:
        table = NodeTable(model.config.in_features, config.dim, seed=config.seed, replicas=replicas_of(mesh))
        table.to(device, config.parameter_dtype)
    return Pipeline(stages, [replicate(stage, mesh, shard=plan.shard) for stage in stages], plan, mesh, table)


def own_share(plan: Plan, mesh: DeviceMesh | None) -> Share:
    """The part of every global batch that this rank builds."""
    if mesh is None:
        return Share(num_microbatches=plan.num_microbatches)
    dp_rank, cp_rank = mesh.get_local_rank("dp"), mesh.get_local_rank("cp")
    return Share(
        dp_rank=dp_rank,
        dp=plan.dp,
        cp_rank=cp_rank,
        cp=plan.cp,
        num_microbatches=plan.num_microbatches,
        embeds=mesh.get_local_rank("pp") == 0,
    )


def make_optimizers(pipeline: Pipeline, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW for the layers, SparseAdam for the table of a learned embedding."""
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(pipeline.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True)
    ]
    if pipeline.table is not None:
        optimizers.append(torch.optim.SparseAdam(pipeline.table.parameters()))
    return optimizers


def train_step(
    pipeline: Pipeline, optimizers: list[torch.optim.Optimizer], batch: Batch, dropout_key: Tensor, clip_norm: float
) -> tuple[float, float]:
    """One step of all optimizers on this rank's share of a global batch: the global loss, and its gradient's norm."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = pipeline.backward(batch, dropout_key, loss_sum)
    phase("optimizer")
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    with record_function("optimizer"):
        norm = clip_gradients(parameters, clip_norm, pipeline.mesh)
        for optimizer in optimizers:
            optimizer.step()
    if pipeline.mesh is not None:
        loss = sum_over_ranks(loss.double())
    return loss.item(), float(norm)  # waits for the device, so the step's time is all of it


class _Epochs:
    """The state that goes from one epoch to the next: optimizers, schedule, counters of steps and batches."""

    def __init__(
        self,
        config: TrainConfig,
        builder: EgoBatches | ClusterBatches,
        graph: Graph,
        split: Split,
        pipeline: Pipeline,
        run: Run,
    ) -> None:
        self.config, self.graph, self.split, self.pipeline, self.run_folder = config, graph, split, pipeline, run
        self.checkpoints = Checkpoints(run.folder / "checkpoints")
        share = own_share(pipeline.plan, pipeline.mesh)
        self.train_loader = make_loader(config, builder, split.train, shuffle=True, share=share)
        self.eval_loader = make_loader(config, builder, np.concatenate([split.val, split.test]), share=share)
        self.optimizers = make_optimizers(pipeline, config)
        in_stages = pipeline.plan.pp > 1
        self.profiler = recorder(run.folder / "trace", rank(), pipeline=in_stages) if config.trace else None
        if self.profiler is not None:
            self.profiler.start()
        self.step = 0
        self.epoch, self.batch = 0, 0  # the next batch, and its epoch
        self.steps: list[dict[str, Any]] = []  # of this epoch, as in metrics.jsonl
        self.history: list[dict[str, Any]] = []  # of the epochs before
        self.step_seconds: list[float] = []  # of this process, with the wait for the batch
        self.total_steps = config.epochs * len(self.train_loader.epoch(0))
        if config.max_steps is not None:
            self.total_steps = min(self.total_steps, config.max_steps)

    @property
    def finished(self) -> bool:
        return self.batch == 0 and (self.epoch == self.config.epochs or self.step == self.total_steps)

    def save(self) -> None:
        """Write a checkpoint."""
        phase("save")
        self.checkpoints.save(
            self.step,
            TrainingState(self.pipeline, self.optimizers),
            {"step": self.step, "epoch": self.epoch, "batch": self.batch},
            self.run_folder.checkpointed,
        )

    def resume(self) -> None:
        """Go back to the newest checkpoint; what the run has written since is taken back, too."""
        folder, progress = self.checkpoints.load(TrainingState(self.pipeline, self.optimizers))
        self.step, self.epoch, self.batch = progress["step"], progress["epoch"], progress["batch"]
        on_rank_zero(lambda: self.run_folder.restore(folder))
        self.history, self.steps = on_rank_zero(self.run_folder.progress)
        if self.run_folder.writes:
            print(f"resumed from {folder}: epoch {self.epoch}, batch {self.batch}", file=sys.stderr)

    def run(self) -> None:
        """Train what is left of an epoch and evaluate."""
        started = time.perf_counter() - sum(step["step_seconds"] + step["stall_seconds"] for step in self.steps)
        self.pipeline.train()
        silent = None if self.run_folder.writes else True  # None: silent where there is no terminal
        batches = self.train_loader.epoch(self.epoch, self.batch)
        progress = tqdm(batches, desc=f"epoch {self.epoch}", leave=False, disable=silent)
        waiting = time.perf_counter()
        for batch in _waiting_for(progress):
            stall_seconds = time.perf_counter() - waiting
            if self.step == self.total_steps:
                break
            self.batch += 1
            if batch.num_targets:  # a cluster batch may have no training nodes
                self._train_step(batch, stall_seconds)
                progress.set_postfix(loss=f"{self.steps[-1]['loss']:.3f}")
                saving = time.perf_counter()
                if self.config.checkpoint_every and self.step % self.config.checkpoint_every == 0:
                    self.save()
                started += time.perf_counter() - saving
            phase("next batch")
            waiting = time.perf_counter()
        trained = time.perf_counter()
        phase("evaluation")
        probabilities = class_probabilities(self.pipeline, self.eval_loader)
        val, test = (accuracy(probabilities, self.graph.labels, n) for n in (self.split.val, self.split.test))
        line = {
            "epoch": self.epoch,
            "loss": float(np.mean([step["loss"] for step in self.steps])),
            "val_accuracy": val,
            "test_accuracy": test,
            "train_seconds": trained - started,
            "evaluation_seconds": time.perf_counter() - trained,
        }
        if self.run_folder.writes:
            print(
                f"epoch {self.epoch:3d}  loss {line['loss']:.4f}  validation {val:.4f}  test {test:.4f}",
                file=sys.stderr,
            )
        if all(val > before["val_accuracy"] for before in self.history):
            phase("save")
            self.run_folder.save_weights(gather_tensors(self.pipeline.state_dict(), self.pipeline.mesh))
        self.run_folder.log(**line)
        self.history.append(line)
        self.epoch, self.batch, self.steps = self.epoch + 1, 0, []
        if not self.config.checkpoint_every and not self.finished:
            self.save()

    def _train_step(self, batch: Batch, stall_seconds: float) -> None:
        phase("forward and backward", step=self.step)
        started = time.perf_counter()
        config = self.config
        learning_rate = config.learning_rate * schedule(self.step, self.total_steps, config.warmup)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
        batch = self.pipeline.receive(batch)
        keys = dropout_keys(config.seed, self.step, batch.sequence_ids)
        with record_function(STEP):
            loss, gradient_norm = train_step(self.pipeline, self.optimizers, batch, keys, config.clip_norm)
        if self.profiler is not None:
            self.profiler.step()
        if not np.isfinite(loss):
            raise FloatingPointError(
                f"the loss of step {self.step} is {loss}; lower --learning-rate (now {learning_rate:.2e}), "
                "or look for extreme values in the features"
            )
        self.steps.append(
            {
                "step": self.step,
                "loss": loss,
                "learning_rate": learning_rate,
                "gradient_norm": gradient_norm,
                "step_seconds": time.perf_counter() - started,
                "stall_seconds": stall_seconds,
            }
        )
        self.run_folder.log(**self.steps[-1])
        self.step_seconds.append(self.steps[-1]["step_seconds"] + stall_seconds)
        self.step += 1


def _waiting_for(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The same batches; the time until each is there has a name in traces."""
    iterator = iter(batches)
    while True:
        with record_function("stall"):
            batch = next(iterator, None)
        if batch is None:
            return
        yield batch


def schedule(step: int, total_steps: int, warmup: float) -> float:
    """Factor on the peak learning rate: linear from 0 over the warm-up steps, then linear down to 0."""
    warmup_steps = warmup * total_steps
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    return (total_steps - step) / max(total_steps - warmup_steps, 1)


def loss_sum(scores: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy summed over the labels that count; divided by their number in the global batch it is the loss."""
    scores = scores.flatten(0, 1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return nn.functional.cross_entropy(scores, labels.flatten(), ignore_index=-1, reduction="sum")


def _checksums(arrays: Any) -> dict[str, int]:
    """CRC-32 of every array of a dataclass; work that takes a while, and for one process is not needed."""
    if world_size() == 1:
        return {}
    values = {field.name: getattr(arrays, field.name) for field in fields(arrays)}
    return {
        name: zlib.crc32(np.ascontiguousarray(value).data)
        for name, value in values.items()
        if isinstance(value, np.ndarray)
    }


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows, where nothing else here needs it

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
