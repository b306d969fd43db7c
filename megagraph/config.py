"""One typed configuration of a training run; its fields are the flags. Defaults of models and batches are theirs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megagraph import files, flags
from megagraph.attention.ways import Comm
from megagraph.data.options import Batching, BatchOptions, Scope
from megagraph.models.config import Init, ModelConfig, ModelName
from megagraph.planner.plan import Across, Plan, ScheduleName
from megagraph.planner.workload import Precision

if TYPE_CHECKING:
    import torch  # takes longer to import than to say what a flag means

AUTO = Path("auto")
# that a model may do without
Part = Literal["bias", "initial", "features", "labels", "super_nodes", "global_token", "convolution", "samples"]
LAYOUT_FIELDS = (  # how the processes share the work, which the numbers do not depend on
    "plan", "shares", "stage_layers", "stages_per_rank", "microbatches", "schedule", "across", "checkpoint", "comm",
    "shard",
)  # fmt: skip
SEARCH_FIELDS = ("pp", "cp", "dp", "memory_gib", "any_fit")  # what guides a search of them
FREE_FIELDS = (  # what the numbers of a run do not depend on
    "root", "resume", "resume_step", "out", "device", "workers", "checkpoint_every", "keep", "time_limit", "lock_wait",
    "bad_steps", "timeout", "trace", "tensorboard", "wandb", "cuda_graphs", *SEARCH_FIELDS, *LAYOUT_FIELDS,
)  # fmt: skip

_AT_MOST = {"seed": (1 << 63) - 1, "workers": 1024, "channels": 1024}  # others fit into 32 bits
_MAX_SECONDS = 1e9


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train; every field is a flag of ``megagraph train``, and its type and value are checked here: ValueError
    names what is wrong. NumPy's scalars become Python's, strings paths, and paths strings, as the field has them."""

    dataset: str = "synthetic"
    """synthetic, citeseer, cora, pubmed, dblp, computers, photo, cs, physics, actor, chameleon, squirrel, roman-empire,
    amazon-ratings, minesweeper, tolokers, questions, reddit, reddit2, yelp, ogbn-arxiv, ogbn-products, a FILE.npz or
    the folder of a store."""
    root: Path | None = None
    """Folder of the named data sets; what is missing there is downloaded."""
    split: Literal["random", "public"] = "random"
    """random: 60/20/20 of the labelled nodes by seed; public: the data set's own, of several one by seed."""
    out: Path | None = None
    """Run folder to create; default runs/DATASET-DATE-TIME."""
    resume: Path | None = None
    """Run folder to go on with, from its newest checkpoint; its config.json takes the place of all defaults.
    auto: go on with the run in --out, begin it where there is none, print its summary where it has finished."""
    resume_step: int | None = None
    """With --resume: go on from the checkpoint of this step."""
    weights: Path | None = None
    """Start from these weights, a model.safetensors, in place of random ones."""
    checkpoint_every: int = 0
    """Steps from one checkpoint to the next; 0: one at the end of every epoch."""
    keep: int = 2
    """Checkpoints to keep; the newest one stays when the run has finished."""
    time_limit: str | None = None
    """Write a checkpoint and leave before this time since the start is over, as in 3h, 90m, 1h30m or 2-12:00:00."""
    lock_wait: float = 60.0
    """Seconds to wait for another process that still writes to the run folder."""
    bad_steps: int = 3
    """Steps in a row whose loss or gradient is not finite, which are skipped, before the run ends."""

    model: ModelName = "hierarchical"
    """hierarchical: ANS-GT's; graphormer: with degree codes and hop distances."""
    embedding: Literal["features", "learned"] = ModelConfig.embedding
    """features: a projection of the node's features; learned: a vector of its own for every node of this graph."""
    layers: int = ModelConfig.layers
    """Transformer layers."""
    dim: int = ModelConfig.dim
    """Hidden width d."""
    ffn_dim: int = ModelConfig.ffn_dim
    """Inner width of the feed-forward network."""
    heads: int = ModelConfig.heads
    """Attention heads; they divide dim."""
    init: Init = ModelConfig.init
    """Initial weights. small: N(0, 0.02 / sqrt(layers)), as ANS-GT; xavier: by a layer's widths, for full batches."""
    global_tokens: int = BatchOptions.global_tokens
    """Learned tokens that every node attends to."""
    bias: Literal["auto", "projected", "bucket"] = "auto"
    """projected: adjacency powers; bucket: hop distances; auto: bucket but for ego batches of hierarchical."""
    channels: int = BatchOptions.channels
    """Adjacency powers of a projected bias."""
    power_scope: Scope = BatchOptions.power_scope
    """graph: powers of the whole graph's adjacency; batch: of each sequence's own nodes; auto: graph, if they fit."""
    power_gib: float = BatchOptions.power_gib
    """GiB that the powers of the whole graph may take in every process."""
    shuffle_structure: bool = BatchOptions.shuffle_structure
    """To see what the structure is worth: the bias is that of a random relabelling of the nodes."""
    max_distance: int = BatchOptions.max_distance
    """Hop distances that a bucket bias tells apart."""
    max_degree: int = ModelConfig.max_degree
    """Degrees that graphormer tells apart."""
    dropout: float = ModelConfig.dropout
    """Probability to drop a number of a hidden state."""
    input_dropout: float = ModelConfig.input_dropout
    """Probability to drop a number of a node's embedding."""
    attention_dropout: float = ModelConfig.attention_dropout
    """Probability to drop an attention weight."""

    convolution: bool = ModelConfig.convolution
    """Beside attention every layer has a graph convolution, GCN's sum over a node's neighbours; for full batches."""
    propagate: int = BatchOptions.propagate
    """Beside a node's features those of its surroundings, averaged once, twice, ... so many times."""
    degree_input: bool = BatchOptions.degree_input
    """Beside a node's features how many neighbours it has, of which attention, being a mean over them, knows little."""
    label_input: float = BatchOptions.label_input
    """In full batches labels of such a part of the training nodes are input of a step, whose loss is of the others."""
    partitions: int = BatchOptions.partitions
    """In full batches training takes a step on each of so many parts of the graph, other ones every epoch; evaluation
    is of the whole graph."""
    batching: Batching = BatchOptions.batching
    """ego: one target node and its sampled surroundings a sequence; cluster: whole clusters, every node a target;
    full: the whole graph is one sequence, and an epoch one step, or one of each of --partitions."""
    batch_size: int = 32
    """Global batch: target nodes (ego) or sequences (cluster)."""
    sample_nodes: int = BatchOptions.sample_nodes
    """Nodes sampled around the target of an ego sequence."""
    samples: int = BatchOptions.samples
    """Ego sequences a target, in training and in the vote of evaluation."""
    candidates: int | None = BatchOptions.candidates
    """The most nodes that an ego target samples from, the nearest by PageRank; default max(128, 4 * sample_nodes)."""
    epsilon: float = BatchOptions.epsilon
    """To what precision the nearest by PageRank are found; less is slower, and reaches further."""
    super_ratio: float = BatchOptions.super_ratio
    """Super nodes of the coarsened graph per node (ego)."""
    sequence_nodes: int = BatchOptions.sequence_nodes
    """Regular nodes of a cluster sequence."""
    hops: int = BatchOptions.hops
    """In full batches nodes so far apart attend to each other."""
    top: int = BatchOptions.top
    """In full batches a node also attends to so many that are nearest by personalised PageRank."""
    max_pairs: int = BatchOptions.max_pairs
    """The most pairs of nodes in full batches; more are refused."""
    super_nodes: int | None = BatchOptions.super_nodes
    """Super nodes of a sequence with the global tokens; default for ego batches one more than these, else 64."""

    epochs: int = 5
    """Passes over the training nodes."""
    evaluate_every: int = 1
    """Epochs from one evaluation to the next; the last epoch is evaluated anyway."""
    patience: int | None = None
    """Stop after so many epochs in a row without a better one on the validation nodes; 0: never."""
    max_steps: int | None = None
    """Stop after this many steps, whatever the epochs say."""
    learning_rate: float = 5e-4
    """Peak rate; linear warm-up from 0, then linear decay, to 0 after the last step."""
    warmup: float = 0.1
    """Part of all steps spent in warm-up."""
    weight_decay: float = 0.1
    """Weight decay of AdamW; a learned embedding has none (SparseAdam)."""
    bias_lr_scale: float = 30.0
    """Rate of the learned part of a bias, as a multiple of the learning rate; it has no weight decay. 0: it stays."""
    clip_norm: float = 1.0
    """Largest global norm of the gradients."""
    metric: Literal["auto", "accuracy", "roc_auc", "micro_f1", "macro_f1", "average_precision"] = "auto"
    """By what on the validation nodes the best epoch is chosen: accuracy or, for two classes, roc_auc; of several
    labels a node micro_f1, macro_f1, average_precision or roc_auc. auto: the first."""
    seed: int = 0
    """Seed of split, weights, sampling and dropout."""
    dtype: Precision = "fp32"
    """bf16: mixed precision, weights and what layers add up stay in fp32."""
    device: str = "auto"
    """auto, cpu, cuda, or a GPU such as cuda:0, which processes share where there are more of them than GPUs."""
    workers: int = 0
    """Loader processes; 0 builds batches in the training process."""

    plan: str = "1,1,1"
    """pp,cp,dp: pipeline stages, ranks that share a sequence, groups that share a batch; torchrun starts pp*cp*dp.
    auto: measure this machine and take the fastest plan that fits. PLAN.json: of megagraph search --out, or a run."""
    pp: int | None = None
    """With --plan auto: no other number of pipeline stages."""
    cp: int | None = None
    """With --plan auto: no other number of ranks that share a sequence."""
    dp: int | None = None
    """With --plan auto: no other number of groups that share a batch."""
    memory_gib: float | None = None
    """With --plan auto: what a process may use; default all of a GPU, or its part of this machine's memory."""
    any_fit: bool = False
    """With --plan auto: search even if what was measured is too noisy to predict itself."""
    comm: Comm = "ring"
    """How keys and values reach all cp ranks: a block at a time, or all at once, in more memory and fewer steps.
    halo: just those that a rank's pairs name, in full batches. ulysses: each rank has all nodes of a part of the heads,
    and the bias of all nodes; cp divides heads."""
    shares: str | None = None
    """Sequences of a batch that each dp group takes, as in 11,5 where one of two is slower; default as even as can be,
    and what --plan auto finds."""
    stage_layers: str | None = None
    """Layers of every pipeline stage, as in 3,7,7,7; default as even as can be."""
    stages_per_rank: int = 1
    """Stages of every rank of a pipeline (virtual stages): with pp = 2 the first rank has stages 0, 2, ..."""
    microbatches: int = 1
    """Parts of a batch that follow each other through the stages of a pipeline; without one gradients accumulate."""
    schedule: ScheduleName = "gpipe"
    """gpipe: all forward, then all backward; 1f1b: fewer micro-batches in memory; interleaved: several stages per rank,
    shorter waits; zero_bubble: gradients of weights fill the waits."""
    across: Across = "pp"
    """What lies on other nodes first: pp, stages, with the groups of a stage side by side, or dp, these groups."""
    checkpoint: bool = False
    """Keep the input of every layer only, and compute the rest again for the backward pass."""
    shard: bool = False
    """Shard parameters and optimizer over cp x dp (fully_shard) instead of replicating them (DDP). --plan auto does
    where it is faster, or nothing else fits."""
    cuda_graphs: bool = False
    """On one GPU: replay the kernels of a step whose shapes came before as one CUDA graph. Faster where these take less
    time than Python takes to call them, with short sequences; the numbers stay the same, but for rounding."""
    trace: bool = False
    """Trace the third to fifth step into RUN/trace/rank-0.json.gz, ... (for Perfetto and megagraph plot timeline)."""
    tensorboard: bool = False
    """Write the numbers of metrics.jsonl to RUN/tensorboard, too; needs the package tensorboard."""
    wandb: bool = False
    """Send the numbers of metrics.jsonl to Weights & Biases, too; needs the package wandb."""
    timeout: float = 1800.0
    """Seconds that a process waits for the others, also for one that downloads the data; then all end."""

    def __post_init__(self) -> None:
        if isinstance(self.plan, Plan):
            raise ValueError(f"plan must be words such as 2,1,1 or a file, got a Plan, {self.plan}; call with_plan(it)")
        files.check_fields(self)
        if self.plan.endswith(".json"):
            self._take_plan_file()
        self._check_numbers()
        at_least = {
            1: ("batch_size", "epochs", "evaluate_every", "keep", "bad_steps"),
            0: ("seed", "workers", "learning_rate", "weight_decay", "bias_lr_scale", "checkpoint_every", "lock_wait"),
        }
        for low, names in at_least.items():
            for name in names:
                if not low <= getattr(self, name) < math.inf:
                    raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if not 0.0 <= self.warmup < 1.0:
            raise ValueError(f"warmup must be in [0, 1), got {self.warmup}")
        if self.model == "graphormer" and self.bias == "projected":
            raise ValueError("bias must be bucket or auto for model graphormer, got projected")
        for name in ("degree_input", "label_input", "propagate"):
            if getattr(self, name) and self.embedding == "learned":
                raise ValueError(f"{name} needs embedding features, got learned")
        for name in ("clip_norm", "timeout"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name, low in {"max_steps": 1, "patience": 0}.items():
            if (value := getattr(self, name)) is not None and value < low:
                raise ValueError(f"{name} must be at least {low}, got {value}")
        if self.patience == 0:
            object.__setattr__(self, "patience", None)
        if self.resume == AUTO and self.out is None:
            raise ValueError("--resume auto needs --out, the folder of the run to begin or to go on with")
        if self.resume not in (None, AUTO) and self.out is not None and self.out.resolve() != self.resume.resolve():
            raise ValueError(f"out must be the folder that --resume names, {self.resume}, got {self.out}; leave it out")
        if self.resume_step is not None and (self.resume is None or self.resume_step < 0):
            raise ValueError(f"resume_step is a step of the run that --resume names, got {self.resume_step}")
        _ = self.limit_seconds
        # what concerns the model and its batches is checked where it is used
        self.model_config(in_features=1, num_classes=1, bias_size=1)
        _ = self.batch_options
        self._check_plan()

    def _check_numbers(self) -> None:
        """Raise ValueError for a number that is too large for whatever it is passed on to."""
        for name, value in vars(self).items():
            most = _AT_MOST.get(name, (1 << 31) - 1)
            if type(value) is int and value > most:
                raise ValueError(f"{name} must be at most {most}, got {flags.short(value)}")
        for name in ("timeout", "lock_wait"):
            if getattr(self, name) > _MAX_SECONDS:
                raise ValueError(f"{name} must be at most {_MAX_SECONDS:g} seconds, got {getattr(self, name)}")

    def _check_plan(self) -> None:
        for name in ("pp", "cp", "dp", "memory_gib"):
            value = getattr(self, name)
            if value is not None and self.plan != "auto":
                raise ValueError(f"{name} is a part of --plan auto, got {value} beside --plan {self.plan}")
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0, got {value}")
        if self.any_fit and self.plan != "auto":
            raise ValueError(f"any_fit is a part of --plan auto, got it beside --plan {self.plan}")
        if self.batching == "full":
            plan = None if self.plan == "auto" else self.parallel_plan()
            spread = (self.dp or 1) * self.microbatches if plan is None else plan.dp * plan.num_microbatches
            if spread > 1:
                raise ValueError(
                    "plan must have dp = 1 and microbatches 1 for full batches, which are one sequence: its nodes are "
                    f"spread by cp, its layers by pp; got {self.plan} and {self.microbatches}"
                )
        elif self.comm == "halo":
            raise ValueError(
                "comm must be ring, allgather or ulysses where all pairs attend, got halo; it is for full batches"
            )
        if self.cuda_graphs:
            self._check_cuda_graphs()
        if self.plan != "auto":
            self.parallel_plan()
        elif self.stage_layers is not None or self.shares is not None or self.stages_per_rank != 1:
            raise ValueError(
                "stage_layers, shares and stages_per_rank must not be given with --plan auto, which finds them"
            )

    def _check_cuda_graphs(self) -> None:
        """A step must be one call of the whole model, of tensors alone."""
        allowed = {"plan": ("1,1,1",), "microbatches": (1,), "embedding": ("features",), "batching": ("ego", "cluster")}
        for name, values in allowed.items():
            if (value := getattr(self, name)) not in values:
                raise ValueError(f"{name} must be {' or '.join(map(str, values))} with cuda_graphs, got {value}")

    def parallel_plan(self) -> Plan:
        """The layout of the processes, from its fields; the inverse of ``with_plan``."""
        pp, cp, dp = flags.integers("plan", self.plan, "pp,cp,dp, three numbers", 3)
        Plan(pp=pp, cp=cp, dp=dp)  # so that the degrees are checked before the stages
        stages = pp * self.stages_per_rank
        layers, shares = tuple[int, ...](), tuple[int, ...]()
        if self.shares is not None:
            shares = flags.integers("shares", self.shares, f"dp = {dp} numbers", dp)
        if self.stage_layers is not None:
            layers = flags.integers("stage_layers", self.stage_layers, f"{stages} numbers", stages)
        return Plan(
            pp=pp,
            cp=cp,
            comm=self.comm,
            dp=dp,
            shares=shares,
            layers=layers,
            stages_per_rank=self.stages_per_rank,
            num_microbatches=self.microbatches,
            schedule=self.schedule,
            across=self.across,
            checkpoint=self.checkpoint,
            shard=self.shard,
        )

    def _take_plan_file(self) -> None:
        """In place of the file, the fields of its plan."""
        names = [name for name in (*LAYOUT_FIELDS, *SEARCH_FIELDS) if name != "plan"]
        given = [name for name in names if getattr(self, name) != getattr(TrainConfig, name)]
        if given:
            raise ValueError(
                f"{', '.join(given)} must not be given beside --plan {self.plan}, which says all of a plan"
            )
        told = replace(self, plan=TrainConfig.plan).with_plan(Plan.load(self.plan))
        for name in ("plan", *names):
            object.__setattr__(self, name, getattr(told, name))

    def with_plan(self, plan: Plan) -> TrainConfig:
        """The configuration under this plan, which ``parallel_plan`` then gives back; what guided a search is gone."""
        return replace(
            self,
            plan=f"{plan.pp},{plan.cp},{plan.dp}",
            **{name: getattr(TrainConfig, name) for name in SEARCH_FIELDS},
            comm=plan.comm,
            shares=",".join(map(str, plan.shares)) or None,
            stage_layers=",".join(map(str, plan.layers)) or None,
            stages_per_rank=plan.stages_per_rank,
            microbatches=plan.num_microbatches,
            schedule=plan.schedule,
            across=plan.across,
            checkpoint=plan.checkpoint,
            shard=plan.shard,
        )

    @property
    def limit_seconds(self) -> float | None:
        """The time limit."""
        return None if self.time_limit is None else flags.seconds(self.time_limit)

    @property
    def batch_sequences(self) -> int:
        """Sequences of a global batch."""
        if self.batching == "full":
            return 1
        return self.batch_size * (self.samples if self.batching == "ego" else 1)

    @property
    def sizes_of_plan(self) -> dict[str, int]:
        """What a plan must fit, beside the processes."""
        return {"num_layers": self.layers, "heads": self.heads, "batch_sequences": self.batch_sequences}

    def model_config(self, **data: Any) -> ModelConfig:
        """The model to train on data that say the other fields of one."""
        return ModelConfig(**self._fields_of(ModelConfig, bias=self.bias_form, **data))

    @property
    def batch_options(self) -> BatchOptions:
        """The batches to train on."""
        channel_dtype = "bf16" if self.dtype == "bf16" else "fp32"
        return BatchOptions(**self._fields_of(BatchOptions, bias=self.bias_form, channel_dtype=channel_dtype))

    def _fields_of(self, kind: type[BatchOptions] | type[ModelConfig], **given: Any) -> dict[str, Any]:
        """Fields of ``kind``: those given, and others that are here."""
        return {field.name: getattr(self, field.name) for field in fields(kind) if hasattr(self, field.name)} | given

    @property
    def bias_form(self) -> Literal["projected", "bucket"]:
        if self.bias == "auto":
            return "projected" if self.batching == "ego" and self.model == "hierarchical" else "bucket"
        return self.bias

    @property
    def parameter_dtype(self) -> torch.dtype:
        import torch

        return torch.float64 if self.dtype == "fp64" else torch.float32

    def torch_device(self) -> torch.device:
        """The device to train on; "auto" and "cuda" give each process of a machine a GPU of its own.

        Raises:
            ValueError: there is no such device.
        """
        return flags.device(self.device)

    def shared_fields(self) -> dict[str, Any]:
        """What all processes of a run must agree on; folders and devices may differ from machine to machine."""
        own = ("root", "out", "resume", "weights", "device", "workers")
        return {name: value for name, value in asdict(self).items() if name not in own}

    def numbers(self) -> dict[str, Any]:
        """The fields that stay as they are for the whole of a run."""
        changing = (*FREE_FIELDS, "epochs", "max_steps", "learning_rate")
        return {name: value for name, value in asdict(self).items() if name not in changing}

    def check_continues(self, run: TrainConfig) -> dict[str, tuple[Any, Any]]:
        """What of a run to resume changes its numbers: training longer and a lower learning rate, old and new values.

        Raises:
            ValueError: another field that the numbers depend on is not that of ``run``.
        """
        changes = {}
        for name, value in asdict(self).items():
            before = getattr(run, name)
            if name in FREE_FIELDS or value == before:
                continue
            longer = name in ("epochs", "max_steps") and (value is None or (before is not None and value > before))
            if not longer and not (name == "learning_rate" and value < before):
                free = [free for free in FREE_FIELDS if free not in ("resume", "resume_step", "out")]
                raise ValueError(
                    f"{name} of a resumed run must stay {before!r}, got {value!r}; "
                    f"only {', '.join(free)} may change, epochs and max_steps may grow, learning_rate may fall"
                )
            changes[name] = (before, value)
        return changes

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrainConfig:
        """A configuration from the values of a JSON object; ValueError names a field that is not right."""
        return files.typed(cls, values, "the configuration of a run")
