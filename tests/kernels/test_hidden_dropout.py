"""The kernel of hidden dropout beside its torch form: the same bits."""

from __future__ import annotations

import pytest
import torch

import megagraph as mg
from megagraph.attention.dropout import dropout_keys
from megagraph.attention.hidden import _dropped, _hidden_dropout, hidden_dropout
from tests.problems import DEVICE, EXACT

pytest.importorskip("triton", reason="triton has wheels for Linux only")

DTYPES = (torch.float16, torch.bfloat16, torch.float32, EXACT)
KEY = dropout_keys(2**31 + 7, 3, torch.tensor([0, 9]))


def expected(x: torch.Tensor, p: float, layout: mg.NodeLayout) -> torch.Tensor:
    return hidden_dropout(x.cpu(), p, KEY, layout)


def run(x: torch.Tensor, p: float, row_ids: torch.Tensor | None = None) -> torch.Tensor:
    return _dropped(_hidden_dropout, x, p, KEY.to(x.device), row_ids)


def assert_same(got: torch.Tensor, want: torch.Tensor):
    # the interpreter cuts off what does not fit into bf16, where a GPU rounds
    cut = got.dtype == torch.bfloat16 and not got.is_cuda
    torch.testing.assert_close(got.cpu(), want, rtol=2**-7 if cut else 0, atol=0)
    assert torch.equal(got.cpu() == 0, want == 0)


def hidden(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, *shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", dict.fromkeys(DTYPES), ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (17, 63), (33, 129), (50, 256)], ids=str)
def test_equals_torch(shape, dtype):
    x, layout = hidden(*shape, dtype=dtype), mg.NodeLayout(shape[0], 0)
    for p in (0.1, 0.7):  # the threshold of the latter is no int32
        assert_same(run(x, p), expected(x, p, layout))


@pytest.mark.parametrize(
    "view",
    [lambda x: x.transpose(1, 2), lambda x: x[:, ::3, 1::2], lambda x: x[:, :, :1].expand(-1, -1, 20)],
    ids=["transposed", "sliced", "expanded"],
)
def test_strides(view):
    x = view(hidden(40, 30))
    layout = mg.NodeLayout(x.shape[1], 0)
    assert_same(run(x, 0.3), expected(x, 0.3, layout))


def test_rows_of_a_rank():
    layout = mg.NodeLayout(21, 3, rank=1, world_size=2)
    x = hidden(layout.num_local, 8)
    got = run(x, 0.5, layout.row_ids(x.device))
    assert_same(got, expected(x, 0.5, layout))


def test_gradient_keeps_nothing():
    x = hidden(19, 24).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = run(x, 0.4)
    assert sum(t.nbytes for t in saved) == KEY.nbytes
    d_out = torch.randn_like(x)
    (dx,) = torch.autograd.grad(out, x, d_out, create_graph=True)
    assert_same(dx.detach(), expected(d_out, 0.4, mg.NodeLayout(19, 0)))
    by_operator = _hidden_dropout(x, 0.4, KEY.to(x.device), None)
    assert torch.equal(out, by_operator)
    assert torch.equal(dx, torch.autograd.grad(by_operator, x, d_out)[0])


def test_opcheck():
    x, key = hidden(5, 7).requires_grad_(), KEY.to(DEVICE)
    for row_ids in (None, torch.arange(5, device=DEVICE)):
        torch.library.opcheck(_hidden_dropout, (x, 0.3, key, row_ids))


@pytest.mark.filterwarnings("default")  # the compiler warns about itself
def test_compiles():
    x = hidden(9, 11)
    assert torch.equal(torch.compile(run, fullgraph=True)(x, 0.3), run(x, 0.3))


def test_no_rows():
    assert run(hidden(0, 8), 0.3).shape == (2, 0, 8)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
@pytest.mark.parametrize("layout", [mg.NodeLayout(21, 3), mg.NodeLayout(21, 3, rank=1, world_size=2)], ids=["1", "2"])
def test_cuda_takes_the_kernel(layout):
    x = hidden(layout.num_local, 8)
    got = hidden_dropout(x.requires_grad_(), 0.5, KEY.to(DEVICE), layout)
    assert "_Dropout" in type(got.grad_fn).__name__
    assert_same(got.detach(), expected(x.detach(), 0.5, layout))
