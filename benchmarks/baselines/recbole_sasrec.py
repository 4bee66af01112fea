"""Trains RecBole 1.2.1's SASRec on an exported data set and writes its scores for the test users.

The script runs in an environment of its own (`requirements-recbole.txt`: RecBole needs numpy < 2) and imports nothing
of this project, so that the baseline is RecBole's code and nothing else. It reads one `.inter` file (user, item,
position of the interaction in the user's history), checks that RecBole's leave-one-out split of it is the intended one,
trains SASRec with RecBole's defaults, and writes the score of every item for every test user. Ranking and metrics are
left to the project's own evaluator, because RecBole does not remove seen items for sequential models.

Four settings differ from RecBole's defaults: cross-entropy needs `train_neg_sample_args` unset, the validation metric
is NDCG@10, the columns read are those of the export, and nothing is drawn on a terminal. Model, optimiser, batch size,
history length 50, patience 10, at most 300 epochs and seed 2020 are RecBole's own.

The best weights stay in memory; no checkpoint is written and no pickle is read. Scores and record are rewritten
whenever validation improves (`"complete": false`), so a run that is stopped leaves the scores of its best epoch.

    python recbole_sasrec.py --inter ml-100k.inter --scores scores.npy --record record.json --threads 2
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import recbole
import scipy
import torch
from recbole.config import Config
from recbole.data import create_dataset, data_preparation
from recbole.trainer import Trainer
from recbole.utils import get_model, init_seed

DATASET_NAME = "export"  # RecBole replaces the data path by its own for the name "ml-100k"

SETTINGS: dict[str, Any] = {
    "train_neg_sample_args": None,
    "valid_metric": "NDCG@10",
    "load_col": {"inter": ["user_id", "item_id", "timestamp"]},
    "show_progress": False,
}

RECORDED_SETTINGS = (
    "n_layers",
    "n_heads",
    "hidden_size",
    "inner_size",
    "hidden_dropout_prob",
    "attn_dropout_prob",
    "hidden_act",
    "layer_norm_eps",
    "initializer_range",
    "loss_type",
    "MAX_ITEM_LIST_LENGTH",
    "train_batch_size",
    "learner",
    "learning_rate",
    "weight_decay",
    "epochs",
    "eval_step",
    "stopping_step",
    "valid_metric",
    "metric_decimal_place",
    "eval_args",
    "repeatable",
    "seed",
    "reproducibility",
    "shuffle",
    "enable_amp",
    "train_neg_sample_args",
)


def read_sequences(inter: Path) -> dict[str, list[str]]:
    """Reads the export without RecBole.

    Args:
        inter: Tab-separated file with the header `user_id:token  item_id:token  timestamp:float`.

    Returns:
        The items of every user (raw ids as strings), in the order of the third column.
    """
    rows: dict[str, list[tuple[float, str]]] = {}
    with inter.open(encoding="utf-8") as lines:
        header = next(lines).split()
        if header != ["user_id:token", "item_id:token", "timestamp:float"]:
            sys.exit(f"{inter}: unexpected header {header}")
        for line in lines:
            user, item, position = line.split()
            rows.setdefault(user, []).append((float(position), item))
    return {user: [item for _, item in sorted(pairs, key=lambda pair: pair[0])] for user, pairs in rows.items()}


def check_splits(sequences: dict[str, list[str]], loaders: dict[str, Any], max_length: int) -> dict[str, int]:
    """Compares RecBole's training, validation and test samples with the leave-one-out split computed from the export.

    Args:
        sequences: Items of every user in order, from :func:`read_sequences`.
        loaders: RecBole's data loaders under the names `train`, `valid` and `test`.
        max_length: Number of most recent items a history keeps.

    Returns:
        The number of samples of each split. Exits with a message when a sample is missing, superfluous or different.
    """
    expected: dict[str, set[tuple[str, str, tuple[str, ...]]]] = {"train": set(), "valid": set(), "test": set()}
    sizes = {"train": 0, "valid": 0, "test": 0}
    for user, items in sequences.items():
        for target in range(1, len(items)):
            split = {len(items) - 1: "test", len(items) - 2: "valid"}.get(target, "train")
            expected[split].add((user, items[target], tuple(items[max(0, target - max_length) : target])))
            sizes[split] += 1
    for split, loader in loaders.items():
        dataset = loader.dataset
        features = dataset.inter_feat
        users = dataset.id2token(dataset.uid_field, features["user_id"].numpy())
        targets = dataset.id2token(dataset.iid_field, features["item_id"].numpy())
        histories = dataset.id2token(dataset.iid_field, features["item_id_list"].numpy())
        lengths = features["item_length"].tolist()
        found = {
            (str(user), str(target), tuple(map(str, history[:length])))
            for user, target, history, length in zip(users, targets, histories, lengths, strict=True)
        }
        if found != expected[split] or len(features) != sizes[split]:
            sys.exit(f"RecBole's {split} split is not the exported one: {len(found ^ expected[split])} samples differ")
    return sizes


def test_scores(model: Any, test_loader: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores all items for all test users without consuming any random number.

    Args:
        model: RecBole's SASRec.
        test_loader: RecBole's test loader (one sample per user).

    Returns:
        Scores [users, items] float32, raw user ids [users] int64, raw item ids [items] int64; both ids ascend.
    """
    dataset = test_loader.dataset
    features = dataset.inter_feat
    was_training = model.training
    model.eval()
    with torch.no_grad():
        scores = model.full_sort_predict(features).numpy()  # column 0 is RecBole's padding item
    model.train(was_training)
    raw_users = dataset.id2token(dataset.uid_field, features["user_id"].numpy()).astype(np.int64)
    raw_items = dataset.id2token(dataset.iid_field, np.arange(1, dataset.item_num)).astype(np.int64)
    user_order, item_order = np.argsort(raw_users), np.argsort(raw_items)
    return scores[user_order][:, item_order + 1], raw_users[user_order], raw_items[item_order]


def cpu_name() -> str:
    """The processor's name as Linux tells it, else what Python knows."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def write_aside(path: Path, data: bytes) -> None:
    """Writes a file under another name and renames it, so that a reader never sees half of it."""
    aside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    aside.write_bytes(data)
    aside.replace(path)


class Progress:
    """RecBole's end-of-epoch callback: prints a line, and keeps scores and record of the best epoch on disk.

    Args:
        trainer: The trainer whose model is scored and whose losses are printed.
        test_loader: RecBole's test loader.
        record: What is known before training; results are added to it.
        scores: Where the score matrix goes (`.npy`).
        record_path: Where the record goes (JSON).
    """

    def __init__(
        self, *, trainer: Trainer, test_loader: Any, record: dict[str, Any], scores: Path, record_path: Path
    ) -> None:
        self.trainer = trainer
        self.test_loader = test_loader
        self.record = record
        self.scores = scores
        self.record_path = record_path
        self.best_score = -1.0
        self.best_epoch = -1
        self.best_weights: dict[str, torch.Tensor] = {}
        self.started = self.last = time.monotonic()

    def __call__(self, epoch: int, valid_score: float) -> None:
        """Called by RecBole after the validation of each epoch (`epoch` counts from 0)."""
        now = time.monotonic()
        improved = valid_score >= self.best_score  # as RecBole decides: of equal epochs the later one is kept
        if improved:
            self.best_score, self.best_epoch = valid_score, epoch
            self.best_weights = {name: value.clone() for name, value in self.trainer.model.state_dict().items()}
        self.record["epochs_run"] = epoch + 1
        self.record["valid_ndcg@10_per_epoch"].append(valid_score)
        self.record["train_loss_per_epoch"].append(round(self.trainer.train_loss_dict[epoch], 4))
        self.record["seconds"] = round(now - self.started, 1)
        self.write(complete=False, scores_too=improved)
        print(
            f"epoch {epoch + 1} loss {self.trainer.train_loss_dict[epoch]:.4f} valid_ndcg@10 {valid_score:.4f} "
            f"best {self.best_score:.4f} at {self.best_epoch + 1} seconds {now - self.last:.1f}",
            flush=True,
        )
        self.last = now

    def write(self, *, complete: bool, scores_too: bool) -> None:
        """Writes the record, and before it the score matrix of the weights the model has now.

        Args:
            complete: Whether training ended by RecBole's own rule.
            scores_too: Whether the score matrix is written as well.
        """
        if scores_too:
            matrix, users, items = test_scores(self.trainer.model, self.test_loader)
            aside = self.scores.with_name(f"{self.scores.name}.tmp-{os.getpid()}.npy")
            np.save(aside, matrix, allow_pickle=False)
            aside.replace(self.scores)
            self.record["scores_shape"] = list(matrix.shape)
            self.record["scores_sha256"] = hashlib.sha256(self.scores.read_bytes()).hexdigest()
            self.record["users_sha256"] = hashlib.sha256(users.tobytes()).hexdigest()
            self.record["items_sha256"] = hashlib.sha256(items.tobytes()).hexdigest()
        self.record["best_epoch"] = self.best_epoch + 1
        self.record["best_valid_ndcg@10"] = self.best_score
        self.record["complete"] = complete
        write_aside(self.record_path, (json.dumps(self.record, indent=1) + "\n").encode())


def main() -> None:
    """Trains, validates after every epoch, and writes scores and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inter", type=Path, required=True, help="exported interactions")
    parser.add_argument("--scores", type=Path, required=True, help="score matrix to write (.npy)")
    parser.add_argument("--record", type=Path, required=True, help="record to write (.json)")
    parser.add_argument("--threads", type=int, default=2, help="threads torch may use")
    parser.add_argument("--epochs", type=int, default=None, help="stop after so many epochs (to try the script out)")
    arguments = parser.parse_args()
    sys.argv = sys.argv[:1]  # RecBole reads the command line on its own

    torch.set_num_threads(arguments.threads)
    inter, scores, record_path = arguments.inter.resolve(), arguments.scores.resolve(), arguments.record.resolve()
    with tempfile.TemporaryDirectory(prefix="recbole-") as folder:
        (Path(folder) / DATASET_NAME).mkdir()
        (Path(folder) / DATASET_NAME / f"{DATASET_NAME}.inter").symlink_to(inter)
        os.chdir(folder)  # RecBole writes its TensorBoard log into the current folder
        settings = {**SETTINGS, "data_path": folder, "checkpoint_dir": folder}
        if arguments.epochs is not None:
            settings["epochs"] = arguments.epochs
        config = Config(model="SASRec", dataset=DATASET_NAME, config_dict=settings)
        # The order of RecBole's own run_recbole: the second seeding makes the weights independent of the data.
        init_seed(config["seed"], config["reproducibility"])
        dataset = create_dataset(config)
        train_loader, valid_loader, test_loader = data_preparation(config, dataset)
        sizes = check_splits(
            read_sequences(inter),
            {"train": train_loader, "valid": valid_loader, "test": test_loader},
            config["MAX_ITEM_LIST_LENGTH"],
        )
        print(f"splits agree with the export: {sizes}", flush=True)
        init_seed(config["seed"] + config["local_rank"], config["reproducibility"])
        model = get_model(config["model"])(config, train_loader.dataset).to(config["device"])
        trainer = Trainer(config, model)
        record: dict[str, Any] = {
            "model": "SASRec",
            "config": {name: config[name] for name in RECORDED_SETTINGS},
            "changed_from_defaults": SETTINGS,
            "data_sha256": hashlib.sha256(inter.read_bytes()).hexdigest(),
            "samples": sizes,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "versions": {
                "recbole": recbole.__version__,
                "torch": torch.__version__,
                "numpy": np.__version__,
                "pandas": pandas.__version__,
                "scipy": scipy.__version__,
                "python": platform.python_version(),
            },
            "machine": {
                "cpu": cpu_name(),
                "threads": arguments.threads,
                "system": platform.system(),
                "arch": platform.machine(),
            },
            "valid_ndcg@10_per_epoch": [],
            "train_loss_per_epoch": [],
        }
        progress = Progress(
            trainer=trainer, test_loader=test_loader, record=record, scores=scores, record_path=record_path
        )
        trainer.fit(train_loader, valid_loader, verbose=False, saved=False, callback_fn=progress)
        model.load_state_dict(progress.best_weights)
        progress.write(complete=arguments.epochs is None, scores_too=True)
        print(f"done: best valid_ndcg@10 {progress.best_score:.4f} at epoch {progress.best_epoch + 1}", flush=True)
        os.chdir("/")  # the folder is about to go


if __name__ == "__main__":
    main()
