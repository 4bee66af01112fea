"""What the adaptations change on CPU, one rank: SemiSync, Fused and Prefetch run, and the others are as they were.

Twin tests: `without` shows the host's own behaviour.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.distributed.train_pipeline.postproc import PipelinedPostproc
from torchrec.sparse.jagged_tensor import KeyedTensor

from tests.pipeline import small_model
from tests.stock import ours, without
from turbogr_plugin.backend.collectives import process_group
from turbogr_plugin.pipeline.adaptations import (
    ADAPTATIONS,
    cpu_record_stream,
    forward_device,
    prefetch_without_streams,
)

CPU = torch.device("cpu")
PIPELINES: dict[str, dict[str, Any]] = {
    "TrainPipelineBase": {},
    "TrainPipelineSparseDist": {},
    "TrainPipelineSparseDistLite": {},
    "EvalPipelineSparseDist": {},
}


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    ours(ADAPTATIONS)
    with process_group(CPU, timeout=timedelta(seconds=20)):
        yield


def _losses(name: str, **options: Any) -> list[float]:
    model = small_model.sharded(CPU)
    if name.startswith("Eval"):
        model.eval()
    pipeline = getattr(train_pipelines, name)(model, small_model.dense_optimizer(model), CPU, **options)
    with torch.set_grad_enabled(not name.startswith("Eval")):
        return small_model.pipeline_losses(pipeline, small_model.batches(5))


def _plain() -> list[float]:
    return small_model.plain_losses(small_model.sharded(CPU), small_model.batches(5), CPU)


@pytest.mark.parametrize("lookup", ["data_dist", "new", "current"])
def test_the_fused_pipeline_trains_on_cpu_as_the_plain_loop(lookup: str) -> None:
    assert _losses("TrainPipelineFusedSparseDist", emb_lookup_stream=lookup) == _plain()


def test_the_prefetching_pipeline_trains_on_cpu_as_the_plain_loop() -> None:
    assert _losses("PrefetchTrainPipelineSparseDist") == _plain()


def test_the_semi_synchronous_pipeline_runs_on_cpu_and_waits_until_its_first_batch() -> None:
    plain, late, early = _plain(), *(_losses("TrainPipelineSemiSync", start_batch=start) for start in (3, 0))
    assert len(early) == len(late) == len(plain)
    # A batch is stale once the one before it was semi-synchronous: its lookup has not seen that one's update.
    assert late[:4] == plain[:4] and late[4] != plain[4]
    assert early[0] == plain[0] and early[1] != plain[1]


@pytest.mark.parametrize("name", ["TrainPipelineFusedSparseDist", "TrainPipelineSemiSync"])
def test_stock_records_cpu_tensors_for_a_stream_and_fails(name: str) -> None:
    with without(cpu_record_stream.ADAPTATIONS), pytest.raises(RuntimeError, match="unknown parameter type"):
        _losses(name)


@pytest.mark.parametrize("name", ["TrainPipelineFusedSparseDist", "TrainPipelineSemiSync"])
def test_stock_looks_for_a_cuda_stream_and_fails(name: str) -> None:
    with without(forward_device.ADAPTATIONS), pytest.raises((RuntimeError, AssertionError), match=r"CUDA|NVIDIA"):
        _losses(name)


def test_stock_prefetches_nothing_on_cpu_and_fails() -> None:
    with without(prefetch_without_streams.ADAPTATIONS), pytest.raises(AssertionError, match="PrefetchPipelinedForward"):
        _losses("PrefetchTrainPipelineSparseDist")


@pytest.mark.parametrize("name", PIPELINES)
def test_the_other_pipelines_do_on_cpu_what_they_did(name: str) -> None:
    adapted = _losses(name)
    with without(ADAPTATIONS):
        assert _losses(name) == adapted


def test_pipelines_on_cpu_have_no_streams() -> None:
    model = small_model.sharded(CPU)
    optimizer = small_model.dense_optimizer(model)
    pipeline = train_pipelines.PrefetchTrainPipelineSparseDist(model, optimizer, CPU)
    streams = ("_memcpy_stream", "_data_dist_stream", "_prefetch_stream", "_default_stream")
    assert [getattr(pipeline, stream) for stream in streams] == [None] * 4
    assert pipeline._stream_context is torch.cuda.stream
    assert train_pipelines.TrainPipelineBase(model, optimizer, CPU)._memcpy_stream is None


def test_a_keyed_tensor_still_tells_an_accelerators_stream() -> None:
    told: list[object] = []

    class Values(torch.Tensor):
        def record_stream(self, stream: object) -> None:
            told.append(stream)

    keyed = KeyedTensor(keys=["a"], length_per_key=[2], values=torch.ones(1, 2).as_subclass(Values))
    user = object()
    keyed.record_stream(user)
    keyed.record_stream(torch.cpu.current_stream())
    assert told == [user]


def test_postprocessing_on_cpu_records_what_it_did() -> None:
    told: list[object] = []

    class Held(small_model.Batch):
        def record_stream(self, stream: Any) -> None:
            told.append(stream)

    held = Held(*(torch.ones(1) for _ in range(3)))
    values = [torch.ones(1), {"a": held}, (held,)]
    PipelinedPostproc.recursive_record_stream(values, "stream")
    assert told == ["stream", "stream"]
