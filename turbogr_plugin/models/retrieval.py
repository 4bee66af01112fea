"""Sequential retrieval: TorchRec item embeddings, a sequence encoder, and the sampled-softmax loss.

The item table is a torchrec.EmbeddingCollection with two features, the sequence and its negatives, so that TorchRec
shards it, looks it up and fuses its optimizer. All that follows the lookup is one leaf module for TorchRec's pipelines.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig, dtype_to_data_type
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor

from turbogr_plugin.data.batch import ITEM, NEGATIVE, SequenceBatch
from turbogr_plugin.errors import InputError
from turbogr_plugin.kernels.jagged_select import last_tokens
from turbogr_plugin.kernels.keyed_dropout import DropoutKey
from turbogr_plugin.kernels.offsets import lengths_to_offsets, positions, row_ids
from turbogr_plugin.kernels.relative_bias import query_times
from turbogr_plugin.models.hstu import HSTU, HSTUConfig, JaggedSequence
from turbogr_plugin.negatives.sampled_softmax import sampled_softmax
from turbogr_plugin.negatives.uniform import NegativeSharing

ITEM_TABLE = "item_table"


@dataclass(kw_only=True)
class LossConfig:
    """The training objective."""

    temperature: float = 0.05
    "Divides the logits; positive."
    normalize: bool = True
    "L2-normalise queries and items, in training and in evaluation."

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise InputError(f"loss.temperature must be positive, got {self.temperature}")


def l2_normalize(x: Tensor) -> Tensor:
    """Rows of x [N, D] divided by their length; a row of zeros stays zero."""
    return nn.functional.normalize(x, dim=-1, eps=1e-6)


class RetrievalHead(nn.Module):
    """From looked-up embeddings to the loss (training) or to query vectors (evaluation)."""

    def __init__(self, config: HSTUConfig, loss: LossConfig, sharing: NegativeSharing, precision: torch.dtype) -> None:
        super().__init__()
        self.encoder = HSTU(config)
        self._loss = loss
        self._sharing = sharing
        self._precision = precision
        self._query_time = config.query_time

    def forward(self, embeddings: dict[str, JaggedTensor], batch: SequenceBatch) -> Tensor:
        """Sum of the loss over this rank's targets (training), or the query of each sample's last token [B, D].

        A sample without tokens has no last one: its query is zero.
        """
        items = embeddings[ITEM].values()
        if self.training:
            return self._loss_sum(items, embeddings[NEGATIVE].values(), batch)
        at = query_times(batch.times, batch.offsets, self._query_time)
        places = positions(batch.offsets, batch.tokens)
        encoded = self._encode(items, places, JaggedSequence(batch.offsets, batch.times, at, dropout_key=None))
        return self._unit(last_tokens(encoded, batch.offsets))

    def _encode(self, items: Tensor, places: Tensor, sequence: JaggedSequence) -> Tensor:
        with torch.autocast(items.device.type, self._precision, enabled=self._precision != torch.float32):
            encoded: Tensor = self.encoder(items, places, sequence)
        return encoded

    def _unit(self, x: Tensor) -> Tensor:
        full = x if x.dtype == torch.float64 else x.float()
        return l2_normalize(full) if self._loss.normalize else full

    def _loss_sum(self, items: Tensor, negatives: Tensor, batch: SequenceBatch) -> Tensor:
        # The last token of a sequence is a target only, so the inputs are the tokens that have a next one.
        inputs, next_index = batch.query_index, batch.query_index + 1
        offsets = lengths_to_offsets(batch.target_lengths)
        places = positions(offsets, inputs.numel())
        samples = batch.sample_ids[row_ids(offsets, inputs.numel())]
        times = batch.times[inputs]
        at = times if self._query_time == "own" else batch.times[next_index]
        key = DropoutKey(batch.seed, batch.step, samples, places)
        encoded = self._encode(
            items[inputs], places, JaggedSequence(offsets, times, at, key, batch.host_target_offsets)
        )
        return sampled_softmax(
            self._unit(encoded),
            self._unit(items[next_index]),
            self._unit(negatives),
            target_ids=batch.item_ids[next_index],
            negative_ids=batch.negative_ids,
            target_lengths=batch.target_lengths,
            host_target_offsets=batch.host_target_offsets,
            sharing=self._sharing,
            temperature=self._loss.temperature,
        )


class SequentialRetriever(nn.Module):
    """Next-item retrieval over sequences of items.

    In training mode forward gives the sum of the loss over the batch's targets; in evaluation mode the query vectors
    [B, D], whose products with the (normalised) item rows are the scores.
    """

    def __init__(
        self,
        config: HSTUConfig,
        *,
        num_items: int,
        loss: LossConfig,
        sharing: NegativeSharing,
        precision: torch.dtype = torch.float32,
        table_precision: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        """Args:
        config: the encoder.
        num_items: rows of the item table.
        loss: temperature and normalisation.
        sharing: how the batches' negatives are drawn.
        precision: torch.float32, or torch.bfloat16 for autocast of the encoder.
        table_precision: of the item table: torch.float32, torch.float16 or torch.bfloat16.
        device: of the item table; `torch.device("meta")` where TorchRec is to allocate the shards.
        """
        super().__init__()
        self.item_embeddings = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name=ITEM_TABLE,
                    embedding_dim=config.dimensions().dim,
                    num_embeddings=num_items,
                    feature_names=[ITEM, NEGATIVE],
                    data_type=dtype_to_data_type(table_precision),
                )
            ],
            device=device,
        )
        self.head = RetrievalHead(config, loss, sharing, precision)

    def forward(self, batch: SequenceBatch) -> Tensor:
        """See the class."""
        result: Tensor = self.head(self.item_embeddings(batch.features), batch)
        return result
