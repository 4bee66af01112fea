"""The configuration of a run: typed, in one YAML file, each value overridable on the command line.

    turbogr train --config run.yaml --training.epochs 3 --model.size small

Unknown keys and values of another type are errors (jsonargparse). Each section is the config of the component that
reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from turbogr_plugin.backend.matmul_precision import MatmulPrecision
from turbogr_plugin.data.config import PrepareConfig
from turbogr_plugin.errors import InputError
from turbogr_plugin.models.hstu import HSTUConfig
from turbogr_plugin.models.retrieval import LossConfig
from turbogr_plugin.negatives.uniform import NegativesConfig
from turbogr_plugin.sharding.balance_config import BalanceConfig
from turbogr_plugin.sharding.groups_config import GroupsConfig
from turbogr_plugin.training.gradient_scale import LossReduction
from turbogr_plugin.training.item_corpus import DEFAULT_CHUNK_ITEMS
from turbogr_plugin.training.metrics import DEFAULT_CUTOFFS
from turbogr_plugin.training.optimizers import OptimizerConfig
from turbogr_plugin.training.pipelines import PipelineConfig

Precision = Literal["fp32", "bf16"]
TablePrecision = Literal["fp32", "fp16", "bf16"]
TableRounding = Literal["stochastic", "nearest"]


@dataclass(kw_only=True)
class DataConfig:
    """Where the interactions are."""

    store: str
    "Folder of the prepared store."
    prepare: PrepareConfig | None = None
    "How to make the store where it is not there yet; without it a missing store is an error."
    workers: int = 1
    "Processes that collate batches ahead of the training step, per rank; 0 collates in the training process."

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise InputError(f"data.workers must be at least 0, got {self.workers}")


@dataclass(kw_only=True)
class TrainingConfig:
    """The loop."""

    seed: int = 0
    "Keys the order of samples, negatives, dropout and initial values; in [0, 2^32)."
    epochs: int = 100
    "Most epochs to train."
    global_batch_size: int = 128
    "Samples of a step over all ranks."
    precision: Precision = "fp32"
    "fp32, or bf16 for autocast of the encoder."
    table_precision: TablePrecision = "fp32"
    "Of the embedding tables: fp32, or fp16 or bf16 for half the memory; docs/lookup.md says what that costs."
    table_rounding: TableRounding = "stochastic"
    "How updates round to tables in fp16 and bf16: stochastic, which keeps small updates on average, or nearest."
    matmul_precision: MatmulPrecision = "fp32"
    "Of float32 products: fp32; hf32 (HF32 on npu, TF32 on cuda), in which the paper trains; bf16 (cpu)."
    loss_reduction: LossReduction = "target"
    "target: mean over all targets, independent of the ranks. sample: the paper's weighting by samples per rank."
    evaluate_every: int = 1
    "Epochs between validations."
    patience: int = 10
    "Validations without a better NDCG@10 after which training stops; 0 never stops early."
    checkpoint_every: int = 0
    "Steps between checkpoints besides the one at each validation; 0 makes no others."
    keep: int = 2
    "Checkpoints to keep besides the best one."
    log_every: int = 10
    "Steps between reads of the losses: the loop itself waits for the device then and at evaluations."

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 32:
            raise InputError(f"training.seed must be in [0, 2^32), got {self.seed}")
        for name in ("epochs", "global_batch_size", "evaluate_every", "keep", "log_every"):
            if getattr(self, name) < 1:
                raise InputError(f"training.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("patience", "checkpoint_every"):
            if getattr(self, name) < 0:
                raise InputError(f"training.{name} must be at least 0, got {getattr(self, name)}")


@dataclass(kw_only=True)
class EvaluationConfig:
    """Full-corpus evaluation."""

    cutoffs: list[int] = field(default_factory=lambda: list(DEFAULT_CUTOFFS))
    "K of HR@K and NDCG@K; 10 is always among them, since validation stops by NDCG@10."
    batch_size: int = 64
    "Users of a rank and step."
    chunk_items: int = DEFAULT_CHUNK_ITEMS
    "Items scored at a time."
    max_users: int = 0
    "Validate on this many users, spread evenly over all; 0 takes all. The test always takes all."

    def __post_init__(self) -> None:
        for name in ("batch_size", "chunk_items"):
            if getattr(self, name) < 1:
                raise InputError(f"evaluation.{name} must be at least 1, got {getattr(self, name)}")
        if self.max_users < 0:
            raise InputError(f"evaluation.max_users must be at least 0, got {self.max_users}")
        if not self.cutoffs or min(self.cutoffs) < 1:
            raise InputError(f"evaluation.cutoffs must be at least 1, got {self.cutoffs}")
        self.cutoffs = sorted({10, *self.cutoffs})


@dataclass(kw_only=True)
class RunConfig:
    """Everything that a run is made of."""

    output: str
    "Run folder: configuration, logs, checkpoints, metrics and the picture of the curves."
    data: DataConfig
    "Where the interactions are."
    device: str = "cpu"
    "Device type of all ranks."
    timeout_minutes: float = 10.0
    "After which a collective that some rank does not join fails on the others."
    model: HSTUConfig = field(default_factory=HSTUConfig)
    "The encoder."
    loss: LossConfig = field(default_factory=LossConfig)
    "The objective."
    negatives: NegativesConfig = field(default_factory=NegativesConfig)
    "Sampled negatives."
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    "Both optimizers."
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    "Of samples over ranks."
    groups: GroupsConfig = field(default_factory=GroupsConfig)
    "Of ranks that hold the tables once."
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    "How the stages of steps overlap."
    training: TrainingConfig = field(default_factory=TrainingConfig)
    "The loop."
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    "Full-corpus evaluation."
    profile: int = 0
    "Steps of a timeline that is written below the run folder; 0 writes none."

    def __post_init__(self) -> None:
        if self.profile < 0:
            raise InputError(f"profile must be at least 0, got {self.profile}")
        if not self.timeout_minutes > 0:
            raise InputError(f"timeout_minutes must be positive, got {self.timeout_minutes}")
