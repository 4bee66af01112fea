"""One rank of the measurement; rank 0 writes the figures.

    python -m benchmarks.hierarchical.ranks SETTINGS OUTPUT

SETTINGS is a JSON object with the fields of `Settings`, OUTPUT the file to write.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function
from torchrec import KeyedJaggedTensor
from torchrec.distributed.planner.types import Topology

import turbogr_plugin
from benchmarks.hierarchical import step_spans
from benchmarks.hierarchical.variants import CPU, VARIANTS, Variant, planned, quiet, sharded
from benchmarks.hierarchical.workload import Items, Workload
from benchmarks.two_hosts import sent_bytes
from turbogr_plugin.sharding.hierarchical_model_parallel import HierarchicalModelParallel
from turbogr_plugin.sharding.link_measurement import measure_links
from turbogr_plugin.sharding.plan_report import TCP_FRAMING, sent_over_link

RANKS_PER_HOST = 2


@dataclass(frozen=True)
class Settings:
    """What one run measures."""

    workloads: list[Workload]
    variants: list[str]
    """Names of VARIANTS."""
    rounds: int
    steps: int
    compute_seconds: float
    """Of the dense part and the host by lookup, for the prediction."""
    seed: int

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Reads what `as_json` gives."""
        values = json.loads(text)
        return cls(**{**values, "workloads": [Workload(**workload) for workload in values["workloads"]]})

    def as_json(self) -> str:
        """Plain values."""
        return json.dumps(dataclasses.asdict(self))


class Trained:
    """One variant under training."""

    def __init__(self, variant: Variant, workload: Workload, rows: int, topology: Topology) -> None:
        self.model: nn.Module = sharded(variant, workload, rows, topology)
        dense = [parameter for name, parameter in self.model.named_parameters() if "dense" in name]
        self.dense_bytes = 4 * sum(parameter.numel() for parameter in dense)
        self._optimizer = torch.optim.SGD(dense, lr=0.1)

    def step(self, batch: KeyedJaggedTensor) -> None:
        """Forward, backward and update, as any loop of TorchRec."""
        with record_function(step_spans.STEP):
            self._optimizer.zero_grad()
            loss = self.model(batch)
            loss.backward()
            self._optimizer.step()

    def finish(self) -> None:
        """All updates carried out, on all ranks."""
        if isinstance(self.model, HierarchicalModelParallel):
            self.model.finish()
        dist.barrier()

    def measure(self, batches: list[KeyedJaggedTensor]) -> dict[str, list[float] | float]:
        """Milliseconds of each step, and of it in all-to-all and in any collective; bytes over the link per step."""
        warm, timed = batches[0], batches[1:]
        self.step(warm)
        self.finish()
        before = sent_bytes()
        times = []
        for batch in timed:
            started = time.perf_counter()
            self.step(batch)
            times.append(1e3 * (time.perf_counter() - started))
        self.finish()
        link = (sent_bytes() - before) / len(timed)
        everything = _ExperimentalConfig(profile_all_threads=True)
        with profile(activities=[ProfilerActivity.CPU], experimental_config=everything) as profiler:
            dist.barrier()
            for batch in timed:
                self.step(batch)
            self.finish()
            with record_function(step_spans.STEP):
                pass
        collectives, begins = step_spans.of_profile(profiler)
        to_all = [(begin, end) for name, begin, end in collectives if name == "all_to_all"]
        return {
            "step_ms": times,
            "a2a_ms": step_spans.covered(to_all, begins),
            "comm_ms": step_spans.covered([(begin, end) for _, begin, end in collectives], begins),
            "link_bytes": link,
        }


def _over_ranks(measured: list[dict[str, Any]]) -> dict[str, float]:
    """Of the rounds of this rank the median step, then the mean over ranks; of bytes the mean."""
    found = {
        name: statistics.median(value for each in measured for value in each[name])
        for name in ("step_ms", "a2a_ms", "comm_ms")
    }
    found["link_bytes"] = statistics.mean(each["link_bytes"] for each in measured)
    values = torch.tensor(list(found.values()), dtype=torch.float64)
    dist.all_reduce(values)
    return dict(zip(found, (values / dist.get_world_size()).tolist(), strict=True))


def _unique_share(workload: Workload, seed: int, group: int) -> float:
    """Different ids of a group of ranks by its lookups, in one step."""
    drawn = [next(Items(workload, seed + rank).batches(1)).values() for rank in range(group)]
    return torch.cat(drawn).unique().numel() / (group * workload.lookups)


def run(settings: Settings) -> dict[str, Any]:
    """All workloads and variants, in turns; the same on every rank."""
    links = measure_links(CPU, ranks_per_node=RANKS_PER_HOST, memory_bytes=4 << 30)
    variants = [variant for variant in VARIANTS if variant.name in settings.variants]
    found: dict[str, Any] = {"links": links.lines(), "workloads": []}
    for workload in settings.workloads:
        items = Items(workload, settings.seed + dist.get_rank())
        batches = list(items.batches(settings.steps + 1))
        trained = {variant: Trained(variant, workload, items.rows, links.topology) for variant in variants}
        measured: dict[Variant, list[dict[str, Any]]] = {variant: [] for variant in variants}
        for _ in range(settings.rounds):
            for variant in variants:
                measured[variant].append(trained[variant].measure(batches))
        figures = {}
        for variant in variants:
            dense_seconds = settings.compute_seconds * workload.lookups
            plan = planned(variant, workload, items.rows, links.topology, dense_seconds)
            assert plan.report is not None
            (candidate,) = plan.report.candidates
            assert candidate.prediction is not None
            figures[variant.name] = {
                **_over_ranks(measured[variant]),
                "predicted_bytes": sent_over_link(
                    candidate,
                    ranks=RANKS_PER_HOST,
                    world=dist.get_world_size(),
                    dense_bytes=trained[variant].dense_bytes,
                    framing=TCP_FRAMING,
                ),
                "predicted_ms": 1e3 * candidate.prediction.step,
            }
        found["workloads"].append(
            {
                **dataclasses.asdict(workload),
                "rows": items.rows,
                "unique_share": _unique_share(workload, settings.seed, RANKS_PER_HOST),
                "variants": figures,
            }
        )
    return found


def main() -> None:
    """Runs as one rank."""
    settings, output = Settings.from_json(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    quiet()
    turbogr_plugin.register()
    dist.init_process_group("gloo")
    found = run(settings)
    if dist.get_rank() == 0:
        output.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
