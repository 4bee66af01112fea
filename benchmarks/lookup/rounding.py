"""What rounding does to rows of a table in fp16 or bf16 over many updates, to nearest and stochastically.

    python -m benchmarks.lookup.rounding [--updates 100000]

Each row is pulled towards a target of its own by noisy gradients, (row - target) + noise, under row-wise Adagrad, whose
steps shrink with the root of the number of updates: late in a long training, or for a popular item, they are smaller
than the spacing of the numbers that the table can hold. Printed is how far rows are from their targets (root mean
square over all elements) after 100, 1,000, ... updates. The noise is the same for all formats.

Left out: quality of a model; docs/lookup.md has that of the demo.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch

from turbogr_plugin.kernels.fused_update import fused_update
from turbogr_plugin.kernels.lookup_call import StochasticRounding

ROWS, DIM = 32, 64
FORMATS = (
    ("fp32", torch.float32, False),
    ("fp16 nearest", torch.float16, False),
    ("fp16 stochastic", torch.float16, True),
    ("bf16 nearest", torch.bfloat16, False),
    ("bf16 stochastic", torch.bfloat16, True),
)


def distances(dtype: torch.dtype, *, stochastic: bool, updates: int, rate: float, noise: float) -> dict[int, float]:
    """Distance of rows from their targets after 100, 1,000, ... updates.

    Args:
        dtype: of the table.
        stochastic: how updates are rounded.
        updates: how many.
        rate: learning rate of row-wise Adagrad.
        noise: standard deviation of the gradients around (row - target).
    """
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(ROWS, DIM, generator=generator)
    table, state = torch.zeros(ROWS, DIM, dtype=dtype), torch.zeros(ROWS)
    ids = torch.arange(ROWS)
    found, shown = {}, 100
    for step in range(1, updates + 1):
        gradient = table.float() - target + noise * torch.randn(ROWS, DIM, generator=generator)
        rounding = StochasticRounding(seed=1, step=step) if stochastic else None
        fused_update(
            table, state, ids, gradient, "rowwise_adagrad", learning_rate=rate, eps=1e-8, stochastic_rounding=rounding
        )
        if step == shown:
            found[step] = float((table.float() - target).square().mean().sqrt())
            shown *= 10
    return found


def main(arguments: list[str] | None = None) -> int:
    """Prints the table and, as the last line, its figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lookup.rounding", description=__doc__.split("\n")[0])
    parser.add_argument("--updates", type=int, default=100_000, help="updates of each row (default 100000)")
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate (default 0.1)")
    parser.add_argument("--noise", type=float, default=3.0, help="of the gradients (default 3)")
    options = parser.parse_args(arguments)
    figures = {}
    for name, dtype, stochastic in FORMATS:
        figures[name] = distances(
            dtype, stochastic=stochastic, updates=options.updates, rate=options.rate, noise=options.noise
        )
        told = "".join(f"{step:>10,}: {distance:.4f}" for step, distance in figures[name].items())
        print(f"{name:<16}{told}", flush=True)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
