from __future__ import annotations

from typing import Any

import pytest
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.fused_embedding import FusedEmbeddingCollectionSharder
from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
from torchrec.distributed.quant_embeddingbag import QuantEmbeddingBagCollectionSharder

from tests.stock import without
from turbogr_plugin.sharding.adaptations import sharding_types

SHARDERS = (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    FeatureProcessedEmbeddingBagCollectionSharder,
    FusedEmbeddingBagCollectionSharder,
    FusedEmbeddingCollectionSharder,
    QuantEmbeddingBagCollectionSharder,
)


@pytest.mark.parametrize("sharder", SHARDERS)
def test_a_sharder_offers_on_npu_what_it_offers_on_cuda(sharder: Any) -> None:
    assert sharder().sharding_types("npu") == sharder().sharding_types("cuda")


def test_torchrec_alone_offers_no_sharding_by_rows_for_bags_on_npu() -> None:
    with without(sharding_types.ADAPTATIONS):
        assert "row_wise" not in EmbeddingBagCollectionSharder().sharding_types("npu")
        assert "row_wise" not in FusedEmbeddingBagCollectionSharder().sharding_types("npu")


@pytest.mark.parametrize("sharder", SHARDERS)
def test_what_a_sharder_offers_elsewhere_stays_what_it_was(sharder: Any) -> None:
    found = [sharder().sharding_types(device) for device in ("cpu", "cuda", "mtia")]
    with without(sharding_types.ADAPTATIONS):
        assert [sharder().sharding_types(device) for device in ("cpu", "cuda", "mtia")] == found
    if sharder is EmbeddingBagCollectionSharder:
        assert "row_wise" not in found[0]
