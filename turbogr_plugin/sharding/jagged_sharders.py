"""Sharders by which TorchRec's embedding collections use our lookup, on every device.

    sharders = [JaggedEmbeddingCollectionSharder(), JaggedEmbeddingBagCollectionSharder()]
    plan = planner.collective_plan(model, sharders, group)
    model = DistributedModelParallel(model, plan=plan, sharders=sharders, device=device)

They are TorchRec's own, with the same arguments, and can stand wherever those stand, also inside the sharders of
managed-collision and feature-processed collections (`ec_sharder=`, `ebc_sharder=`). After TorchRec has built the tables
they put our lookup into them (jagged_lookup.py), and let the ranks agree on the dtype of rows (row_dtypes.py), which
the adaptations do for TorchRec's own sharders.
"""

from __future__ import annotations

import torch
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from turbogr_plugin.sharding.jagged_lookup import KERNELS, use_jagged_lookup
from turbogr_plugin.sharding.row_dtypes import agree_on_rows


class JaggedEmbeddingCollectionSharder(EmbeddingCollectionSharder):
    """TorchRec's sharder of EmbeddingCollection with our lookup in the tables; same arguments.

    `use_index_dedup` works on every device: each id of a batch travels and is looked up once. Left out: inside the
    sharder of a managed-collision collection, which deduplicates by itself and has no kernel for it on CPU.
    """

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingCollection:
        """As TorchRec's.

        Raises:
            ValueError: tables that our lookup does not serve, or ranks that would send rows of different dtypes.
        """
        sharded = super().shard(module, params, env, device, module_fqn)
        use_jagged_lookup(sharded)
        agree_on_rows(sharded)
        return sharded

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Those of TorchRec's that our lookup serves."""
        return [kernel for kernel in super().compute_kernels(sharding_type, compute_device_type) if kernel in KERNELS]


class JaggedEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """TorchRec's sharder of EmbeddingBagCollection with our lookup in the tables; same arguments."""

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingBagCollection:
        """As TorchRec's.

        Raises:
            ValueError: tables that our lookup does not serve, or ranks that would send rows of different dtypes.
        """
        sharded = super().shard(module, params, env, device, module_fqn)
        use_jagged_lookup(sharded)
        agree_on_rows(sharded)
        return sharded

    def reshard(
        self,
        sharded_module: ShardedEmbeddingBagCollection,
        changed_shard_to_params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> ShardedEmbeddingBagCollection:
        """As TorchRec's, which builds the tables anew."""
        resharded = super().reshard(sharded_module, changed_shard_to_params, env, device)
        use_jagged_lookup(resharded)
        agree_on_rows(resharded)
        return resharded

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Those of TorchRec's that our lookup serves."""
        return [kernel for kernel in super().compute_kernels(sharding_type, compute_device_type) if kernel in KERNELS]
