"""Dropout whose mask is a pure function of (key, head, row, column), so that it does not depend on the layout.

    row_key = mix32(mix32(key ^ head) ^ row)
    dropped = mix32(row_key ^ column * 0x9E3779B9) < floor(p * 2**32)        unsigned 32-bit arithmetic

mix32 is the finaliser of MurmurHash3 (Appleby, public domain). The same three lines run in Triton on uint32; here
they run in int32, whose products and sums wrap to the same bits.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, nn

_GOLDEN = 0x9E3779B9 - (1 << 32)  # 2**32 / golden ratio: spreads neighbouring columns over all bits
_MUL_1 = 0x85EBCA6B - (1 << 32)
_MUL_2 = 0xC2B2AE35 - (1 << 32)


def dropout_threshold(p: float) -> int:
    """Hash values below this are dropped; 0 <= p < 1."""
    return int(p * (1 << 32))


def mix32(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser, elementwise on int32."""
    # the masks turn int32's arithmetic shifts into logical ones; in place, because this runs once per score
    x = (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x).mul_(_MUL_1)
    x = x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(_MUL_2)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _as_int32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def mix_key(key: Tensor, *values: int | Tensor) -> Tensor:
    """Fold ``values`` (ints, or integer tensors that broadcast with ``key``) into an int32 ``key``, one by one."""
    for value in values:
        key = mix32(key ^ (_as_int32(value) if isinstance(value, int) else value.to(torch.int32)))
    return key


def place_keys(key: Tensor, layers: range, places: int) -> list[list[Tensor]]:
    """``mix_key(key, layer, place)`` of all layers and places at once, or a GPU has hundreds of launches to make.

    Args:
        key: int32 [B].

    Returns:
        of each layer the keys of its places, int32 [B] each, where a kernel reads four at a time.
    """
    aligned = nn.functional.pad(key, (0, -len(key) % 4))
    layer_ids, place_ids = (
        torch.arange(ids.start, ids.stop, dtype=torch.int32, device=key.device) for ids in (layers, range(places))
    )
    of_layers = mix_key(aligned[None], layer_ids[:, None])
    keys = mix_key(of_layers[:, None], place_ids[:, None])[..., : len(key)]
    return [list(of_layer.unbind()) for of_layer in keys.unbind()]


def dropout_keys(seed: int, step: int, sequence_ids: Tensor, *, layer: int = 0) -> Tensor:
    """Base key of each sequence, from which the operators of attention make the mask of dropout.

    Args:
        seed, step: integers; their low 32 bits count.
        sequence_ids: integer [B], position of each sequence in the *global* batch.
        layer: integer; layers that have the same key drop alike.

    Returns:
        int32 [B], on the device of ``sequence_ids``.

    Raises:
        ValueError: ``sequence_ids`` is no tensor of integers.

    Examples:
        >>> key = mg.dropout_keys(seed=0, step=7, sequence_ids=torch.arange(2), layer=1)
        >>> q = torch.randn(2, 4, 50, 8)
        >>> out = mg.biased_attention(q, q, q, dropout_p=0.1, dropout_key=key)
        >>> torch.equal(out, mg.biased_attention(q, q, q, dropout_p=0.1, dropout_key=key))
        True
    """
    if not isinstance(sequence_ids, Tensor) or sequence_ids.is_floating_point():
        got = sequence_ids.dtype if isinstance(sequence_ids, Tensor) else type(sequence_ids).__name__
        raise ValueError(f"sequence_ids must be a tensor of integers, got {got}; torch.as_tensor(ids) makes one")
    start = torch.zeros(1, dtype=torch.int32, device=sequence_ids.device)
    numbers = (x if isinstance(x, Tensor) else operator.index(x) for x in (layer, seed, step))  # NumPy's, too
    return mix_key(start, *numbers, sequence_ids)  # mix32(0) is 0: layer 0 changes no bit


def row_keys(key: Tensor, heads: int, rows: Tensor, first_head: int = 0) -> Tensor:
    """int32 [B, heads, M], of heads from a global one on, from the key of each sequence [B] and global row ids [M]."""
    head_ids = torch.arange(first_head, first_head + heads, dtype=torch.int32, device=key.device)
    return mix32(mix32(key[:, None] ^ head_ids)[:, :, None] ^ rows.to(torch.int32))


def keep_mask(row_key: Tensor, columns: Tensor, p: float) -> Tensor:
    """int32 [..., N], 1 = kept and 0 = dropped, from row keys [...] and the global column ids [N]."""
    hashed = mix32(row_key[..., None] ^ (columns.to(torch.int32) * _GOLDEN))
    sign = -(1 << 31)  # flipping the sign bit orders int32 as unsigned
    return hashed.bitwise_xor_(sign).ge_(dropout_threshold(p) + sign)
