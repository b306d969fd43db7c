"""What all models are: an embedding, a list of identical layers, a read-out; any run of layers is a pipeline stage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megagraph.attention.bias import BorderedData
from megagraph.attention.dropout import mix_key, place_keys
from megagraph.attention.engines import is_short_shape
from megagraph.attention.hidden import hidden_dropout
from megagraph.attention.layout import NodeLayout
from megagraph.attention.neighbours import Neighbours
from megagraph.attention.once import differentiable_once
from megagraph.attention.packing import Packing
from megagraph.models.config import ModelConfig
from megagraph.models.layers import DROPOUT_PLACES, Context, GraphTransformerLayer

_INPUT_PLACE = DROPOUT_PLACES  # after the layers' own, with the layer index -1

_SPARSE_BELOW = 1 / 32  # share of nonzeros in features
_PACKED_FROM = 1 / 16  # share of padding from which leaving it out pays on a CPU
_TABLES = ("global_tokens", "degree_table")


def is_bias(name: str) -> bool:
    """Whether a parameter of this name is the learned part of an attention bias, [H, C] or [H, R] of a layer."""
    return name.endswith("bias_weight")


class GraphTransformer(nn.Module):
    """Linear(d_in -> d) on raw features, learned global tokens, L pre-LN layers, LayerNorm, Linear(d -> classes).

    With a learned embedding the features are vectors of width d from a table outside the model, taken as they are.
    Super nodes are rows like any other: the mean feature of their members passes the same projection. A row is
    encoded once per distinct node of the batch, and the last layer computes the rows that are read out only.

    Args:
        mesh: the CP group over which the nodes of a sequence are spread; ``None`` for one rank.
    """

    global_tokens: nn.Parameter | None
    input_proj: nn.Linear | None

    def __init__(self, config: ModelConfig, *, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.config = config
        self.input_proj = nn.Linear(config.in_features, config.dim) if config.embedding == "features" else None
        tokens = nn.Parameter(torch.empty(config.global_tokens, config.dim)) if config.global_tokens else None
        self.register_parameter("global_tokens", tokens)
        # keyed by the position in the whole model, which a pipeline stage keeps
        self.layers = nn.ModuleDict({str(i): GraphTransformerLayer(config, i, mesh) for i in range(config.layers)})
        self.final_norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights as ``config.init`` says, learned rows from N(0, 0.02), offsets zero.

        The learned part of a bias starts where ``config.bias_start`` says.
        """
        std = 0.02 / self.config.layers**0.5
        for name, parameter in self.named_parameters():
            if is_bias(name) and self.config.bias_start:
                with torch.no_grad():
                    parameter.copy_(torch.tensor(self.config.bias_start))
            elif name in _TABLES:
                nn.init.normal_(parameter, std=0.02)
            elif parameter.ndim == 2 and self.config.init == "xavier" and not is_bias(name):
                nn.init.xavier_uniform_(parameter)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def keep_layers(self, layers: range) -> None:
        """Become one stage of a pipeline: drop the other layers, and the embedding and read-out that go with them."""
        for index in range(self.config.layers):
            if index not in layers:
                del self.layers[str(index)]
        if 0 not in layers:
            del self.input_proj, self.global_tokens
        if self.config.layers - 1 not in layers:
            del self.final_norm, self.head

    def forward(
        self,
        features: Tensor,
        node_index: Tensor,
        structure: Tensor | BorderedData,
        key_padding_mask: Tensor,
        *,
        degrees: Tensor | None = None,
        layout: NodeLayout | None = None,
        neighbours: Neighbours | None = None,
        num_targets: int = 1,
        dropout_key: Tensor | None = None,
    ) -> Tensor:
        """Class scores of the first rows of every sequence.

        Args:
            features: [U, d_in], the batch's distinct raw rows (graph nodes and super nodes), or [U, d] learned ones.
            node_index: int64 [B, S - G], the row of ``features`` at each local position; G global tokens follow.
            structure: channels [B or 1, C, S, N] or uint8 buckets [B or 1, S, N]; S = N on one rank, and N for S where
                ranks attend by heads (``comm="ulysses"``); or those of a whole graph.
            key_padding_mask: bool [B, N], True = padding.
            degrees: int64 [U], of the rows of ``features``; only Graphormer reads it.
            layout: which nodes are local; ``None``: all, on one rank.
            neighbours: of the one sequence, which layers with a convolution need.
            num_targets: T, local rows to read out; may be 0.
            dropout_key: int32 [B] from [megagraph.dropout_keys][]; needed in training, ignored in evaluation.

        Returns:
            logits [B, T, num_classes].
        """
        if layout is None:
            layout = NodeLayout(key_padding_mask.shape[1], 0)
        if self.config.convolution:
            _check_neighbours(neighbours, layout, len(key_padding_mask))
        context = Context(
            structure=structure,
            key_padding_mask=key_padding_mask,
            layout=layout,
            neighbours=neighbours,
            dropout_key=dropout_key,
        )
        return self.read_out(self.transform(self.embed(features, degrees, node_index, context), context, num_targets))

    def encode(self, features: Tensor, degrees: Tensor | None) -> Tensor:
        """Raw rows [U, d_in], or learned ones [U, d] -> [U, d], in the dtype of parameters.

        What layers add up stays in it under autocast, too: a sum that is rounded in every layer has two to four times
        the error after some tens.
        """
        if self.input_proj is None:
            return features
        features = features.to(self.input_proj.weight.dtype)
        if _mostly_zeros(features):
            return _SparseProduct.apply(self.input_proj.weight, features) + self.input_proj.bias
        return self.input_proj(features).to(features.dtype)

    def embed(self, features: Tensor, degrees: Tensor | None, node_index: Tensor, context: Context) -> Tensor:
        """Input rows [B, S, d], global tokens last."""
        x = nn.functional.embedding(node_index, self.encode(features, degrees))
        if self.global_tokens is not None:
            x = torch.cat([x, self.global_tokens.expand(x.shape[0], -1, -1)], dim=1)
        key = self._key(context)
        key = None if key is None else mix_key(key, -1, _INPUT_PLACE)
        return hidden_dropout(x, self.config.input_dropout, key, context.layout)

    def transform(self, x: Tensor, context: Context, num_targets: int) -> Tensor:
        """The layers that are here, [B, S, d] -> [B, S, d]; the model's last layer gives its first T rows only."""
        packing = None if isinstance(context.structure, BorderedData) else self._worth_packing(x, context)
        ids, key = [int(index) for index in self.layers], self._key(context)
        if key is not None:
            keys = place_keys(key, range(ids[0], ids[-1] + 1), DROPOUT_PLACES)
            context = replace(context, place_keys=dict(zip(ids, keys, strict=True)))
        context = replace(context, packing=packing)
        x = x if packing is None else packing.pack(x)
        for index, layer in zip(ids, self.layers.values(), strict=True):
            x = layer(x, context, num_targets if index == self.config.layers - 1 else None)
        return x if packing is None or x.ndim == 3 else packing.unpack(x)

    def read_out(self, x: Tensor) -> Tensor:
        """Class scores [B, T, num_classes]."""
        return self.head(self.final_norm(x))

    def _worth_packing(self, x: Tensor, context: Context) -> Packing | None:
        """On a GPU shapes that depend on the data would make it wait."""
        padding = context.key_padding_mask
        if x.device.type != "cpu" or context.layout.world_size > 1 or torch.compiler.is_compiling():
            return None
        if self.config.convolution:  # which finds nodes by their slots
            return None
        if padding.dtype != torch.bool or padding.shape != x.shape[:2]:  # of which attention speaks
            return None
        head_dim = self.config.dim // self.config.heads
        short = x.dtype == torch.float32 and is_short_shape(padding.shape[1], head_dim)
        if not short or torch.is_autocast_enabled("cpu"):
            return None
        return Packing(padding) if _PACKED_FROM <= padding.double().mean().item() < 1 else None

    def _key(self, context: Context) -> Tensor | None:
        if not self.training:
            return None
        if context.dropout_key is None:
            raise ValueError("dropout_key is needed in training; make one with megagraph.dropout_keys(seed, step, ids)")
        key, batch = context.dropout_key, len(context.key_padding_mask)
        if key.dtype != torch.int32 or key.shape != (batch,):  # dropout of hidden states trusts it
            raise ValueError(
                f"dropout_key must be torch.int32 [B] = [{batch}], got {key.dtype} {list(key.shape)}; make one with "
                "megagraph.dropout_keys(seed, step, ids)"
            )
        return key


def _check_neighbours(neighbours: Neighbours | None, layout: NodeLayout, batch: int) -> None:
    """Raise ValueError unless a convolution finds all nodes that it names."""
    if neighbours is None:
        raise ValueError("neighbours are needed by a model with a convolution; those of a full batch are in it")
    if batch != 1:
        raise ValueError(f"a model with a convolution takes one sequence at a time, got {batch}; pass them one by one")
    rows, columns = len(neighbours.relation.row_starts) - 1, neighbours.relation.num_columns
    if (rows, columns) != (layout.block_size, layout.num_nodes):
        raise ValueError(
            f"neighbours must be of the {layout.block_size} regular rows here and the {layout.num_nodes} regular nodes "
            f"of the layout, got {rows} and {columns}; pass those of this sequence, and its layout"
        )


def _mostly_zeros(features: Tensor) -> bool:
    """Whether a product should be by the nonzeros of rows [U, d_in]: on a CPU, judged by every 16th row."""
    if features.device.type != "cpu" or features.dtype not in (torch.float32, torch.float64):
        return False
    if features.requires_grad or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return False
    some = features[::16]
    return some.count_nonzero().item() <= _SPARSE_BELOW * some.numel()


class _SparseProduct(torch.autograd.Function):
    """x weight^T [U, d] by the nonzeros of x [U, d_in], which gets no gradient."""

    @staticmethod
    def forward(ctx, weight, x):
        rows = x.detach().numpy()
        at = np.flatnonzero(rows != 0)  # of booleans: several times faster than of numbers, and than torch's
        starts = np.searchsorted(at, rows.shape[1] * np.arange(len(rows) + 1))
        ctx.x = sp.csr_array((rows.ravel()[at], at % rows.shape[1], starts), shape=rows.shape)
        return torch.from_numpy(ctx.x @ weight.detach().t().contiguous().numpy())

    @staticmethod
    @differentiable_once
    def backward(ctx, d_out):
        return torch.from_numpy(ctx.x.T @ d_out.contiguous().numpy()).t(), None
