"""Calls at which the C++ of the lookup and its parts takes its different ways: widths, types, sizes, orders of ids."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from turbogr_plugin.kernels.coalesce_rows import coalesce_rows
from turbogr_plugin.kernels.fused_optimizers import OPTIMIZERS, Settings
from turbogr_plugin.kernels.fused_update import fused_update
from turbogr_plugin.kernels.jagged_lookup import TableUpdate, jagged_lookup
from turbogr_plugin.kernels.jagged_unique import jagged_unique
from turbogr_plugin.kernels.lookup_call import StochasticRounding

FAMILIES = ("jagged_lookup", "jagged_unique", "coalesce_rows", "fused_update")
SERVED = ("sgd", "adagrad", "rowwise_adagrad", "adam")

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """One lookup."""

    name: str
    tables: tuple[tuple[int, int], ...]
    """(rows, width)."""
    features: tuple[int, ...]
    """Table of each."""
    lengths: tuple[int, ...]
    """Number of ids of each feature."""
    pooling: str = "none"
    table: torch.dtype = FP32
    output: torch.dtype | tuple[torch.dtype, ...] = FP32
    batch: int = 1
    """Bags of each feature."""
    ids: torch.dtype = torch.int64
    weighted: bool = False
    distinct: int | None = None
    """Ids are drawn from so many rows."""
    optimizer: str = "sgd"
    rounding: bool = False
    limit: float | None = None
    weight_decay_mode: int = 0


SHAPES = (
    Shape("no ids", ((5, 8),), (0,), (0,)),
    Shape("one id", ((5, 1),), (0,), (1,), optimizer="adagrad"),
    Shape("absent ids", ((1, 8), (4, 8)), (0, 1), (40, 40), optimizer="rowwise_adagrad"),
    Shape("a table without rows", ((0, 16), (30, 16), (9, 16)), (0, 1, 2, 1), (5, 300, 0, 70), ids=torch.int32),
    Shape("several blocks of rows", ((9000, 20),), (0,), (9000,), optimizer="adam"),
    Shape("one row of everything", ((7, 32),), (0,), (5000,), distinct=1, optimizer="rowwise_adagrad"),
    Shape("few rows", ((70_000, 3),), (0,), (70_000,), distinct=40),
    Shape("sorted by several threads", ((300_000, 4),) * 2, (0, 1, 0), (50_000, 1000, 40_000), optimizer="adagrad"),
    Shape("streamed", ((60_000, 130 + 30),), (0,), (30_000,), distinct=900, optimizer="rowwise_adagrad"),
    Shape("streamed in fp16", ((50, 64),), (0,), (140_000,), output=FP16),
    Shape("fp16 tables", ((90, 24),), (0,), (3000,), table=FP16, output=FP16, optimizer="adagrad"),
    Shape("bf16 tables", ((90, 24),), (0,), (3000,), table=BF16, output=BF16, optimizer="adam", limit=0.5),
    Shape("fp16 rounded by draws", ((90, 37),), (0,), (3000,), table=FP16, rounding=True),
    Shape("bf16 rounded by draws", ((90, 64),), (0,), (3000,), table=BF16, rounding=True, optimizer="rowwise_adagrad"),
    Shape("outputs of three types", ((50, 40),), (0, 0, 0, 0), (900, 0, 800, 700), output=(FP32, FP16, FP16, BF16)),
    Shape("sums", ((300, 16), (40, 4)), (0, 1, 0), (5000, 300, 2000), "sum", batch=97, optimizer="rowwise_adagrad"),
    Shape("sums with weights", ((30, 12),), (0, 0), (900, 0), "sum", batch=64, weighted=True, weight_decay_mode=1),
    Shape("means", ((30, 8), (9, 20)), (1, 0), (90, 900), "mean", batch=130, ids=torch.int32, optimizer="adagrad"),
    Shape("means in fp16", ((30, 33),), (0,), (900,), "mean", FP16, FP16, 30, weighted=True, limit=0.25),
    Shape("no rows in the batch", ((30, 8),), (0, 0), (0, 0), "mean", batch=0),
)


def inputs(shape: Shape) -> dict[str, Tensor]:
    """Random numbers of a shape, one seed for each; ids lie now and then outside of their tables."""
    generator = torch.Generator().manual_seed(SHAPES.index(shape) if shape in SHAPES else 0)
    ids, bags, begin = [], [torch.zeros(1, dtype=torch.int64)], 0
    for table, length in zip(shape.features, shape.lengths, strict=True):
        rows = shape.tables[table][0]
        drawn = torch.randint(0, shape.distinct or rows + 1, (length,), generator=generator)
        if shape.distinct:
            drawn = drawn * (rows // shape.distinct)
        ids.append(torch.where(torch.rand(length, generator=generator) < 0.01, -1, drawn))
        ends = torch.randint(0, length + 1, (max(shape.batch - 1, 0),), generator=generator).sort().values
        bags.append(begin + torch.cat([ends, torch.full((min(shape.batch, 1),), length)]))
        begin += length
    count, elements = sum(shape.lengths), sum(rows * width for rows, width in shape.tables)
    sizes = {"weight": elements, "row": sum(rows for rows, _ in shape.tables)}
    found = {
        "weights": torch.randn(elements, generator=generator).to(shape.table),
        "ids": torch.cat(ids).to(shape.ids),
        "offsets": torch.cat(bags).to(shape.ids),
        "factors": torch.rand(count, generator=generator),
    }
    for number, kind in enumerate(OPTIMIZERS[shape.optimizer].states):
        found[f"state {number}"] = torch.rand(sizes[kind], generator=generator)
    return found


def look_up(shape: Shape, implementation: str) -> list[Tensor]:
    """Outputs, gradients of tables and of weights of ids; then tables and states after a fused update."""
    results: list[Tensor] = []
    for fused in (False, True):
        given = {name: value.clone() for name, value in inputs(shape).items()}
        factors = given["factors"].requires_grad_() if shape.weighted else None
        states = [value for name, value in given.items() if name.startswith("state")]
        weights = given["weights"].requires_grad_(not fused)
        found = jagged_lookup(
            weights,
            given["ids"],
            given["offsets"] if shape.pooling == "none" else None,
            rows=[rows for rows, _ in shape.tables],
            dim=[width for _, width in shape.tables],
            feature_tables=shape.features,
            pooling=shape.pooling,  # type: ignore[arg-type]
            bag_offsets=None if shape.pooling == "none" else given["offsets"],
            id_weights=factors,
            output_dtype=shape.output,
            update=_update(shape, states) if fused else None,
            implementation=implementation,
        )
        outputs = found if isinstance(found, tuple) else (found,)
        torch.autograd.backward(outputs, [_gradient(output) for output in outputs])
        results += [output.detach() for output in outputs]
        results += [weights.detach(), *states] if fused else [value for value in (weights.grad,) if value is not None]
        if factors is not None and factors.grad is not None:
            results.append(factors.grad)
    return results


def _update(shape: Shape, states: Sequence[Tensor]) -> TableUpdate:
    settings = Settings(
        learning_rate=0.05,
        eps=1e-3,
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.01,
        iteration=3,
        weight_decay_mode=shape.weight_decay_mode,
    )
    rounding = StochasticRounding(seed=3, step=5) if shape.rounding else None
    return TableUpdate(
        optimizer=shape.optimizer,
        states=states,
        settings=settings,
        max_gradient=shape.limit,
        stochastic_rounding=rounding,
    )


def _gradient(output: Tensor) -> Tensor:
    """Random, with the rows of the last one further apart than they are wide."""
    generator = torch.Generator().manual_seed(output.numel())
    wide = torch.randn(output.shape[0], output.shape[1] + 3, generator=generator).to(output.dtype)
    return wide[:, : output.shape[1]]


_IDS: tuple[tuple[int, int], ...] = ((0, 1), (1, 1), (5000, 300), (100_000, 3_000_000), (5000, 1 << 40))
"""Number of ids and their range; the last needs entries of more than 32 bits."""


def unique_and_sums() -> Iterator[tuple[str, Callable[[str], list[Tensor]]]]:
    """Calls of jagged_unique and coalesce_rows: (name, results of an implementation)."""
    types = cycle((FP32, FP16, BF16, torch.float64))
    for count, span in _IDS:
        generator = torch.Generator().manual_seed(count)
        ids = torch.randint(-span, span, (count,), generator=generator)
        ids = torch.where(torch.rand(count, generator=generator) < 0.3, ids[:1] if count else 0, ids)
        offsets = torch.tensor([0, count // 5, count // 5, count])
        grads = torch.randn(count, 9, generator=generator).to(next(types))[:, :7]

        def unique(implementation: str, ids: Tensor = ids, offsets: Tensor = offsets) -> list[Tensor]:
            small = ids.clamp(-(1 << 31), (1 << 31) - 1).to(torch.int32)
            return [
                *jagged_unique(ids, offsets, implementation=implementation),
                *(part for part in jagged_unique(small, implementation=implementation) if part is not None),
            ]

        def coalesce(implementation: str, ids: Tensor = ids, grads: Tensor = grads) -> list[Tensor]:
            return list(coalesce_rows(ids, grads, implementation=implementation))

        yield f"unique ids, {count} within {span}", unique
        yield f"sums, {count} within {span}", coalesce


def updates() -> Iterator[tuple[str, Callable[[str], list[Tensor]]]]:
    """Calls of fused_update: (name, results of an implementation)."""
    types = cycle((FP32, FP16, BF16))
    for optimizer in SERVED:
        for count, width in ((0, 8), (700, 20), (3000, 16)):
            dtype = next(types)

            def update(
                implementation: str,
                optimizer: str = optimizer,
                count: int = count,
                width: int = width,
                dtype: torch.dtype = dtype,
            ) -> list[Tensor]:
                generator = torch.Generator().manual_seed(count)
                weights = torch.randn(4000, width, generator=generator).to(dtype)
                shapes = {"weight": weights.shape, "row": weights.shape[:1]}
                states = [torch.rand(shapes[kind], generator=generator) for kind in OPTIMIZERS[optimizer].states]
                ids = torch.randperm(4100, generator=generator)[:count] - 50
                rows = torch.randn(count, width, generator=generator)
                fused_update(
                    *(weights, states, ids, rows, optimizer),
                    learning_rate=0.05,
                    eps=1e-3,
                    iteration=2,
                    stochastic_rounding=None if dtype == FP32 else StochasticRounding(seed=1, step=2),
                    implementation=implementation,
                )
                return [weights, *states]

            yield f"{optimizer}, {count} rows of {width} in {dtype}", update


def calls() -> Iterator[tuple[str, bool, Callable[[str], list[Tensor]]]]:
    """All calls: name, whether roots are taken or rows summed up, results of an implementation."""
    for shape in SHAPES:
        rough = shape.optimizer != "sgd" or shape.weighted
        yield shape.name, rough, lambda implementation, shape=shape: look_up(shape, implementation)
    for name, call in unique_and_sums():
        yield name, False, call
    for name, call in updates():
        yield name, not name.startswith("sgd"), call


def run_all() -> int:
    """Makes every call in C++; returns how many they were."""
    return sum(1 for _, _, call in calls() if call("cpu") is not None)


def assert_like_the_reference() -> str:
    """Holds all results in C++ to those of the reference; returns a digest of their bits.

    They are the same bits but where a root is taken (ATen's is not always rounded correctly) or a row is summed up.
    """
    digest = hashlib.sha256()
    for name, rough, call in calls():
        for found, wanted in zip(call("cpu"), call("reference"), strict=True):
            assert found.dtype == wanted.dtype, name
            if rough:
                tolerance = {FP16: 2e-3, BF16: 2e-2}.get(found.dtype, 1e-5)
                torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
            else:
                assert torch.equal(found, wanted), name
            digest.update(found.contiguous().view(torch.uint8).numpy().tobytes() if found.numel() else b"")
    return digest.hexdigest()
