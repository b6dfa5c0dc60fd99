"""What a training run is made of: one frozen dataclass, validated.

Imports nothing heavy, so that command lines can show their help quickly.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ecospec.predictor.choices import require_choice
from ecospec.predictor.predictor_config import InputMode

DTYPES = ("float32", "bfloat16")
OPTIMIZERS = ("muon", "adamw")
STRATEGIES = ("auto", "ddp", "fsdp2")

#: What ``trainer`` may pass on to Lightning's Trainer.
TRAINER_OPTIONS = (
    "benchmark",
    "detect_anomaly",
    "deterministic",
    "enable_model_summary",
    "gradient_clip_algorithm",
    "limit_train_batches",
    "limit_val_batches",
    "log_every_n_steps",
    "num_nodes",
    "profiler",
)

#: What Lightning's Trainer calls the things that have an option of their own here.
_TRAINER_TWINS = {
    "accelerator": "device",
    "accumulate_grad_batches": "accumulate",
    "default_root_dir": "out",
    "devices": "devices",
    "gradient_clip_val": "gradient_clip",
    "logger": "wandb",
    "max_epochs": "max_epochs",
    "max_time": "max_minutes",
    "precision": "dtype",
    "strategy": "strategy",
}


class Objective(enum.StrEnum):
    """What training minimises; see `ecospec.train.losses`."""

    CROSS_ENTROPY = "cross_entropy"
    BCE = "bce"
    ROUTER_WEIGHTED = "router_weighted"


class Finetune(enum.StrEnum):
    """Which weights training changes: all, low-rank additions to the backbone, or only projection and head."""

    FULL = "full"
    LORA = "lora"
    HEADS = "heads"


#: The traces as files below ``--out``, whole, half made, and the lock of their making.
CACHE_NAMES = ("arrays", "arrays.partial", ".arrays.lock")


@dataclass(frozen=True)
class TrainPredictorConfig:
    """Options of ``train-predictor``."""

    target: Path
    """Folder of the target; its embedding table is the predictor's input."""
    traces: str
    """Trace store of this target; several, separated by commas, are trained on together."""
    out: Path
    """Folder for checkpoints, logs and the run's config."""
    tree_traces: str = ""
    """Draft-tree store to train on too; several, separated by commas. Their text must be among --traces."""
    trees_only: bool = False
    """Train on the draft trees alone; --traces then only gives the text before them."""
    preset: str = "tiny"
    """Backbone trained from scratch: tiny, qwen3-0.6b, deepseek-r1-distill-qwen-1.5b (the paper's two)."""
    backbone: dict[str, Any] | None = None
    """Changes to the preset's backbone config, e.g. {num_hidden_layers: 2}."""
    backbone_path: str | None = None
    """Pretrained causal LM to start from instead of a preset: a hub id (Qwen/Qwen3-0.6B) or a folder."""
    input_mode: str = "target_embedding"
    """What the backbone reads: target_embedding, or backbone_embedding (its own; identical vocabularies only)."""
    head_rank: int | None = None
    """Rank of the head for all layers; None for a full matrix."""
    finetune: str = "full"
    """What is trained: full; of a pretrained backbone also lora (merged at export), heads (projection and head)."""
    lora_rank: int = 16
    """Rank of the LoRA matrices."""
    lora_alpha: float = 32.0
    """Scale of LoRA: its product is multiplied by alpha / rank."""
    lora_target_modules: str = "all-linear"
    """Linear layers of the backbone that get LoRA: all-linear, or names separated by commas, e.g. q_proj,v_proj."""
    objective: str = "cross_entropy"
    """Loss: cross_entropy (the paper's: mass 1/K on the selected experts), bce, or router_weighted."""
    context_length: int = 512
    """Longest training window, in tokens."""
    batch_tokens: int = 4096
    """Tokens of a batch of all devices together, padding included."""
    accumulate: int = 1
    """Batches whose gradients are added up for one optimiser step."""
    max_epochs: int = 10
    """Passes over the training tokens."""
    max_minutes: float | None = None
    """Wall-clock budget; training stops there. The learning rate follows epochs or time, whichever is further."""
    patience: int | None = None
    """Stop after so many epochs without a better validation overlap; None trains to the end."""
    learning_rate: float = 2e-3
    """Peak learning rate of AdamW."""
    backbone_learning_rate: float = 2e-4
    """Peak learning rate of a pretrained backbone's own or LoRA weights; projection and head start afresh."""
    optimizer: str | None = None
    """muon (for the backbone's matrices, AdamW for the rest) or adamw; None: muon from scratch, else adamw."""
    muon_learning_rate: float = 0.02
    """Peak learning rate of Muon."""
    warmup: float = 0.03
    """Share of a cycle in which the learning rate rises; afterwards it falls along a cosine to 0."""
    cycles: int = 1
    """Times the learning rate rises and falls; 2 prolongs a finished run to twice its epochs exactly."""
    weight_decay: float = 0.05
    """Decoupled weight decay of the matrices (norms and biases have none)."""
    beta2: float = 0.98
    """AdamW's second-moment decay."""
    gradient_clip: float = 1.0
    """Largest norm of the gradient."""
    token_dropout: float = 0.0
    """Share of input embeddings zeroed in training against overfitting."""
    validation_fraction: float = 0.2
    """Share of groups held out for validation (the paper: 0.2)."""
    calibration_fraction: float | None = None
    """Share of groups kept for calibration, of what validation leaves; None: 0.05, if that is any group at all."""
    hold_out_dataset: str = ""
    """Datasets kept out of training, validation and calibration; several, separated by commas."""
    hold_out_length: int | None = None
    """Keep sequences of more tokens out of training, validation and calibration."""
    baseline_tokens: int = 2_000_000
    """Most tokens of a split that the table baselines are fitted on, or compared on; they are held in memory."""
    cache: Path | None = None
    """Folder of the traces as plain files, made once (28 bytes a token at L = 6, K = 4); None: --out/arrays."""
    workers: int = 0
    """Processes that assemble batches; 0 does it in the training process. The order does not depend on it."""
    device: str = "cpu"
    """Device: cpu, cuda, cuda:0, ..."""
    devices: int = 1
    """Number of them on this machine; one process each. The batches, and so the steps, do not depend on it."""
    strategy: str = "auto"
    """Several devices: ddp (each holds the network), fsdp2 (they share its weights), auto (ddp)."""
    dtype: str | None = None
    """Arithmetic of the forward pass: float32, bfloat16 (weights stay float32); None: bfloat16 on CUDA."""
    gradient_checkpointing: bool = False
    """Compute the backbone's layers again in the backward pass instead of keeping what they computed."""
    compile: bool = False
    """Compile the backbone with torch.compile, for any batch shape."""
    seed: int = 0
    """Seed of the split, the initial weights and the order of training."""
    threads: int | None = None
    """CPU threads; None leaves torch's choice."""
    resume: bool = False
    """Go on from the last checkpoint in --out."""
    checkpoint_every_minutes: float | None = 10.0
    """Minutes between checkpoints inside an epoch; None leaves those at the ends of epochs."""
    checkpoint_every_steps: int | None = None
    """Optimiser steps between checkpoints inside an epoch."""
    keep_overlap: str = ""
    """Keep a checkpoint where the validation overlap first reaches these levels, e.g. 0.5,0.6,0.7."""
    overlap_looks: int = 20
    """Times an epoch that the validation overlap is looked at while a level of --keep_overlap is ahead."""
    wandb: str | None = None
    """Weights & Biases project to log to, beside the CSV and TensorBoard files."""
    trainer: dict[str, Any] | None = None
    """Further options of Lightning's Trainer, e.g. {log_every_n_steps: 50, num_nodes: 2}."""

    def __post_init__(self) -> None:
        """Validate every field.

        Raises:
            ValueError: A field is out of range; the message names it and what is allowed.
        """
        if not self.trace_paths():
            raise ValueError(f"traces {self.traces!r} names no trace store; name at least one")
        self._check_data()
        self._check_choices()
        self._check_model()
        for name, low in (
            ("context_length", 8),
            ("lora_rank", 1),
            ("batch_tokens", 8),
            ("accumulate", 1),
            ("devices", 1),
            ("max_epochs", 1),
            ("cycles", 1),
            ("seed", 0),
            ("workers", 0),
            ("baseline_tokens", 1),
            ("overlap_looks", 1),
        ):
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if self.seed >= 2**63:
            raise ValueError(f"seed must be below 2**63, got {self.seed}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be at least 1, got {self.threads}")
        for name in ("max_minutes", "checkpoint_every_minutes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {value}")
        self._check_rates()
        self._check_processes()
        self._check_levels()

    def trace_paths(self) -> list[Path]:
        """Folders of the trace stores."""
        return _folders(self.traces)

    def tree_paths(self) -> list[Path]:
        """Folders of the draft-tree stores; perhaps none."""
        return _folders(self.tree_traces)

    def overlap_levels(self) -> list[float]:
        """Validation overlaps at which a checkpoint is kept; perhaps none.

        Raises:
            ValueError: An entry is no number.
        """
        try:
            return [float(part) for part in self.keep_overlap.split(",")] if self.keep_overlap.strip() else []
        except ValueError:
            raise ValueError(
                f"keep_overlap {self.keep_overlap!r} must be numbers separated by commas, e.g. 0.5,0.6,0.7"
            ) from None

    def chosen_optimizer(self) -> str:
        """The optimiser: what was asked for, or what suits the backbone."""
        return self.optimizer or ("muon" if self.backbone_path is None else "adamw")

    def chosen_dtype(self) -> str:
        """Arithmetic of the forward pass: what was asked for, or what suits the device."""
        return self.dtype or ("bfloat16" if self.device.startswith("cuda") else "float32")

    def chosen_strategy(self) -> str:
        """``ddp``, also of one device, or ``fsdp2``."""
        return "fsdp2" if self.strategy == "fsdp2" else "ddp"

    def processes(self) -> int:
        """Processes of the run, on all machines."""
        return self.devices * int((self.trainer or {}).get("num_nodes", 1))

    def _check_choices(self) -> None:
        require_choice("strategy", self.strategy, STRATEGIES)
        if self.dtype is not None:
            require_choice("dtype", self.dtype, DTYPES)
        if self.optimizer is not None:
            require_choice("optimizer", self.optimizer, OPTIMIZERS)
        for name, choices in (("input_mode", InputMode), ("objective", Objective), ("finetune", Finetune)):
            require_choice(name, getattr(self, name), [choice.value for choice in choices])

    def _check_model(self) -> None:
        if self.backbone_path is not None and (self.backbone is not None or self.preset != "tiny"):
            raise ValueError("backbone_path brings its own config; leave out preset and backbone")
        if self.backbone_path is None and self.finetune != Finetune.FULL:
            raise ValueError(
                f"finetune {self.finetune} keeps pretrained weights, and there are none; give --backbone_path"
            )
        if self.finetune == Finetune.LORA and self.optimizer == "muon":
            raise ValueError("optimizer muon moves whole matrices, LoRA trains factors of them; use adamw")
        if self.objective == Objective.ROUTER_WEIGHTED and self.tree_traces:
            raise ValueError("objective router_weighted needs router weights, draft trees hold none; use bce")

    def _check_data(self) -> None:
        for name in ("traces", "tree_traces", "hold_out_dataset"):
            value = getattr(self, name)
            if value and not all(part.strip() for part in value.split(",")):
                raise ValueError(f"{name} {value!r} holds an empty entry; write one name, or several as A,B")
        if self.trees_only and not self.tree_traces:
            raise ValueError("trees_only needs draft trees; name a draft-tree store with --tree_traces")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction must lie between 0 and 1, got {self.validation_fraction}")
        if not 0 <= (self.calibration_fraction or 0.0) < 1 - self.validation_fraction:
            raise ValueError(
                f"calibration_fraction must be at least 0 and leave groups for training beside "
                f"validation_fraction {self.validation_fraction}, got {self.calibration_fraction}"
            )
        for name in ("hold_out_length", "checkpoint_every_steps", "patience"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def _check_levels(self) -> None:
        levels = self.overlap_levels()
        if wrong := [level for level in levels if not 0 < level < 1]:
            raise ValueError(f"keep_overlap levels must lie between 0 and 1, got {wrong[0]:g}; write e.g. 0.5,0.6")
        if twice := [level for level in levels if levels.count(level) > 1]:
            raise ValueError(f"keep_overlap names {twice[0]:g} twice; name every level once")

    def _check_rates(self) -> None:
        for name in ("warmup", "token_dropout", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        for name in (
            "learning_rate",
            "backbone_learning_rate",
            "muon_learning_rate",
            "gradient_clip",
            "lora_alpha",
        ):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name)}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must not be negative and must be finite, got {self.weight_decay}")

    def _check_processes(self) -> None:
        for name in self.trainer or {}:
            if twin := _TRAINER_TWINS.get(name):
                raise ValueError(f"trainer option {name!r} has an option of its own: --{twin}")
            require_choice("trainer option", name, TRAINER_OPTIONS)
        nodes = (self.trainer or {}).get("num_nodes", 1)
        if not isinstance(nodes, int) or nodes < 1:
            raise ValueError(f"trainer option num_nodes must be at least 1, got {nodes!r}")
        if ":" in self.device and self.processes() > 1:
            raise ValueError(
                f"device {self.device} names one device, devices {self.devices} asks for more; use cuda"
            )
        if self.strategy == "fsdp2" and self.processes() == 1:
            raise ValueError("strategy fsdp2 divides weights over devices; give --devices 2 or more, or use ddp")
        if self.strategy == "fsdp2" and self.token_dropout and self.input_mode == InputMode.BACKBONE_EMBEDDING:
            raise ValueError("strategy fsdp2 cannot drop tokens of a backbone's own embedding; use ddp")
        if self.wandb is not None and not self.wandb.strip():
            raise ValueError("wandb is empty; name a project")


def _folders(text: str) -> list[Path]:
    """Folders of a comma-separated list."""
    return [Path(part.strip()) for part in text.split(",") if part.strip()]
