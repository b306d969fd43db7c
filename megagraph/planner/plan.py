"""A plan: how the processes of a run share a model and its batches."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal, get_args

from megagraph import files
from megagraph.attention.ways import Comm, check_comm
from megagraph.data.options import deal

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
Across = Literal["pp", "dp"]

_SCHEDULES, _ACROSS = get_args(ScheduleName), get_args(Across)
MAX_PROCESSES = 1 << 20
# a schedule is made of all stages and micro-batches
_MOST = dict.fromkeys(("pp", "cp", "dp"), MAX_PROCESSES) | {"stages_per_rank": 1 << 14, "num_microbatches": 1 << 14}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A layout of pp * cp * dp processes; paper symbols in brackets.

    Args:
        pp: ranks of a pipeline [P_pp].
        cp: ranks over which the nodes of a sequence are spread [P_cp].
        comm: how keys and values reach all cp ranks: ``"ring"``, block by block behind the work, ``"allgather"``, of
            listed pairs ``"halo"``, or ``"ulysses"``, queries as well, of a part of the heads for each.
        dp: groups of ranks that take different sequences of a batch, replicas [P_dp].
        shares: sequences of a batch that each replica takes, in proportion where it has others; ``()`` for as even as
            can be.
        layers: layers of every stage [L_i], in the order of the layers; ``()`` for as even as can be, the first
            stages one less.
        stages_per_rank: stage s is on rank s % pp of its pipeline, so that each has this many; virtual stages.
        num_microbatches: parts of a batch that follow each other through the stages [K]; without a pipeline (pp = 1)
            each goes forward and back before the next one, and gradients are accumulated.
        schedule: order of the micro-batches, and what it asks for:
            ``"gpipe"``: all forward, then all backward;
            ``"1f1b"``: backward as soon as it can be, at most pp micro-batches in flight; K >= pp;
            ``"interleaved"``: the same over several stages per rank, a shorter bubble; K a multiple of pp;
            ``"zero_bubble"``: gradients of weights come later, where a rank would wait (ZB1P, arXiv:2401.10241);
            K a multiple of pp, ``shard`` where cp * dp > 1, no ``checkpoint``.
        across: what lies on other nodes first, where a plan is of several: stages, so that replicas are side by side,
            or replicas. The ranks of a ring, which send most, are always neighbours.
        checkpoint: keep the input of every layer only, and compute the rest again for the backward pass.
        shard: parameters, gradients and optimizer state are sharded over dp x cp (fully_shard) instead of
            replicated (DDP).

    Raises:
        ValueError: a degree below 1, or stages that do not fit; the message gives expected and actual.

    Examples:
        >>> plan = mg.Plan(pp=2, dp=4, layers=(3, 5), num_microbatches=4, schedule="1f1b")
        >>> plan.world_size, plan.stages(num_layers=8)
        (8, [range(0, 3), range(3, 8)])
    """

    pp: int = 1
    cp: int = 1
    comm: Comm = "ring"
    dp: int = 1
    shares: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()
    stages_per_rank: int = 1
    num_microbatches: int = 1
    schedule: ScheduleName = "gpipe"
    across: Across = "pp"
    checkpoint: bool = False
    shard: bool = False

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
            if value > most:
                raise ValueError(f"{name} must be at most {most}, got {value}")
        if check_comm(self.comm) == "halo" and self.cp == 1:
            raise ValueError("comm must be 'ring' for cp = 1, where nothing is sent, got 'halo'")
        if self.across not in _ACROSS:
            raise ValueError(f"across must be 'pp' or 'dp', got {self.across!r}")
        if self.across == "dp" and min(self.pp, self.dp) == 1:
            raise ValueError(f"across must be 'pp' unless pp and dp are above 1, got {self.pp} and {self.dp}")
        if self.shares and (len(self.shares) != self.dp or min(self.shares) < 1):
            raise ValueError(f"shares must give each of the dp = {self.dp} replicas at least 1, got {self.shares}")
        if self.layers and (len(self.layers) != self.num_stages or min(self.layers) < 1):
            raise ValueError(
                f"layers must give each of the pp * stages_per_rank = {self.pp} * {self.stages_per_rank} stages "
                f"at least 1 layer, got {self.layers}"
            )
        if self.schedule not in _SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(_SCHEDULES)}, got {self.schedule!r}")
        if self.pp == 1:
            for name, only in (("stages_per_rank", 1), ("schedule", "gpipe")):
                if getattr(self, name) != only:
                    raise ValueError(
                        f"{name} must be {only!r} without a pipeline (pp = 1), got {getattr(self, name)!r}"
                    )
        self._check_schedule()

    def _check_schedule(self) -> None:
        if self.schedule in ("gpipe", "1f1b") and self.stages_per_rank != 1:
            raise ValueError(
                f"stages_per_rank must be 1 under schedule {self.schedule!r}, got {self.stages_per_rank}; "
                "take 'interleaved' for more"
            )
        if self.schedule == "interleaved" and self.stages_per_rank == 1:
            raise ValueError(
                "stages_per_rank must be at least 2 under schedule 'interleaved', got 1; take '1f1b' for one"
            )
        if self.schedule == "1f1b" and self.num_microbatches < self.pp:
            raise ValueError(
                f"num_microbatches must be at least pp = {self.pp} under schedule '1f1b', got {self.num_microbatches}"
            )
        if self.schedule in ("interleaved", "zero_bubble") and self.num_microbatches % self.pp:
            raise ValueError(
                f"num_microbatches must be a multiple of pp = {self.pp} under schedule {self.schedule!r}, "
                f"got {self.num_microbatches}"
            )
        if self.schedule == "zero_bubble" and self.cp * self.dp > 1 and not self.shard:
            # DDP waits for gradients that autograd.grad hands out past it
            raise ValueError("shard must be true under schedule 'zero_bubble' where cp * dp > 1")
        if self.schedule == "zero_bubble" and self.checkpoint:
            # every part of the split backward would compute the layer again
            raise ValueError("checkpoint must be false under schedule 'zero_bubble'; take '1f1b' or 'interleaved'")

    def __str__(self) -> str:
        words = [f"pp {self.pp}, cp {self.cp}, dp {self.dp}"]
        words += [f"shares {','.join(map(str, self.shares))}"] if self.shares else []
        if self.pp > 1:
            layers = ",".join(map(str, self.layers)) or "even"
            words += [f"layers {layers}", f"{self.num_microbatches} micro-batches", self.schedule]
        elif self.num_microbatches > 1:
            words += [f"{self.num_microbatches} micro-batches"]
        words += [name for name in ("checkpoint", "shard") if getattr(self, name)]
        words += [self.comm] if self.cp > 1 and self.comm != "ring" else []
        words += ["dp across"] if self.across == "dp" else []
        return ", ".join(words)

    @property
    def world_size(self) -> int:
        """Processes."""
        return self.pp * self.cp * self.dp

    @property
    def strides(self) -> tuple[int, int, int]:
        """How far apart neighbours in pp, dp and cp are, by their ranks."""
        stage, replica = (self.dp, 1) if self.across == "pp" else (1, self.pp)
        return stage * self.cp, replica * self.cp, 1

    @property
    def num_stages(self) -> int:
        """Stages of the whole model."""
        return self.pp * self.stages_per_rank

    def stages(self, num_layers: int) -> list[range]:
        """The layers of every stage.

        Raises:
            ValueError: the stages do not add up to ``num_layers``, or there are more stages than layers.
        """
        layers = self.layers or tuple((num_layers + stage) // self.num_stages for stage in range(self.num_stages))
        if sum(layers) != num_layers:
            raise ValueError(
                f"layers of the stages must sum to the model's {num_layers}, "
                f"got {' + '.join(map(str, layers))} = {sum(layers)}"
            )
        if min(layers) < 1:
            raise ValueError(
                f"pp * stages_per_rank must be at most the number of layers, {num_layers}, "
                f"got {self.pp} * {self.stages_per_rank}"
            )
        bounds = [0, *accumulate(layers)]
        return [range(start, stop) for start, stop in pairwise(bounds)]

    def check(self, *, world_size: int, num_layers: int, heads: int, batch_sequences: int) -> None:
        """Raise ValueError unless the plan fits the processes, the model and the global batch."""
        if self.world_size != world_size:
            raise ValueError(
                f"pp * cp * dp must equal the number of processes: {self.pp} * {self.cp} * {self.dp} = "
                f"{self.world_size}, got {world_size}; start them with torchrun --nproc-per-node {self.world_size}, "
                f"or pass --plan auto, or a plan of {world_size}"
            )
        self.stages(num_layers)
        check_comm(self.comm, heads=heads, ranks=self.cp)
        least = min(self.sequences(batch_sequences))
        if least < self.num_microbatches:
            raise ValueError(
                f"every replica must have a sequence for each of num_microbatches = {self.num_microbatches}, got "
                f"{least} of the {batch_sequences} of a global batch on one of dp = {self.dp}; take fewer of "
                "either, or a larger batch"
            )

    def sequences(self, batch_sequences: int) -> list[int]:
        """Sequences of every replica, of a batch of so many."""
        return [stop - start for start, stop in pairwise(deal(batch_sequences, self.shares or (1,) * self.dp))]

    def most_sequences(self, batch_sequences: int) -> int:
        """Sequences of the replica that has most, of a batch of so many."""
        return max(self.sequences(batch_sequences)) if self.shares else -(-batch_sequences // self.dp)

    def save(self, path: Path | str) -> None:
        """Write the plan as JSON."""
        files.write_json(Path(path), asdict(self))

    @classmethod
    def load(cls, path: Path | str) -> Plan:
        """Read a plan.

        Raises:
            FileNotFoundError, ValueError: the file is not there, not as it was written, or no plan; one that was
                written by hand needs no checksum.
        """
        values = files.read_json(Path(path), "a plan", by_hand=True)
        if not values:
            raise ValueError(f"expected a plan with pp, cp, dp or more, got {{}} in {path}")
        return files.typed(cls, values, "a plan")
