"""What is measured, as data (`Case`), and how a case becomes something that runs (`Problem`).

A step is a forward and, unless the case says otherwise, the gradients by torch.autograd.grad: .backward() would add
into .grad and so measure memory traffic that no side needs. Both sides of a comparison get the same values.

Letters: T tokens, B rows, N the longest row, H heads, D dim of a head.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from benchmarks.baselines import dense_chains, meta_attention, padded_attention
from turbogr_plugin.kernels import explain
from turbogr_plugin.kernels.fuxi_attention import fuxi_attention
from turbogr_plugin.kernels.gated_norm import gated_norm
from turbogr_plugin.kernels.jagged_attention import hstu_attention
from turbogr_plugin.kernels.keyed_dropout import DropoutKey
from turbogr_plugin.kernels.offsets import positions, row_ids
from turbogr_plugin.kernels.uvqk_projection import uvqk_projection

Kernel = Literal["hstu", "fuxi", "gate", "uvqk"]
Side = Literal["ours", "padded", "compiled", "meta", "eager"]

TIME_BUCKETS = 128
SECONDS = 31 * 86_400
"""Times are drawn from 31 days, the span of KuaiRand-27K."""

_EPS = 1e-6  # of the norms, as in the published models


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to run. All fields are JSON types, so that a case can be handed to another process."""

    kernel: Kernel
    side: Side = "ours"
    lengths: tuple[int, ...]
    """Tokens of each row."""
    cap: int
    """Longest row of the model: entries of the position table, and what the scores are divided by."""
    heads: int = 8
    dim: int = 64
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    bias: bool = True
    """HSTU: with time and position bias."""
    gradients: bool = True
    """With backward."""
    dropout: float = 0.2
    """gate: share of the elements that is dropped."""
    implementation: str | None = None
    """Ours: named one instead of the fastest that serves the call."""
    device: str = "cpu"
    seed: int = 0

    @property
    def tokens(self) -> int:
        """T."""
        return sum(self.lengths)

    @property
    def pairs(self) -> int:
        """Allowed (causal) pairs of a query and a key."""
        return sum(length * (length + 1) // 2 for length in self.lengths)

    @property
    def useful_flops(self) -> float:
        """4 D per allowed pair and head (FuXi: 8, it has three channels), times 3.5 with backward."""
        forward = (8 if self.kernel == "fuxi" else 4) * self.dim * self.heads * self.pairs
        return forward * 3.5 if self.gradients else float(forward)

    def of(self, side: Side, **changes: Any) -> Case:
        """The same on another side, or with other changes."""
        return replace(self, side=side, **changes)


class Problem(NamedTuple):
    """Inputs that exist, and the call whose time and memory are measured."""

    call: Callable[[], Tensor | tuple[Tensor, ...]]
    leaves: tuple[Tensor, ...]
    """What gradients are taken of."""
    grad: Tensor | tuple[Tensor, ...]
    """Gradients of what the call gives."""
    explanation: str
    """Ours: which implementation serves the call; others: what is run."""

    def step(self) -> tuple[Tensor, ...]:
        """Runs forward and backward: what the call gives, and the gradients."""
        given = self.call()
        gradients = torch.autograd.grad(given, self.leaves, self.grad)
        return (*given, *gradients) if isinstance(given, tuple) else (given, *gradients)

    def forward(self) -> tuple[Tensor, ...]:
        """Runs forward alone, with nothing kept for backward."""
        with torch.no_grad():
            given = self.call()
        return given if isinstance(given, tuple) else (given,)


def problem(case: Case) -> Problem:
    """Makes the inputs of a case."""
    torch.manual_seed(case.seed)
    return _PROBLEMS[case.kernel](case)


def runner(case: Case) -> Callable[[], tuple[Tensor, ...]]:
    """Makes the inputs of a case; what to time."""
    made = problem(case)
    return made.step if case.gradients else made.forward


class _Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    offsets: Tensor
    times: Tensor
    tables: tuple[Tensor, ...]
    """() or (time_bias [buckets], position_bias [cap])."""


def _inputs(case: Case, channels: int = 1) -> _Inputs:
    dtype = getattr(torch, case.dtype)
    width = (case.tokens, case.heads, case.dim)
    q, k, v = (torch.randn(width).to(dtype) for _ in range(3))
    grad = torch.randn(case.tokens, case.heads, case.dim * channels).to(dtype)
    # Published models keep the tables in float32 beside bf16 activations.
    wide = torch.promote_types(dtype, torch.float32)
    tables = tuple(torch.randn(entries).to(wide) for entries in (TIME_BUCKETS, case.cap)) if case.bias else ()
    rows = [torch.randint(0, SECONDS, (length,)).sort().values for length in case.lengths]
    offsets = torch.tensor([0, *itertools.accumulate(case.lengths)])
    made = _Inputs(q, k, v, grad, offsets, torch.cat(rows), tables)
    return made if case.device == "cpu" else _Inputs(*(_moved(value, case.device) for value in made))


def _moved(value: Any, device: str) -> Any:
    return tuple(part.to(device) for part in value) if isinstance(value, tuple) else value.to(device)


def _leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.requires_grad_() for tensor in tensors)


def _compiled(function: Callable[..., Tensor], case: Case) -> Callable[..., Tensor]:
    if case.side != "compiled":
        return function
    return torch.compile(function, fullgraph=True, dynamic=False)


def _hstu(case: Case) -> Problem:
    inputs = _inputs(case)
    factors = {"alpha": case.dim**-0.5, "scale": 1 / case.cap}
    if case.side == "meta":
        if case.bias:
            raise ValueError("Meta's PyTorch attention has no bias: pass bias=False")
        q, k, v = _leaves(inputs.q, inputs.k, inputs.v)
        longest = max(case.lengths)
        return Problem(
            lambda: meta_attention.hstu(q, k, v, inputs.offsets, longest=longest, **factors),
            *((q, k, v), inputs.grad, "padded inside the step, without bias"),
        )
    if case.side == "ours":
        q, k, v, *tables = _leaves(inputs.q, inputs.k, inputs.v, *inputs.tables)
        arguments: dict[str, Any] = {**factors, "implementation": case.implementation}
        if case.bias:
            arguments |= {"timestamps": inputs.times, "time_bias": tables[0], "position_bias": tables[1]}
        return Problem(
            lambda: hstu_attention(q, k, v, inputs.offsets, **arguments),
            *((q, k, v, *tables), inputs.grad),
            str(explain(hstu_attention, q, k, v, inputs.offsets, **arguments)),
        )
    return _padded(case, inputs, _compiled(padded_attention.hstu, case), factors)


def _fuxi(case: Case) -> Problem:
    inputs = _inputs(case, channels=3)
    factors = {"alpha": case.dim**-0.5, "scale": 1 / case.cap, "bias_scale": 1 / case.cap}
    if case.side == "ours":
        q, k, v, time_bias, position_bias = _leaves(inputs.q, inputs.k, inputs.v, *inputs.tables)
        arguments: dict[str, Any] = {**factors, "implementation": case.implementation, "timestamps": inputs.times}
        arguments |= {"time_bias": time_bias, "position_bias": position_bias}
        return Problem(
            lambda: fuxi_attention(q, k, v, inputs.offsets, **arguments),
            *((q, k, v, time_bias, position_bias), inputs.grad),
            str(explain(fuxi_attention, q, k, v, inputs.offsets, **arguments)),
        )
    return _padded(case, inputs, _compiled(padded_attention.fuxi, case), factors)


def _padded(case: Case, inputs: _Inputs, attention: Callable[..., Tensor], factors: dict[str, float]) -> Problem:
    q, k, v, grad = (padded_attention.pad(x, case.lengths) for x in (inputs.q, inputs.k, inputs.v, inputs.grad))
    pairs = padded_attention.Pairs.of(padded_attention.pad(inputs.times, case.lengths), q.dtype)
    leaves = _leaves(q, k, v, *inputs.tables)
    tables = leaves[3:] or (None, None)
    how = "padded, eager" if case.side == "padded" else "padded, torch.compile"
    return Problem(lambda: attention(*leaves[:3], pairs, *tables, **factors), leaves, grad, how)


def _norm_parameters(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weight around 1 and bias around 0 of a norm, [width]."""
    return (1 + 0.1 * torch.randn(width)).to(dtype), (0.1 * torch.randn(width)).to(dtype)


def _gate(case: Case) -> Problem:
    dtype, width = getattr(torch, case.dtype), case.heads * case.dim
    x, gate, grad = (torch.randn(case.tokens, width).to(dtype) for _ in range(3))
    leaves = _leaves(x, gate, *_norm_parameters(width, dtype))
    if case.side == "eager":
        chain = dense_chains.gated_norm
        return Problem(lambda: chain(*leaves, eps=_EPS, dropout=case.dropout), leaves, grad, "eager chain")
    offsets = torch.tensor([0, *itertools.accumulate(case.lengths)])
    key = DropoutKey(0, 0, samples=row_ids(offsets, case.tokens), positions=positions(offsets, case.tokens))
    arguments: dict[str, Any] = {"eps": _EPS, "dropout_key": key, "p": case.dropout}
    arguments["implementation"] = case.implementation
    explanation = str(explain(gated_norm, *leaves, **arguments))
    return Problem(lambda: gated_norm(*leaves, **arguments), leaves, grad, explanation)


def _uvqk(case: Case) -> Problem:
    dtype, width = getattr(torch, case.dtype), case.heads * case.dim
    x, *grads = (torch.randn(case.tokens, width).to(dtype) for _ in range(5))
    projection = (torch.randn(4 * width, width) * width**-0.5).to(dtype)
    leaves = x, projection, norm_weight, norm_bias = _leaves(x, projection, *_norm_parameters(width, dtype))
    widths = (width,) * 4
    if case.side == "eager":
        chain = dense_chains.uvqk
        return Problem(lambda: chain(*leaves, widths=widths, eps=_EPS), leaves, tuple(grads), "eager chain")
    arguments: dict[str, Any] = {"norm_weight": norm_weight, "norm_bias": norm_bias, "eps": _EPS}
    arguments["implementation"] = case.implementation
    explanation = str(explain(uvqk_projection, x, projection, widths, **arguments))
    return Problem(lambda: uvqk_projection(x, projection, widths, **arguments), leaves, tuple(grads), explanation)


_PROBLEMS: dict[Kernel, Callable[[Case], Problem]] = {"hstu": _hstu, "fuxi": _fuxi, "gate": _gate, "uvqk": _uvqk}
