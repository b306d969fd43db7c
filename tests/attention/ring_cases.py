"""The ring over a process group: what runs in every process of tests/ranks.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import megagraph as mg
from megagraph.attention import context_parallel, exchange, rank
from megagraph.attention.relation import Relation
from megagraph.attention.ways import Comm
from tests.problems import FORMS, IMPLS, Problem, to, with_learned
from tests.problems import ring_problem as make_ring_problem

ROW_WAYS: tuple[Comm, ...] = ("ring", "allgather")  # a rank attends from its rows, as many as it wants
DENSE_WAYS: tuple[Comm, ...] = (*ROW_WAYS, "ulysses")
HEADS = 12
SIZES = [(num_super, num_nodes) for num_super in (0, 1, 5) for num_nodes in (13, 2)]


def ring_options(world_size: int) -> dict[str, dict]:
    """The problem, the implementation and the communication of every case."""
    cases = {}
    for i, form in enumerate(FORMS):
        for j, (num_super, num_nodes) in enumerate(SIZES):
            problem = dict(form=form, world_size=world_size, num_super=num_super, num_nodes=num_nodes)
            problem["dropout_p"] = 0.25 * ((i + j) % 2)
            # of two ranks, every form and every size runs through Triton: the interpreter takes its time
            for impl in IMPLS if world_size == 2 and (i + j) % 3 == 0 else IMPLS[-1:]:
                for comm in DENSE_WAYS:
                    name = f"attention-{comm}-{form}-{num_super}-{num_nodes}-{impl}"
                    cases[name] = problem | {"impl": impl, "comm": comm, "H": world_size if comm == "ulysses" else 2}
    return cases


def staged_options(world_size: int) -> dict[str, dict]:
    """Options of staged exchanges: of each form the problem that no number of ranks divides."""
    return {f"staged-{name}": ring for name, ring in ring_options(world_size).items() if f"-5-13-{IMPLS[-1]}" in name}


def staged(**options) -> dict[str, Tensor]:
    """A ring whose messages go through buffers of the host, as those of ranks that share a GPU."""
    with patch.object(context_parallel, "make_exchange", exchange.StagedExchange):
        return run_ring(**options)


def ring_problem(impl: str, comm: str, **options) -> Problem:
    return make_ring_problem(B=1, **options)


def ring_cases(world_size: int) -> dict[str, Callable]:
    if world_size > 4:
        return {}
    cases: dict[str, Callable] = {
        name: partial(run_ring, **options) for name, options in ring_options(world_size).items()
    }
    if world_size == 2:
        cases |= {name: partial(bad_call, options) for name, (options, _) in BAD_CALLS.items()}
    cases |= {name: partial(staged, **options) for name, options in staged_options(world_size).items()}
    cases |= {f"gather-{comm}": partial(gathered_mean, comm=comm) for comm in DENSE_WAYS}
    cases |= {f"queries-{comm}": partial(one_query_but_on_rank_zero, comm) for comm in ROW_WAYS}
    return cases | {"trace": traced_messages, "sent": sent_by_heads, "rows": all_rows_then_fewer}


BAD_CALLS = {
    "no layout": (dict(layout=None), "ValueError: layout is needed on a mesh of 2 ranks; pass NodeLayout(num_nodes, "),
    "no dropout key": (
        dict(dropout=0.5),
        "ValueError: dropout_key is needed in training on a mesh of 2 ranks, which must drop alike",
    ),
    "another layout": (
        dict(layout=mg.NodeLayout(7, 2)),
        "ValueError: the layout is that of rank 0 of 1, but this process is rank",
    ),
    "mesh of two dims": (dict(mesh_shape=(1, 2)), "ValueError: mesh must have one dim, got ('a', 'b'); pass a slice"),
    "all columns": (dict(columns=6), "ValueError: bias must have shape [B or 1, H or 1, M, N] = [2 or 1, 12, 6, 9]"),
    "reference": (dict(impl="reference"), "NotImplementedError: impl='reference' cannot run these inputs:"),
    "heads of a module": (
        dict(comm="ulysses", num_heads=3),
        "ValueError: heads must be a multiple of the 2 ranks that comm 'ulysses' deals them out to, got 3; take 'ring'",
    ),
    "heads of a module whose way was set": (
        dict(set_comm="ulysses", num_heads=3, all_rows=True),
        "ValueError: heads must be a multiple of the 2 ranks that comm 'ulysses' deals them out to, got 3; take 'ring'",
    ),
    "own rows": (
        dict(comm="ulysses"),
        "ValueError: bias must have shape [B or 1, H or 1, M, N] = [2 or 1, 12, 9, 9], got [2, 12, 6, 9]; pass",
    ),
    "few rows": (
        dict(comm="ulysses", num_rows=5),
        "ValueError: q must have all the S = 6 rows of this rank, got 5",
    ),
}


def bad_call(options: dict) -> str:
    """The error of a module that is called as it must not be."""
    options = dict(options)
    mesh = ring_mesh(2)
    layout = options.pop("layout", mg.NodeLayout(7, 2, mesh.get_local_rank(), 2))
    columns = options.pop("columns", 9)
    if shape := options.pop("mesh_shape", None):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))
    num_rows, set_comm = options.pop("num_rows", None), options.pop("set_comm", None)
    bias_rows = slice(9 if options.pop("all_rows", False) else 6)
    try:
        module, x, index = attention_and_input(mesh=mesh, **options)
        module.comm = set_comm or module.comm
        bias = mg.BucketBias(index[:, bias_rows, :columns], torch.zeros(module.num_heads, 5, dtype=torch.float64))
        if num_rows is None:
            module(x[:, :6], bias, layout=layout)
        else:
            q = x[:, None, :6]
            mg.ring_attention(q[:, :, :num_rows], q, q, None, layout=layout, mesh=mesh, comm=module.comm)
    except (ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@cache
def ring_mesh(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,))


def run_ring(impl: str, comm: Comm, num_super: int, num_nodes: int, world_size: int, **options) -> dict[str, Tensor]:
    """out, lse and gradients of the whole problem, from the rows of all ranks."""
    problem = ring_problem(impl, comm, num_super=num_super, num_nodes=num_nodes, world_size=world_size, **options)
    mesh = ring_mesh(world_size)
    layout = mg.NodeLayout(num_nodes, num_super, mesh.get_local_rank(), world_size)
    rows = layout.local_to_global.to(problem.q.device)
    q, k, v = (layout.shard(x, 2).requires_grad_() for x in (problem.q, problem.k, problem.v))
    learned, bias = [], None
    if problem.bias is not None:
        bias = problem.bias if comm == "ulysses" else problem.bias.rows(rows.clamp(min=0))
        learned = [bias.learned.detach().requires_grad_()]
    out, lse = mg.ring_attention(
        q,
        k,
        v,
        with_learned(bias, *learned) if learned else None,
        layout=layout,
        mesh=mesh,
        key_padding_mask=problem.padding,
        dropout_p=problem.dropout_p,
        dropout_key=problem.dropout_key,
        return_lse=True,
        impl=impl,
        comm=comm,
    )
    # the gradient of a super row reaches every rank in part, as it does behind replicated rows of a model
    share = torch.ones(len(rows), dtype=q.dtype, device=q.device)
    share[layout.block_size :] = (layout.rank + 1) / (world_size * (world_size + 1) / 2)
    d_out, d_lse = layout.shard(problem.d_out, 2) * share[:, None], layout.shard(problem.d_lse, 2) * share
    finite_lse = lse.masked_fill(lse == -torch.inf, 0.0)
    grads = torch.autograd.grad([out, finite_lse], [q, k, v, *learned], [d_out, d_lse])

    whole = partial(sum_of_rows, layout)
    result = {"out": layout.gather(out.detach(), 2, mesh), "lse": layout.gather(lse.detach(), 2, mesh)}
    result |= {name: whole(grad) for name, grad in zip(("dq", "dk", "dv"), grads, strict=False)}
    if learned and bias.form == "dense" and comm != "ulysses":
        result["d_learned"] = whole(grads[3])
    elif learned:
        dist.all_reduce(grads[3])
        result["d_learned"] = grads[3]
    return result


def traced_messages() -> dict[str, list[str]]:
    """What one rank does, forward and backward, in order: sends, steps and waits."""
    mesh = ring_mesh(dist.get_world_size())
    layout = mg.NodeLayout(7, 2, mesh.get_local_rank(), mesh.size())
    inputs = [torch.zeros(1, 2, layout.num_local, 4, requires_grad=True) for _ in range(3)]
    events: list[str] = []
    post = dist.batch_isend_irecv

    def traced_post(operations):
        assert [operation.op for operation in operations] == [dist.irecv, dist.isend]  # or links would be half duplex
        name = f"message {sum(event.startswith('send') for event in events)}"
        events.append(f"send {name}, {operations[1].tensor.numel()} elements")
        works = post(operations)

        def wait() -> None:
            for work in works:
                work.wait()
            events.append(f"wait for {name}")

        return [Mock(wait=wait)]

    def traced(step):
        return lambda *args, **kwargs: (events.append("step"), step(*args, **kwargs))

    trace = {}
    with (
        patch.object(dist, "batch_isend_irecv", traced_post),
        patch.object(rank, "attention_step_", traced(rank.attention_step_)),
        patch.object(rank, "attention_step_backward_", traced(rank.attention_step_backward_)),
    ):
        out = mg.ring_attention(*inputs, layout=layout, mesh=mesh)
        trace["forward"], events = events, []
        torch.autograd.grad(out, inputs, torch.zeros_like(out))
        trace["backward"] = events
    return trace


def sent_by_heads() -> dict[str, list[int]]:
    """Elements that one rank sends to others in every exchange of ulysses."""
    mesh, sent = ring_mesh(dist.get_world_size()), []
    layout = mg.NodeLayout(12, 2, mesh.get_local_rank(), mesh.size())
    inputs = [torch.zeros(1, HEADS, layout.num_local, 4, requires_grad=True) for _ in range(3)]
    post = dist.batch_isend_irecv

    def counted(operations):
        sent.append(sum(operation.tensor.numel() for operation in operations if operation.op is dist.isend))
        return post(operations)

    with patch.object(dist, "batch_isend_irecv", counted):
        out = mg.ring_attention(*inputs, layout=layout, mesh=mesh, comm="ulysses")
        forward, sent = sent, []
        torch.autograd.grad(out, inputs, torch.zeros_like(out))
    return {"forward": forward, "backward": sent}


def sum_of_rows(layout: mg.NodeLayout, local: Tensor) -> Tensor:
    """[B, H, N, ...] from the rows [B, H, S, ...] of all ranks, each in its place."""
    rows = layout.local_to_global.to(local.device)
    total = local.new_zeros(*local.shape[:2], layout.num_columns, *local.shape[3:])
    total.index_add_(2, rows[rows >= 0], local[:, :, rows >= 0])
    dist.all_reduce(total)
    return total


def one_query_but_on_rank_zero(comm: Comm) -> list[Tensor]:
    """Gradients of k and v where rank 0 computes no row, and every other rank its first one."""
    world_size = dist.get_world_size()
    problem, mesh = queries_problem(world_size), ring_mesh(world_size)
    layout = mg.NodeLayout(13, 2, mesh.get_local_rank(), world_size)
    rows = slice(min(layout.rank, 1))
    q, k, v, d_out = (layout.shard(x, 2) for x in (problem.q, problem.k, problem.v, problem.d_out))
    out = mg.ring_attention(
        q[:, :, rows],
        k.requires_grad_(),
        v.requires_grad_(),
        problem.bias.rows(layout.local_to_global[rows]),
        layout=layout,
        mesh=mesh,
        comm=comm,
        dropout_p=problem.dropout_p,
        dropout_key=problem.dropout_key,
        impl=IMPLS[-1],
    )
    return [sum_of_rows(layout, grad) for grad in torch.autograd.grad(out, [k, v], d_out[:, :, rows])]


def all_rows_then_fewer() -> tuple[Tensor, Tensor]:
    """By halos, results of all rows, and then of the first ones: of one, but of all on rank 0."""
    mesh = ring_mesh(dist.get_world_size())
    layout = mg.NodeLayout(13, 2, mesh.get_local_rank(), mesh.size())
    torch.manual_seed(0)
    lists = 15 * torch.arange(16), torch.arange(15, dtype=torch.int32).repeat(15)
    relation, index = Relation.from_lists("all pairs", *lists, torch.randint(0, 5, (225,), dtype=torch.uint8), 15)
    q, bias = layout.shard(torch.randn(1, 2, 15, 4), 2), mg.BucketBias(index, torch.randn(2, 5), relation)
    bias = bias.rows(layout.local_to_global.clamp(min=0))
    results = []
    for rows in (slice(layout.num_local), slice(1 if layout.rank else layout.num_local)):
        some = bias if not results else bias.rows(rows)
        results.append(mg.ring_attention(q[:, :, rows], q, q, some, layout=layout, mesh=mesh, comm="halo"))
    return results[0][:, :, rows], results[1]


def queries_problem(world_size: int) -> Problem:
    return to(make_ring_problem("projected", world_size, 2, 13, dropout_p=0.25, padded=False), "cpu", torch.float64)


def attention_and_input(num_heads=HEADS, **options) -> tuple[mg.BiasedRingAttention, Tensor, Tensor]:
    """A module, x [2, 9, 24] whose last two nodes are super nodes, and a bias index."""
    torch.manual_seed(0)
    module = mg.BiasedRingAttention(24, num_heads, **options).double()
    return module, torch.randn(2, 9, 24, dtype=torch.float64), torch.randint(0, 5, (2, 9, 9), dtype=torch.uint8)


def learned_table() -> Tensor:
    """A table [HEADS, 5] for the index's buckets."""
    return torch.linspace(-1, 1, 5 * HEADS, dtype=torch.float64).view(HEADS, 5).requires_grad_()


def gathered_mean(**options) -> dict[str, Tensor]:
    """Gradients of ``gather(attention(x)).mean()``, summed over the ranks."""
    mesh = ring_mesh(dist.get_world_size())
    layout = mg.NodeLayout(7, 2, mesh.get_local_rank(), mesh.size())
    module, x, index = attention_and_input(mesh=mesh, **options)
    table, rows = learned_table(), layout.shard(x, 1).requires_grad_()
    out = module(rows, mg.BucketBias(index if module.by_heads else layout.shard(index, 1), table), layout=layout)
    loss = (layout.gather(out, 1, mesh) ** 2).mean()
    loss.backward()
    grads = {name: parameter.grad for name, parameter in module.named_parameters()} | {"table": table.grad}
    x_grad = torch.zeros_like(x)
    real = layout.local_to_global >= 0
    x_grad[:, layout.local_to_global[real]] = rows.grad[:, real]
    grads["x"] = x_grad
    for grad in grads.values():
        dist.all_reduce(grad)
    return grads | {"loss": loss.detach()}
