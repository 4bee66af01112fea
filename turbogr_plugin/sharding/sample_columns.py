"""A batch of samples as columns that can be taken apart by sample, sent, and put together again.

A batch may be a tensor [B, ...], a JaggedTensor of B rows, a KeyedJaggedTensor of stride B, or any nesting of dicts,
lists, tuples and dataclasses of these; None stays None. A column is one tensor or jagged tensor of the batch in the
order of its samples: of a KeyedJaggedTensor all keys of the first sample come first. Left out: KeyedJaggedTensors with
a stride per key, and values that are no tensors, of which nobody knows what they are per sample.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


@dataclass
class Column:
    """One part of a batch, sample after sample.

    Attributes:
        values: [T, ...] of all rows, or [B, ...] of a column without rows.
        lengths: [B, F] int, values of each sample's F rows; None: one value per sample.
        weights: [T] of the values, where the batch has some.
    """

    values: Tensor
    lengths: Tensor | None = None
    weights: Tensor | None = None

    def take(self, samples: Tensor) -> Column:
        """The column of some samples, in the order given.

        Args:
            samples: [n] int64.
        """
        if self.lengths is None:
            return Column(self.values[samples])
        of_samples = self.lengths.sum(dim=1)
        index = ragged_index(of_samples, samples)
        weights = None if self.weights is None else self.weights[index]
        return Column(self.values[index], self.lengths[samples], weights)

    def sizes(self, counts: Sequence[int]) -> list[int]:
        """Values of successive groups of samples, of which there are `counts`."""
        if self.lengths is None:
            return list(counts)
        total = torch.cat([self.lengths.new_zeros(1, dtype=torch.int64), self.lengths.sum(dim=1).cumsum(0)])
        ends = torch.tensor([0, *itertools.accumulate(counts)], device=total.device)
        return total[ends].diff().tolist()


def ragged_index(lengths: Tensor, rows: Tensor) -> Tensor:
    """Indices of the values of some rows, in the order of the rows.

    Args:
        lengths: [R] of all rows, which lie one after the other.
        rows: [n] int64.

    Returns:
        [sum of their lengths] int64.
    """
    taken = lengths[rows].long()
    starts = (lengths.cumsum(0) - lengths)[rows].long()
    ends = taken.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    return torch.arange(total, device=lengths.device) + (starts - (ends - taken)).repeat_interleave(taken)


def join(columns: Sequence[Column]) -> Column:
    """Successive columns of the same part as one."""
    first = columns[0]
    return Column(
        torch.cat([column.values for column in columns]),
        None if first.lengths is None else torch.cat([_given(column.lengths) for column in columns]),
        None if first.weights is None else torch.cat([_given(column.weights) for column in columns]),
    )


def columns_of(batch: Any) -> tuple[list[Column], int]:
    """The columns of a batch and its number of samples.

    Raises:
        TypeError: a part that is no tensor.
        ValueError: parts of different numbers of samples, a scalar, or strides per key.
    """
    columns: list[Column] = []
    sizes: dict[str, int] = {}
    for path, part in _parts(batch, "batch"):
        column, samples = _column(path, part)
        columns.append(column)
        sizes[path] = samples
    if not columns:
        raise ValueError("batch has no tensor: there is nothing to balance")
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the parts of a batch must have as many samples, got {sizes}")
    return columns, next(iter(sizes.values()))


def batch_of(like: Any, columns: Sequence[Column]) -> Any:
    """The batch of some columns.

    Args:
        like: a batch of the same structure.
        columns: as `columns_of` gives them.
    """
    remaining = iter(columns)
    return _rebuilt(like, lambda part: _part(part, next(remaining)))


def structure_of(batch: Any) -> int:
    """A positive number that batches of the same parts, keys, dtypes and shapes of a sample share."""
    described = []
    for path, part in _parts(batch, ""):
        keys = part.keys() if isinstance(part, KeyedJaggedTensor) else None
        values = part if isinstance(part, Tensor) else part.values()
        weights = None if isinstance(part, Tensor) else part.weights_or_none()
        shape = list(values.shape[1:])
        described.append((path, type(part).__name__, keys, str(values.dtype), shape, weights is None))
    return 1 + zlib.crc32(repr(described).encode())


def _column(path: str, part: Any) -> tuple[Column, int]:
    if isinstance(part, KeyedJaggedTensor):
        if part.variable_stride_per_key():
            raise ValueError(f"{path} has a stride per key: its rows are not samples")
        keys, stride = len(part.keys()), part.stride()
        rows = torch.arange(keys * stride, device=part.values().device).reshape(keys, stride).T.reshape(-1)
        index = ragged_index(part.lengths(), rows)
        weights = part.weights_or_none()
        lengths = part.lengths().reshape(keys, stride).T.contiguous()
        return Column(part.values()[index], lengths, None if weights is None else weights[index]), stride
    if isinstance(part, JaggedTensor):
        lengths = part.lengths()
        total, weights = int(lengths.sum()), part.weights_or_none()
        weights = None if weights is None else weights[:total]
        column = Column(part.values()[:total], lengths.reshape(-1, 1), weights)
        return column, len(lengths)
    if part.dim() == 0:
        raise ValueError(f"{path} is a scalar: every part of a batch needs one row per sample")
    return Column(part), len(part)


def _part(like: Any, column: Column) -> Any:
    if isinstance(like, KeyedJaggedTensor):
        lengths = _given(column.lengths)
        samples, keys = lengths.shape
        rows = torch.arange(keys * samples, device=lengths.device).reshape(samples, keys).T.reshape(-1)
        index = ragged_index(lengths.reshape(-1), rows)
        return KeyedJaggedTensor(
            keys=like.keys(),
            values=column.values[index],
            weights=None if column.weights is None else column.weights[index],
            lengths=lengths.T.reshape(-1),
            stride=samples,
        )
    if isinstance(like, JaggedTensor):
        return JaggedTensor(column.values, lengths=_given(column.lengths).reshape(-1), weights=column.weights)
    return column.values


def _parts(batch: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every tensor and jagged tensor of a batch with its path, depth first."""
    if batch is None:
        return
    if isinstance(batch, (Tensor, JaggedTensor, KeyedJaggedTensor)):
        yield path, batch
    elif isinstance(batch, dict):
        for key, part in batch.items():
            yield from _parts(part, f"{path}[{key!r}]")
    elif isinstance(batch, (list, tuple)):
        for number, part in enumerate(batch):
            yield from _parts(part, f"{path}[{number}]")
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from _parts(getattr(batch, field.name), f"{path}.{field.name}")
    else:
        raise TypeError(
            f"{path} is a {type(batch).__name__}: a batch consists of tensors, JaggedTensors and KeyedJaggedTensors in "
            "dicts, lists, tuples and dataclasses; make what belongs to the whole batch after balancing (finish=)"
        )


def _rebuilt(like: Any, of: Callable[[Any], Any]) -> Any:
    """`like` with every part replaced, depth first."""
    if like is None:
        return None
    if isinstance(like, (Tensor, JaggedTensor, KeyedJaggedTensor)):
        return of(like)
    if isinstance(like, dict):
        return {key: _rebuilt(part, of) for key, part in like.items()}
    if isinstance(like, (list, tuple)):
        parts = [_rebuilt(part, of) for part in like]
        return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)
    names = [field.name for field in dataclasses.fields(like)]
    return type(like)(**{name: _rebuilt(getattr(like, name), of) for name in names})


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
