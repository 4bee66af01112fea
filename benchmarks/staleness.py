"""What stale embeddings cost in ranking quality: staleness 1 against 0, the same seeds, all tables stale.

    python -m benchmarks.staleness [--json] [--seeds 3]            trains on MovieLens-100K (3 min a pair on two cores)
    python -m benchmarks.staleness --kuairand FILE_OR_FOLDER ...   on KuaiRand logs, too
    python -m benchmarks.staleness --output DIR                    finished runs of DIR are taken, the rest is trained

The HSTU of configs/ml-100k.yaml is trained for a fixed number of epochs, on one rank: two runs of a pair differ in
`pipeline.staleness` alone, so both see the same batches, negatives and dropout. They are ranked on the test items,
over all items, seen ones filtered. With d[s, u] the difference in a metric of user u under seed s, stale minus exact,
the mean over seeds and users is printed with

    users   the standard error over users of the mean over seeds of d[s, u]
    seeds   the standard error over seeds of the mean over users of d[s, u]

and, as a scale for both, how far exact runs of different seeds are apart. alpha, the collision probability between
steps that the paper's bound depends on, is measured on the ids of the first steps (`pipeline/collisions.py`). No speed
is measured. Left out: the published setting (KuaiRand-27K whole, 200 epochs).
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from benchmarks import harness
from turbogr_plugin.data.config import PrepareConfig
from turbogr_plugin.data.loader import TrainingSteps
from turbogr_plugin.data.prepare import prepare
from turbogr_plugin.data.store import InteractionStore
from turbogr_plugin.errors import InputError
from turbogr_plugin.models.retrieval import ITEM_TABLE
from turbogr_plugin.negatives.uniform import NegativesConfig
from turbogr_plugin.pipeline.collisions import CountedTable, TableCollisions
from turbogr_plugin.training.metrics import user_metrics

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "ml-100k.yaml"
METRICS = ("hr@10", "ndcg@10")
COUNTED_STEPS = 50
LIMIT = 0.005
"""Largest difference that is said to be none."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two runs of one seed."""

    seed: int
    exact: dict[str, np.ndarray]
    """[U] by metric, in ascending order of raw user id."""
    stale: dict[str, np.ndarray]
    """Likewise."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Stale minus exact in one metric."""

    exact: float
    """Mean over seeds and users."""
    stale: float
    mean: float
    """stale - exact."""
    users: float
    """Standard error over users."""
    seeds: float
    """Standard error over seeds; NaN for one seed."""
    apart: float
    """Root mean square of the differences between exact runs of two seeds; NaN for one seed."""

    @property
    def passes(self) -> bool:
        """Within two standard errors over users, and within LIMIT."""
        return abs(self.mean) <= min(2 * self.users, LIMIT)


def difference(pairs: list[Pair], metric: str) -> Difference:
    """Of all pairs, which are of the same users."""
    exact = np.stack([pair.exact[metric] for pair in pairs])
    stale = np.stack([pair.stale[metric] for pair in pairs])
    by_user, by_seed, of_seeds = (stale - exact).mean(axis=0), (stale - exact).mean(axis=1), exact.mean(axis=1)
    several = len(pairs) > 1
    gaps = [one - other for one, other in itertools.combinations(of_seeds, 2)]
    return Difference(
        exact=float(exact.mean()),
        stale=float(stale.mean()),
        mean=float(by_user.mean()),
        users=float(by_user.std(ddof=1) / np.sqrt(by_user.size)),
        seeds=float(by_seed.std(ddof=1) / np.sqrt(by_seed.size)) if several else float("nan"),
        apart=float(np.sqrt(np.mean(np.square(gaps)))) if several else float("nan"),
    )


def configuration(store: Path, epochs: int) -> dict[str, Any]:
    """That of all runs on a store, but for seed, staleness and output."""
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    # Only the last epoch is evaluated: which epoch is the best is a matter of chance that pairs need not share.
    config["training"] |= {"epochs": epochs, "evaluate_every": epochs, "patience": 0}
    config["data"] = {"store": str(store), "workers": 0}
    return config


def train(config: dict[str, Any], seed: int, staleness: int, output: Path) -> None:
    """A run, in a process of its own; nothing where it is finished already.

    Raises:
        InputError: it failed; its own message stands above.
    """
    if (output / "metrics.json").exists():
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    file = output.parent / "config.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [sys.executable, "-m", "turbogr_plugin.cli", "train", "--config", str(file), "--output", str(output)]
    command += ["--training.seed", str(seed), "--pipeline.staleness", str(staleness), "--resume"]
    threads = {"OMP_NUM_THREADS": "1"}
    # The table and the JSON line own stdout.
    done = subprocess.run(command, cwd=ROOT, stdout=sys.stderr.fileno(), env={**os.environ, **threads}, check=False)
    if done.returncode:
        raise InputError(f"the run {output} failed; its output is above")


def read_pair(exact: Path, stale: Path) -> Pair:
    """Two finished runs.

    Raises:
        InputError: they are not finished, or differ in more than their staleness, or tested other users.
    """
    configs, metrics, users = [], [], []
    for folder, staleness in ((exact, 0), (stale, 1)):
        try:
            config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
            with np.load(folder / "test_ranks.npz", allow_pickle=False) as arrays:
                order = np.argsort(arrays["users"])
                users.append(arrays["users"][order])
                ranks = torch.from_numpy(arrays["filtered"][order])
        except FileNotFoundError as error:
            raise InputError(f"{folder} is not a finished run: {error.filename} is missing") from None
        if config["pipeline"].pop("staleness") != staleness:
            raise InputError(f"{folder} was not trained with staleness {staleness}")
        del config["output"]
        configs.append(config)
        metrics.append({name: values.numpy() for name, values in user_metrics(ranks).items()})
    if configs[0] != configs[1] or not np.array_equal(users[0], users[1]):
        raise InputError(f"{exact} and {stale} differ in more than their staleness: compare their config.yaml")
    return Pair(seed=configs[0]["training"]["seed"], exact=metrics[0], stale=metrics[1])


def alpha_of(config: dict[str, Any], store: InteractionStore, seed: int = 0) -> float:
    """Of the item table, over the first steps of a run."""
    steps = TrainingSteps(
        store,
        max_length=config["model"]["max_length"],
        global_batch_size=config["training"]["global_batch_size"],
        negatives=NegativesConfig(**config["negatives"]),
        seed=seed,
        rank=0,
        world_size=1,
    )
    table = CountedTable("item_embeddings", ITEM_TABLE, store.num_items, ("item", "negative"))
    counted = TableCollisions([table], torch.device("cpu"))
    for step in range(COUNTED_STEPS):
        counted.observe(table.module, steps[step].features)
        counted.end_step()
    return counted.alphas()[table]


def store_of(name: str, source: Path | None, output: Path) -> Path:
    """The prepared store of a data set; made where it is not there yet."""
    path = output / "stores" / name
    if not path.exists():
        if source is None:
            settings = PrepareConfig(format="ml-100k", user_core=1, item_core=1)
        else:
            # The published rules; files without the columns is_like and is_hate go without these two.
            header = _header(source)
            feedback = [each for each in PrepareConfig(format="kuairand", inputs=["x"]).feedback if each in header]
            settings = PrepareConfig(
                format="kuairand", inputs=[str(source)], feedback=feedback, drop_hated="is_hate" in header
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        print("\n".join(prepare(settings, path).lines()), file=sys.stderr)
    return path


def _header(source: Path) -> list[str]:
    first = min(source.glob("log_standard_*.csv")) if source.is_dir() else source
    with first.open(encoding="utf-8") as lines:
        return lines.readline().strip().replace("\t", ",").split(",")


def result(
    pairs: dict[str, list[Pair]], alphas: dict[str, float], items: dict[str, int], epochs: int
) -> dict[str, Any]:
    """Everything that is printed, as JSON types."""
    values: dict[str, Any] = {"epochs": epochs, "staleness": 1, "stale_tables": "all", "limit": LIMIT, "data": {}}
    for name, of_data in pairs.items():
        found = {metric: difference(of_data, metric) for metric in METRICS}
        values["data"][name] = {
            "seeds": [pair.seed for pair in of_data],
            "users": int(of_data[0].exact[METRICS[0]].size),
            "items": items[name],
            "alpha": alphas[name],
            **{metric: vars(each) | {"passes": each.passes} for metric, each in found.items()},
        }
    values["passes"] = all(row[metric]["passes"] for row in values["data"].values() for metric in METRICS)
    return values


def table(values: dict[str, Any]) -> str:
    """The result for people."""
    head = ("data", "alpha", "metric", "exact", "stale", "difference", "s.e. users", "s.e. seeds", "seeds apart")
    lines = [
        f"HSTU, {values['epochs']} epochs, all tables stale by {values['staleness']}: stale minus exact on test items",
        "",
        f"{head[0]:<10}{head[1]:>10}  {head[2]:<9}" + "".join(f"{each:>13}" for each in head[3:]),
    ]
    for name, row in values["data"].items():
        for metric in METRICS:
            found = row[metric]
            numbers = [f"{found['exact']:.4f}", f"{found['stale']:.4f}", f"{found['mean']:+.4f}"]
            numbers += [f"{found[each]:.4f}" for each in ("users", "seeds", "apart")]
            lines.append(
                f"{name:<10}{row['alpha']:10.2e}  {metric.upper():<9}"
                + "".join(f"{number:>13}" for number in numbers)
                + ("" if found["passes"] else f"  not within two s.e. over users and {LIMIT}")
            )
    lines.append("")
    lines += [
        f"{name}: {row['users']} users, {row['items']} items, seeds {row['seeds']}"
        for name, row in values["data"].items()
    ]
    return "\n".join(lines)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.staleness",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 ... n-1")
    parser.add_argument("--epochs", type=int, default=24, help="of every run")
    parser.add_argument("--kuairand", type=Path, help="logs of KuaiRand, a file or a folder: a second data set")
    parser.add_argument("--output", type=Path, help="where stores and runs go (default: runs/staleness-TIME)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code (2: input that the user can mend)."""
    options = parse_arguments(arguments)
    for name in ("seeds", "epochs"):
        if getattr(options, name) < 1:
            print(f"--{name} is {getattr(options, name)}; at least 1 is needed", file=sys.stderr)
            return 2
    output = (options.output or ROOT / "runs" / f"staleness-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    pairs: dict[str, list[Pair]] = {}
    alphas: dict[str, float] = {}
    items: dict[str, int] = {}
    try:
        sources = {"ml-100k": None} | ({"kuairand": options.kuairand} if options.kuairand else {})
        for name, source in sources.items():
            path = store_of(name, source, output)
            config, store = configuration(path, options.epochs), InteractionStore.open(path)
            items[name], alphas[name] = store.num_items, alpha_of(config, store)
            for seed in range(options.seeds):
                folders = [output / name / f"seed-{seed}-staleness-{staleness}" for staleness in (0, 1)]
                for staleness, folder in enumerate(folders):
                    train(config, seed, staleness, folder)
                pairs.setdefault(name, []).append(read_pair(*folders))
        values = result(pairs, alphas, items, options.epochs)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print(table(values))
    # Ranks do not depend on the machine's speed, so no drift is sampled.
    harness.finish(values, drift=None, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
