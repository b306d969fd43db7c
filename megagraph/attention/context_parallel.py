"""Attention with the nodes of a sequence spread over ranks: exact with a learnable bias (GA-CP, paper Sec. 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, overload

from torch import Tensor
from torch.autograd.profiler import record_function
from torch.distributed.device_mesh import DeviceMesh

from megagraph.attention.bias import Bias, BorderedBias
from megagraph.attention.bordered import bordered_attention
from megagraph.attention.checks import check_inputs
from megagraph.attention.comm import attend
from megagraph.attention.engines import Impl, choose
from megagraph.attention.exchange import Exchange, Loopback, make_exchange
from megagraph.attention.layout import NodeLayout
from megagraph.attention.operator import attention, make_step
from megagraph.attention.step import Step
from megagraph.attention.sums import as_bias
from megagraph.attention.ulysses import bias_of_heads, own_heads, to_heads, to_rows
from megagraph.attention.ways import Comm, check_comm

Given = tuple[Tensor, Tensor, Tensor, Any]  # q, k, v and bias of a rank


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | Tensor | None = ...,
    *,
    layout: NodeLayout,
    mesh: DeviceMesh | None = ...,
    comm: Comm = ...,
    key_padding_mask: Tensor | None = ...,
    scale: float | None = ...,
    dropout_p: float = ...,
    dropout_key: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    impl: Impl | None = ...,
) -> Tensor: ...
@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | Tensor | None = ...,
    *,
    layout: NodeLayout,
    mesh: DeviceMesh | None = ...,
    comm: Comm = ...,
    key_padding_mask: Tensor | None = ...,
    scale: float | None = ...,
    dropout_p: float = ...,
    dropout_key: Tensor | None = ...,
    return_lse: Literal[True],
    impl: Impl | None = ...,
) -> tuple[Tensor, Tensor]: ...
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | Tensor | None = None,
    *,
    layout: NodeLayout,
    mesh: DeviceMesh | None = None,
    comm: Comm = "ring",
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_key: Tensor | None = None,
    return_lse: bool = False,
    impl: Impl | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """[megagraph.biased_attention][] with the nodes of a sequence spread over the ranks of a CP group.

    Every rank passes its rows and gets its rows; together they are what one device computes, to rounding, with
    dropout too. Gradients of super rows and of what all ranks hold (a table, a weight) are shares: their sum over the
    group is the gradient. Collective: all ranks of ``mesh`` call it, forward and backward, in the same order.

    Args:
        q: [B, H, M, D], the first M of this rank's S rows; usually M = S.
        k, v: [B, H, S, D], all its rows in the order of ``layout.local_to_global``.
        bias: these M rows, all N columns: a bias class of shape [B or 1, H or 1, M, N] or a float tensor; for
            ``"ulysses"`` all N rows on every rank, [B or 1, H or 1, N, N].
        layout: which nodes this rank holds.
        mesh: the CP group, one dim; ``None`` for one rank.
        comm: ``"ring"``: k and v travel in P - 1 steps behind which they hide, and no rank ever holds more than three
            blocks; ``"allgather"``: they are gathered once and kept for backward, which is faster where sequences are
            short; ``"halo"``, of a sparse bias: just the rows that its pairs name travel, and are kept. Who needs which
            is found at the first call with its relation, which must be the first on all ranks (``rows`` gives a new
            relation); ``"ulysses"``: a rank gets q, k and v of all rows for H / P of the heads, a whole number, and
            attends with these as one rank does; q has M = S. The result is the same, to rounding.
        key_padding_mask: bool [B, N], all columns.
        scale, dropout_p, dropout_key, return_lse, impl: as in ``biased_attention``; ``dropout_key`` must be equal on
            all ranks; ``impl="reference"`` runs on one rank, and for ``"ulysses"``, only.

    Returns:
        out [B, H, M, D], and lse [B, H, M] if asked for; padding rows hold numbers of no meaning.

    Raises:
        ValueError: shape, dtype, device or value of an argument; the message gives expected and actual.
        NotImplementedError: ``impl`` cannot run these inputs; every reason is listed.

    Examples:
        The call of one of P ranks; with ``mesh=None`` there is one.

        >>> layout = mg.NodeLayout(num_nodes=46, num_super=4)  # rank=mesh.get_local_rank(), world_size=mesh.size()
        >>> q, k, v = (torch.randn(2, 4, layout.num_local, 8) for _ in range(3))
        >>> bias = mg.BucketBias(torch.zeros(2, layout.num_local, 50, dtype=torch.uint8), torch.zeros(4, 12))
        >>> mg.ring_attention(q, k, v, bias, layout=layout, mesh=None).shape
        torch.Size([2, 4, 50, 8])
    """
    given = as_bias(bias)
    layout.check_mesh(mesh)
    several = layout.world_size > 1
    by_heads = several and comm == "ulysses"
    check_inputs(q, k, v, given, key_padding_mask, dropout_p, dropout_key, layout, all_rows=by_heads)
    sparse = given is not None and given.relation is not None
    check_comm(comm, sparse=sparse, alone=mesh is None, heads=q.shape[1], ranks=layout.world_size)
    engine, short = choose(impl, q, ring=several and not by_heads)
    make = partial(make_step, scale=scale, dropout_p=dropout_p, dropout_key=dropout_key, engine=engine, short=short)
    here = q, k, v, given
    if mesh is None or not several:
        results = _alone(layout, make, here, key_padding_mask)
    else:
        exchange = make_exchange(mesh, q.device)
        results = _attend(comm, exchange, [layout], make, [here], key_padding_mask, return_lse=return_lse)
    return (results[0], results[1]) if return_lse else results[0]


def _alone(layout: NodeLayout, make: Callable[..., Step], given: Given, padding: Tensor | None) -> Sequence[Tensor]:
    """out and lse where one rank has all nodes."""
    q, k, v, bias = given
    step = make(q, bias, padding)
    if isinstance(bias, BorderedBias) and step.engine != "reference":
        return bordered_attention("ring", None, [layout], partial(make, short=False), [given], padding)
    return attention(step, q, k, v, bias)


def _attend(
    comm: Comm,
    exchange: Exchange,
    layouts: list[NodeLayout],
    make: Callable[..., Step],
    inputs: list[Given],
    key_padding_mask: Tensor | None,
    *,
    return_lse: bool = True,
) -> Sequence[Tensor]:
    """out and lse, which ulysses leaves out unless it is wanted, of every rank that is here."""
    if comm == "ulysses":
        return _by_heads(exchange, layouts, make, inputs, key_padding_mask, return_lse=return_lse)
    if isinstance(inputs[0][3], BorderedBias):
        return bordered_attention(comm, exchange, layouts, make, inputs, key_padding_mask)
    steps: list[tuple[Step, ...]] = [(make(q, bias, key_padding_mask),) for q, _, _, bias in inputs]
    relations = [None if bias is None else bias.relation for *_, bias in inputs]
    flat = [x for (q, k, v, _), (step,) in zip(inputs, steps, strict=True) for x in (q, k, v, step.learned)]
    return attend(comm, exchange, layouts, steps, relations, flat)


def _by_heads(
    exchange: Exchange,
    layouts: list[NodeLayout],
    make: Callable[..., Step],
    inputs: list[Given],
    key_padding_mask: Tensor | None,
    *,
    return_lse: bool,
) -> Sequence[Tensor]:
    """Every rank attends alone with its heads, between two exchanges."""
    own = to_heads(exchange, layouts, [given[:3] for given in inputs])
    results = []
    for layout, (q, k, v), (*_, bias) in zip(layouts, own, inputs, strict=True):
        whole, heads = NodeLayout(layout.num_nodes, layout.num_super), own_heads(layout, q.shape[1])
        given = q, k, v, bias_of_heads(bias, heads)
        with record_function("ring step"):
            results.append(_alone(whole, partial(make, first_head=heads.start), given, key_padding_mask))
    outs = to_rows(exchange, layouts, [out for out, _ in results])
    if not return_lse:
        return outs
    lses = to_rows(exchange, layouts, [lse.unsqueeze(3) for _, lse in results])
    return [x for out, lse in zip(outs, lses, strict=True) for x in (out, lse.squeeze(3))]


def loopback_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | Tensor | None = None,
    *,
    num_super: int,
    world_size: int,
    cuts: tuple[int, ...] | None = None,
    comm: Comm = "ring",
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_key: Tensor | None = None,
    impl: Impl | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`ring_attention` of ``world_size`` ranks in one process, without communication, for tests and benchmarks.

    Takes and returns whole tensors: q, k, v [B, H, N, D], the last ``num_super`` nodes super nodes, bias
    [B or 1, H or 1, N, N] -> out [B, H, N, D], lse [B, H, N]. ``cuts`` are those of ``NodeLayout``.
    """
    given = as_bias(bias)
    num_nodes = q.shape[2] - num_super
    layouts = [NodeLayout(num_nodes, num_super, rank, world_size, cuts) for rank in range(world_size)]
    whole = NodeLayout(num_nodes, num_super)
    check_inputs(q, k, v, given, key_padding_mask, dropout_p, dropout_key, whole)
    sparse = given is not None and given.relation is not None
    check_comm(comm, sparse=sparse, heads=q.shape[1], ranks=world_size)
    path = choose(impl, q, ring=comm != "ulysses")
    make = partial(make_step, scale=scale, dropout_p=dropout_p, dropout_key=dropout_key, engine=path[0], short=path[1])
    inputs = [
        (layout.shard(q, 2), layout.shard(k, 2), layout.shard(v, 2), _shard(given, layout, comm)) for layout in layouts
    ]
    flat = _attend(comm, Loopback(), layouts, make, inputs, key_padding_mask)
    last = layouts[0].block_size
    out, lse = (layouts[0].join(parts, parts[0][:, :, last:], dim=2) for parts in (flat[0::2], flat[1::2]))
    return out, lse


def _shard(bias: Bias | None, layout: NodeLayout, comm: Comm) -> Bias | None:
    """What one rank is given of a bias of all nodes."""
    if comm == "ulysses":
        return bias
    if bias is None or isinstance(bias, BorderedBias):
        return None if bias is None else bias.shard(layout)
    return bias.rows(layout.local_to_global.clamp(min=0).to(bias.learned.device))
