"""Stages ``traces`` and ``predictor``: the target's routing on groups of its own, and the predictor trained on it.

Scratch of the recipe::

    runs/recipe/traces/
      predictor_train/{text,greedy,sampled}/    # trained on; also what the table baselines are fitted on
      report/{text,greedy}/                     # read once, for the figures of the card
    runs/recipe/predictor/                      # training run: checkpoints, logs
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoTokenizer, Qwen3MoeForCausalLM

from checkpoints.recipe.experts import keep_freed_memory
from checkpoints.recipe.settings import Settings
from ecospec.cli.provenance import provenance
from ecospec.cli.training_lines import TrainingLines, quiet_lightning
from ecospec.predictor.fingerprint import routing_spec_of
from ecospec.trace_collection.collect import CollectProgress, collect
from ecospec.trace_collection.manifest import MANIFEST_NAME, StoreManifest
from ecospec.trace_collection.plan import CollectConfig
from ecospec.trace_collection.prompts import load_prompts
from ecospec.train.config import TrainPredictorConfig
from ecospec.train.export import export_predictor
from ecospec.train.fit import train_predictor


@dataclass(frozen=True)
class TraceJob:
    """One store to collect.

    Attributes:
        split: Split of the corpus, and folder of the store.
        name: Folder of the store below it.
        config: How it is collected.
    """

    split: str
    name: str
    config: CollectConfig

    def folder(self, settings: Settings) -> Path:
        """Return the store's folder."""
        return settings.work / "traces" / self.split / self.name


#: Text as it was written, and text of the target's own, which routes differently and is what decoding meets.
JOBS = (
    TraceJob("predictor_train", "text", CollectConfig(mode="teacher_forced", batch_size=16)),
    TraceJob(
        "predictor_train",
        "greedy",
        CollectConfig(max_prompt_tokens=64, max_new_tokens=192, windows_per_document=16, batch_size=128),
    ),
    TraceJob(
        "predictor_train",
        "sampled",
        CollectConfig(
            max_prompt_tokens=64,
            max_new_tokens=192,
            windows_per_document=16,
            batch_size=128,
            temperature=0.8,
            seed=1,
        ),
    ),
    TraceJob("report", "text", CollectConfig(mode="teacher_forced", batch_size=16)),
    TraceJob(
        "report",
        "greedy",
        CollectConfig(max_prompt_tokens=64, max_new_tokens=192, windows_per_document=4, batch_size=128),
    ),
)


def traces_complete(settings: Settings) -> bool:
    """Return whether every store is complete."""
    return all(_complete(job.folder(settings)) for job in JOBS)


def _complete(store: Path) -> bool:
    return (store / MANIFEST_NAME).is_file() and StoreManifest.load(store).complete


def make_traces(settings: Settings) -> None:
    """Collect (or continue collecting) every store."""
    keep_freed_memory()
    torch.set_num_threads(settings.threads)
    spec = routing_spec_of(settings.target)
    model = Qwen3MoeForCausalLM.from_pretrained(settings.target, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(settings.target)
    console = Console(soft_wrap=True)
    for job in JOBS:
        if _complete(job.folder(settings)):
            continue
        reported = [0.0]

        def progress(state: CollectProgress, job: TraceJob = job, reported: list[float] = reported) -> None:
            if state.sequences >= reported[0]:
                reported[0] = state.sequences + 0.1 * state.total
                where = f"{job.split}/{job.name}"
                console.print(f"{where}: {state.sequences} of {state.total} sequences, {state.tokens:,} tokens")

        collect(
            model,
            tokenizer,
            load_prompts(f"stdlib:{job.split}", groups=settings.manifest),
            job.config,
            job.folder(settings),
            spec=spec,
            resume=job.folder(settings).exists(),
            options={"prompts": f"stdlib:{job.split}", "dtype": "float32"},
            provenance=provenance(),
            progress=progress,
        )


def predictor_complete(settings: Settings) -> bool:
    """Return whether weights and card exist."""
    return all((settings.predictor / name).is_file() for name in ("config.json", "model.safetensors", "README.md"))


def training_config(settings: Settings) -> TrainPredictorConfig:
    """Return the options of the committed predictor's training."""
    out = settings.work / "predictor"
    return TrainPredictorConfig(
        target=settings.target,
        traces=",".join(str(job.folder(settings)) for job in JOBS if job.split == "predictor_train"),
        out=out,
        context_length=2048,
        batch_tokens=4096,
        max_epochs=8,
        cycles=4,
        validation_fraction=0.05,
        dtype="bfloat16",  # halves the time where the processor has matrix units for it
        threads=settings.threads,
        seed=settings.seed,
        resume=(out / "checkpoints" / "last.ckpt").exists(),
    )


def make_predictor(settings: Settings) -> None:
    """Train (or continue training) the predictor and write ``checkpoints/predictor`` in bf16."""
    keep_freed_memory()
    quiet_lightning()
    config = training_config(settings)
    console = Console(soft_wrap=True)
    train_predictor(config, callbacks=[TrainingLines(console, every_seconds=60)], provenance=provenance())
    result = export_predictor(
        config.out, settings.target, settings.predictor, dtype="bfloat16", overwrite=True, provenance=provenance()
    )
    console.print(f"{result.out}: {result.size_bytes / 1e6:.2f} MB, validation overlap {result.overlap:.4f}")
