"""What a layer makes again for its backward pass: the same gradients, and what is not kept meanwhile."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from megagraph.models.recompute import recomputed

ROWS, DIM = 13, 6


def readers(seed: int = 0) -> tuple[nn.Module, nn.ModuleList, torch.Tensor]:
    torch.manual_seed(seed)
    norm, products = nn.LayerNorm(DIM).double(), nn.ModuleList(nn.Linear(DIM, 4).double() for _ in range(3))
    return norm, products, torch.randn(2, ROWS, DIM, dtype=torch.float64, requires_grad=True)


def loss_of(norm, products, x, again):
    def function(x):
        return torch.tanh(norm(x))

    def read(y):  # all, a part, and transposed
        return products[0](y).sum() + (products[1](y[:, 3:9]) ** 2).sum() + products[2](y.transpose(0, 1)).cos().sum()

    if not again:
        return read(function(x))
    with recomputed(function, x) as y:
        return read(y)


def gradients(again, times=1, dtype=None):
    norm, products, x = readers()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = loss_of(norm, products, x, again)
    for left in reversed(range(times)):
        loss.backward(retain_graph=left > 0)
    return [loss, x.grad, *(parameter.grad for module in (norm, products) for parameter in module.parameters())]


@pytest.mark.parametrize(("times", "dtype"), [(1, None), (3, None), (1, torch.bfloat16)])
def test_gradients_are_those_of_what_is_kept(times, dtype):
    torch.testing.assert_close(gradients(True, times, dtype), gradients(False, times, dtype), rtol=0, atol=0)


@pytest.mark.parametrize("again", [True, False])
def test_it_is_made_once_a_backward_pass_and_not_kept_meanwhile(again):
    made = []

    def function(x):
        y = torch.sin(x)
        made.append(StorageWeakRef(y.untyped_storage()))
        return y

    _, products, x = readers()
    with recomputed(function, x) if again else nullcontext(function(x)) as y:
        loss = sum(product(y).sum() for product in products)
    del y
    assert [held.expired() for held in made] == [again]
    for passes in (1, 2):
        loss.backward(retain_graph=passes == 1)
        assert len(made) == 1 + passes * again and made[-1].expired() == (again or passes == 2)


def test_what_was_changed_in_place_is_an_error():
    norm, products, x = readers()
    hidden = x * 1
    loss = loss_of(norm, products, hidden, True)
    with torch.no_grad():
        hidden.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_without_gradients_nothing_is_made_again():
    norm, products, x = readers()
    with torch.no_grad(), recomputed(norm, x) as y:
        assert not products[0](y).requires_grad
