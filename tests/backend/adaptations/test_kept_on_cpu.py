"""What the adaptations of the backend leave as it is on CPU; npu, stock against ours, is in tests/npu."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import (  # type: ignore[attr-defined]
    Shard,
    ShardedTensor,
    init_from_local_shards,
)
from torchrec.distributed import dist_data, embedding, embedding_sharding
from torchrec.distributed.types import DeviceToHostTensorAwaitable
from torchrec.sparse import jagged_tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.stock import ours, without
from turbogr_plugin.backend.adaptation import Adaptation, fingerprint, lookup
from turbogr_plugin.backend.adaptations import (
    collective_results,
    device_to_host_awaitable,
    kjt_without_host_sync,
    pinned_small_tensors,
    sharded_tensor_device,
)
from turbogr_plugin.backend.collectives import process_group

CPU = torch.device("cpu")
ADAPTATIONS = (
    *kjt_without_host_sync.ADAPTATIONS,
    *pinned_small_tensors.ADAPTATIONS,
    *collective_results.ADAPTATIONS,
    *device_to_host_awaitable.ADAPTATIONS,
    *sharded_tensor_device.ADAPTATIONS,
)


@pytest.fixture(autouse=True)
def _adapted() -> None:
    ours(ADAPTATIONS)


@pytest.mark.parametrize("adaptation", ADAPTATIONS, ids=lambda adaptation: adaptation.target.rpartition(":")[2])
def test_each_record_says_why_where_and_until_when(adaptation: Adaptation) -> None:
    assert adaptation.why and adaptation.delete_when
    assert adaptation.upstream.startswith(("torchrec 1.8.0, ", "torch 2.13.0, "))
    with without(ADAPTATIONS):
        for source, expected in adaptation.written_for.items():
            assert fingerprint(lookup(source)[2]) == expected


def test_every_module_that_has_the_function_gets_ours() -> None:
    functions = {module._safe_tolist for module in (jagged_tensor, dist_data, embedding, embedding_sharding)}
    assert len(functions) == 1
    with without(ADAPTATIONS):
        stock = {module._safe_tolist for module in (jagged_tensor, dist_data, embedding, embedding_sharding)}
    assert len(stock) == 1
    assert functions.isdisjoint(stock)


@pytest.mark.parametrize("shape", [(0,), (4,)])
def test_lengths_on_cpu_become_the_same_list(shape: tuple[int, ...]) -> None:
    lengths = torch.arange(4)[: shape[0]]
    assert jagged_tensor._safe_tolist(lengths) == lengths.tolist()
    assert dist_data._safe_tolist_2d(lengths.view(-1, 2)) == lengths.view(-1, 2).tolist()


def test_nothing_is_pinned_for_a_cpu() -> None:
    tensor = torch.ones(2)
    for module in (jagged_tensor, embedding):
        moved = module._pin_and_move(tensor, CPU)
        assert moved is tensor
        assert not moved.is_pinned()


class _Keyed(torch.nn.Module):
    def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        keyed = KeyedJaggedTensor(keys=["a", "b"], values=values, lengths=lengths).permute([1, 0])
        return keyed.length_per_key(), keyed.values()


def test_a_jagged_tensor_is_still_compiled_by_torchscript() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(_Keyed())
    lengths_per_key, values = scripted(torch.arange(6), torch.tensor([1, 2, 0, 3]))
    assert lengths_per_key == [3, 3]
    assert values.tolist() == [3, 4, 5, 0, 1, 2]


def test_a_copy_from_cpu_to_the_host_still_asks_for_a_cuda_event() -> None:
    with pytest.raises(RuntimeError, match="Event"):
        DeviceToHostTensorAwaitable(torch.ones(1))


@pytest.fixture
def table() -> Iterator[ShardedTensor]:
    with process_group(CPU, timeout=timedelta(seconds=20)), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        shard = Shard.from_tensor_and_offsets(torch.ones(2, 3), [0, 0], rank=0)
        yield init_from_local_shards([shard], (2, 3), process_group=dist.group.WORLD)


def test_a_table_on_cpu_is_on_cpu_with_and_without_its_shard(table: ShardedTensor) -> None:
    assert table.device == CPU
    table.local_shards().clear()
    assert table.device == CPU  # by the backend of its group, as torch does
    with without(ADAPTATIONS):
        assert table.device == CPU
