"""Calls of HSTU and FuXi attention, and their truth: row by row with all pairs, masks and entries by nested loops.

Nothing here shares code with the implementations. `assert_exact` holds one to the truth in float64,
`assert_as_exact_as_reference` to the tolerance rule of lower precisions.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from turbogr_plugin.kernels.fuxi_attention import fuxi_attention
from turbogr_plugin.kernels.jagged_attention import hstu_attention
from turbogr_plugin.kernels.offsets import lengths_to_offsets

BUCKET_WIDTH = 0.301
BORDERS = (1.0, 5.0, 5.0, 60.0, 3600.0, math.inf)
"""Of seven buckets given as an argument, one of them empty."""


@dataclass(frozen=True)
class Case:
    """One call. `time` and `position` are the entries of the tables (0: none), `per_head` gives each head its own."""

    lengths: tuple[int, ...]
    family: Literal["hstu", "fuxi"] = "hstu"
    heads: int = 2
    dim: int = 8
    value_dim: int = 8
    causal: bool = True
    targets: tuple[int, ...] | None = None
    contextual: int | tuple[int, ...] = 0
    window: int | None = None
    full_tail: int = 0
    time: int = 9
    borders: bool = False
    decay: bool = False
    position: int = 4
    per_head: bool = False
    next_times: bool = False
    sorted_times: bool = True
    index_dtype: torch.dtype = torch.int64
    seed: int = 0

    def __str__(self) -> str:
        changed = [f"{k}={v}" for k, v in vars(self).items() if k != "lengths" and v != getattr(Case, k)]
        return ",".join(["x".join(map(str, self.lengths)) or "none", *changed])

    def row_targets(self, row: int) -> int:
        return 0 if self.targets is None else self.targets[row]

    def row_contextual(self, row: int) -> int:
        return self.contextual if isinstance(self.contextual, int) else self.contextual[row]


@dataclass
class Inputs:
    """Tensors of a call. Leaves require gradients."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    offsets: Tensor
    times: Tensor
    query_times: Tensor
    time_bias: Tensor | None
    time_decay: Tensor | None
    position_bias: Tensor | None
    alpha: float = 0.7
    scale: float = 1 / 11
    bias_scale: float = 0.3

    def leaves(self) -> dict[str, Tensor]:
        names = ("q", "k", "v", "time_bias", "time_decay", "position_bias")
        return {name: x for name in names if (x := getattr(self, name)) is not None}

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of the public operator."""
        case, timed = self.case, self.time_bias is not None or self.time_decay is not None
        contextual = case.contextual
        if isinstance(contextual, tuple):
            contextual = torch.tensor(contextual, dtype=case.index_dtype)
        only_fuxi = {"bias_scale": self.bias_scale, "time_decay": self.time_decay} if case.family == "fuxi" else {}
        return {
            "alpha": self.alpha,
            "scale": self.scale,
            "causal": case.causal,
            "num_targets": None if case.targets is None else torch.tensor(case.targets, dtype=case.index_dtype),
            "num_contextual": contextual,
            "window": case.window,
            "full_tail": case.full_tail,
            "timestamps": self.times if timed else None,
            "query_timestamps": self.query_times if case.next_times and timed else None,
            "time_bias": self.time_bias,
            "time_buckets": torch.tensor(BORDERS) if case.borders and self.time_bias is not None else None,
            "position_bias": self.position_bias,
            **only_fuxi,
        }

    def call(self, **changes: Any) -> Tensor:
        """The operator's output; keyword arguments in place of the case's own."""
        operator = fuxi_attention if self.case.family == "fuxi" else hstu_attention
        return operator(self.q, self.k, self.v, self.offsets, **{**self.keywords(), **changes})


def inputs(case: Case, dtype: torch.dtype = torch.float64) -> Inputs:
    """Random tensors of a case: the same numbers, rounded, in each dtype."""
    generator = torch.Generator().manual_seed(case.seed)
    total = sum(case.lengths)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    def table(width: int) -> Tensor | None:
        return (random(case.heads, width) if case.per_head else random(width)) if width else None

    rows = [torch.randint(0, 60 * 4**5, (n,), generator=generator) for n in case.lengths]
    rows = [row.sort().values for row in rows] if case.sorted_times else rows
    none = torch.empty(0, dtype=torch.int64)
    times = torch.cat([none, *rows])
    queries = torch.cat([none, *(torch.cat([row[1:], row[-1:]]) for row in rows)]) if case.next_times else times
    decay = None
    if case.decay:
        parameters = torch.tensor([0.8, 0.05, 0.4], dtype=torch.float64)
        if case.per_head:
            parameters = parameters * torch.linspace(0.5, 1.5, case.heads, dtype=torch.float64)[:, None]
        decay = parameters.to(dtype).requires_grad_()
    return Inputs(
        case,
        random(total, case.heads, case.dim),
        random(total, case.heads, case.dim),
        random(total, case.heads, case.value_dim),
        lengths_to_offsets(torch.tensor(case.lengths, dtype=case.index_dtype)),
        times.to(case.index_dtype),
        queries.to(case.index_dtype),
        None if case.decay else table(len(BORDERS) + 1 if case.borders and case.time else case.time),
        decay,
        table(case.position if case.causal else 0),
    )


def sees(i: int, j: int, length: int, targets: int, contextual: int, case: Case) -> bool:
    """Whether token i of a row sees token j, said by what the tokens are: contextual, history or target."""
    if i == j:
        return True
    if contextual + targets > length:
        return False

    def is_target(x: int) -> bool:
        return x >= length - targets

    def rank(x: int) -> int:  # contextual tokens come first and targets last, all of a kind at the same place
        before = 1 if contextual else 0
        return 0 if x < contextual else before + min(x, length - targets) - contextual

    if is_target(i) and is_target(j):
        return False
    if i < contextual and not is_target(j):
        return True
    if case.causal and rank(j) >= rank(i):
        return False
    if case.window is None or abs(rank(i) - rank(j)) <= case.window:
        return True
    # The tail of history and, where there is one, all targets.
    return case.full_tail > 0 and rank(i) >= rank(length - targets) - case.full_tail


def _bucket(gap: int, case: Case, entries: int) -> int:
    if case.borders:
        return bisect_right(BORDERS, float(gap))
    return min(math.floor(math.log(max(gap, 1)) / BUCKET_WIDTH), entries - 1)


def _by_entry(table: Tensor, entries: list[list[int]], heads: int) -> Tensor:
    per_head = table if table.dim() == 2 else table.expand(heads, -1)
    return per_head[:, torch.tensor(entries)]


def _time_weights(x: Inputs, gaps: list[list[int]]) -> Tensor:
    if x.time_decay is not None:
        per_head = x.time_decay if x.time_decay.dim() == 2 else x.time_decay.expand(x.case.heads, -1)
        amplitude, rate, power = (p[:, None, None] for p in per_head.unbind(1))
        gap = torch.tensor(gaps, dtype=x.q.dtype)
        positive = torch.where(gap > 0, gap, 1)
        return torch.where(gap > 0, amplitude * torch.exp(-rate * positive**power), amplitude)
    assert x.time_bias is not None
    entries = x.time_bias.shape[-1]
    return _by_entry(x.time_bias, [[_bucket(gap, x.case, entries) for gap in row] for row in gaps], x.case.heads)


def truth(x: Inputs) -> Tensor:
    """The output, in the dtype of the inputs: all pairs of each row in dense tensors, for autograd to differentiate."""
    case, outputs, start = x.case, [], 0
    times, queries = x.times.tolist(), x.query_times.tolist()
    for row, length in enumerate(case.lengths):
        places, tokens = range(length), slice(start, start + length)
        mask = torch.tensor(
            [
                [sees(i, j, length, case.row_targets(row), case.row_contextual(row), case) for j in places]
                for i in places
            ],
            dtype=torch.bool,
        ).view(length, length)
        gaps = [[abs(queries[start + i] - times[start + j]) for j in places] for i in places]
        values = x.v[tokens]
        if not length:
            continue
        scores = torch.einsum("ihd,jhd->hij", x.q[tokens], x.k[tokens]) * x.alpha
        timed = None if x.time_bias is None and x.time_decay is None else _time_weights(x, gaps)
        placed = None
        if x.position_bias is not None:
            last = x.position_bias.shape[-1] - 1
            entries = [[min(max(i - j, 0), last) for j in places] for i in places]
            placed = _by_entry(x.position_bias, entries, case.heads)
        if case.family == "hstu":
            scores = scores + (0 if timed is None else timed) + (0 if placed is None else placed)
        weights = [scores * torch.sigmoid(scores) * x.scale]
        if case.family == "fuxi":
            assert timed is not None and placed is not None
            weights += [timed * x.bias_scale, placed * x.bias_scale]
        channels = [torch.einsum("hij,jhe->ihe", torch.where(mask, weight, 0.0), values) for weight in weights]
        outputs.append(torch.cat(channels, dim=2))
        start += length
    width = case.value_dim * (3 if case.family == "fuxi" else 1)
    unseen = sum(leaf.sum() for leaf in x.leaves().values()) * 0  # all leaves are part of the graph
    return torch.cat([x.v.new_zeros(0, case.heads, width), *outputs]) + unseen


def output_weight(case: Case, output: Tensor) -> Tensor:
    """The gradient of the output that tests start from: random numbers like it."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    return torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype).to(output.device)


def with_gradients(x: Inputs, output: Tensor) -> dict[str, Tensor]:
    """The output, detached, and the gradient of each leaf under `output_weight`."""
    leaves = x.leaves()
    gradients = torch.autograd.grad(output, list(leaves.values()), output_weight(x.case, output))
    found = dict(zip(leaves, gradients, strict=True))
    return {"output": output.detach(), **found}


def assert_exact(x: Inputs, **changes: Any) -> None:
    """Output and all gradients of the operator equal the truth in float64."""
    expected, found = with_gradients(x, truth(x)), with_gradients(x, x.call(**changes))
    for name, want in expected.items():
        torch.testing.assert_close(
            found[name], want, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_as_exact_as_reference(case: Case, dtype: torch.dtype, implementation: str) -> None:
    """The rule: errors of at most twice (output) or five times (gradients) those of the reference in that precision.

    All are measured against float64 on the same, rounded, inputs; one rounding of the largest element is always
    allowed, for on few numbers the reference may happen to be exact.
    """
    x = inputs(case, dtype)
    exact = inputs(case)
    for name, leaf in exact.leaves().items():
        leaf.data.copy_(x.leaves()[name])
    expected = with_gradients(exact, exact.call(implementation="reference"))
    reference = with_gradients(x, x.call(implementation="reference"))
    found = with_gradients(x, x.call(implementation=implementation))
    for name, want in expected.items():
        assert found[name].dtype == dtype, name
        assert found[name].shape == want.shape, name
        if not want.numel():
            continue
        yardstick = float((reference[name] - want).abs().max())
        rounding = torch.finfo(dtype).eps * float(want.abs().max())
        allowed = (2 if name == "output" else 5) * max(yardstick, rounding)
        error = float((found[name] - want).abs().max())
        assert error <= allowed, f"{name} of {case} in {dtype}: error {error:.3e}, allowed {allowed:.3e}"


def reordered(x: Inputs, order: list[int]) -> tuple[Inputs, Tensor]:
    """The rows of `order` as a batch of their own, and the tokens that they were made of."""
    bounds = x.offsets.tolist()
    token = torch.cat([torch.arange(bounds[row], bounds[row + 1]) for row in order])
    case = replace(
        x.case,
        lengths=tuple(x.case.lengths[row] for row in order),
        targets=None if x.case.targets is None else tuple(x.case.targets[row] for row in order),
        contextual=x.case.contextual
        if isinstance(x.case.contextual, int)
        else tuple(x.case.contextual[row] for row in order),
    )
    leaves = {name: getattr(x, name).detach()[token].requires_grad_() for name in ("q", "k", "v")}
    changed = replace(
        x,
        case=case,
        **leaves,
        offsets=lengths_to_offsets(torch.tensor(case.lengths, dtype=case.index_dtype)),
        times=x.times[token],
        query_times=x.query_times[token],
    )
    return changed, token
