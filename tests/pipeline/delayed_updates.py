"""What staleness means, computed slowly and plainly: one process, float64, no TorchRec, no sharding, no pipeline.

All ranks' batches are one step. Batch j reads the tables as they were after the update of batch j - s - 1 (s: its
staleness), the dense part is that after batch j - 1, and the gradient is applied to the tables as they are then:

    read      W_(j - s - 1)[ids of all ranks]
    loss      mean over ranks of each rank's loss
    update    of rows with ids in the batch, row-wise Adagrad:  M += mean(g^2),  W -= lr g / (sqrt(M) + eps)
              of the dense part, SGD

It is written for the model of small_model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.pipeline import small_model


@dataclass
class Result:
    """Of a run.

    Attributes:
        losses: [steps][ranks].
        tables: as they end, [rows, dim] by name.
        weight: of the linear layer, [1, inputs].
        bias: of the linear layer, [1].
    """

    losses: list[list[float]]
    tables: dict[str, Tensor]
    weight: Tensor
    bias: Tensor


def simulated(
    batches: Sequence[Sequence[small_model.Batch]],
    staleness: Sequence[int],
    tables: dict[str, Tensor],
    weight: Tensor,
    bias: Tensor,
    *,
    learning_rate: float,
    eps: float,
    exact: Sequence[str] = (),
) -> Result:
    """Trains.

    Args:
        batches: [steps][ranks].
        staleness: of each step, at most its number.
        tables: at the start.
        weight: at the start.
        bias: at the start.
        learning_rate: of tables and linear layer.
        eps: of Adagrad.
        exact: tables whose staleness is 0 in each step.
    """
    history = [{name: table.double() for name, table in tables.items()}]  # history[k]: before the update of batch k
    moments = {name: torch.zeros(table.size(0), dtype=torch.float64) for name, table in tables.items()}
    weight, bias = weight.double(), bias.double()
    losses = []
    for step, (of_ranks, stale) in enumerate(zip(batches, staleness, strict=True)):
        read = {
            name: history[step if name in exact else step - stale][name].clone().requires_grad_() for name in tables
        }
        weight, bias = weight.detach().requires_grad_(), bias.detach().requires_grad_()
        of_step = [_loss(batch, read, weight, bias) for batch in of_ranks]
        losses.append([loss.item() for loss in of_step])
        total = sum(of_step, torch.zeros((), dtype=torch.float64)) / len(of_step)
        gradients = torch.autograd.grad(total, [*read.values(), weight, bias])
        now = {}
        for (name, table), gradient in zip(history[-1].items(), gradients, strict=False):
            seen = torch.cat([batch.ids[name].values() for batch in of_ranks]).unique()
            table, rows = table.clone(), gradient[seen]
            moments[name][seen] += rows.square().mean(1)
            table[seen] -= learning_rate * rows / (moments[name][seen].sqrt() + eps).unsqueeze(1)
            now[name] = table
        history.append(now)
        weight = weight.detach() - learning_rate * gradients[-2]
        bias = bias.detach() - learning_rate * gradients[-1]
    return Result(losses, history[-1], weight, bias)


def _loss(batch: small_model.Batch, tables: dict[str, Tensor], weight: Tensor, bias: Tensor) -> Tensor:
    parts = []
    for name in ("bag_a", "bag_b", "sequence"):
        rows = tables[name][batch.ids[name].values()].split(batch.ids[name].lengths().tolist())
        parts.append(torch.stack([row.sum(0) for row in rows]))
    logits = torch.cat([*parts, batch.floats.double()], 1) @ weight.t() + bias
    return torch.nn.functional.binary_cross_entropy_with_logits(logits.squeeze(1), batch.label.double())
