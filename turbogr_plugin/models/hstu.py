"""HSTU: blocks of pointwise SiLU attention with relative time and position bias (Zhai et al., 2024).

A block is  x + W_o dropout( LayerNorm(attention(q, k, v)) * u ),  where  u, v, q, k = split(SiLU(W LayerNorm(x))).
Everything works on jagged tokens [T, D]; the attention comes from `kernels`. Left out: the ranking heads, and the
contextual and target tokens of the ranking variant.

Letters: T tokens, D model dim, H heads, A query/key dim of a head, E value dim of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import get_args

import torch
from torch import Tensor, nn

from turbogr_plugin.errors import InputError
from turbogr_plugin.kernels.gated_norm import gated_norm
from turbogr_plugin.kernels.jagged_attention import hstu_attention
from turbogr_plugin.kernels.keyed_dropout import DropoutKey, keyed_dropout
from turbogr_plugin.kernels.output_projection import output_projection
from turbogr_plugin.kernels.projection_call import Recompute
from turbogr_plugin.kernels.relative_bias import QueryTime
from turbogr_plugin.kernels.uvqk_projection import uvqk_projection
from turbogr_plugin.models.sizes import SIZES, ModelSize, SizeName

_EPS = 1e-6


@dataclass(kw_only=True)
class HSTUConfig:
    """Shape and regularisation of an HSTU. Fields left at None take the value of the named size."""

    size: SizeName = "tiny"
    "Named size of the paper; single fields below override it."
    dim: int | None = None
    "Model and item embedding dimension D."
    blocks: int | None = None
    "Number of blocks."
    heads: int | None = None
    "Number of heads H."
    qk_dim: int | None = None
    "Query and key dimension of a head."
    value_dim: int | None = None
    "Value and gate dimension of a head."
    max_length: int | None = None
    "Longest sequence the model takes; longer histories keep their latest events. Attention is divided by it."
    input_dropout: float = 0.2
    "Dropout of the input embeddings."
    dropout: float = 0.2
    "Dropout before each block's output projection."
    time_buckets: int = 128
    "Buckets of the relative time bias; 0 leaves the bias out."
    position_bias: bool = True
    "Whether attention has a relative position bias."
    query_time: QueryTime = "own"
    "own: a query stands at the time of its own event; next: at that of the next one, where the request time is known."
    recompute: Recompute = "norm"
    """What backward computes again instead of keeping it: norm: the normalised tokens of a block; projection: u, v, q
    and k before their activation, too: a third less memory for what a block keeps, a third more work in its
    projection."""

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise InputError(f"model.size must be one of {', '.join(SIZES)}, got {self.size!r}")
        for name, value in asdict(self.dimensions()).items():
            if value < 1:
                raise InputError(f"model.{name} must be at least 1, got {value}")
        for name in ("input_dropout", "dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"model.{name} must be in [0, 1), got {getattr(self, name)}")
        if self.time_buckets < 0:
            raise InputError(f"model.time_buckets must be at least 0, got {self.time_buckets}")
        if self.query_time not in get_args(QueryTime):
            raise InputError(f"model.query_time must be one of {get_args(QueryTime)}, got {self.query_time!r}")

        if self.recompute not in get_args(Recompute):
            raise InputError(f"model.recompute must be one of {get_args(Recompute)}, got {self.recompute!r}")

    def dimensions(self) -> ModelSize:
        """The named size with the fields given here in place of its own."""
        given = {field.name: getattr(self, field.name) for field in fields(ModelSize)}
        return replace(SIZES[self.size], **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True)
class JaggedSequence:
    """What the blocks need to know of a batch besides the tokens.

    Attributes:
        offsets: [B + 1] int64.
        times: [T] int64 seconds.
        query_times: [T] int64 seconds, the time at which each token, as a query, stands.
        dropout_key: samples and positions of the tokens; None where nothing is dropped (evaluation).
        host_offsets: the numbers of `offsets`, where they are known on the host.
    """

    offsets: Tensor
    times: Tensor
    query_times: Tensor
    dropout_key: DropoutKey | None
    host_offsets: Sequence[int] | None = None


class HSTUBlock(nn.Module):
    """One block, [T, D] to [T, D]."""

    def __init__(self, config: HSTUConfig, layer: int) -> None:
        super().__init__()
        size = config.dimensions()
        self.heads, self.qk_dim, self.value_dim = size.heads, size.qk_dim, size.value_dim
        self.scale = 1.0 / size.max_length
        self.alpha = 1.0  # as published: the products are not divided by sqrt(A)
        self.layer = layer
        self.p = config.dropout
        self.recompute = config.recompute
        inner = size.heads * size.value_dim
        self.input_norm = nn.LayerNorm(size.dim, eps=_EPS)
        self.uvqk = nn.Linear(size.dim, 2 * inner + 2 * size.heads * size.qk_dim, bias=False)
        self.attention_norm = nn.LayerNorm(inner, eps=_EPS)
        self.output = nn.Linear(inner, size.dim)
        nn.init.normal_(self.uvqk.weight, std=0.02)
        nn.init.xavier_uniform_(self.output.weight)
        nn.init.zeros_(self.output.bias)
        self.time_bias = nn.Parameter(torch.randn(config.time_buckets) * 0.02) if config.time_buckets else None
        self.position_bias = nn.Parameter(torch.randn(size.max_length) * 0.02) if config.position_bias else None

    def forward(self, x: Tensor, sequence: JaggedSequence) -> Tensor:
        """x: [T, D]; returns [T, D]."""
        inner, width = self.heads * self.value_dim, self.heads * self.qk_dim
        u, v, q, k = uvqk_projection(
            x,
            self.uvqk.weight,
            [inner, inner, width, width],
            norm_weight=self.input_norm.weight,
            norm_bias=self.input_norm.bias,
            eps=_EPS,
            recompute=self.recompute,
        )
        attended = hstu_attention(
            q.unflatten(1, (self.heads, self.qk_dim)),
            k.unflatten(1, (self.heads, self.qk_dim)),
            v.unflatten(1, (self.heads, self.value_dim)),
            sequence.offsets,
            alpha=self.alpha,
            scale=self.scale,
            timestamps=sequence.times,
            time_bias=self.time_bias,
            query_timestamps=sequence.query_times,
            position_bias=self.position_bias,
            host_offsets=sequence.host_offsets,
        )
        gated = gated_norm(
            attended.flatten(1),
            u,
            self.attention_norm.weight,
            self.attention_norm.bias,
            eps=_EPS,
            dropout_key=sequence.dropout_key,
            layer=self.layer,
            p=self.p,
        )
        return output_projection(gated, self.output.weight, x, bias=self.output.bias)


class HSTU(nn.Module):
    """Encoder: item embeddings of jagged sequences to one query vector per token."""

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        size = config.dimensions()
        self.p = config.input_dropout
        self.input_scale = size.dim**0.5
        self.position_embedding = nn.Parameter(torch.randn(size.max_length, size.dim) * size.dim**-0.5)
        self.blocks = nn.ModuleList(HSTUBlock(config, layer + 1) for layer in range(size.blocks))

    def forward(self, embeddings: Tensor, positions: Tensor, sequence: JaggedSequence) -> Tensor:
        """Encodes tokens.

        Args:
            embeddings: [T, D] item embeddings.
            positions: [T] int64 in [0, max_length), position of each token in its sequence.
            sequence: layout, times and dropout key.

        Returns:
            [T, D], each row seeing its own and earlier tokens of its sequence alone.
        """
        x = embeddings * self.input_scale + self.position_embedding[positions]
        if sequence.dropout_key is not None:
            x = keyed_dropout(x, sequence.dropout_key, layer=0, p=self.p)
        for block in self.blocks:
            x = block(x, sequence)
        return x
