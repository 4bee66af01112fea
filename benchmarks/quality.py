"""Does the HSTU of `make train` rank at least as well as a peer's SASRec? MovieLens-100K, leave-one-out, test items.

    python -m benchmarks.quality [--json] [--seeds 3]        trains HSTU (two ranks, a few minutes a seed) and compares
    python -m benchmarks.quality --runs DIR...               compares runs that are there already
    python -m benchmarks.quality --rebuild-baseline          trains SASRec again (hours) and rewrites its ranks
    python -m benchmarks.quality --from-scores NPY JSON      rewrites the ranks from the scores of a SASRec run

The peer is RecBole 1.2.1's SASRec with RecBole's defaults, one seed, trained on the splits of this project's store and
ranked by this project's evaluator (`baselines/`). Both models see the same training interactions, stop by validation
NDCG@10 and are ranked over all items; "filtered" leaves out the items that the user has seen, "unfiltered" does not.
Lengths and epochs differ and are printed. The difference is the mean over HSTU's seeds minus SASRec, with a paired
bootstrap over users: it says how far the difference depends on which users were drawn, not how it would vary with
SASRec's seed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import yaml

from benchmarks import harness
from benchmarks.baselines import sasrec_ranks
from benchmarks.baselines.sasrec_ranks import SasrecRanks
from turbogr_plugin.data.store import InteractionStore
from turbogr_plugin.errors import InputError
from turbogr_plugin.training.metrics import ranking_metrics, user_metrics

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "ml-100k.yaml"
RANKS = 2
BOOTSTRAP_SEED = 20240601
BOOTSTRAP_SAMPLES = 10_000

Filter = Literal["filtered", "unfiltered"]
FILTERS: tuple[Filter, Filter] = ("filtered", "unfiltered")


@dataclass(frozen=True, kw_only=True)
class HstuRun:
    """What a finished run folder says."""

    folder: Path
    """The run folder."""
    config: dict[str, Any]
    """config.yaml."""
    filtered: np.ndarray
    """[U] int64 ranks, in ascending order of raw user id."""
    unfiltered: np.ndarray
    """[U] int64 ranks, likewise."""
    summary: dict[str, Any]
    """metrics.json."""

    @property
    def seed(self) -> int:
        """What the run's randomness is keyed by."""
        return int(self.config["training"]["seed"])

    @property
    def max_length(self) -> int:
        """Most recent items that the model sees."""
        return int(self.config["model"]["max_length"])

    @property
    def config_without_seed(self) -> dict[str, Any]:
        """What runs that are averaged have in common."""
        training = {name: value for name, value in self.config["training"].items() if name != "seed"}
        return {name: value for name, value in self.config.items() if name != "output"} | {"training": training}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """HSTU minus SASRec in one metric."""

    mean: float
    """Over users."""
    low: float
    """2.5 % quantile of the bootstrap."""
    high: float
    """97.5 % quantile of the bootstrap."""


def paired_bootstrap(differences: np.ndarray, *, samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """95 % intervals of mean differences, by drawing users with replacement; all metrics share the draws.

    Args:
        differences: [U, M] float64, difference of every user in every metric.
        samples: number of draws.
        seed: of the draws.

    Returns:
        (2.5 % quantiles [M], 97.5 % quantiles [M]).
    """
    generator = np.random.default_rng(seed)
    num_users = len(differences)
    # How often each user is drawn is all that a mean needs: multinomial counts instead of [samples, U, M] gathers.
    counts = generator.multinomial(num_users, np.full(num_users, 1 / num_users), size=samples)
    low, high = np.quantile(counts @ differences / num_users, [0.025, 0.975], axis=0)
    return low, high


def compare(baseline: SasrecRanks, runs: list[HstuRun], which: Filter) -> dict[str, Difference]:
    """Mean of the runs minus the baseline, metric by metric.

    Args:
        baseline: ranks of SASRec.
        runs: one run per seed, of the same users.
        which: with or without the seen filter.
    """
    peer = user_metrics(torch.from_numpy(getattr(baseline, which)))
    ours = [user_metrics(torch.from_numpy(getattr(run, which))) for run in runs]
    columns = [np.mean([user[name].numpy() for user in ours], axis=0) - peer[name].numpy() for name in peer]
    differences = np.stack(columns, axis=1)
    low, high = paired_bootstrap(differences, samples=BOOTSTRAP_SAMPLES, seed=BOOTSTRAP_SEED)
    means = differences.mean(axis=0)
    return {
        name: Difference(mean=float(means[i]), low=float(low[i]), high=float(high[i])) for i, name in enumerate(peer)
    }


def check_data(store: InteractionStore, baseline: SasrecRanks) -> None:
    """Raises InputError unless `store` is, interaction by interaction, what the baseline was trained on."""
    found = hashlib.sha256(sasrec_ranks.export_inter(store)).hexdigest()
    if found != baseline.record["data_sha256"]:
        raise InputError(
            f"{store.path} is not the data of the baseline (exported sha256 {found}, recorded "
            f"{baseline.record['data_sha256']}): MovieLens-100K with user_core 1 and item_core 1 is compared here"
        )


def read_run(folder: Path, baseline: SasrecRanks) -> HstuRun:
    """Reads a finished run and checks that it can be compared.

    Raises:
        InputError: the run is not finished, or is of other data or users than the baseline.
    """
    try:
        summary = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        with np.load(folder / "test_ranks.npz", allow_pickle=False) as arrays:
            users, filtered, unfiltered = arrays["users"], arrays["filtered"], arrays["unfiltered"]
    except FileNotFoundError as error:
        raise InputError(f"{folder} is not a finished run: {error.filename} is missing") from None
    check_data(InteractionStore.open(ROOT / config["data"]["store"]), baseline)
    order = np.argsort(users)
    if not np.array_equal(users[order], baseline.users):
        raise InputError(f"{folder} tested {len(users)} users, which are not the {len(baseline.users)} of the baseline")
    return HstuRun(
        folder=folder,
        config=config,
        filtered=filtered[order],
        unfiltered=unfiltered[order],
        summary=summary,
    )


def check_runs(runs: list[HstuRun]) -> None:
    """Raises InputError unless the runs differ in their seed and in nothing else."""
    seeds = [run.seed for run in runs]
    if len(set(seeds)) < len(seeds):
        raise InputError(f"the runs have the seeds {seeds}: a mean over seeds takes each seed once")
    for run in runs[1:]:
        if run.config_without_seed != runs[0].config_without_seed:
            raise InputError(
                f"{run.folder} and {runs[0].folder} differ in more than their seed: compare their config.yaml"
            )


def train_hstu(seed: int, output: Path) -> None:
    """The job of `make train` with another seed: the same configuration on the same number of ranks.

    Raises:
        InputError: the run failed; its own message stands above.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += ["-m", "turbogr_plugin.cli", "train", "--config", str(CONFIG)]
    command += ["--training.seed", str(seed), "--output", str(output)]
    # The table and the JSON line own stdout.
    if subprocess.run(command, cwd=ROOT, stdout=sys.stderr.fileno(), check=False).returncode:
        raise InputError(f"the run with seed {seed} failed; its output is above, its folder is {output}")


def result(baseline: SasrecRanks, runs: list[HstuRun]) -> dict[str, Any]:
    """Everything that is printed, as JSON types."""
    record = baseline.record
    values: dict[str, Any] = {
        "sasrec_complete": record["complete"],
        "sasrec_epochs": record["epochs_run"],
        "sasrec_best_epoch": record["best_epoch"],
        "sasrec_max_length": record["config"]["MAX_ITEM_LIST_LENGTH"],
        "sasrec_seed": record["config"]["seed"],
        "sasrec_versions": record["versions"],
        "sasrec_machine": record["machine"],
        "hstu_seeds": [run.seed for run in runs],
        "hstu_epochs": [run.summary["epochs"] for run in runs],
        "hstu_best_epochs": [run.summary["best_epoch"] for run in runs],
        "hstu_max_length": runs[0].max_length,
        "hstu_seconds": [run.summary["seconds"] for run in runs],
        "users": len(baseline.users),
        "data_sha256": record["data_sha256"],
        "bootstrap_seed": BOOTSTRAP_SEED,
        "bootstrap_samples": BOOTSTRAP_SAMPLES,
    }
    for which in FILTERS:
        per_seed = [ranking_metrics(torch.from_numpy(getattr(run, which))) for run in runs]
        values[which] = {
            name: {
                "sasrec": peer,
                "hstu": [metrics[name] for metrics in per_seed],
                "hstu_mean": float(np.mean([metrics[name] for metrics in per_seed])),
                "difference": difference.mean,
                "interval": [difference.low, difference.high],
            }
            for (name, peer), difference in zip(
                ranking_metrics(torch.from_numpy(getattr(baseline, which))).items(),
                compare(baseline, runs, which).values(),
                strict=True,
            )
        }
    for name in ("ndcg@10", "hr@10", "ndcg@50", "hr@50", "mrr"):
        values[f"hstu_minus_sasrec_{name.replace('@', '')}"] = values["filtered"][name]["difference"]
    return values


def table(values: dict[str, Any]) -> str:
    """The result for people."""
    seeds = values["hstu_seeds"]
    lines = [f"MovieLens-100K, leave-one-out, {values['users']} test users, all items ranked", ""]
    for which in FILTERS:
        columns = ["SASRec", *(f"HSTU {seed}" for seed in seeds), "HSTU mean", "difference"]
        lines.append(f"{which:<11}{''.join(f'{column:>11}' for column in columns)}{'95 % interval':>20}")
        for name, row in values[which].items():
            numbers = "".join(f"{value:11.4f}" for value in (row["sasrec"], *row["hstu"], row["hstu_mean"]))
            low, high = row["interval"]
            lines.append(f"{name.upper():<11}{numbers}{row['difference']:+11.4f}{f'{low:+.4f} .. {high:+.4f}':>20}")
        lines.append("")
    lines += [
        f"SASRec: RecBole {values['sasrec_versions']['recbole']}, seed {values['sasrec_seed']}, "
        f"last {values['sasrec_max_length']} items, "
        f"best epoch {values['sasrec_best_epoch']} of {values['sasrec_epochs']}"
        + ("" if values["sasrec_complete"] else " (NOT COMPLETE: training was stopped before its own rule did)"),
        f"HSTU:   seeds {seeds}, last {values['hstu_max_length']} items, best epochs {values['hstu_best_epochs']} "
        f"of {values['hstu_epochs']}, seconds {values['hstu_seconds']}",
        f"difference: mean over HSTU's seeds minus SASRec; paired bootstrap over users, "
        f"{values['bootstrap_samples']} samples, seed {values['bootstrap_seed']}",
        f"SASRec was trained on {values['sasrec_machine']['cpu']}, {values['sasrec_machine']['threads']} threads, with "
        + ", ".join(f"{name} {version}" for name, version in values["sasrec_versions"].items()),
    ]
    return "\n".join(lines)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--seeds", type=int, default=3, help="train HSTU with the seeds 0 ... n-1")
    parser.add_argument("--runs", type=Path, nargs="+", metavar="DIR", help="compare these finished runs instead")
    parser.add_argument("--output", type=Path, help="where the run folders go (default: runs/quality-TIME)")
    parser.add_argument("--rebuild-baseline", action="store_true", help="train SASRec again, rewrite its ranks (hours)")
    parser.add_argument("--threads", type=int, default=2, help="threads of SASRec's training")
    parser.add_argument(
        "--from-scores", type=Path, nargs=2, metavar=("NPY", "JSON"), help="rewrite SASRec's ranks from these scores"
    )
    return parser.parse_args(arguments)


def make_ranks(arguments: argparse.Namespace, output: Path) -> SasrecRanks:
    """Makes the ranks of the baseline again, from scratch or from given scores."""
    with tempfile.TemporaryDirectory(prefix="turbogr-quality-") as folder:
        store = sasrec_ranks.movielens_store(Path(folder) / "store")
        if arguments.from_scores:
            scores, record = arguments.from_scores
            return sasrec_ranks.ranks_from_scores(scores, record, store)
        return sasrec_ranks.rebuild(
            store,
            environment=ROOT / ".venv-recbole",
            output=output / "sasrec",
            threads=arguments.threads,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code (2: input that the user can mend)."""
    options = parse_arguments(arguments)
    if options.seeds < 1:
        print(f"--seeds is {options.seeds}; at least 1 is needed", file=sys.stderr)
        return 2
    output = (options.output or ROOT / "runs" / f"quality-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    try:
        if options.rebuild_baseline or options.from_scores:
            ranks = make_ranks(options, output)
            ranks.write()
            state = "complete" if ranks.record["complete"] else "NOT COMPLETE (stopped early by hand)"
            print(f"wrote {sasrec_ranks.RANKS_FILE}: {ranks.record['epochs_run']} epochs, {state}")
            return 0
        baseline = SasrecRanks.read()
        folders = options.runs or [output / f"seed-{seed}" for seed in range(options.seeds)]
        if not options.runs:
            for seed, folder in enumerate(folders):
                train_hstu(seed, folder)
        runs = [read_run(folder, baseline) for folder in folders]
        check_runs(runs)
        values = result(baseline, runs)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print(table(values))
    # Ranks do not depend on the machine's speed, so no drift is sampled.
    harness.finish(values, drift=None, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
