"""Adaptations of the backend and of the pipelines on npu, one process: what stock does there against what ours does."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed import dist_data, embedding
from torchrec.distributed.train_pipeline import experimental_pipelines
from torchrec.distributed.train_pipeline.pipeline_context import TrainPipelineContext
from torchrec.distributed.train_pipeline.postproc import PipelinedPostproc
from torchrec.distributed.train_pipeline.types import CallArgs
from torchrec.distributed.train_pipeline.utils import DataLoadingThread
from torchrec.distributed.types import DeviceToHostTensorAwaitable
from torchrec.sparse import jagged_tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.stock import ours, without
from turbogr_plugin import simnpu
from turbogr_plugin.backend import streams
from turbogr_plugin.backend.adaptation import Adaptation
from turbogr_plugin.backend.adaptations import (
    device_to_host_awaitable,
    kjt_without_host_sync,
    pinned_small_tensors,
)
from turbogr_plugin.pipeline.adaptations import data_loading_thread, memory_stashing, postproc_streams

pytestmark = pytest.mark.usefixtures("npu")

_TYPE = torch._C._get_privateuse1_backend_name()  # "npu" once that is loaded, and the same device before
NPU, SECOND = torch.device(_TYPE, 0), torch.device(_TYPE, 1)
_ADAPTATIONS = (
    *kjt_without_host_sync.ADAPTATIONS,
    *pinned_small_tensors.ADAPTATIONS,
    *device_to_host_awaitable.ADAPTATIONS,
    *data_loading_thread.ADAPTATIONS,
    *postproc_streams.ADAPTATIONS,
    *memory_stashing.ADAPTATIONS,
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    ours(_ADAPTATIONS)
    for device in (NPU, SECOND):
        streams.synchronize(device)
    simnpu.reset()
    yield
    for device in (NPU, SECOND):
        streams.synchronize(device)
    simnpu.reset()


def test_lengths_become_a_list_by_waiting_for_one_stream() -> None:
    lengths = torch.arange(4, device=NPU)
    busy = streams.new_stream(NPU)
    with streams.on_stream(busy):
        torch.ones(3, device=NPU)
    assert jagged_tensor._safe_tolist(lengths) == [0, 1, 2, 3]
    assert dist_data._safe_tolist_2d(lengths.view(2, 2)) == [[0, 1], [2, 3]]
    assert jagged_tensor._safe_tolist(lengths[:0]) == []
    counted = simnpu.counters()
    assert (counted.d2h, counted.host_syncs) == (2, 2)
    assert not simnpu.races()


def test_a_jagged_tensor_on_npu_has_its_lengths_per_key() -> None:
    keyed = KeyedJaggedTensor(
        keys=["a", "b"], values=torch.arange(6, device=NPU), lengths=torch.tensor([1, 2, 0, 3], device=NPU)
    )
    assert keyed.length_per_key() == [3, 3]


@pytest.mark.parametrize("module", [jagged_tensor, embedding], ids=["jagged_tensor", "embedding"])
def test_small_tensors_go_to_npu_from_pinned_memory(module: Any) -> None:
    pin = Tensor.pin_memory

    def pinned(stock: Sequence[Adaptation]) -> int:
        seen: list[Tensor] = []

        def counted(tensor: Tensor) -> Tensor:
            seen.append(tensor)
            return pin(tensor)

        with without(stock), patch.object(Tensor, "pin_memory", counted):
            moved = module._pin_and_move(torch.arange(3), NPU)
        assert moved.tolist() == [0, 1, 2]
        assert module._pin_and_move(moved, NPU) is moved
        return len(seen)

    assert pinned(()) == 1
    assert pinned(pinned_small_tensors.ADAPTATIONS) == 0
    assert not simnpu.races()


def test_an_awaitable_copy_to_the_host_waits_for_its_own_event() -> None:
    values = torch.arange(5, device=NPU) + 1
    awaitable = DeviceToHostTensorAwaitable(values)
    assert simnpu.counters().host_syncs == 0
    assert awaitable.wait().tolist() == [1, 2, 3, 4, 5]
    assert not simnpu.races()
    with without(device_to_host_awaitable.ADAPTATIONS), pytest.raises(RuntimeError, match="Event"):
        DeviceToHostTensorAwaitable(values)


def _loaded(device: torch.device) -> tuple[int, Any, Tensor]:
    """The device that is current in the loading thread, its stream, and the batch it gives."""
    seen: list[int] = []

    def source() -> Iterator[Tensor]:
        seen.append(torch.npu.current_device())  # type: ignore[attr-defined]
        yield torch.ones(3).pin_memory()

    thread: DataLoadingThread[Any] = DataLoadingThread(device, source(), True, memcpy_stream_priority=-1)
    thread.start()
    batch = thread.get_next_batch()
    thread.stop()  # and no join: TorchRec has named an attribute _stop, which threading calls
    assert batch is not None
    return seen[0], thread._memcpy_stream, batch


def test_a_loading_thread_works_on_its_own_npu_and_stream() -> None:
    current, stream, batch = _loaded(SECOND)
    assert current == 1
    assert stream.device == SECOND == batch.device
    streams.wait(streams.current_stream(SECOND), stream)
    assert batch.sum().item() == 3
    assert not simnpu.races()
    with without(data_loading_thread.ADAPTATIONS):
        current, stream, _ = _loaded(SECOND)
    assert (current, stream) == (0, None)


def _read_after_reuse(stock: Sequence[Adaptation]) -> set[str]:
    """Races of a tensor in a dictionary that a second stream reads while it is freed."""
    simnpu.reset()
    side = streams.new_stream(NPU)
    held: dict[str, list[Tensor]] = {"a": [torch.ones(4096, device=NPU)]}
    streams.wait(side, streams.current_stream(NPU))
    with streams.on_stream(side):
        held["a"][0].sum()
    with without(stock):
        PipelinedPostproc.recursive_record_stream(held, side)
    held.clear()
    gc.collect()
    torch.zeros(4096, device=NPU)
    return {race.kind for race in simnpu.races()}


def test_what_postprocessing_returns_keeps_its_memory() -> None:
    assert _read_after_reuse(()) == set()
    assert _read_after_reuse(postproc_streams.ADAPTATIONS) == {"buffer reused before its reader ended"}


def test_postprocessing_runs_on_the_stream_of_the_input_distribution() -> None:
    side, used = streams.new_stream(NPU), []

    class Twice(nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            used.append(streams.current_stream(NPU))
            return values * 2

    def run() -> Tensor:
        module = PipelinedPostproc(
            Twice(), "twice", CallArgs(args=[], kwargs={}), TrainPipelineContext(), streams.current_stream(NPU), side
        )
        module._args = type("Args", (), {"build_args_kwargs": staticmethod(lambda batch: ([batch], {}))})()
        values = torch.ones(3, device=NPU)
        streams.wait(side, streams.current_stream(NPU))
        return module(values)

    assert run().tolist() == [2, 2, 2]
    assert used == [side]
    assert not simnpu.races()
    with without(postproc_streams.ADAPTATIONS), pytest.raises((RuntimeError, AssertionError), match=r"CUDA|NVIDIA"):
        run()


@pytest.mark.parametrize(
    "name", ["TrainPipelineSparseDistOptStash", "TrainPipelineSparseDistEmbStash", "TrainPipelinePrefetchEMS"]
)
def test_pipelines_that_stash_memory_are_refused_on_npu(name: str) -> None:
    make = getattr(experimental_pipelines, name)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=rf"{name} stashes memory through torch.cuda.*npu:0.*TrainPipelineSparseDist"):
        make(model, optimizer, NPU, site_fqn="bags")
    with pytest.raises(ValueError, match="no npu path"):
        make(model=model, optimizer=optimizer, device=NPU, site_fqn="bags")
    with without(memory_stashing.ADAPTATIONS), pytest.raises((RuntimeError, AssertionError), match=r"CUDA|NVIDIA"):
        make(model, optimizer, NPU, site_fqn="bags")
