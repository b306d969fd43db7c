"""One attention step: this rank's queries against one visiting block of keys (paper Eq. 3)."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Step:
    """What forward and backward share; the fields are the keywords of the Triton launchers.

    H heads, M query rows here, N global columns. ``segments`` are (key_start, column_start, length): keys
    key_start.. of the visiting block stand in columns column_start.. of the bias and the masks.
    """

    form: str  # "none", "dense", "bucket" or "projected"
    data: Tensor | None  # uint8 [B or 1, M, N] or [B or 1, C, M, N]
    learned: Tensor | None  # [B or 1, H or 1, M, N], [H, R] or [H, C]
    bias_mask: Tensor | None  # bool [B or 1, M, N]
    key_padding_mask: Tensor | None  # bool [B, N]
    segments: list[tuple[int, int, int]]
    scale: float
    dropout_p: float
    dropout_key: Tensor | None  # int32 [B]
    row_ids: Tensor | None = None  # global row of each local row; None: the same

    def flat(self) -> tuple:
        """The fields in order, as arguments of an operator, which takes no list of tuples."""
        values = vars(self) | {"segments": [number for segment in self.segments for number in segment]}
        return tuple(values.values())

    @classmethod
    def from_flat(cls, *values) -> Step:
        step = dict(zip((field.name for field in fields(cls)), values, strict=True))
        if len(step["segments"]) % 3:
            raise ValueError(
                f"segments must be (key_start, column_start, length) of each in one list, got {step['segments']}"
            )
        numbers = iter(step["segments"])
        return cls(**step | {"segments": list(zip(numbers, numbers, numbers, strict=True))})
