"""A DLRM of TorchRec with our planner, groups of ranks and pipeline; docs/quickstart.md walks through it.

    torchrun --nproc-per-node 2 docs/quickstart.py [--stock] [--staleness 1] [--timeline FOLDER] [--device npu]

`--stock` trains with TorchRec's own three classes in place of ours. The batches are random.
"""

import argparse
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from turbogr_plugin.backend.collectives import process_group
from turbogr_plugin.backend.current_device import current_device
from turbogr_plugin.pipeline import TrainPipelineFineGrained
from turbogr_plugin.sharding import HierarchicalModelParallel, HierarchicalShardingPlanner, cpu_topology, npu_topology

ROWS = {"user": 2_000, "item": 10_000}
BATCH = 32


def parsed() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--device", choices=("cpu", "npu"), default="cpu")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--timeline", type=Path, help="folder to write the timeline of 20 steps to")
    return parser.parse_args()


def random_batches(steps: int, seed: int) -> Iterator[Batch]:
    """Batches of 0 to 3 ids per feature."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        lengths = torch.randint(0, 4, (len(ROWS), BATCH), generator=generator)
        ids = [
            torch.randint(ROWS[name], (int(n.sum()),), generator=generator)
            for name, n in zip(ROWS, lengths, strict=True)
        ]
        sparse = KeyedJaggedTensor(list(ROWS), torch.cat(ids), lengths=lengths.flatten())
        dense = torch.rand(BATCH, 13, generator=generator)
        yield Batch(dense, sparse, torch.randint(2, (BATCH,), generator=generator))


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    """What a TorchRec script does, with one choice between TorchRec's classes and ours."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=32, num_embeddings=rows, feature_names=[name])
        for name, rows in ROWS.items()
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.Adagrad, collection.parameters(), {"lr": 0.05})
    model = DLRMTrain(DLRM(collection, 13, [64, 32], [64, 1], dense_device=device))
    sharders = get_default_sharders()

    if arguments.stock:
        planner = EmbeddingShardingPlanner(topology=Topology(ranks, device.type), batch_size=BATCH)
    else:
        if device.type == "npu":
            topology = npu_topology("atlas-800t-a2", nodes=1, devices_per_node=ranks)
        else:
            topology = cpu_topology(ranks_per_node=ranks, nodes=1, memory_bytes=1 << 30, intra=2e9, inter=1e9)
        planner = HierarchicalShardingPlanner(topology=topology, batch_size=BATCH)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    if rank == 0:
        print(plan)

    parallel = DistributedModelParallel if arguments.stock else HierarchicalModelParallel
    model = parallel(model, plan=plan, sharders=sharders, device=device)

    dense = [parameter for name, parameter in model.named_parameters() if "embedding_bags" not in name]
    optimizer = torch.optim.Adam(dense, lr=1e-3)
    if arguments.stock:
        pipeline = TrainPipelineSparseDist(model, optimizer, device)
    else:
        pipeline = TrainPipelineFineGrained(model, optimizer, device, staleness=arguments.staleness)

    batches = random_batches(arguments.steps, seed=rank)
    if arguments.timeline is not None and not arguments.stock:
        recording = pipeline.timeline(20)
        while not recording.done:
            pipeline.progress(batches)
        if rank == 0:
            timeline = recording.timeline()
            print(timeline.table())
            timeline.write(arguments.timeline)

    losses = []
    while True:
        try:
            losses.append(pipeline.progress(batches)[0])
        except StopIteration:
            break
    print(f"rank {rank}: last loss {losses[-1].item():.6f}")


def main() -> None:
    """Trains on the ranks that the launcher has started."""
    arguments = parsed()
    device = current_device(arguments.device)
    with process_group(device, timeout=timedelta(minutes=10)):
        train(arguments, device)


if __name__ == "__main__":
    main()
