"""The training loop: what goes from one step and one epoch to the next."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, cast

import numpy as np
from torch.profiler import record_function

from megagraph.attention.dropout import dropout_keys
from megagraph.checkpoint import Checkpoints
from megagraph.config import AUTO, TrainConfig
from megagraph.data.batch import Batch
from megagraph.data.build import Builder
from megagraph.data.graph import Graph, Split
from megagraph.data.loader import Loader
from megagraph.evaluate import class_probabilities, make_loader
from megagraph.metrics import EpochLine
from megagraph.objective import METRICS, choose_metric, measures, predicted, same_answer
from megagraph.parallel.delivery import NodeLoader, builds, stages_of_node
from megagraph.parallel.failure import phase
from megagraph.parallel.mesh import (
    all_gather,
    found_everywhere,
    on_rank_zero,
    rank,
    world_size,
)
from megagraph.parallel.pipeline import Pipeline
from megagraph.parallel.replicate import gather_tensors
from megagraph.parallel.stop import Stop, Stopped
from megagraph.progress import Progress, log
from megagraph.run import Run, State
from megagraph.state import TrainingState, cause
from megagraph.timeline import STEP, recorder
from megagraph.train_step import make_optimizers, own_share, schedule, train_step


class Epochs:
    """The state that goes from one epoch to the next: optimizers, schedule, counters of steps and batches."""

    def __init__(
        self,
        config: TrainConfig,
        builder: Builder,
        graph: Graph,
        split: Split,
        pipeline: Pipeline,
        run: Run,
        stop: Stop,
        fingerprint: str,
    ) -> None:
        self.config, self.graph, self.split, self.pipeline, self.run_folder = config, graph, split, pipeline, run
        self.metric = choose_metric(config.metric, graph.labels)
        self.stop = stop
        self.checkpoints = Checkpoints(
            run.folder / "checkpoints", run=run.id, data=fingerprint, config=config.numbers(), keep=config.keep
        )
        share = own_share(pipeline.plan, pipeline.mesh)
        # a full batch is built once, by everyone
        stages = None if config.batching == "full" else stages_of_node(pipeline.mesh)

        def load(nodes: np.ndarray, *, shuffle: bool) -> Loader | NodeLoader:
            if stages is None:
                return make_loader(config, builder, nodes, shuffle=shuffle, share=share)
            own = config if builds(stages) else replace(config, workers=0)
            return NodeLoader(make_loader(own, builder, nodes, shuffle=shuffle, share=share), stages)

        self.train_loader = load(split.train, shuffle=True)
        self.eval_nodes = np.concatenate([split.val, split.test])
        self.eval_loader = load(self.eval_nodes, shuffle=False)
        self.optimizers = make_optimizers(pipeline, config)
        in_stages = pipeline.plan.pp > 1
        traced = partial(recorder, run.folder / "trace", rank(), ranks=world_size(), run=run.id, pipeline=in_stages)
        self.profiler = traced() if config.trace else None
        if self.profiler is not None:
            self.profiler.start()
        self.step = 0
        self.bad_steps: list[tuple[float, float]] = []  # loss and norm, in a row up to the last step
        self.epoch, self.batch = 0, 0  # the next batch, and its epoch
        # since the last evaluation; NaN where a step was skipped. Arrays, as lists of objects would grow by megabytes
        self.losses = array("d")
        self.seconds_before = 0.0  # of the steps since then, but for those of the epoch under way since it began here
        self.history: list[EpochLine] = []  # of the epochs that were evaluated
        self.classes: np.ndarray | None = None  # of the last evaluation, as ``predicted`` has them
        self.same_answer: str | None = None  # that the model of the best epoch, of this start, gives to all
        self.step_seconds = array("d")  # of this process, with the wait for the batch
        self.epoch_batches = self.first_batches = len(self.train_loader.epoch(0))  # of this epoch, and of the first

    @property
    def finished(self) -> bool:
        return self.batch == 0 and (self.epoch == self.config.epochs or self._no_more_steps or self._in_vain)

    @property
    def _no_more_steps(self) -> bool:
        """Whether no more steps may be taken."""
        return self.step == self.config.max_steps

    @property
    def _place(self) -> tuple[float, float]:
        """Place in the schedule, and its end, in steps of epochs like the first one.

        Epochs may differ in their batches, and some batches have nothing to train on.
        """
        end, most = self.config.epochs * self.first_batches, self.config.max_steps
        place = self.epoch * self.first_batches + (self.batch - 1) * (self.first_batches / self.epoch_batches)
        if most is None or most >= end:
            return place, end
        return max(self.step, place * most / end), most

    @property
    def _in_vain(self) -> bool:
        """Whether the best epoch is too long ago."""
        if self.config.patience is None or not self.history:
            return False
        best = max(self.history, key=self._score)  # the first of equals
        return self.history[-1]["epoch"] - best["epoch"] >= self.config.patience

    def run_all(self, state: State, note: Callable[[], None]) -> None:
        """Begin, or go on, and train to the end; the last checkpoint is on disk then.

        Args:
            note: notes the start of a run that goes on, on rank 0, before any other of its files changes.
        """
        try:
            self.begin(state, note)
            while not self.finished:
                self.run()
            self.save()
            self.checkpoints.wait()
        finally:
            self.checkpoints.settle()
        if self.profiler is not None:
            self.profiler.stop()

    def results(self) -> dict[str, Any]:
        """What a summary says of the epochs; what is measured is that of the best validation epoch."""
        best = cast(dict[str, Any], max(self.history, key=self._score))  # the first of equals
        told = {"test": "test", "val": "best_val"}
        measured = {f"{told[part]}_{name}": best.get(f"{part}_{name}") for part in told for name in METRICS}
        return measured | {
            "best_epoch": best["epoch"],
            "epochs": self.epoch,
            "steps": self.step,
            "skipped_steps": sum(line["skipped_steps"] for line in self.history),
            "epoch_seconds": float(np.median([epoch["train_seconds"] for epoch in self.history])),
            "evaluation_seconds": float(np.median([epoch["evaluation_seconds"] for epoch in self.history])),
            "measured_step_seconds": float(np.median(self.step_seconds)) if self.step_seconds else 0.0,
        }

    def _score(self, line: EpochLine, part: str = "val") -> float:
        """The number of a line by which the best epoch is chosen."""
        return cast(dict[str, float], line)[f"{part}_{self.metric}"]

    def begin(self, state: State, note: Callable[[], None]) -> None:
        """Go back to a checkpoint, or write the first one."""
        try:
            if state == "started":
                self._resume(note)
        except FileNotFoundError as error:
            weights = self.config.weights
            if self.config.resume != AUTO or (weights is not None and not found_everywhere(weights)):
                raise
            on_rank_zero(note)
            on_rank_zero(self.run_folder.begin_anew)
            if self.run_folder.writes:
                log.info(f"megagraph: beginning anew: {error}")
        self.stop.defer()
        self.save()

    def _resume(self, note: Callable[[], None]) -> None:
        """Go on from a checkpoint; what the run has written since is taken back, too."""
        state = TrainingState(self.pipeline, self.optimizers)
        tensors = state.tensors()
        folder, progress = self.checkpoints.load(tensors, self.config.resume_step)
        state.load(tensors)
        names = ("step", "epoch", "batch")
        if not all(type(progress.get(name)) is int and progress[name] >= 0 for name in names):
            raise ValueError(f"expected step, epoch and batch in {folder}, numbers from 0 on, got {progress}")
        batches = len(self.train_loader.epoch(progress["epoch"]))
        most = {"step": self.config.max_steps, "epoch": self.config.epochs, "batch": batches}
        if any(high is not None and progress[name] > high for name, high in most.items()):
            raise ValueError(f"expected step, epoch and batch of at most {most} in {folder}, got {progress}")
        self.step, self.epoch, self.batch = progress["step"], progress["epoch"], progress["batch"]
        on_rank_zero(note)
        on_rank_zero(lambda: self.run_folder.restore(folder))
        self.history, steps = on_rank_zero(self.run_folder.progress)
        self.losses = array("d", [math.nan if step["loss"] is None else step["loss"] for step in steps])
        self.seconds_before = sum(step["step_seconds"] + step["stall_seconds"] for step in steps)
        if self.run_folder.changes:
            self.run_folder.log(changes=self.run_folder.changes, from_step=self.step)
        if self.run_folder.writes:
            log.info(f"resumed from {folder}: epoch {self.epoch}, batch {self.batch}")

    def save(self) -> None:
        """Begin to write a checkpoint."""
        phase("save")
        self.checkpoints.save(
            self.step,
            TrainingState(self.pipeline, self.optimizers).tensors(),
            {"step": self.step, "epoch": self.epoch, "batch": self.batch},
            self.run_folder.checkpointed,
        )
        self.stop.took(self.checkpoints.seconds)

    def _leave(self) -> NoReturn:
        """Write a checkpoint and end, on all ranks."""
        self.save()
        self.checkpoints.wait()
        if self.run_folder.writes:
            log.info(
                f"megagraph: stopped by {self.stop.reason} after {self.step} steps; go on with the same command and "
                f"--resume auto --out {self.run_folder.folder}, or with megagraph train --resume "
                f"{self.run_folder.folder}"
            )
        raise Stopped(self.stop.reason)

    def look_up(self) -> None:
        """Between batches of an evaluation: raise the error of a failed save, or leave if any rank was asked to."""
        self.checkpoints.check()
        if self.stop.agreed():
            self._leave()

    def run(self) -> None:
        """Train what is left of an epoch and evaluate, where it is time to."""
        started = time.perf_counter() - self.seconds_before
        self.pipeline.train()
        batches = self.train_loader.epoch(self.epoch, self.batch)
        self.epoch_batches = self.batch + len(batches)
        received = self.pipeline.receive(batches)
        progress = Progress(received, f"epoch {self.epoch}", self.epoch_batches, done=self.batch)
        waiting = time.perf_counter()
        for batch in _waiting_for(progress):
            stall_seconds = time.perf_counter() - waiting
            if self._no_more_steps:
                break
            self.batch += 1
            if batch.num_targets:  # a cluster batch may have no training nodes
                self._train_step(batch, stall_seconds)
                progress.set_postfix(loss=f"{self.losses[-1]:.3f}", refresh=False)
                saving = time.perf_counter()
                self.checkpoints.check()
                if self.stop.leave:
                    self._leave()
                every = self.config.checkpoint_every
                if every and self.step % every == 0 and not self.bad_steps:  # one from before them stays longer
                    self.save()
                started += time.perf_counter() - saving
            phase("next batch")
            waiting = time.perf_counter()
        self.seconds_before = time.perf_counter() - started
        last = self.epoch + 1 == self.config.epochs or self._no_more_steps
        if last or (self.epoch + 1) % self.config.evaluate_every == 0:
            self._evaluate()
        self.epoch, self.batch = self.epoch + 1, 0
        if not self.config.checkpoint_every:
            self.save()

    def _evaluate(self) -> None:
        """Say how it has gone since the last time, and keep the weights if they are the best."""
        phase("evaluation")
        started = time.perf_counter()
        probabilities = class_probabilities(self.pipeline, self.eval_loader, self.look_up)
        if not np.isfinite(probabilities).all():
            raise FloatingPointError(
                f"the evaluation after step {self.step} gave numbers that are not finite, {cause(self.pipeline)}"
            )
        self.classes = predicted(probabilities, multi_label=self.graph.multi_label)
        measured = measures(probabilities, self.graph.labels, self.split)
        losses = [loss for loss in self.losses if not math.isnan(loss)]
        values = {
            "epoch": self.epoch,
            "loss": float(np.mean(losses)) if losses else None,
            "skipped_steps": len(self.losses) - len(losses),
            **measured,
            "train_seconds": self.seconds_before / (self.epoch - (self.history[-1]["epoch"] if self.history else -1)),
            "evaluation_seconds": time.perf_counter() - started,
        }
        line = cast(EpochLine, values)
        if self.run_folder.writes:
            log.info(
                f"epoch {self.epoch:3d}  loss {np.mean(losses) if losses else np.nan:.4f}  "
                f"validation {self.metric} {self._score(line):.4f}  test {self._score(line, 'test'):.4f}"
            )
        if all(self._score(line) > self._score(before) for before in self.history):
            phase("save")
            self.same_answer = same_answer(self.classes, self.graph, self.eval_nodes)
            self.run_folder.save_weights(gather_tensors(self.pipeline.state_dict(), self.pipeline.mesh))
        self.run_folder.log(**line)
        self.history.append(line)
        self.losses, self.seconds_before = array("d"), 0.0

    def _train_step(self, batch: Batch, stall_seconds: float) -> None:
        phase("forward and backward", step=self.step)
        started = time.perf_counter()
        config = self.config
        learning_rate = config.learning_rate * schedule(*self._place, config.warmup)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * group.get("scale", 1.0)
        keys = dropout_keys(config.seed, self.step, batch.sequence_ids)
        with record_function(STEP):
            loss, norm = train_step(self.pipeline, self.optimizers, batch, keys, config.clip_norm, self.stop)
        if self.profiler is not None:
            self.profiler.step()
        seconds = time.perf_counter() - started
        self.stop.took(seconds)
        finite = math.isfinite(loss + norm)
        self.losses.append(loss if finite else math.nan)
        self.bad_steps = [] if finite else [*self.bad_steps, (loss, norm)]
        if not finite:
            self._report_bad_step(batch, learning_rate)
        self.run_folder.log(
            step=self.step,
            loss=loss if finite else None,
            learning_rate=learning_rate,
            gradient_norm=norm if finite else None,
            step_seconds=seconds,
            stall_seconds=stall_seconds,
        )
        self.step_seconds.append(seconds + stall_seconds)
        self.step += 1

    def _report_bad_step(self, batch: Batch, learning_rate: float) -> None:
        """Warn of a step that was skipped, or end the run after the last one that may be."""
        first, last = self.bad_steps[0], self.bad_steps[-1]
        if len(self.bad_steps) < self.config.bad_steps:
            if self.run_folder.writes:
                log.warning(
                    f"step {self.step} was skipped, its loss is {last[0]} and the norm of its gradient {last[1]}"
                )
            return
        own = [
            name
            for name, parameter in self.pipeline.named_parameters().items()
            if parameter.grad is not None and not parameter.grad.isfinite().all()
        ]
        named = [name for part in all_gather(own) for name in part]
        rows = all_gather(not batch.features.isfinite().all().item())
        of_features = "; its features are not finite" if any(rows) else ""
        what, value = ("norm of the gradient", first[1]) if math.isfinite(first[0]) else ("loss", first[0])
        layers = ", ".join(named[:3]) + (" and more" if len(named) > 3 else "")
        raise FloatingPointError(
            f"the {what} of step {self.step - len(self.bad_steps) + 1} is {value}; lower --learning-rate (now "
            f"{learning_rate:.2e}), or look for extreme values in the features. {len(self.bad_steps)} steps in a row "
            f"were skipped, the last one batch {self.batch - 1} of epoch {self.epoch}, loss {last[0]}{of_features}; "
            f"not finite is the gradient of {layers or 'nothing'}. "
            f"To go on from before: --resume {self.run_folder.folder} --resume-step N with a lower --learning-rate"
        )


def _waiting_for(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches; in traces, the wait for each is a span."""
    iterator = iter(batches)
    while True:
        with record_function("stall"):
            batch = next(iterator, None)
        if batch is None:
            return
        yield batch
