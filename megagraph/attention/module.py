"""Multi-head attention with a graph bias, as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megagraph.attention.bias import Bias
from megagraph.attention.context_parallel import ring_attention
from megagraph.attention.engines import Impl
from megagraph.attention.layout import NodeLayout
from megagraph.attention.multihead import sizes_of, take_multihead_state
from megagraph.attention.packed import packed_attention
from megagraph.attention.packing import Packing
from megagraph.attention.sums import as_bias
from megagraph.attention.ways import Comm, check_comm


class BiasedRingAttention(nn.Module):
    """Multi-head self-attention with an additive graph bias, nodes spread over a context-parallel (CP) group.

    On rank i, O_i = softmax(Q_i K^T / sqrt(D) + b_i) V (paper Eq. 1-2).

    Every rank passes its S rows and the bias of its rows, and gets its rows; gradients of the parameters are shares,
    to be summed over the group. On one rank S = N and nothing is sent. State dicts of ``nn.MultiheadAttention`` load,
    too; what asks for such a module takes [megagraph.MultiheadAttention][].

    Args:
        embed_dim: width E of the input and output.
        num_heads: attention heads H; must divide ``embed_dim``.
        dropout: probability to drop an attention weight in training.
        bias: learn an offset in the query, value and output projections; keys have none, it cancels in the softmax.
        mesh: the CP group, a ``DeviceMesh`` of one dim; ``None`` for one rank.
        comm: ``"ring"``, ``"allgather"``, ``"halo"`` or ``"ulysses"``, see [megagraph.ring_attention][].
        impl: see [megagraph.biased_attention][].
        device, dtype: of the parameters.

    Of P ranks and N nodes, N_s of them super nodes, a rank has R regular ones, and S = R + N_s rows.

    Memory per rank, in elements of [B, S, E]: x, q, k, v and the result are kept for backward, no scores. In a ring the
    fp32 output accumulator and two visiting blocks of k and v come on top; in backward, fp32 gradients of q, k and v
    and three visiting blocks of gradients (two for P = 2).
    Communication per rank: (P - 1) * 2 * B * R * E elements forward and twice that backward, half of it in fp32.
    With ``comm="allgather"``, k and v of all N nodes are kept for backward, and not sent again there; with
    ``comm="halo"`` those h of other ranks that pairs name: 2 * B * h * E elements arrive, and as many gradients leave.
    ``comm="ulysses"`` sends (P - 1) / P * B * (4 * R + N_s) * E elements each way, and keeps the result twice; its bias
    has all N rows on every rank.

    Raises:
        ValueError: ``num_heads`` does not divide ``embed_dim``, or is no multiple of the ranks of ``"ulysses"``; there
            is no such ``comm``; in a call a shape does not hold, or on a mesh of several ranks ``layout``, or
            ``dropout_key`` in training, is missing.

    Examples:
        >>> attention = mg.BiasedRingAttention(32, num_heads=4, dropout=0.1)
        >>> bias = mg.BucketBias(torch.zeros(1, 50, 50, dtype=torch.uint8), torch.zeros(4, 12))
        >>> attention(torch.randn(2, 50, 32), bias).shape
        torch.Size([2, 50, 32])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        mesh: DeviceMesh | None = None,
        comm: Comm = "ring",
        impl: Impl | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
            raise ValueError(f"num_heads must be at least 1 and divide embed_dim = {embed_dim} >= 1, got {num_heads}")
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.dropout = dropout
        self.mesh = mesh
        self.comm = check_comm(comm, heads=num_heads, ranks=1 if mesh is None else mesh.size())
        self.impl = impl
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=False, device=device, dtype=dtype)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.register_load_state_dict_pre_hook(take_multihead_state)

    @property
    def by_heads(self) -> bool:
        """Whether each of several ranks attends from all N rows, with some of the heads."""
        return self.comm == "ulysses" and self.mesh is not None and self.mesh.size() > 1

    @classmethod
    def from_multihead_attention(
        cls,
        module: nn.MultiheadAttention,
        *,
        mesh: DeviceMesh | None = None,
        comm: Comm = "ring",
        impl: Impl | None = None,
    ) -> BiasedRingAttention:
        """One with copies of the parameters of ``module``; its x is [B, S, E], whatever ``module.batch_first`` is.

        Args:
            module: what to copy.
            mesh, comm, impl: as of this class.

        Raises:
            ValueError: ``module`` has keys or values of another width, ``add_bias_kv`` or ``add_zero_attn``.
        """
        like, weight = sizes_of(module), module.out_proj.weight
        made = cls(**like, mesh=mesh, comm=comm, impl=impl, device=weight.device, dtype=weight.dtype)
        made.load_state_dict(module.state_dict())
        for name, x in made.named_parameters():  # what is frozen stays so
            theirs = name if name.startswith("out_proj") else f"in_proj_{name.rpartition('.')[2]}"
            x.requires_grad_(module.get_parameter(theirs).requires_grad)
        return made.train(module.training)

    def forward(
        self,
        x: Tensor,
        attn_bias: Bias | Tensor | None = None,
        *,
        layout: NodeLayout | None = None,
        key_padding_mask: Tensor | None = None,
        dropout_key: Tensor | None = None,
        num_queries: int | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x: [B, S, E], the rows of this rank.
            attn_bias: [B or 1, H or 1, M, N], a bias class or a float tensor; ``None`` for none. On several ranks of
                ``"ulysses"`` [B or 1, H or 1, N, N], whatever M is. Of those heads that the projections give: some of
                them where these are sharded (``ColwiseParallel``).
            layout: which nodes the rows are; ``None``: all of them, on one rank.
            key_padding_mask: bool [B, N], True = ignore.
            dropout_key: int32 [B], see [megagraph.dropout_keys][]; ``None`` in training draws one from the default
                generator, on one rank. Not used in evaluation.
            num_queries: compute the first M local rows only; ``attn_bias`` then has M rows.
            packing: x is packed rows [T, E] of whole sequences on one rank, in float32 on a CPU; so is the result, or
                [B, M, E] with ``num_queries``.

        Returns:
            [B, M, E] in the dtype of x; M = S without ``num_queries``.
        """
        if packing is None and x.ndim != 3:
            raise ValueError(f"x must have shape [B, S, E], got {list(x.shape)}; one sequence is x[None]")
        batch, rows = x.shape[:2] if packing is None else packing.padding.shape
        if num_queries is not None and not 0 <= num_queries <= rows:
            raise ValueError(f"num_queries must be in 0..{rows}, the rows that are here, got {num_queries}")
        world_size = 1 if self.mesh is None else self.mesh.size()
        if layout is None:
            if world_size > 1:
                raise ValueError(
                    f"layout is needed on a mesh of {world_size} ranks; "
                    "pass NodeLayout(num_nodes, num_super, mesh.get_local_rank(), mesh.size())"
                )
            layout = NodeLayout(rows, 0)
        dropout_p = self.dropout if self.training else 0.0
        if dropout_p > 0.0 and dropout_key is None:
            if world_size > 1:
                raise ValueError(
                    f"dropout_key is needed in training on a mesh of {world_size} ranks, which must drop alike; "
                    "make one with megagraph.dropout_keys(seed, step, sequence_ids, layer=layer)"
                )
            dropout_key = torch.randint(-(2**31), 2**31, (batch,), dtype=torch.int32, device=x.device)
        if packing is not None:
            first = x if num_queries is None else packing.first_rows(x, num_queries)
            q, k, v = self.q_proj(first), self.k_proj(x), self.v_proj(x)
            bias, heads = as_bias(attn_bias), q.shape[-1] // self.head_dim
            return self.out_proj(
                packed_attention(q, k, v, bias, packing, heads, dropout_p=dropout_p, dropout_key=dropout_key)
            )
        out = ring_attention(
            self._split(self.q_proj(x if num_queries is None or self.by_heads else x[:, :num_queries])),
            self._split(self.k_proj(x)),
            self._split(self.v_proj(x)),
            attn_bias,
            layout=layout,
            mesh=self.mesh,
            comm=self.comm,
            key_padding_mask=key_padding_mask,
            dropout_p=dropout_p,
            dropout_key=dropout_key,
            impl=self.impl,
        )
        return self.out_proj(self._join(out[:, :, :num_queries]))

    def _split(self, x: Tensor) -> Tensor:
        """[B, S, H * D] -> [B, H, S, D]; with tensor parallelism a rank's projections give some of the heads."""
        return x.unflatten(2, (-1, self.head_dim)).transpose(1, 2)

    @staticmethod
    def _join(x: Tensor) -> Tensor:
        """[B, H, M, D] -> [B, M, E]."""
        return x.transpose(1, 2).flatten(2)
