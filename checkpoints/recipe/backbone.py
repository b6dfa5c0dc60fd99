"""Stage ``backbone``: a small dense language model of the demo text, for predictors that start from one.

It plays the part of Qwen3-0.6B: the shape of the preset ``tiny``, the target's vocabulary, trained on the groups
that the target was trained on. It is scratch, ``<work>/backbone``, and not shipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import lightning as L
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from checkpoints.recipe.corpus import load_manifest
from checkpoints.recipe.experts import keep_freed_memory
from checkpoints.recipe.language_training import LanguageModule, TrainingConfig, train
from checkpoints.recipe.settings import Settings
from checkpoints.recipe.target_data import Phase, TargetData, encode_documents, held_out_windows, plan_batches
from ecospec.predictor.backbones import BACKBONE_PRESETS
from ecospec.trace_collection.stdlib_corpus import documents_of

PHASES = (Phase(768, 256), Phase(512, 512), Phase(256, 1024))


def backbone_folder(settings: Settings) -> Path:
    """Return where the finished model lies."""
    return settings.work / "backbone"


def backbone_complete(settings: Settings) -> bool:
    """Return whether weights and tokenizer exist."""
    return all((backbone_folder(settings) / name).is_file() for name in ("model.safetensors", "tokenizer.json"))


def backbone_config(tokenizer: PreTrainedTokenizerBase) -> Qwen3Config:
    """Return the architecture: the preset ``tiny`` with the target's vocabulary and an LM head."""
    tiny = {name: value for name, value in BACKBONE_PRESETS["tiny"].items() if name != "model_type"}
    return Qwen3Config(**{**tiny, "vocab_size": len(tokenizer), "tie_word_embeddings": True})


def make_backbone(settings: Settings, phases: Sequence[Phase] = PHASES) -> None:
    """Train (or continue training) the language model and write it with its tokenizer.

    Args:
        settings: Folders, threads and seed.
        phases: Steps and sequence lengths.
    """
    keep_freed_memory()
    torch.set_num_threads(settings.threads)
    manifest = load_manifest(settings)
    tokenizer = AutoTokenizer.from_pretrained(settings.target)
    texts, held_out = (
        encode_documents(tokenizer, documents_of(manifest, split)) for split in ("target_train", "tuning")
    )
    # bf16 halves the time where the processor has matrix units for it, and costs a little where it has none.
    config = TrainingConfig(total_steps=sum(phase.steps for phase in phases), precision="bf16-mixed")
    L.seed_everything(settings.seed, verbose=False)
    module = LanguageModule(Qwen3ForCausalLM(backbone_config(tokenizer)), config)
    data = TargetData(
        plan_batches(texts, phases, config.tokens_per_batch, settings.seed),
        held_out_windows(held_out, 512, 64, settings.seed),
    )
    train(module, data, settings.work / "backbone_training")
    module.model.save_pretrained(backbone_folder(settings))
    tokenizer.save_pretrained(backbone_folder(settings))
