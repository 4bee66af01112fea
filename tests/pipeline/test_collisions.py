"""alpha against counting pairs of lookups one by one, and against what popularity says it must be."""

from __future__ import annotations

import itertools

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.npu.ranks import Call, RankPool
from tests.pipeline.collision_runs import STEPS, TABLES, ids_of
from turbogr_plugin.pipeline.collisions import (
    BUCKETS,
    CountedTable,
    TableCollisions,
    measure_collisions,
    tables_of,
)

CPU = torch.device("cpu")


def _pair_by_pair(ranks: int) -> dict[str, float]:
    """The share of pairs of lookups, one of a step and one of the next, that are of one row."""
    found = {}
    for table in TABLES:
        steps = [
            [
                row
                for rank in range(ranks)
                for feature in table.features
                for sample in ids_of(rank, step)[feature]
                for row in sample
            ]
            for step in range(STEPS)
        ]
        pairs = [pair for one, other in itertools.pairwise(steps) for pair in itertools.product(one, other)]
        found[table.table] = sum(one == other for one, other in pairs) / len(pairs) if pairs else 0.0
    return found


@pytest.mark.parametrize("device_type", ["cpu", "npu"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_alpha_is_the_share_of_pairs_of_lookups_that_meet_over_all_ranks(
    ranks: RankPool, device_type: str, world_size: int
) -> None:
    call = Call("tests.pipeline.collision_runs:alphas", {"device_type": device_type}, world_size)
    found, expected = ranks.run([call])[0].result(), _pair_by_pair(world_size)
    assert all(other == found[0] for other in found[1:])
    assert expected["gender"] > 0.4 and expected["never"] == 0 and expected["large"] > 0.02
    for table in TABLES:
        # Thirty rows in 16,384 buckets share none with this hash, but x * (1 + 1 / buckets) - 1 / buckets stays.
        assert found[0][table.table] == pytest.approx(expected[table.table], abs=1e-6 if table.rows < BUCKETS else 1e-4)


def _alpha(rows: int, draw: torch.Tensor) -> float:
    """Of one table, from [steps, lookups] ids."""
    table = CountedTable("module", "table", rows, ("feature",))
    counted = TableCollisions([table], CPU)
    for ids in draw:
        counted.observe("module", KeyedJaggedTensor(["feature"], ids, lengths=torch.tensor([ids.numel()])))
        counted.end_step()
    return counted.alphas()[table]


def test_uniform_lookups_meet_with_one_over_the_rows_and_a_row_of_all_always() -> None:
    generator = torch.Generator().manual_seed(0)
    assert _alpha(50, torch.randint(0, 50, (40, 5000), generator=generator)) == pytest.approx(1 / 50, rel=0.01)
    assert _alpha(50, torch.full((3, 20), 7)) == 1
    assert _alpha(10 * BUCKETS, torch.full((3, 20), 7)) == 1


@pytest.mark.parametrize("stride", [1, 64, 1 << 20])
def test_a_hashed_table_has_the_alpha_of_its_popularity(stride: int) -> None:
    rows, generator = 100_000, torch.Generator().manual_seed(1)
    share = 1 / torch.arange(1, rows + 1, dtype=torch.float64)  # Zipf
    share /= share.sum()
    ids = torch.multinomial(share, 30 * 20_000, replacement=True, generator=generator).view(30, -1) * stride
    expected = float(share.square().sum())
    assert expected == pytest.approx(0.0113, abs=1e-3)
    assert _alpha(rows * stride, ids) == pytest.approx(expected, rel=0.04)


def test_uniform_lookups_of_a_hashed_table_hardly_meet() -> None:
    ids = torch.randint(0, 1 << 30, (30, 20_000), generator=torch.Generator().manual_seed(2))
    assert _alpha(1 << 30, ids) < 2e-6  # not the 1 / buckets = 6e-5 that chance puts into the same bucket


def test_tables_are_found_in_collections_and_measured_before_they_are_sharded() -> None:
    bags = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name="b", embedding_dim=4, num_embeddings=9, feature_names=["x", "y"])]
    )
    sequences = EmbeddingCollection(tables=[EmbeddingConfig(name="s", embedding_dim=4, num_embeddings=3)])
    assert tables_of(bags, "bags") == [CountedTable("bags", "b", 9, ("x", "y"))]
    assert tables_of(torch.nn.Linear(1, 1), "none") == []
    steps = [
        KeyedJaggedTensor(["x", "y", "s"], torch.tensor(ids), lengths=torch.tensor([1, 1, 2]))
        for ids in ([0, 1, 2, 2], [1, 5, 2, 0], [1, 1, 0, 1])
    ]
    found = measure_collisions({"bags": bags, "sequences": sequences}, steps)
    # bags: {0, 1} and {1, 5} meet in 1 of 4 pairs, {1, 5} and {1, 1} in 2; sequences: 2 of 4, then 1 of 4.
    assert {table.table: alpha for table, alpha in found.items()} == {"b": 3 / 8, "s": 3 / 8}


def test_one_step_and_a_missing_feature_are_refused() -> None:
    counted = TableCollisions([CountedTable("module", "table", 5, ("a", "b"))], CPU)
    with pytest.raises(ValueError, match=r"must have the key 'b', which table 'table' of 'module' reads; got \['a'\]"):
        counted.observe("module", KeyedJaggedTensor(["a"], torch.tensor([1]), lengths=torch.tensor([1])))
    counted.end_step()
    with pytest.raises(ValueError, match="at least 2 steps, 1 were counted"):
        counted.alphas()
    with pytest.raises(ValueError, match="steps is empty"):
        measure_collisions({}, [])
