"""`jagged_lookup` and its parts on npu: equal to the oracle, from allowed operators, waiting only where they say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.lookup_cases import (
    FAST_OPTIMIZERS,
    MODES,
    lookup,
    make_batch,
    make_tables,
    train_beside_truth,
    update_of,
)
from tests.kernels.table_groups import Batch, Group, dyadic
from turbogr_plugin.kernels.coalesce_rows import coalesce_rows
from turbogr_plugin.kernels.fused_update import fused_update
from turbogr_plugin.kernels.jagged_lookup import jagged_lookup
from turbogr_plugin.kernels.jagged_unique import jagged_unique
from turbogr_plugin.kernels.lookup_call import StochasticRounding

UNIFORM = Group(((11, 8), (0, 8), (7, 8)), (0, 1, 0, 2))
MIXED = Group(((11, 8), (7, 4), (0, 4), (5, 16)), (0, 1, 2, 3))

pytestmark = pytest.mark.filterwarnings("ignore:.*runs as reference.*:UserWarning")


# Each mode with one optimizer, and each with all of them in the long run.
_TRAININGS = [
    pytest.param(optimizer, mode, marks=() if column == row % 4 else pytest.mark.full)
    for row, mode in enumerate(MODES)
    for column, optimizer in enumerate(FAST_OPTIMIZERS)
]


@pytest.mark.parametrize(("optimizer", "mode"), _TRAININGS)
def test_a_hundred_steps_with_many_duplicates_equal_those_of_a_dictionary_in_float64(
    npu: Any, optimizer: str, mode: str
) -> None:
    group = UNIFORM if mode == "none" else MIXED
    for exact in (True, False):
        if optimizer == "adam" and exact:
            continue  # its quotients are no dyadic numbers
        train_beside_truth(group, optimizer, mode, exact=exact, implementations=(None,), device="npu")
    assert npu.cpu_fallbacks() == {}
    assert npu.races() == []


@pytest.mark.parametrize("mode", MODES)
def test_a_step_does_not_wait_for_the_device(npu: Any, mode: str) -> None:
    group = UNIFORM if mode == "none" else MIXED
    trained = make_tables(group, "rowwise_adagrad", torch.Generator().manual_seed(1), device="npu")
    made = make_batch(group, torch.Generator().manual_seed(2), weighted="weighted" in mode)
    weights = None if made.weights is None else made.weights.to("npu")
    batch = Batch(made.indices.to("npu"), made.offsets.to("npu"))
    for modes in ("none", "ignore", "warning"):
        gradient = torch.ones_like(lookup(trained, batch, mode, id_weights=weights))
        npu.reset()
        output = lookup(*(trained, batch, mode), id_weights=weights, update=update_of(trained, 1), bounds_check=modes)
        output.backward(gradient)
        assert npu.counters().host_syncs == 0, npu.host_syncs()
    # nor without an update
    tables = trained.weights.requires_grad_()
    lookup(trained, batch, mode, id_weights=weights).backward(gradient)
    assert npu.counters().host_syncs == 0, npu.host_syncs()
    assert tables.grad is not None
    assert npu.cpu_fallbacks() == {}


def test_positives_in_fp32_and_negatives_in_fp16_come_from_one_table_without_a_wait(npu: Any) -> None:
    weights = dyadic((72,), torch.Generator().manual_seed(3)).to("npu")
    ids, offsets = torch.tensor([1, 4, 1, 8, 2]).to("npu"), torch.tensor([0, 3, 5]).to("npu")
    npu.reset()
    found = jagged_lookup(
        *(weights, ids, offsets),
        rows=9,
        dim=8,
        feature_tables=[0, 0],
        output_dtype=[torch.float32, torch.float16],
        feature_lengths=[3, 2],
    )
    assert npu.counters().host_syncs == 0
    assert [(part.dtype, len(part)) for part in found] == [(torch.float32, 3), (torch.float16, 2)]
    assert torch.equal(torch.cat([part.float().cpu() for part in found]), weights.cpu().view(9, 8)[ids.cpu()])


def test_ids_out_of_range_are_told_with_bounds_check_fatal_for_one_wait(npu: Any) -> None:
    weights, offsets = torch.zeros(8, device="npu"), torch.tensor([0, 2]).to("npu")
    good, bad = torch.tensor([1, 0]).to("npu"), torch.tensor([1, 2]).to("npu")
    npu.reset()
    jagged_lookup(weights, good, offsets, rows=2, dim=4, bounds_check="fatal")
    assert npu.counters().host_syncs == 1
    with pytest.raises(ValueError, match="id 2 at position 1 belongs to feature 0, whose table has 2 rows"):
        jagged_lookup(weights, bad, offsets, rows=2, dim=4, bounds_check="fatal")


def test_unique_ids_and_sums_of_rows_wait_once_and_the_update_of_rows_never(npu: Any) -> None:
    generator = torch.Generator().manual_seed(4)
    for count in (60, 1, 0):
        ids = torch.randint(-2, 9, (count,), generator=generator)
        grads = torch.randn(count, 8, generator=generator)
        offsets = torch.tensor([0, count // 3, count // 3, count])
        for dtype in (torch.int32, torch.int64):
            here = ids.to(dtype)
            there, there_grads, there_offsets = here.to("npu"), grads.to("npu"), offsets.to("npu")
            npu.reset()
            unique = jagged_unique(there, there_offsets)
            sums = coalesce_rows(there, there_grads)
            assert npu.counters().host_syncs <= 2, npu.host_syncs()
            expected = (*jagged_unique(here, offsets), *coalesce_rows(here, grads))
            for found, wanted in zip((*unique, *sums), expected, strict=True):
                assert found is not None
                assert wanted is not None
                assert torch.equal(found.cpu(), wanted)
            for optimizer, kinds in (("sgd", 0), ("adam", 2)):
                table = torch.ones(9, 8).half()
                states = [torch.zeros(9, 8) for _ in range(kinds)]
                there_table, there_states = table.to("npu"), [state.to("npu") for state in states]
                key: dict[str, Any] = {"learning_rate": 0.5, "stochastic_rounding": StochasticRounding(1, 2)}
                npu.reset()
                fused_update(there_table, there_states, *sums, optimizer, nan_guard=None, **key)
                assert npu.counters().host_syncs == 0, npu.host_syncs()
                fused_update(table, states, *expected[3:], optimizer, implementation="reference", **key)  # type: ignore[arg-type]
                assert torch.equal(there_table.cpu(), table)
    assert npu.cpu_fallbacks() == {}
