"""The gradient of embedding bags, with tensors on the CPU, against torch's own."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.table_groups import dyadic
from turbogr_plugin.kernels.aten_embedding_bag import embedding_bag_backward

MODES = {"sum": 0, "mean": 1, "max": 2}


@pytest.mark.parametrize("last", [False, True], ids=["", "include_last_offset"])
@pytest.mark.parametrize("padding", [-1, 2], ids=["", "padding"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max", "weighted"])
def test_gradients_equal_those_of_torch(mode: str, padding: int, last: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    for lengths in ([3, 0, 2, 4, 0], [0, 0], [], [7]):
        for dtype in (torch.int32, torch.int64):
            offsets = torch.tensor([0, *lengths]).cumsum(0).to(dtype)
            indices = torch.randint(0, 5, (sum(lengths),), generator=generator).to(dtype)
            table = dyadic((6, 4), generator)
            weights = dyadic((len(indices),), generator) if mode == "weighted" else None
            offsets = offsets if last else offsets[:-1]
            number = MODES.get(mode, 0)
            found = torch.ops.aten._embedding_bag(table, indices, offsets, False, number, False, weights, last, padding)
            gradient = dyadic(found[0].shape, generator)
            arguments = (gradient, indices, offsets, *found[1:], 6, False, number, False, weights, padding)
            expected = torch.ops.aten._embedding_bag_backward(*arguments)
            torch.testing.assert_close(embedding_bag_backward(*arguments), expected)


@pytest.mark.parametrize("option", ["sparse", "scale_grad_by_freq"])
def test_options_that_are_not_served_are_refused_by_name(option: str) -> None:
    given = {"sparse": False, "scale_grad_by_freq": False} | {option: True}
    empty = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match=f"{option}=True is not supported on npu, only {option}=False"):
        embedding_bag_backward(
            torch.zeros(1, 4), empty, empty, empty, empty, empty, 3, mode=0, per_sample_weights=None, **given
        )
