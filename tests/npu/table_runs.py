"""Training runs of TorchRec's embedding modules on one rank, for test_torchrec_tables.py; they run in the rank pool."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

ROWS, WIDTH, FEATURES = 9, 8, ("f0", "f1", "f2")


class Sum(nn.Module):
    """A weighted sum over everything that an embedding module returns."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, features: Any) -> Tensor:
        found = self.embeddings(features)
        values = found.values() if hasattr(found, "keys") and callable(found.values) else found
        parts = [values] if isinstance(values, Tensor) else [each.values() for each in values]
        total: Tensor = sum(((part.float() ** 2).sum() for part in parts), torch.zeros((), device=parts[0].device))
        return total


def collection(kind: str, device: str) -> nn.Module:
    """Two tables of one width, the second with two features; "pooled" or "sequence"."""
    import torchrec

    features = (FEATURES[:1], FEATURES[1:])
    common = [
        {"name": f"t{number}", "num_embeddings": ROWS, "embedding_dim": WIDTH, "feature_names": list(names)}
        for number, names in enumerate(features)
    ]
    if kind == "pooled":
        return torchrec.EmbeddingBagCollection(
            [torchrec.EmbeddingBagConfig(**given) for given in common], device=torch.device(device)
        )
    return torchrec.EmbeddingCollection(
        [torchrec.EmbeddingConfig(**given) for given in common], device=torch.device(device)
    )


def batch(generator: torch.Generator) -> Any:
    """Eight samples whose ids come from five rows, so that most come several times."""
    import torchrec

    lengths = torch.randint(0, 5, (8 * len(FEATURES),), generator=generator)
    ids = torch.randint(0, 5, (int(lengths.sum()),), generator=generator)
    return torchrec.KeyedJaggedTensor(list(FEATURES), ids, lengths=lengths)


def train(
    *, kind: str, sharding: str, device: str, optimizer: str = "EXACT_SGD", steps: int = 20
) -> dict[str, list[float]]:
    """Trains, saving and loading the state half way; returns losses and the tables."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torch.distributed.remote_device import _remote_device
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, data_parallel, table_wise
    from torchrec.distributed.types import ShardingPlan

    from turbogr_plugin import simnpu
    from turbogr_plugin.backend import adaptation
    from turbogr_plugin.backend.adaptations import dense_tables_on_device, fused_tables_on_device

    for record in (*dense_tables_on_device.ADAPTATIONS, *fused_tables_on_device.ADAPTATIONS):
        adaptation.apply(record)
    if device == "npu":
        simnpu.reset()
    where = torch.device(device, 0) if device == "npu" else torch.device(device)
    sharder_class = EmbeddingBagCollectionSharder if kind == "pooled" else EmbeddingCollectionSharder
    sharder = sharder_class(fused_params={"optimizer": EmbOptimType[optimizer], "learning_rate": 0.05})

    def build() -> Any:
        tables = collection(kind, "meta")
        choice = data_parallel() if sharding == "data_parallel" else table_wise(rank=0, compute_kernel="fused")
        plan = construct_module_sharding_plan(
            tables, {"t0": choice, "t1": choice}, sharder, local_size=1, world_size=1, device_type=device
        )
        for parameter in plan.values():
            for shard in parameter.sharding_spec.shards if parameter.sharding_spec else ():
                shard.placement = _remote_device("rank:0/npu:0" if device == "npu" else "rank:0/cpu")
        return DistributedModelParallel(
            Sum(tables), device=where, plan=ShardingPlan(plan={"embeddings": plan}), sharders=[sharder]
        )

    model = build()
    fixed = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in sorted(model.state_dict().items()):
            table = value.local_shards()[0].tensor if hasattr(value, "local_shards") else value
            assert table.device.type == device, f"{name} lies on {table.device}"
            table.copy_(torch.randint(-8, 9, (ROWS, WIDTH), generator=fixed) / 8)
    losses = []
    generator = torch.Generator().manual_seed(2)
    dense = torch.optim.SGD(model.parameters(), lr=0.05) if sharding == "data_parallel" else None
    for step in range(steps):
        if step == steps // 2:
            state, fused = model.state_dict(), model.fused_optimizer.state_dict()
            model = build()
            model.load_state_dict(state)
            model.fused_optimizer.load_state_dict(fused)
            dense = torch.optim.SGD(model.parameters(), lr=0.05) if dense is not None else None
        if step == steps - 2:
            for group in [*model.fused_optimizer.param_groups, *(dense.param_groups if dense is not None else ())]:
                group["lr"] = 0.01
            model.fused_optimizer.step()
        loss = model(batch(generator).to(where))
        loss.backward()
        if dense is not None:
            dense.step()
            dense.zero_grad()
        losses.append(float(loss))
    if device == "npu":
        assert simnpu.races() == []
        assert simnpu.cpu_fallbacks() == {}
    tables = [
        value.local_shards()[0].tensor if hasattr(value, "local_shards") else value
        for _, value in sorted(model.state_dict().items())
    ]
    return {"losses": losses, "tables": torch.cat([table.detach().cpu().flatten() for table in tables]).tolist()}


def train_unsharded(*, kind: str, device: str, steps: int = 100) -> dict[str, list[float]]:
    """Trains the embedding module itself, without a wrapper; returns losses and the tables."""
    from turbogr_plugin import simnpu
    from turbogr_plugin.kernels.aten_embedding_bag import KERNELS

    if device == "npu":
        simnpu.reset()
        for kernel in KERNELS:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(kernel.operator, kernel.key):
                _libraries.append(torch.library.Library("aten", "IMPL"))
                _libraries[-1].impl(kernel.operator.removeprefix("aten::"), kernel.function, kernel.key)
    torch.manual_seed(3)
    model = Sum(collection(kind, "cpu")).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(steps):
        loss = model(batch(generator).to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if device == "npu":
        assert simnpu.cpu_fallbacks() == {}
        assert simnpu.races() == []
    tables = torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])
    return {"losses": torch.stack(losses).cpu().tolist(), "tables": tables.tolist()}


_libraries: list[torch.library.Library] = []
