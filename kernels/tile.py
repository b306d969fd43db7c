"""What the attention kernels share: operands, loads and scores of one tile.

B batch, H heads, M queries on this rank, Nk keys in the visiting block, N bias columns, D head dim. A tile is
[BLOCK_M, BLOCK_N] scores of one head. Most tiles lie inside the problem and are loaded without masks; those that
overrun it are ``MASKED``, a second copy of the code, because one mask in the loop costs more than the arithmetic.

Segments (key_start, column_start, length, place) say which columns the visiting keys own, and where these stand in
planes [B, H, M, .]: a dense bias, or memory of a launch. No tile straddles two, so its columns are consecutive.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LOG2E_REST: tl.constexpr = tl.constexpr(1.9259629911266175e-08)  # of LOG2E, beyond fp32
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
MASKED_BUCKET: tl.constexpr = tl.constexpr(255)
TABLE_SIZE: tl.constexpr = tl.constexpr(256)  # every uint8 index has an entry, so that a look-up needs no bounds
REST: tl.constexpr = tl.constexpr(16)  # edge of MASKED tiles: few registers, little computed and thrown away
LANES: tl.constexpr = tl.constexpr(32)  # of a warp
INTERPRET: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))


def _interpreted_range(start, stop, step, num_stages=None):
    """``range`` over the interpreter's one-element tensors, which numpy >= 2.4 does not turn into ints."""
    bounds = (int(x.handle.data.item()) if isinstance(x, tl.tensor) else int(x) for x in (start, stop, step))
    yield from range(*bounds)


# Compiled, it must be a loop that Triton can pipeline; but not those of backward over what overruns the problem
# (num_stages=1), as Triton 3.6 and 3.7 keep one copy of their operands, and load the next over it while a product that
# runs behind (wgmma) still reads it: on an H200 dk was wrong once in a while.
loop = _interpreted_range if INTERPRET else tl.range


class Strided(NamedTuple):
    """A tensor as a kernel argument; strides are in elements, 0 along a broadcast axis."""

    ptr: Tensor
    strides: tuple[int, ...]


class Operands(NamedTuple):
    """What forward and backward read. ``None`` is a compile-time constant: what is absent costs nothing."""

    q: Strided  # [B, H, M, D]
    k: Strided  # [B, H, Nk, D]
    v: Strided  # [B, H, Nk, D]
    learned: Strided | None  # dense [B, H, M, N], bucket [H, TABLE_SIZE], projected [H, C]
    data: Strided | None  # bucket [B, M, N], projected [B, C, M, N]
    bias_mask: Strided | None  # [B, M, N], nonzero = masked
    padding: Strided | None  # [B, N], nonzero = masked
    dropout_key: Tensor | None  # int32 [B]
    row_ids: Tensor | None  # int32 [M]
    first_column: int | None  # of dropout: the global column of column 0; None: 0
    first_head: int | None  # and the global number of head 0
    codes: Tensor | None  # int16 [TABLE_SIZE], bit pattern of each bucket, as ``halves.equal`` compares them
    segments: Tensor | None  # int32 [num_segments, 4]; None: one, of all keys, from column 0 on
    num_segments: int
    scale: float
    H: int
    M: int
    Nk: int
    # compile-time constants, as tl.constexpr
    FORM: str  # "none", "dense", "bucket" or "projected"
    NUM_CHANNELS: int  # C
    HEADS: int  # narrow heads (D <= 16) share programs: H padded to whole groups; 0: a program has one head
    ONES: bool  # v of narrow heads gets a column of ones, after its own
    BLOCK_V: int  # columns of v and acc of narrow heads
    PAIRED: bool  # bf16 bias values may be read as 32-bit pairs
    THRESHOLD: int  # hashes below it are dropped; 0 = no dropout
    KEEP_SCALE: float  # 1 / (1 - dropout_p)
    FOLD: bool  # see exp
    ALIGNMENT: int  # elements; divides all strides of q, k, v and what has their rows, but the last
    OFFSETS: tl.dtype  # of offsets within a tile, 64 bits where a stride needs it; starts of tiles have 64 bits
    COLUMN_ALIGNMENT: int  # divides the column where a segment starts
    PLACE_ALIGNMENT: int  # and its place
    ACC_DTYPE: tl.dtype  # of scores and sums
    PRECISION: str  # of products of fp32: "ieee", or "tf32"
    ASSEMBLY: bool  # ``halves`` may use it
    ENTRIES: int  # of a table that is read as it is, at most LANES; 0: it is padded
    CODE: int  # or'ed with a bucket to give its pattern
    D: int
    BLOCK_D: int  # D padded to a power of two, at least 16, in registers


class Saved(NamedTuple):
    """What backward reads beside its operands."""

    d_out: Strided  # [B, H, M, D]
    lse: Tensor  # [B, H, M], contiguous
    delta: Tensor  # [B, H, M], contiguous


class Queries(NamedTuple):
    """The rows of a program, made by it: BLOCK_M of one head, or of several."""

    b: tl.tensor
    h: tl.tensor  # the head, or heads [GROUP]
    row: tl.tensor  # the first
    offs: tl.tensor  # [BLOCK_M] from there; those beyond M repeat the last one
    inside: tl.tensor  # [BLOCK_M], whether they exist
    keys: tl.tensor | None  # [BLOCK_M], or [GROUP, BLOCK_M], of dropout


class Keys(NamedTuple):
    """The keys of a tile."""

    k: tl.tensor | None  # pointers to the head's first element, if there is one head
    v: tl.tensor | None
    start: tl.tensor  # the first, in the visiting block
    col: tl.tensor  # and its column
    place: tl.tensor  # which may stand elsewhere in planes
    left: tl.tensor  # of the segment, from the first on


@triton.jit
def head_ptr(x, t, b, h):
    """First element of t[b, h], where t has rows as q has."""
    return t.ptr + b * (t.strides[0] // x.ALIGNMENT * x.ALIGNMENT) + h * (t.strides[1] // x.ALIGNMENT * x.ALIGNMENT)


@triton.jit
def row_offsets(x, t, rows):
    """Offsets [BLOCK, BLOCK_D] of ``rows`` within one head of t, and which columns exist."""
    offs_d = tl.arange(0, x.BLOCK_D)[None, :]
    stride = t.strides[2] // x.ALIGNMENT * x.ALIGNMENT
    return rows.to(x.OFFSETS)[:, None] * stride + offs_d.to(x.OFFSETS) * t.strides[3], offs_d < x.D


@triton.jit
def load_rows(x, t, ptr, start, offs, left, MASKED: tl.constexpr):
    """Rows start + offs of the head of t that begins at ptr, [BLOCK, BLOCK_D]; zero beyond D and, if MASKED, where
    offs >= left. What varies in a loop is added to ptr, so that the offsets are computed once."""
    offsets, in_d = row_offsets(x, t, offs)
    ptrs = (ptr + start * (t.strides[2] // x.ALIGNMENT * x.ALIGNMENT)) + offsets
    if MASKED:
        rows = tl.load(ptrs, mask=(offs < left)[:, None] & in_d, other=0.0)
    elif x.D < x.BLOCK_D:
        rows = tl.load(ptrs, mask=in_d, other=0.0)
    else:
        rows = tl.load(ptrs)
    return readable(rows)


@triton.jit
def readable(operand):
    """An operand of a product; the interpreter multiplies the bit patterns of bf16."""
    if INTERPRET and operand.dtype == tl.bfloat16:
        return operand.to(tl.float32)
    else:
        return operand


@triton.jit
def write_rows(x, t, place, offs, left, rows, ACCUMULATE: tl.constexpr):
    """t[b, h, start + offs] = rows, or += rows, of place (b, h, start); they are this program's alone."""
    b, h, start = place
    offsets, in_d = row_offsets(x, t, offs)
    ptrs = (head_ptr(x, t, b, h) + start * (t.strides[2] // x.ALIGNMENT * x.ALIGNMENT)) + offsets
    keep = (offs < left)[:, None] & in_d
    if ACCUMULATE:
        rows += tl.load(ptrs, mask=keep, other=0.0)
    tl.store(ptrs, rows, mask=keep)


@triton.jit
def dot(x, a, b):
    """a b, of fp32 as ``PRECISION`` says.

    Interpreted, in fp64: numpy rounds an fp32 product up to twice as much as PyTorch does, on CPUs with AVX2.
    """
    if INTERPRET:
        return tl.dot(a.to(tl.float64), b.to(tl.float64), out_dtype=tl.float64).to(x.ACC_DTYPE)
    return tl.dot(a, b, input_precision=x.PRECISION, out_dtype=x.ACC_DTYPE)


@triton.jit
def add_dot(x, acc, p, a):
    """acc + p a, with the scores-shaped p rounded to a's dtype for the tensor cores."""
    if INTERPRET:
        return (acc + tl.dot(p.to(a.dtype).to(tl.float64), a.to(tl.float64), out_dtype=tl.float64)).to(acc.dtype)
    if a.dtype == tl.float32:  # a tile's sum first, as one long chain of sums loses digits; of 0, Triton would chain it
        return acc + tl.dot(p, a, acc * 0.0, input_precision=x.PRECISION, out_dtype=acc.dtype)
    return tl.dot(p.to(a.dtype), a, acc, input_precision=x.PRECISION, out_dtype=acc.dtype)


@triton.jit
def exp(x, s, pivot):
    """exp(s - pivot), in a multiply-add and an exp2 if FOLD, when the pivot is in base 2.

    A product with log2(e) is rounded once more. 16-bit inputs are rounded by far more; of fp32 what that left out goes
    to the result.
    """
    if x.FOLD:
        return tl.exp2(s * LOG2E - pivot)
    elif s.dtype == tl.float32:
        d = s - pivot
        d = tl.where(d < -256.0, -256.0, d)  # 0 all the same, without infinity less itself; NaN stays
        power = d * LOG2E
        left_out = tl.fma(d, tl.full(d.shape, LOG2E, tl.float32), -power) + d * LOG2E_REST
        p = tl.exp2(power)
        return p + p * (left_out * LN2)
    else:
        return tl.exp2((s - pivot) * LOG2E)


@triton.jit
def online_softmax(x, m, s):
    """Fold scores s [..., BLOCK_N] into the running max m [..., 1]: m, p, and by what factor earlier sums shrink. m is
    in base 2 if FOLD.

    m and sums keep the last axis, so that the compiler gives them the layout of the scores; without it they take that
    of the bias, and the softmax is computed in both.
    """
    s_max = tl.max(s, axis=-1, keep_dims=True)
    m_new = tl.maximum(m, s_max * LOG2E if x.FOLD else s_max)
    # a row that has met no valid key keeps m == -inf; a finite pivot avoids (-inf) - (-inf)
    pivot = tl.where(m_new == -float("inf"), 0.0, m_new)
    p = exp(x, s, pivot)
    rescale = tl.exp2(m - pivot if x.FOLD else (m - pivot) * LOG2E)
    return m_new, p, rescale


@triton.jit
def log_sum_exp(x, m, l):
    """lse, natural, and l without zeros: a row that met no valid key has lse = m = -inf."""
    l_safe = tl.where(l == 0.0, 1.0, l)
    return (m + tl.log2(l_safe)) * LN2 if x.FOLD else m + tl.log2(l_safe) * LN2, l_safe


@triton.jit
def load_lse(x, ptr, offs, mask):
    """Pivot of ``exp`` from lse at ptr, [..., BLOCK, 1]; +inf where there was no key or is no row, so that p = 0."""
    return pivot_of(x, tl.expand_dims(tl.load(ptr + offs, mask=mask, other=None if mask is None else float("inf")), -1))


@triton.jit
def pivot_of(x, lse):
    """Pivot of ``exp`` from lse, in base 2 if FOLD; +inf where there was no key, so that p = 0."""
    lse = tl.where(lse == -float("inf"), float("inf"), lse)
    return lse * LOG2E if x.FOLD else lse


@triton.jit
def segment(x, i):
    """(key_start, column_start, length, place); starts in 64 bits, as they are multiplied by strides."""
    if x.segments is None:
        key_start = tl.full([], 0, tl.int64)
        column_start = key_start
        length = x.Nk
        place = key_start
    else:
        key_start = tl.load(x.segments + 4 * i).to(tl.int64)
        column_start = tl.multiple_of(tl.load(x.segments + 4 * i + 1).to(tl.int64), x.COLUMN_ALIGNMENT)
        length = tl.load(x.segments + 4 * i + 2)
        place = tl.multiple_of(tl.load(x.segments + 4 * i + 3).to(tl.int64), x.PLACE_ALIGNMENT)
    return key_start, column_start, length, place


@triton.jit
def find_keys(x, tile, BLOCK_N: tl.constexpr):
    """Start, column, place and number of the keys of a tile, where tiles are counted over the segments."""
    key, col, own, left = tile * 0, tile * 0, tile * 0, (tile * 0).to(tl.int32)
    for i in loop(0, x.num_segments, 1):
        key_start, column_start, length, place = segment(x, i)
        start = tile * BLOCK_N
        here = (start >= 0) & (start < length)
        key = tl.where(here, key_start + start, key)
        col = tl.where(here, column_start + start, col)
        own = tl.where(here, place + start, own)
        left = tl.where(here, tl.minimum(length - start, BLOCK_N), left).to(tl.int32)
        tile -= tl.cdiv(length, BLOCK_N)
    col, own = tl.multiple_of(col, x.COLUMN_ALIGNMENT), tl.multiple_of(own, x.PLACE_ALIGNMENT)
    return key, col, own, left


@triton.jit
def plane_offsets(x, stride_m, stride_n, offs_m, offs_n):
    """Offsets [BLOCK_M, BLOCK_N] within a tile of a plane."""
    return offs_m.to(x.OFFSETS)[:, None] * stride_m + offs_n.to(x.OFFSETS)[None, :] * stride_n


@triton.jit
def load_plane(x, plane, queries, col, offs_n, inside, MASKED: tl.constexpr):
    """A plane [M, N] at some queries and the columns col + offs_n; 0 outside, which asynchronous copies can write."""
    stride_m, stride_n = plane.strides
    start = plane.ptr + queries.row * stride_m + col * stride_n
    ptrs = start + plane_offsets(x, stride_m, stride_n, queries.offs, offs_n)
    if MASKED:
        return tl.load(ptrs, mask=inside, other=0)
    return tl.load(ptrs)


@triton.jit
def tile_ptrs(x, planes, b, h, row, offs_m, place, offs_n):
    """A tile of planes [B, H, M, .], pointers [BLOCK_M, BLOCK_N]."""
    stride_b, stride_h, stride_m, stride_n = planes.strides
    start = planes.ptr + b * stride_b + h * stride_h + row * stride_m + place * stride_n
    return start + plane_offsets(x, stride_m, stride_n, offs_m, offs_n)


@triton.jit
def _load_pairs(x, ptr, stride_m, row, offs_m, col, BLOCK_N: tl.constexpr):
    """bf16 plane [row + offs_m, col + arange(BLOCK_N)] as fp32, read as 32-bit pairs.

    A bf16 is the upper half of an fp32: a shift and a mask unpack a pair, where the compiler takes three instructions.
    """
    ptr = ptr.to(tl.pointer_type(tl.int32))
    offsets = offs_m.to(x.OFFSETS)[:, None] * (stride_m // 2) + tl.arange(0, BLOCK_N // 2)[None, :]
    pair = tl.load((ptr + row * (stride_m // 2) + col // 2) + offsets)
    low = (pair << 16).to(tl.float32, bitcast=True)
    high = (pair & -65536).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(low, high), [offs_m.shape[0], BLOCK_N])


@triton.jit
def load_values(x, plane, queries, col, offs_n, inside, MASKED: tl.constexpr):
    """A plane of values in the dtype of the scores."""
    # of narrow tiles Triton 3.6 compiles products with p and ds wrongly, where these come from pairs and from a
    # padding: their operands are laid out for 32 numbers, of which a product of 16 then takes every other four twice
    if x.PAIRED and not MASKED and queries.offs.shape[0] >= 32 and offs_n.shape[0] >= 32:
        return _load_pairs(x, plane.ptr, plane.strides[0], queries.row, queries.offs, col, offs_n.shape[0])
    return load_plane(x, plane, queries, col, offs_n, inside, MASKED).to(x.ACC_DTYPE)


@triton.jit
def bucket_tile(x, queries, keys, offs_n, inside, MASKED: tl.constexpr):
    """uint8 bucket of each pair."""
    stride_b, stride_m, stride_n = x.data.strides
    plane = Strided(x.data.ptr + queries.b * stride_b, (stride_m, stride_n))
    return load_plane(x, plane, queries, keys.col, offs_n, inside, MASKED)


@triton.jit
def masked_pairs(x, queries, keys, offs_n, inside, MASKED: tl.constexpr):
    """Nonzero where the mask of a projected bias hides a pair."""
    stride_b, stride_m, stride_n = x.bias_mask.strides
    plane = Strided(x.bias_mask.ptr + queries.b * stride_b, (stride_m, stride_n))
    return load_plane(x, plane, queries, keys.col, offs_n, inside, MASKED)


@triton.jit
def padding_of(x, b, col, offs_n, in_cols, MASKED: tl.constexpr):
    """What padding adds to the scores of each key, 0 or -inf."""
    stride_b, stride_n = x.padding.strides
    ptrs = (x.padding.ptr + b * stride_b + col * stride_n) + offs_n * stride_n
    padding = tl.load(ptrs, mask=in_cols, other=0) if MASKED else tl.load(ptrs)
    return tl.where(padding == 0, 0.0, -float("inf"))


@triton.jit
def look_up(x, h, bucket):
    """The entry of a head's table at each bucket: -inf at the masked one, NaN beyond the table.

    A small table lies in the lanes of a warp, an entry to each, which ask each other: a load of 32 addresses would wait
    for the banks of the cache.
    """
    index = bucket.to(tl.int32)
    if x.ENTRIES == 0:
        return tl.load(x.learned.ptr + h * TABLE_SIZE + index)
    stride_h, stride_r = x.learned.strides
    if INTERPRET:
        ptrs = x.learned.ptr + h * stride_h + index * stride_r
        entry = tl.load(ptrs, mask=index < x.ENTRIES, other=float("nan"))
        other = tl.where(index == MASKED_BUCKET, -float("inf"), float("nan"))
    else:
        table = tl.broadcast_to((x.learned.ptr + h * stride_h).to(tl.int64), index.shape)
        step = tl.full(index.shape, 4 * stride_r, tl.int32)
        own = tl.inline_asm_elementwise(
            """{ .reg .pred inside; .reg .u32 lane; .reg .u64 place; mov.u32 lane, %laneid; mov.b32 $0, 0x7fc00000;
            setp.lt.u32 inside, lane, $3; mad.wide.u32 place, lane, $2, $1; @inside ld.global.nc.b32 $0, [place]; }""",
            "=&r,l,r,r",
            [table, step, tl.full(index.shape, x.ENTRIES, tl.int32)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
        entry = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;",
            "=r,r,r",
            [own, index],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
        other = (-8388353 - index).to(tl.float32, bitcast=True)  # -inf at 255, NaN at what is less
    return tl.where(index < LANES, entry, other)


@triton.jit
def scores(x, qk, queries, keys, offs_n, in_cols, MASKED: tl.constexpr):
    """Scores scale * qk + bias of some queries of a head and the keys at offs_n, natural log, -inf where masked or
    outside. A projected bias is in memory by now (``projection.project_pass``)."""
    h = queries.h
    inside = queries.inside[:, None] & in_cols[None, :]
    s = qk * x.scale
    if x.FORM == "dense" or x.FORM == "projected":
        stride_b, stride_h, stride_m, stride_n = x.learned.strides
        plane = Strided(x.learned.ptr + queries.b * stride_b + h * stride_h, (stride_m, stride_n))
        col = keys.col if x.FORM == "dense" else keys.place
        s += load_values(x, plane, queries, col, offs_n, inside, MASKED)
    elif x.FORM == "bucket":
        bucket = bucket_tile(x, queries, keys, offs_n, inside, MASKED)
        s += look_up(x, h, bucket)
    if x.padding is not None:
        s += padding_of(x, queries.b, keys.col, offs_n, in_cols, MASKED)[None, :]
    if MASKED:
        s = tl.where(inside, s, -float("inf"))
    return s
