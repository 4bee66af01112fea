"""Lookups and popularity counted in batches, and how they reach the planner."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torchrec import KeyedJaggedTensor
from torchrec.distributed.planner import ParameterConstraints

from tests.sharding.planned import SHARDERS, Tables, planner
from turbogr_plugin.sharding import BatchStatistics, cpu_topology
from turbogr_plugin.sharding.batch_statistics import constraints_with_lengths


def _batch(values: list[int], lengths: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["a", "b"], values=torch.tensor(values), lengths=torch.tensor(lengths))


def test_lengths_are_means_over_samples_and_popularity_is_by_table() -> None:
    batches = [_batch([0, 1, 1, 2], [1, 2, 0, 1]), _batch([3, 3], [0, 0, 2, 0])]
    found = BatchStatistics.from_batches(batches, tables={"t": (5, ["a", "b"])})
    assert found.lengths == {"a": 3 / 4, "b": 3 / 4}
    assert found.access["t"].rows == 5
    assert found.access["t"].unique(1e9) == pytest.approx(4)
    shares = found.access["t"].lookup_shares(np.arange(6))
    assert shares.tolist() == pytest.approx([1 / 6, 2 / 6, 1 / 6, 2 / 6, 0])


def test_features_of_a_table_that_are_not_in_a_batch_are_left_out() -> None:
    found = BatchStatistics.from_batches([_batch([0], [1, 0])], tables={"t": (5, ["a"]), "u": (5, ["c"])})
    assert found.lengths == {"a": 1.0}
    assert set(found.access) == {"t"}


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "batches must have at least one sample"),
        ([_batch([7], [1, 0])], "feature 'a' has ids 7 to 7, its table 't' has 5 rows"),
    ],
)
def test_batches_without_samples_or_with_foreign_ids_are_refused(
    batches: list[KeyedJaggedTensor], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        BatchStatistics.from_batches(batches, tables={"t": (5, ["a"])})


def test_lengths_that_are_no_numbers_of_ids_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("lengths['a'] must be a number of ids >= 0, got -1")):
        BatchStatistics(lengths={"a": -1})


def test_lengths_become_pooling_factors_and_leave_the_rest_of_the_constraints() -> None:
    module = Tables({"s": (10, 8), "r": (10, 8)})
    given = {"s": ParameterConstraints(sharding_types=["row_wise"], pooling_factors=[9.0], num_poolings=[2.0])}
    found = constraints_with_lengths(module, SHARDERS, given, BatchStatistics(lengths={"f_s": 3.0}), 64)
    assert found["s"] == ParameterConstraints(sharding_types=["row_wise"], pooling_factors=[3.0], num_poolings=[2.0])
    assert "r" not in found
    assert given["s"].pooling_factors == [9.0]


def test_lookups_of_all_features_of_a_table_are_planned_for() -> None:
    """Twice the ids are twice the bytes, whichever feature brings them."""

    def sent(**lengths: float) -> float:
        topology = cpu_topology(ranks_per_node=1, nodes=2, memory_bytes=1 << 30, intra=1e9, inter=1e7)
        plan = planner(topology, group_size=2, batch_statistics=BatchStatistics(lengths=lengths)).plan(
            Tables({"s": (1_000, 8)}), SHARDERS
        )
        assert plan.report is not None
        return plan.report.candidates[0].between_domains_bytes

    assert sent(f_s=20.0) == pytest.approx(2 * sent(f_s=10.0))
    assert sent(f_s=1.0) == pytest.approx(sent())  # TorchRec's default
