"""Runs the whole matrix and writes docs/npu_matrix.md from what it finds.

    python -m tests.npu.write_matrix        takes about half an hour on two quiet cores

The page is written whatever the outcome: a case that does not hold is named in it. Exit code 1 if there is one.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.npu.cases import COMMUNICATIONS, MODELS, OPTIMIZERS, PIPELINES, SHARDINGS, WORLDS, Case, all_cases
from tests.npu.harness import TOLERANCE, Result, run_cases
from tests.npu.ranks import RankPool
from tests.npu.script import STEPS

PAGE = Path(__file__).parents[2] / "docs/npu_matrix.md"

_NAMES = {
    "dlrm": "DLRM",
    "dlrm_dcn": "DLRM_DCN",
    "simple_deepfm": "SimpleDeepFMNN",
    "deepfm": "DeepFM",
    "sparse_nn": "TestSparseNN",
    "sequence": "EmbeddingCollection",
    "base": "Base",
    "sparse_dist": "SparseDist",
    "fused_sparse_dist": "FusedSparseDist",
    "semi_sync": "SemiSync",
    "4/strided": "4, DMPCollection, groups (0, 2) and (1, 3)",
    "4/contiguous": "4, DMPCollection, groups (0, 1) and (2, 3)",
}

_HEAD = """\
# TorchRec's own models on the simulated npu

Every case trains one model for {steps} steps on CPU and on npu with the same script (`tests/npu/script.py`): planner,
DistributedModelParallel or DMPCollection, a train pipeline of TorchRec. It holds if every loss of every rank differs
by at most {tolerance:g} of its value, no operator was missing or left to the CPU, no fbgemm operator ran boxed, no
use of memory by two streams was unordered, and after the warm-up only TorchRec's own lines made the host wait. The
models come from the torchrec wheel, unchanged; EmbeddingCollection stands for its sequence embeddings under a linear
layer, as no model of the wheel trains them. Optimizers of the tables ({optimizers}) take turns. SemiSync is compared
with itself on CPU.

Written by `python -m tests.npu.write_matrix`; `make test-full` runs the same cases, `make test` a pairwise cover of
them. It is a simulation on CPU memory: it says nothing about speed, nor about the accuracy of an Ascend chip.

A cell is the number of cases that hold, of how many, and the largest relative difference of a loss. A dash: stock
TorchRec does not run it (an EmbeddingCollection shards by table, column and row; data-parallel tables fit neither
SemiSync nor DMPCollection).
"""


def _cell(results: list[Result]) -> str:
    if not results:
        return "-"
    good = [result for result in results if not result.faults()]
    largest = max((result.deviation() for result in good), default=0.0)
    return f"{len(good)} of {len(results)}, {largest:.0e}"


def _table(
    results: list[Result], rows: Iterable[tuple[str, ...]], columns: Iterable[str], key: Callable[[Case], Any]
) -> list[str]:
    cells: dict[tuple[tuple[str, ...], str], list[Result]] = defaultdict(list)
    for result in results:
        cells[key(result.case)].append(result)
    columns = list(columns)
    lines = [f"| | {' | '.join(_NAMES.get(column, column) for column in columns)} |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        name = ", ".join(_NAMES.get(part, part) for part in row)
        lines.append(f"| {name} | {' | '.join(_cell(cells[row, column]) for column in columns)} |")
    return lines


def page(results: list[Result]) -> str:
    """The page as text."""
    head = _HEAD.format(steps=STEPS, tolerance=TOLERANCE, optimizers=", ".join(OPTIMIZERS))
    by_model = _table(
        results,
        itertools.product(MODELS, SHARDINGS),
        PIPELINES,
        lambda case: ((case.model, case.sharding), case.pipeline),
    )
    by_world = _table(
        results,
        ((world,) for world in WORLDS),
        COMMUNICATIONS,
        lambda case: ((case.world,), case.communication),
    )
    failed = [result for result in results if result.faults()]
    lines = [
        head,
        f"{len(results) - len(failed)} of {len(results)} cases hold.\n",
        "## Models and shardings, by pipeline\n",
        *by_model,
        "\n## Processes, by precision of the all-to-alls\n",
        *by_world,
    ]
    if failed:
        lines += ["\n## What does not hold\n", *(f"- {each.case.name}: {each.faults()[0][-300:]!r}" for each in failed)]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Runs everything; see the module."""
    pool, results = RankPool(), []
    try:
        for world, sharding in itertools.product(WORLDS, SHARDINGS):
            cases: list[Case] = [case for case in all_cases() if (case.world, case.sharding) == (world, sharding)]
            found = run_cases(pool, cases, timeout=1800)
            results += found
            held = sum(not result.faults() for result in found)
            print(f"world {world}, {sharding}: {held} of {len(found)}", flush=True)
    finally:
        pool.close()
    PAGE.write_text(page(results))
    return int(any(result.faults() for result in results))


if __name__ == "__main__":
    sys.exit(main())
