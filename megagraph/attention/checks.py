"""What the attention operators refuse."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from megagraph.attention.bias import MASKED_BUCKET, Bias, BucketBias, DenseBias, ProjectedBias
from megagraph.attention.layout import NodeLayout

MAX_HEAD_DIM = 256


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None,
    key_padding_mask: Tensor | None,
    dropout_p: float,
    dropout_key: Tensor | None,
    layout: NodeLayout | None = None,
) -> None:
    """Raise ValueError for what does not fit; with a ``layout``, k and v are one rank's rows of the N columns."""
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

    if layout is not None and rows > keys:
        raise ValueError(f"q must have at most the S = {keys} rows of this rank, got {rows}")

    tensors: dict[str, Tensor | None] = {"k": k, "v": v}
    if bias is not None:
        if not isinstance(bias, DenseBias | BucketBias | ProjectedBias):
            raise ValueError(
                f"bias must be a DenseBias, a BucketBias, a ProjectedBias or a float tensor, got {type(bias).__name__}"
            )
        shape = tuple(bias.shape)
        heads_allowed = (1, heads) if isinstance(bias, DenseBias) else (heads,)
        if shape[0] not in (1, batch) or shape[1] not in heads_allowed or shape[2:] != (rows, columns):
            expected_heads = f"{heads} or 1" if isinstance(bias, DenseBias) else f"{heads}"
            raise ValueError(
                f"bias must have shape [B or 1, H or 1, M, N] = [{batch} or 1, {expected_heads}, {rows}, {columns}], "
                f"got {list(shape)}; pass these query rows and all {columns} columns"
            )
        tensors |= {"bias data": bias.data, "the learned part of bias": bias.learned, "bias mask": bias.mask}
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
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {tensor.device}")
    if not q.is_cuda and not torch.compiler.is_compiling():  # reading values would make a GPU wait
        _check_values(bias)


def _check_values(bias: Bias | None) -> None:
    if isinstance(bias, BucketBias) and bias.index.numel():
        buckets, highest = bias.table.shape[1], _once(_highest_bucket, bias.index)
        if highest >= buckets:
            raise ValueError(
                f"BucketBias index must be below the table's {buckets} buckets, or {MASKED_BUCKET} for a masked pair; "
                f"got {highest}"
            )
    if isinstance(bias, ProjectedBias) and bias.channels.numel() and not _once(_all_finite, bias.channels):
        raise ValueError("ProjectedBias channels must be finite, got inf or nan; use mask for pairs to leave out")


def _highest_bucket(index: Tensor) -> int:
    rows = index.flatten(0, 1).split(max((1 << 20) // index.shape[-1], 1))
    # 255 wraps to 0: every other bucket moves up by one
    return max(int((some + 1).max()) for some in rows) - 1


def _all_finite(channels: Tensor) -> bool:
    low, high = channels.aminmax()
    return bool(torch.isfinite(low) and torch.isfinite(high))


def _once(of_values: Callable[[Tensor], int], data: Tensor) -> int:
    """of_values(data), kept until data changes or goes: all layers of a model share the data of their bias."""
    if data.is_inference():  # has no version
        return of_values(data)
    version, value = _values.get(data, (-1, 0))
    if version != data._version:
        value = of_values(data)
        _values[data] = (data._version, value)
    return value


_values: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # of the data of a bias: (version, value)
