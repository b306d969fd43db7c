"""What the attention operators refuse.

``check_inputs`` sees what a caller passes. Autograd, compiled code and callers of ``torch.ops`` come past it, and a
tensor may change after it: so the operators, which alone see real memory, have ``check_operands`` look at all that
compiled loops and kernels are about to address. Nothing below them checks again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import mul
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from megagraph.attention.bias import Bias, BorderedBias, BucketBias, DenseBias, ProjectedBias
from megagraph.attention.engines import ENGINES
from megagraph.attention.fields import MASKED_BUCKET, check_strided
from megagraph.attention.layout import NodeLayout
from megagraph.attention.step import Step

MAX_HEAD_DIM = 256
_ONE_STEP = (DenseBias, BucketBias, ProjectedBias)
T = TypeVar("T")


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None,
    key_padding_mask: Tensor | None,
    dropout_p: float,
    dropout_key: Tensor | None,
    layout: NodeLayout | None = None,
    *,
    all_rows: bool = False,
) -> None:
    """Raise ValueError for what does not fit; with a ``layout``, k and v are one rank's rows of the N columns.

    ``all_rows``: q has all of this rank's rows, and the bias those of all ranks.
    """
    given = {"q": q, "k": k, "v": v, "key_padding_mask": key_padding_mask, "dropout_key": dropout_key}
    for name, x in given.items():
        if x is not None or name in "qkv":
            check_strided(name, x)
    if q.ndim != 4:
        raise ValueError(f"q must have shape [B, H, M, D], got {tuple(q.shape)}")
    batch, heads, rows, head_dim = q.shape
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"the head dim D must be 1 to {MAX_HEAD_DIM}, got {head_dim}")
    if not q.is_floating_point():
        raise ValueError(f"q must be floating point, got {q.dtype}")
    if layout is not None:
        keys, columns, axis = layout.num_local, layout.num_columns, "S"
    else:
        keys = columns = k.shape[2] if k.ndim == 4 else -1
        axis = "N"
    for name, x in (("k", k), ("v", v)):
        if x.ndim != 4 or x.shape != (batch, heads, keys, head_dim):
            raise ValueError(
                f"{name} must have shape [B, H, {axis}, D] = [{batch}, {heads}, {keys if keys >= 0 else axis}, "
                f"{head_dim}], got {tuple(x.shape)}"
            )
        if x.dtype != q.dtype:
            raise ValueError(f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}")

    if layout is not None and (rows > keys or (all_rows and rows < keys)):
        at_most = "all" if all_rows else "at most"
        raise ValueError(f"q must have {at_most} the S = {keys} rows of this rank, got {rows}")
    if all_rows:
        rows = columns

    tensors: dict[str, Tensor | None] = {"k": k, "v": v}
    if bias is not None:
        if not isinstance(bias, _ONE_STEP) and (
            layout is None or not isinstance(bias, BorderedBias)  # which takes several steps
        ):
            raise ValueError(
                f"bias must be a DenseBias, a BucketBias, a ProjectedBias or a float tensor, got {type(bias).__name__}"
                + ("; add several by megagraph.add_biases" if isinstance(bias, tuple | list) else "")
            )
        shape = tuple(bias.shape)
        shared = isinstance(bias, DenseBias) and bias.relation is None
        heads_allowed = (1, heads) if shared else (heads,)
        if shape[0] not in (1, batch) or shape[1] not in heads_allowed or shape[2:] != (rows, columns):
            expected_heads = f"{heads} or 1" if shared else f"{heads}"
            if not isinstance(bias, DenseBias) and shape[1] != heads == bias.learned.shape[1]:
                what = "weight [H, C]" if isinstance(bias, ProjectedBias) else "table [H, R]"
                raise ValueError(
                    f"{type(bias).__name__} must have a {what} for {heads} heads, got {list(bias.learned.shape)}; "
                    "pass its transpose, .t()"
                )
            wanted = f"these query rows and all {columns} columns"
            if shape[2:] == (rows, columns):
                wanted = "data of every sequence, or of one" if shape[1] in heads_allowed else f"{expected_heads} heads"
            raise ValueError(
                f"bias must have shape [B or 1, H or 1, M, N] = [{batch} or 1, {expected_heads}, {rows}, {columns}], "
                f"got {list(shape)}; pass {wanted}"
            )
        tensors |= {"bias data": bias.data, "the learned part of bias": bias.learned, "bias mask": bias.mask}
        tensors |= {} if bias.relation is None else bias.relation.lists
    if key_padding_mask is not None:
        if key_padding_mask.dtype != torch.bool or key_padding_mask.shape != (batch, columns):
            raise ValueError(
                f"key_padding_mask must be torch.bool [B, N] = [{batch}, {columns}] (True = ignore), "
                f"got {key_padding_mask.dtype} {list(key_padding_mask.shape)}"
            )
        tensors["key_padding_mask"] = key_padding_mask
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    if dropout_p > 0.0:
        if dropout_key is None or dropout_key.dtype != torch.int32 or dropout_key.shape != (batch,):
            got = "None" if dropout_key is None else f"{dropout_key.dtype} {list(dropout_key.shape)}"
            raise ValueError(
                f"dropout_p = {dropout_p} needs dropout_key, torch.int32 [B] = [{batch}], got {got}; "
                "make one with megagraph.dropout_keys(seed, step, sequence_ids)"
            )
        tensors["dropout_key"] = dropout_key
    device = q.device
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} must be on the device of q, {device}, got {tensor.device}")


def check_scale(scale: float) -> float:
    """The factor of q k^T, or a ValueError where it is not finite, or a tensor, which would get no gradient."""
    if isinstance(scale, Tensor):
        raise ValueError("scale must be a number, got a tensor; multiply q by it where it is learned")
    if not -math.inf < scale < math.inf:
        raise ValueError(f"scale must be finite, got {scale}; None takes D ** -0.5")
    return float(scale)


def check_operands(step: Step, q: Tensor, k: Tensor, v: Tensor, *, whole: bool) -> None:
    """Raise ValueError unless an operator's inputs and segments are what, and where, it will address.

    ``whole``: bias and masks have a column for every key, in their order; else as many as they agree on.
    """
    if step.engine not in ENGINES:
        raise ValueError(f"engine must be {' or '.join(map(repr, ENGINES))}, got {step.engine!r}")
    if step.columns is None and step.column_ids is not None:
        raise ValueError("column_ids must be None without columns: dense columns go on from first_column")
    if step.short and not whole:  # that path takes all keys to be here, and looks for a column of each
        raise ValueError(f"short must be False in one step of several, got {step.short}")
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(f"q and k must have shape [B, H, M or N, D], got {list(q.shape)} and {list(k.shape)}")
    (B, H, M, D), keys, device = q.shape, k.shape[2], q.device
    check_tensor("q", q, device, (B, H, M, D))
    check_tensor("k", k, device, (B, H, keys, D), q.dtype)
    check_tensor("v", v, device, (B, H, keys, D), q.dtype)
    if step.columns is not None:
        num_columns: int | None = _check_relation(step, device, B, M, keys if whole else None)
        check_step(step, device, B, H, M, num_columns)
        _check_segments(step, keys, num_columns, whole)
        return
    dense = step.learned if step.form == "dense" else None
    wide = [x for x in (step.data, dense, step.bias_mask, step.key_padding_mask) if x is not None and x.ndim]
    num_columns = keys if whole else wide[0].shape[-1] if wide else None
    check_step(step, device, B, H, M, num_columns)
    _check_segments(step, keys, num_columns, whole)


def _check_segments(step: Step, keys: int, num_columns: int | None, whole: bool) -> None:
    if whole and step.segments != [(0, 0, keys)]:
        raise ValueError(f"segments must be [(0, 0, {keys})], all keys, got {step.segments}")
    for segment in step.segments:
        key, column, length = segment
        if min(segment) < 0 or key + length > keys or (num_columns is not None and column + length > num_columns):
            raise ValueError(
                f"segments must be (key_start, column_start, length) within {keys} keys and "
                f"{'any' if num_columns is None else num_columns} columns of the bias and the masks, got {segment}"
            )


def check_step(step: Step, device: torch.device, B: int, H: int, M: int, N: int | None) -> None:
    """``check_operands`` of the step's own tensors; N is None only if none has columns."""
    N, learned = -1 if N is None else N, step.learned
    if step.columns is not None:
        P, R = len(step.columns), learned.shape[1] if learned is not None and learned.ndim == 2 else -1
        if step.form == "dense":
            check_tensor("the learned part of bias", learned, device, (P, H))
        elif step.form in ("bucket", "projected"):
            check_tensor("the learned part of bias", learned, device, (H, R))
            shape, dtype = ((P,), torch.uint8) if step.form == "bucket" else ((P, R), None)
            check_tensor("bias data", step.data, device, shape, dtype)
        if step.bias_mask is not None:
            raise ValueError("bias mask must be None with listed pairs")
    elif step.form == "dense":
        check_tensor("the learned part of bias", learned, device, (B, H, M, N), broadcast=2)
    elif step.form in ("bucket", "projected"):
        R = learned.shape[1] if learned is not None and learned.ndim == 2 else -1
        check_tensor("the learned part of bias", learned, device, (H, R))
        if step.form == "bucket":
            check_tensor("bias data", step.data, device, (B, M, N), torch.uint8, broadcast=1)
        else:
            check_tensor("bias data", step.data, device, (B, R, M, N), broadcast=1)
    if step.form not in ("none", "dense", "bucket", "projected") or (step.form == "none" and step.columns is not None):
        raise ValueError(f"form must be 'none', 'dense', 'bucket' or 'projected', got {step.form!r}")
    if step.bias_mask is not None:
        check_tensor("bias mask", step.bias_mask, device, (B, M, N), torch.bool, broadcast=1)
    if step.key_padding_mask is not None:
        check_tensor("key_padding_mask", step.key_padding_mask, device, (B, N), torch.bool)
    if step.dropout_key is not None:
        check_tensor("dropout_key", step.dropout_key, device, (B,), torch.int32, contiguous=True)
    if step.row_ids is not None:
        check_tensor("row_ids", step.row_ids, device, (M,), contiguous=True)


def _check_relation(step: Step, device: torch.device, B: int, M: int, N: int | None) -> int:
    """``check_operands`` of the lists of pairs: the number of columns; N, where it is known."""
    columns, row_starts, key_starts = step.columns, step.row_starts, step.key_starts
    assert columns is not None
    if columns.ndim != 1 or row_starts is None or row_starts.ndim != 1 or key_starts is None or key_starts.ndim != 1:
        raise ValueError("columns, row_starts and key_starts must be lists, all of them or none")
    if M == 0 and N is None:  # no rows, which would tell how many relations there are
        wide = (x for x in (step.column_ids, step.key_padding_mask) if x is not None and x.ndim)
        N = next((x.shape[-1] for x in wide), None)
    own = len(row_starts) == B * M + 1 and (M > 0 or (N is not None and len(key_starts) == B * N + 1))
    sequences = B if B > 1 and own else 1
    N = (len(key_starts) - 1) // sequences if N is None else N
    wanted = {
        "row_starts": (row_starts, (sequences * M + 1,), torch.int64),
        "key_starts": (key_starts, (sequences * N + 1,), torch.int64),
        "columns": (columns, columns.shape, torch.int32),
        "key_rows": (step.key_rows, columns.shape, torch.int32),
        "key_pairs": (step.key_pairs, columns.shape, torch.int32),
    }
    if step.column_ids is not None:
        wanted["column_ids"] = (step.column_ids, (N,), torch.int32)
    for name, (x, shape, dtype) in wanted.items():
        check_tensor(name, x, device, shape, dtype, contiguous=True)
    if device.type == "cpu" and not torch.compiler.is_compiling() and type(columns) in (Tensor, nn.Parameter):
        bounds = {"row_starts": len(columns), "key_starts": len(columns), "columns": N - 1, "key_rows": max(M - 1, 0)}
        for name, most in (bounds | {"key_pairs": max(len(columns) - 1, 0)}).items():
            x = wanted[name][0]
            assert x is not None
            low, high = _once(_range_ascending if name.endswith("starts") else _range, x)
            if low < 0 or high > most:
                raise ValueError(
                    f"{name} must be in 0..{most}, and starts ascend, got {low}..{high}; keep it as it was"
                )
    return N


def _range(x: Tensor) -> tuple[int, int]:
    low, high = x.aminmax() if x.numel() else (x.new_zeros(()), x.new_zeros(()))
    return int(low), int(high)


def _range_ascending(x: Tensor) -> tuple[int, int]:
    """From the first to the last, or from -1 where any is below the one before."""
    return -1 if (x.diff() < 0).any() else int(x[0]), int(x[-1])


def check_tensor(
    name: str,
    x: Tensor | None,
    device: torch.device,
    shape: tuple[int, ...],
    dtype: torch.dtype | None = None,
    *,
    broadcast: int = 0,
    contiguous: bool = False,
) -> None:
    """Raise ValueError unless x is there, as told and with memory for all it spans.

    dtype None: any; so many leading axes as ``broadcast`` says may be 1.
    """
    if x is None or (x.shape != shape and not _broadcasts(x.shape, shape, broadcast)):
        axes = ", ".join(f"{size} or 1" if i < broadcast else str(size) for i, size in enumerate(shape))
        got = "None" if x is None else list(x.shape)
        raise ValueError(f"{name} must have shape [{axes}], got {got}; pass it so and keep it so until backward")
    if (dtype is not None and x.dtype != dtype) or x.device != device:
        raise ValueError(
            f"{name} must be {dtype or x.dtype} on {device}, got {x.dtype} on {x.device}; convert it and keep it so "
            "until backward"
        )
    if contiguous and not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {list(x.stride())}; pass {name}.contiguous()")
    size = x.numel()
    if size and not x.is_contiguous():
        strides = x.stride()
        size = 1 + sum(map(mul, x.shape, strides)) - sum(strides)  # (n - 1) steps of each axis
    needed, there = (x.storage_offset() + size) * x.itemsize, x.untyped_storage().nbytes()
    if size and needed > there:
        raise ValueError(
            f"{name} needs {needed} bytes of its storage, got {there}: it was freed or made smaller; bring it back (as "
            "unshard() does for parameters that FSDP has freed) and keep it until backward"
        )


def _broadcasts(shape: torch.Size, wanted: tuple[int, ...], axes: int) -> bool:
    if len(shape) != len(wanted):
        return False
    return all(a == b or (a == 1 and i < axes) for i, (a, b) in enumerate(zip(shape, wanted, strict=True)))


def check_values(step: Step) -> None:
    """Raise ValueError for data of a bias that mean nothing; on a GPU, which would have to wait, nothing is read."""
    data, learned = step.data, step.learned
    if data is None or learned is None or data.device.type != "cpu" or not data.numel():
        return
    if torch.compiler.is_compiling() or type(data) not in (Tensor, nn.Parameter):  # fake ones have no values
        return
    if step.form == "bucket" and (highest := _once(_highest_bucket, data)) >= learned.shape[1]:
        raise ValueError(
            f"BucketBias index must be below the table's {learned.shape[1]} buckets, or {MASKED_BUCKET} for a masked "
            f"pair; got {highest}"
        )
    if step.form == "projected" and not _once(_all_finite, data):
        raise ValueError("ProjectedBias channels must be finite, got inf or nan; use mask for pairs to leave out")


def _highest_bucket(index: Tensor) -> int:
    index = index[None] if index.ndim == 1 else index.flatten(0, 1)
    rows = index.split(max((1 << 20) // index.shape[-1], 1))
    # 255 wraps to 0: every other bucket moves up by one
    return max(int((some + 1).max()) for some in rows) - 1


def _all_finite(channels: Tensor) -> bool:
    low, high = channels.aminmax()
    return bool(torch.isfinite(low) and torch.isfinite(high))


def _once(of_values: Callable[[Tensor], T], data: Tensor) -> T:
    """of_values(data), kept until data changes or goes: all layers of a model share the data of their bias."""
    if data.is_inference():  # has no version
        return of_values(data)
    version, value = _values.get(data, (-1, None))
    if version != data._version:
        value = of_values(data)
        _values[data] = (data._version, value)
    return value


_values: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # of the data of a bias: (version, value)
