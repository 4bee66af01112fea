"""What test_pipelines_streams.py runs on the ranks of a pool: each function is one call, the same on CPU and on npu."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor  # type: ignore[attr-defined]
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils.data import DataLoader
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.distributed.train_pipeline.pipeline_stage import PipelineStage, SparseDataDistUtil

from tests.npu.parallel import device_of
from tests.npu.ranks import forget_groups
from tests.pipeline import small_model
from tests.stock import without
from turbogr_plugin import simnpu
from turbogr_plugin.backend.adaptations import collective_results, sharded_tensor_device
from turbogr_plugin.backend.streams import device_module, new_stream
from turbogr_plugin.pipeline.adaptations import ADAPTATIONS, pipeline_streams

STEPS = 6
_WARM = 3  # steps after which only what every step does is left
_OURS = "/turbogr_plugin/"


@dataclass
class Run:
    """What one rank saw."""

    losses: list[float] = field(default_factory=list)
    races: list[str] = field(default_factory=list)
    host_syncs: dict[str, int] = field(default_factory=dict)
    """Waits of the host behind the first steps, by "operator at file:line" of the innermost line that is not ours."""


def _start(device_type: str) -> torch.device:
    forget_groups()
    return device_of(device_type)


class _Watch:
    """Collects what simnpu reports while a pipeline runs; nothing on CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_npu = device.type == "npu"
        self._losses: list[torch.Tensor] = []
        self._races: list[str] = []
        self._forget()

    def step(self, loss: torch.Tensor) -> None:
        self._losses.append(loss)
        if len(self._losses) == _WARM:
            self._forget()

    def _forget(self) -> None:
        if self._on_npu:
            self._races += [f"{race.kind}: {race.detail}" for race in simnpu.races()]
            simnpu.reset()

    def run(self) -> dict[str, Any]:
        run = Run(races=self._races)
        if self._on_npu:
            for sync in simnpu.host_syncs():
                line = next((line for line in sync.where if _OURS not in line), "nowhere")
                place = f"{sync.operator} at {line.partition('/site-packages/')[2] or line}"
                run.host_syncs[place] = run.host_syncs.get(place, 0) + sync.count
            self._forget()
        run.losses = torch.stack(self._losses).tolist()
        return asdict(run)


@contextmanager
def _everyone_allocates(device: torch.device) -> Iterator[None]:
    """At each change of streams and around each update, freed memory of every size is taken and written to.

    A lifetime that depends on luck is found so: what a stream has freed while another reads is in use again at once.
    """

    def claim() -> None:
        claimed = [torch.zeros(128 * size, device=device) for size in range(1, 48)]
        claimed += [torch.zeros(128, device=device) for _ in range(16)]
        claimed.clear()

    def claiming(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            claim()
            result = function(*args, **kwargs)
            claim()
            return result

        return call

    with ExitStack() as stack:
        if device.type == "npu":
            for name in ("_to_device", "_start_data_dist", "_start_embedding_lookup", "prefetch_embeddings"):
                stack.enter_context(patch.object(train_pipelines, name, claiming(getattr(train_pipelines, name))))
            stack.enter_context(patch.object(torch.optim.SGD, "step", claiming(torch.optim.SGD.step)))
        yield


def _registry(communication: str, device: torch.device) -> Any:
    if communication == "FP32":
        return None
    precision = CommType[communication]
    config = QCommsConfig(forward_precision=precision, backward_precision=precision)
    return get_qcomm_codecs_registry(config, device=device)


def plain(device_type: str, sharding: str = "row_wise", communication: str = "FP32") -> dict[str, Any]:
    """The loop without a pipeline."""
    device = _start(device_type)
    model = small_model.sharded(device, sharding, _registry(communication, device))
    return {"losses": small_model.plain_losses(model, small_model.batches(STEPS, rank=dist.get_rank()), device)}


def pipeline(
    name: str,
    device_type: str,
    options: dict[str, Any],
    sharding: str = "row_wise",
    communication: str = "FP32",
    stock: str = "",
) -> dict[str, Any]:
    """One of TorchRec's pipelines; `stock` is what is left as it comes: "pipelines" or "collective results"."""
    adaptations = {"": (), "pipelines": ADAPTATIONS, "collective results": collective_results.ADAPTATIONS}[stock]
    device = _start(device_type)
    with without(adaptations), _everyone_allocates(device):
        model = small_model.sharded(device, sharding, _registry(communication, device))
        if name.startswith("Eval"):
            model.eval()
        made = getattr(train_pipelines, name)(model, small_model.dense_optimizer(model), device, **options)
        source = iter(small_model.batches(STEPS, rank=dist.get_rank(), pin=device.type == "npu"))
        watch = _Watch(device)
        with torch.set_grad_enabled(not name.startswith("Eval")):
            while True:
                try:
                    watch.step(made.progress(source))
                except StopIteration:
                    break
        return watch.run()


def staged(device_type: str, streams: Sequence[str]) -> dict[str, Any]:
    """StagedTrainPipeline: copy, input distribution, and a stage for each of `streams`."""
    device = _start(device_type)
    model = small_model.sharded(device)
    optimizer = small_model.dense_optimizer(model)
    distribute = new_stream(device)
    util: SparseDataDistUtil[Any] = SparseDataDistUtil(
        model, distribute, **{name: new_stream(device) for name in streams}
    )
    stages = [
        PipelineStage("copy", lambda batch: batch.to(device, non_blocking=True), new_stream(device)),
        util.start_sparse_data_dist_stage(),
    ]
    if "prefetch_stream" in streams:
        stages.append(PipelineStage("prefetch", util.prefetch, util.prefetch_stream))
    if "embedding_lookup_stream" in streams:
        stages.append(util.start_embedding_lookup_stage())
    made = train_pipelines.StagedTrainPipeline(stages)
    source = iter(small_model.batches(STEPS, rank=dist.get_rank(), pin=True))
    watch = _Watch(device)
    while (batch := made.progress(source)) is not None:
        optimizer.zero_grad()
        loss, shown = model(batch)
        loss.backward()
        optimizer.step()
        watch.step(shown)
    return watch.run()


def loader(device_type: str, persistent: bool) -> dict[str, Any]:
    """SparseDist fed by a DataLoader with a worker that pins, two epochs."""
    device = _start(device_type)
    model = small_model.sharded(device)
    made: Any = train_pipelines.TrainPipelineSparseDist(model, small_model.dense_optimizer(model), device)
    data: Any = small_model.batches(STEPS, rank=dist.get_rank())
    batches: DataLoader[Any] = DataLoader(
        data, batch_size=None, num_workers=1, pin_memory=True, persistent_workers=persistent
    )
    losses: list[float] = []
    for _ in range(2):
        # A generator of its own per epoch: with persistent workers `iter` gives the same object again, which a
        # pipeline takes for the exhausted one.
        losses += small_model.pipeline_losses(made, (batch for batch in batches))
    pinned = [batch.floats.is_pinned() for batch in batches]
    return {"losses": losses, "pinned": all(pinned)}


def checkpoint(device_type: str, sharding: str, stock: bool = False) -> dict[str, Any]:
    """Saves a trained model and its table optimizers, loads them into a new model."""
    device = _start(device_type)
    rank = dist.get_rank()
    batches = small_model.batches(3, rank=rank)
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    trained = small_model.sharded(device, sharding)
    small_model.plain_losses(trained, batches, device)
    with without(sharded_tensor_device.ADAPTATIONS if stock else ()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(_state(trained), checkpoint_id=Path(folder[0]) / "state")
        loaded = small_model.sharded(device, sharding)
        state = _state(loaded)
        devices = sorted({str(value.device) for value in state["model"].values()})
        load(state, checkpoint_id=Path(folder[0]) / "state")
    loaded.load_state_dict(state["model"])
    loaded.fused_optimizer.load_state_dict(state["optimizer"])
    return {
        "devices": devices,
        "shards": sum(len(_shards(value)) for value in state["model"].values()),
        "differ": _different(_state(trained), _state(loaded)),
        "losses": [small_model.plain_losses(model, batches, device) for model in (trained, loaded)],
    }


def _state(model: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}


def _shards(value: Any) -> list[torch.Tensor]:
    return [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]


def _different(left: Any, right: Any, at: str = "") -> list[str]:
    """Paths of the tensors that are not bit-equal."""
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        return [path for key in left for path in _different(left[key], right[key], f"{at}/{key}")]
    if not isinstance(left, torch.Tensor):
        return [] if isinstance(left, list) or left == right else [at]
    pairs = zip(_shards(left), _shards(right), strict=True)
    return [] if all(torch.equal(mine.cpu(), theirs.cpu()) for mine, theirs in pairs) else [at]


def streams_of_pipelines() -> dict[str, list[str]]:
    """The streams of each pipeline on npu, by what differs from the current stream: "attribute priority"."""
    device = _start("npu")
    model = small_model.sharded(device)
    optimizer = small_model.dense_optimizer(model)
    found: dict[str, list[str]] = {}
    for label, name, options in (
        ("Base", "TrainPipelineBase", {}),
        ("SparseDist", "TrainPipelineSparseDist", {}),
        ("Lite", "TrainPipelineSparseDistLite", {}),
        ("Fused", "TrainPipelineFusedSparseDist", {}),
        ("Fused new", "TrainPipelineFusedSparseDist", {"emb_lookup_stream": "new"}),
        ("Fused current", "TrainPipelineFusedSparseDist", {"emb_lookup_stream": "current"}),
        ("SemiSync", "TrainPipelineSemiSync", {}),
        ("Prefetch", "PrefetchTrainPipelineSparseDist", {}),
        ("Eval", "EvalPipelineSparseDist", {}),
    ):
        made = getattr(train_pipelines, name)(model, optimizer, device, **options)
        current = device_module(device).current_stream()
        # Equal streams count once, under the first name.
        kept: list[Any] = []
        found[label] = []
        for attribute in ("_memcpy_stream", "_data_dist_stream", "_emb_lookup_stream", "_prefetch_stream"):
            stream = getattr(made, attribute, None)
            if stream is None or stream == current or stream in kept:
                continue
            kept.append(stream)
            found[label].append(attribute.strip("_").removesuffix("_stream"))
        with made._stream_context(made._memcpy_stream):
            assert device_module(device).current_stream() == made._memcpy_stream
    with without(pipeline_streams.ADAPTATIONS):
        stock = train_pipelines.TrainPipelineSparseDist(model, optimizer, device)
        found["stock"] = [name for name in ("_memcpy_stream", "_data_dist_stream") if getattr(stock, name) is not None]
    return found


class OwnPipeline(train_pipelines.TrainPipelineSparseDist):
    """A user's subclass, which calls its parent as users do."""

    def __init__(self, model: Any, optimizer: Any, device: torch.device) -> None:
        super().__init__(model=model, optimizer=optimizer, device=device, execute_all_batches=True)


def subclass_of_a_pipeline() -> dict[str, Any]:
    """A user's pipeline on npu."""
    device = _start("npu")
    model = small_model.sharded(device)
    made: Any = OwnPipeline(model, small_model.dense_optimizer(model), device)
    source = small_model.batches(STEPS, rank=dist.get_rank(), pin=True)
    losses = small_model.pipeline_losses(made, source)
    return {"losses": losses, "has_streams": None not in (made._memcpy_stream, made._data_dist_stream)}
