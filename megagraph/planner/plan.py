"""A plan: how the processes of a run share a model and its batches."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A layout of pp * cp * dp processes; paper symbols in brackets.

    Args:
        pp: pipeline stages [P_pp].
        cp: ranks over which the nodes of a sequence are spread [P_cp].
        dp: groups of ranks that take different sequences of a batch [P_dp].
        layers: layers of every stage [L_i]; ``()`` for as even as can be, the first stages one less.
        num_microbatches: parts of a batch that follow each other through the stages [K]; 1 where pp is 1.
        schedule: order of the micro-batches; ``"gpipe"``: all forward, then all backward.
        shard: parameters, gradients and optimizer state are sharded over dp x cp (fully_shard) instead of
            replicated (DDP).

    Raises:
        ValueError: a degree below 1, or stages that do not fit; the message gives expected and actual.
    """

    pp: int = 1
    cp: int = 1
    dp: int = 1
    layers: tuple[int, ...] = ()
    num_microbatches: int = 1
    schedule: Literal["gpipe"] = "gpipe"
    shard: bool = False

    def __post_init__(self) -> None:
        for name in ("pp", "cp", "dp", "num_microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.layers and (len(self.layers) != self.pp or min(self.layers) < 1):
            raise ValueError(f"layers must give each of the pp = {self.pp} stages at least 1 layer, got {self.layers}")
        if self.pp == 1 and self.num_microbatches != 1:
            raise ValueError(f"num_microbatches must be 1 without a pipeline (pp = 1), got {self.num_microbatches}")
        if self.schedule != "gpipe":
            raise ValueError(f"schedule must be 'gpipe', got {self.schedule!r}")

    @property
    def world_size(self) -> int:
        """Processes."""
        return self.pp * self.cp * self.dp

    def stages(self, num_layers: int) -> list[range]:
        """The layers of every stage.

        Raises:
            ValueError: the stages do not add up to ``num_layers``, or there are more stages than layers.
        """
        layers = self.layers or tuple((num_layers + stage) // self.pp for stage in range(self.pp))
        if sum(layers) != num_layers:
            raise ValueError(
                f"layers of the stages must sum to the model's {num_layers}, "
                f"got {' + '.join(map(str, layers))} = {sum(layers)}"
            )
        if min(layers) < 1:
            raise ValueError(f"pp must be at most the number of layers, {num_layers}, got {self.pp}")
        bounds = [0, *accumulate(layers)]
        return [range(start, stop) for start, stop in pairwise(bounds)]

    def check(self, *, world_size: int, num_layers: int, batch_sequences: int) -> None:
        """Raise ValueError unless the plan fits the processes, the model and the global batch."""
        if self.world_size != world_size:
            raise ValueError(
                f"pp * cp * dp must equal the number of processes: {self.pp} * {self.cp} * {self.dp} = "
                f"{self.world_size}, got {world_size}; start them with torchrun --nproc-per-node {self.world_size}"
            )
        self.stages(num_layers)
        parts = self.dp * self.num_microbatches
        if batch_sequences % parts:
            raise ValueError(
                f"the sequences of a global batch must be a multiple of dp * num_microbatches = "
                f"{self.dp} * {self.num_microbatches} = {parts}, got {batch_sequences}"
            )

    def save(self, path: Path | str) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2))

    @classmethod
    def load(cls, path: Path | str) -> Plan:
        """Read a plan.

        Raises:
            ValueError: the file does not hold the fields of a plan.
        """
        values = json.loads(Path(path).read_text())
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or not set(values) <= names:
            raise ValueError(f"{path} must hold a plan with the fields {sorted(names)}, got {values}")
        if "layers" in values:
            values["layers"] = tuple(values["layers"])
        return cls(**values)
