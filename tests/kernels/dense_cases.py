"""What the tests of the dense operators share: implementations, lengths of errors, the tolerance rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from turbogr_plugin.kernels.cpu import build

THREADS = (1, 2, 3, 5)


def implementations(family: str) -> list[object]:
    """Parameters of a test that holds for each implementation of the CPU lane."""
    missing = build.missing(family)
    return ["reference", pytest.param("cpu", marks=pytest.mark.skipif(missing is not None, reason=f"C++: {missing}"))]


def needs_cpp(family: str) -> pytest.MarkDecorator:
    missing = build.missing(family)
    return pytest.mark.skipif(missing is not None, reason=f"C++: {missing}")


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A leaf that requires gradients, the same numbers in every dtype but for rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def in_float64(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same values, so that what is left is the error of a computation and not that of its inputs."""
    return [x.detach().double().requires_grad_() for x in tensors]


def gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Those of a weighted sum of the outputs, the same weights in every dtype."""
    weights = [random(*y.shape, seed=90 + i, dtype=torch.bfloat16).detach().to(y.dtype) for i, y in enumerate(outputs)]
    return list(torch.autograd.grad(outputs, inputs, weights))


def error(found: Tensor, truth: Tensor) -> float:
    """Length of the difference relative to that of the truth."""
    return float((found.detach().double() - truth.detach()).norm() / truth.detach().norm().clamp(min=1e-300))


def assert_within_the_rule(
    found: Sequence[Tensor], yardstick: Sequence[Tensor], truth: Sequence[Tensor], outputs: int
) -> None:
    """At most twice (outputs) or five times (gradients) the error of the yardstick, a run in the same precision.

    Where the yardstick is exact by luck, half a unit in the last place counts as its error.
    """
    for i, (got, reference, exact) in enumerate(zip(found, yardstick, truth, strict=True)):
        assert got.dtype == reference.dtype
        allowed = (2 if i < outputs else 5) * max(error(reference, exact), torch.finfo(got.dtype).eps / 2)
        assert error(got, exact) <= allowed < 0.1, f"result {i}: {error(got, exact)} > {allowed}"


def with_threads(run: Callable[[], list[Tensor]]) -> list[list[Tensor]]:
    """What `run` gives with each number of threads."""
    before = torch.get_num_threads()
    found = []
    try:
        for threads in THREADS:
            torch.set_num_threads(threads)
            found.append(run())
    finally:
        torch.set_num_threads(before)
    return found
