"""A split collection gives and trains to what the one collection does, under the same names."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from tests.pipeline import small_model
from turbogr_plugin.backend.collectives import process_group
from turbogr_plugin.pipeline.table_split import SplitTables

CPU = torch.device("cpu")
FEATURES = {"bag_a": ["bag_a"], "bag_b": ["bag_b"], "sequence": ["sequence"]}


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    with process_group(CPU, timeout=timedelta(seconds=20)):
        yield


def _bags(device: torch.device = CPU) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=dim, num_embeddings=rows, feature_names=[name])
        for (name, rows), dim in zip(small_model.ROWS.items(), (16, 8, 4), strict=True)
    ]
    return EmbeddingBagCollection(tables=configs, device=device)


def _sequences(device: torch.device = CPU) -> EmbeddingCollection:
    configs = [
        EmbeddingConfig(name=name, embedding_dim=8, num_embeddings=rows, feature_names=[name])
        for name, rows in small_model.ROWS.items()
    ]
    return EmbeddingCollection(tables=configs, device=device)


class _Model(nn.Module):
    def __init__(self, *, split: bool) -> None:
        super().__init__()
        meta = torch.device("meta")
        self.bags: nn.Module = _bags(meta)
        self.sequences: nn.Module = _sequences(meta)
        apply_optimizer_in_backward(RowWiseAdagrad, list(self.parameters()), {"lr": 0.1, "eps": 1e-6})
        if split:
            self.bags = SplitTables(self.bags, exact=["bag_b"])
            self.sequences = SplitTables(self.sequences, exact=["bag_a", "sequence"])
        self.logit = nn.Linear(16 + 8 + 4 + 3 * 8 + small_model.FLOATS, 1)

    def forward(self, batch: small_model.Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return _loss(self.bags(batch.ids), self.sequences(batch.ids), batch, self)


@torch.fx.wrap
def _loss(bags: Any, sequences: Any, batch: Any, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [small_model.sum_of_rows(sequences[name].values(), sequences[name].lengths()) for name in FEATURES]
    parts = [*(bags[name] for name in FEATURES), *rows, batch.floats]
    logits = model.logit(torch.cat(parts, dim=1)).squeeze(1)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
    return loss, loss.detach()


def _sharded(*, split: bool) -> DistributedModelParallel:
    model = _Model(split=split)
    sharders: Any = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    fused = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu"), constraints=dict.fromkeys(small_model.ROWS, fused)
    )
    plan = planner.plan(model, sharders)
    return small_model.started(DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders))


@pytest.mark.parametrize("collection", [_bags, _sequences])
def test_the_parts_give_what_the_collection_gives(collection: Any) -> None:
    one = collection()
    features = small_model.batches(1)[0].ids
    expected, state = one(features), one.state_dict()
    split = SplitTables(one, exact=["bag_b"])
    assert split.stale.device == split.exact.device == one.device  # of which sharding copies the values
    found = split(features)
    assert type(found) is type(expected)
    if isinstance(found, KeyedTensor):
        assert sorted(found.keys()) == sorted(expected.keys())
        assert all(torch.equal(found[key], expected[key]) for key in expected.keys())  # noqa: SIM118
    else:
        for key, value in expected.items():
            assert isinstance(found[key], JaggedTensor) and torch.equal(found[key].values(), value.values())
    assert split.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in split.state_dict().items())


def test_trained_in_two_parts_the_tables_are_those_of_one_collection_to_the_bit() -> None:
    source = small_model.batches(6)
    losses, states, optimizers = [], [], []
    for split in (False, True):
        model = _sharded(split=split)
        names = set(model.plan.plan)
        assert names == (
            {"bags.stale", "bags.exact", "sequences.stale", "sequences.exact"} if split else {"bags", "sequences"}
        )
        pipeline = TrainPipelineSparseDist(model, small_model.dense_optimizer(model), CPU)
        losses.append(small_model.pipeline_losses(pipeline, source))
        states.append({name: _whole(value) for name, value in model.state_dict().items()})
        optimizers.append(model.fused_optimizer.state_dict()["state"])
    assert losses[0] == losses[1] and losses[0][0] != losses[0][-1]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert optimizers[0].keys() == optimizers[1].keys() and "bags.embedding_bags.bag_a.weight" in optimizers[0]
    for name, values in optimizers[0].items():
        assert values.keys() == optimizers[1][name].keys()
        assert all(torch.equal(_whole(value), _whole(optimizers[1][name][key])) for key, value in values.items())


@pytest.mark.parametrize("from_split", [False, True])
def test_a_state_of_either_loads_into_the_other(from_split: bool) -> None:
    source, target = _sharded(split=from_split), _sharded(split=not from_split)
    with torch.no_grad():
        for value in source.state_dict().values():
            _whole(value).add_(1)
    result = target.load_state_dict(source.state_dict())
    assert not result.missing_keys and not result.unexpected_keys
    found = target.state_dict()
    assert all(torch.equal(_whole(value), _whole(found[name])) for name, value in source.state_dict().items())
    state = source.fused_optimizer.state_dict()
    target.fused_optimizer.load_state_dict(state)


def _whole(value: Any) -> torch.Tensor:
    if not hasattr(value, "local_shards"):
        assert isinstance(value, torch.Tensor)
        return value
    (shard,) = value.local_shards()
    tensor: torch.Tensor = shard.tensor
    return tensor


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must be an EmbeddingCollection or EmbeddingBagCollection .* got Linear"):
        SplitTables(nn.Linear(1, 1), exact=["a"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must name tables of \['bag_a', 'bag_b', 'sequence'\], got \['other'\]"):
        SplitTables(_bags(), exact=["other", "bag_a"])
    for exact in ([], list(small_model.ROWS)):
        with pytest.raises(ValueError, match="must name some but not all tables"):
            SplitTables(_bags(), exact=exact)
    shared = [
        EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=5, feature_names=["x"]) for name in ("a", "b")
    ]
    with pytest.raises(ValueError, match=r"read the same feature \(\['x'\]\)"):
        SplitTables(EmbeddingBagCollection(tables=shared), exact=["a"])
