"""What experiments of the paper there are: their commands, and the rows that they write."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Experiment:
    """Commands of modules here; ROOT is the folder of the data, WORK one of large files, AGAIN stands for ``--again``
    where that was asked. Rows are patterns of files."""

    what: str
    rows: tuple[str, ...]
    commands: tuple[str, ...]
    quick: tuple[str, ...] | None = None  # where these are other commands

    @property
    def data(self) -> bool:
        return any("ROOT" in command for command in self.commands)


PRODUCTS = ("generate", "propagation", "metis", "train", "first-step", "full")
EXPERIMENTS = {
    "accuracy": Experiment(
        "accuracy on real graphs, all systems tuned alike",
        ("cpu/accuracy/*.jsonl", "cpu/accuracy/tuned.json"),
        ("accuracy tuned --root ROOT", "accuracy run --root ROOT --minutes 100_000", "compared"),
    ),
    "epoch": Experiment(
        "a training epoch beside eager ANS-GT",
        ("*/epoch_time/*.json",),
        ("epoch_time --dataset citeseer --root ROOT",),
        ("epoch_time --dataset cora --root ROOT",),
    ),
    "memory": Experiment("memory and time of a deep step beside it", ("*/step_memory.json",), ("step_memory steps",)),
    "losses": Experiment(
        "losses of both on the same batches", ("cpu/step_losses.json",), ("step_memory losses --root ROOT",)
    ),
    "rounding": Experiment("error of a deep model in bf16 beside it", ("*/step_errors.json",), ("step_memory errors",)),
    "convergence": Experiment(
        "accuracy against time beside eager ANS-GT",
        ("cpu/convergence/time.json",),
        ("convergence time --root ROOT",),
    ),
    "processes": Experiment(
        "accuracy of several processes, and TorchGT's",
        ("cpu/convergence/processes.json",),
        ("convergence processes --root ROOT", "convergence judge"),
    ),
    "depth": Experiment(
        "accuracy and memory against depth",
        ("cpu/depth/series.json", "cpu/depth/paper.json"),
        ("depth series --root ROOT AGAIN", "depth paper --root ROOT AGAIN"),
    ),
    "sequence-memory": Experiment(
        "bias and activations of ranks that share a sequence",
        ("cpu/plan_memory/sequence.json",),
        ("plan_memory sequence",),
    ),
    "ablation": Experiment(
        "memory with recomputation, pp, cp, sharding, 16 bits",
        ("cpu/plan_memory/ablation.json",),
        ("plan_memory ablation",),
    ),
    "longest": Experiment(
        "the longest sequence below a cap, beside eager ANS-GT",
        ("cpu/plan_memory/longest.json",),
        ("plan_memory longest",),
    ),
    "cost-model": Experiment(
        "the 216 configurations",
        ("*/cost_model*/memory.json", "*/cost_model*/time.json"),
        ("cost_model memory AGAIN", "cost_model time AGAIN", "cost_model judge"),
        ("cost_model memory --subset AGAIN", "cost_model time --subset AGAIN", "cost_model judge --subset"),
    ),
    "transfer": Experiment(
        "Graphormer, predicted by rows of HierarchicalGT", ("*/transfer/rows.json",), ("transfer measure",)
    ),
    "device-steps": Experiment(
        "steps of one device, predicted and measured", ("*/one_device/steps.json",), ("one_device",)
    ),
    "device-runs": Experiment("trainings on one GPU", ("*/runs.json",), ("device_runs --root ROOT",)),
    "stages": Experiment("uneven pipeline stages", ("cpu/pipeline_stages/stages.json",), ("pipeline_stages",)),
    "heavy-stages": Experiment(
        "pipeline stages with a heavy first one", ("cpu/pipeline_stages/heavy.json",), ("pipeline_stages --heavy",)
    ),
    **{
        f"products-{step}": Experiment(
            f"a graph of the size of ogbn-products: {step}",
            (f"*/products_size/{step}.json",),
            (f"products_size --folder WORK/products --step {step}",),
        )
        for step in PRODUCTS
    },
    "whole-graphs": Experiment(
        "real graphs as one sequence each", ("cpu/whole_graphs/*.json",), ("whole_graphs --root ROOT",)
    ),
    "plans": Experiment("plans of two processes, predicted and trained", ("cpu/real_plans/p*.json",), ("real_plans",)),
    "cluster": Experiment(
        "the same on hosts that a slow link joins", ("cpu/cluster/2*.json",), ("cluster run AGAIN", "cluster judge")
    ),
    "pareto": Experiment("all plans of four processes, and what some took", ("cpu/pareto/p*.json",), ("pareto run",)),
}
