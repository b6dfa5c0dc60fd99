"""Stage ``target``: train the Qwen3-MoE target, round it to bf16, measure it, save it with its card."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import lightning as L
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3MoeConfig, Qwen3MoeForCausalLM

from checkpoints.recipe.corpus import load_manifest
from checkpoints.recipe.experts import keep_freed_memory, use_sorted_experts
from checkpoints.recipe.language_training import TrainingConfig, train
from checkpoints.recipe.settings import Settings
from checkpoints.recipe.target_card import TargetRun, target_card
from checkpoints.recipe.target_data import Phase, TargetData, encode_documents, held_out_windows, plan_batches
from checkpoints.recipe.target_measures import TextMeasures, measure_text
from checkpoints.recipe.target_training import TargetModule
from ecospec.cli.provenance import provenance
from ecospec.trace_collection.groups_manifest import GroupsManifest
from ecospec.trace_collection.stdlib_corpus import DATASETS, documents_of

#: Short sequences first: they train 15 to 25 % faster per token; the long ones teach the positions the demo uses.
PHASES = (Phase(1536, 256), Phase(768, 512), Phase(256, 1024))
HELD_OUT_LENGTH = 512
HELD_OUT_WINDOWS = 64


def target_config(tokenizer: PreTrainedTokenizerBase) -> Qwen3MoeConfig:
    """Return the architecture: 6 MoE layers, 64 experts of which 4 work (E/K = 16, as in Qwen3-235B)."""
    return Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=192,
        moe_intermediate_size=48,
        num_hidden_layers=6,
        decoder_sparse_step=1,
        num_experts=64,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        router_aux_loss_coef=TrainingConfig.router_aux_loss,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def new_target(config: Qwen3MoeConfig, seed: int) -> Qwen3MoeForCausalLM:
    """Return a freshly initialised float32 model with the fast experts of the recipe."""
    L.seed_everything(seed, verbose=False)
    model = Qwen3MoeForCausalLM(config)
    use_sorted_experts(model)
    return model


def target_complete(settings: Settings) -> bool:
    """Return whether weights and card exist."""
    return all((settings.target / name).is_file() for name in ("config.json", "model.safetensors", "README.md"))


def make_target(settings: Settings, phases: Sequence[Phase] = PHASES) -> None:
    """Train (or continue training) the target and write ``<out>/target``.

    Args:
        settings: Folders, threads and seed.
        phases: Steps and sequence lengths; the committed target uses the default.

    Raises:
        ValueError: If the manifest or the tokenizer is absent.
    """
    if not (settings.target / "tokenizer.json").is_file():
        raise ValueError(f"{settings.target}/tokenizer.json does not exist; run stage `tokenizer` first")
    keep_freed_memory()
    torch.set_num_threads(settings.threads)
    manifest = load_manifest(settings)
    tokenizer = AutoTokenizer.from_pretrained(settings.target)
    texts = encode_documents(tokenizer, documents_of(manifest, "target_train"))
    held_out = encode_documents(tokenizer, documents_of(manifest, "tuning"))
    config = TrainingConfig(total_steps=sum(phase.steps for phase in phases))
    text_tokens = sum(map(len, texts))
    print(f"{text_tokens:,} tokens of text, {config.total_steps * config.tokens_per_batch:,} to train")
    module = TargetModule(new_target(target_config(tokenizer), settings.seed), config)
    data = TargetData(
        plan_batches(texts, phases, config.tokens_per_batch, settings.seed),
        held_out_windows(held_out, HELD_OUT_LENGTH, HELD_OUT_WINDOWS, settings.seed),
    )
    progress = train(module, data, settings.work / "target")
    model = save_rounded(module.model, settings.target)
    run = TargetRun(
        config=config,
        phases=tuple(phases),
        text_tokens=text_tokens,
        seconds=progress.seconds,
        curve=tuple(progress.curve),
        threads=settings.threads,
        seed=settings.seed,
        manifest_digest=manifest.digest(),
        python_version=manifest.python_version,
        provenance=provenance(),
    )
    card = target_card(run, model.config, model.num_parameters(), measure_report(model, tokenizer, manifest))
    (settings.target / "README.md.tmp").write_text(card, encoding="utf-8")
    (settings.target / "README.md.tmp").replace(settings.target / "README.md")


def save_rounded(model: Qwen3MoeForCausalLM, folder: Path) -> Qwen3MoeForCausalLM:
    """Save the weights rounded to bf16, and return them as a float32 model loaded from what was written.

    Args:
        model: Trained float32 model.
        folder: Destination; the files appear under their final names only when complete.
    """
    copy = Qwen3MoeForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    temporary = folder.with_name(folder.name + ".model.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    copy.to(torch.bfloat16).save_pretrained(temporary)
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(temporary.iterdir()):
        path.chmod(0o644)  # safetensors writes for the owner alone
        path.replace(folder / path.name)
    temporary.rmdir()
    rounded = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    use_sorted_experts(rounded)
    return rounded


def measure_report(
    model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerBase, manifest: GroupsManifest
) -> dict[str, TextMeasures]:
    """Measure the report split: one entry per kind of text, and ``all``."""
    measures = {}
    for name, datasets in {**{dataset: (dataset,) for dataset in DATASETS}, "all": DATASETS}.items():
        documents = documents_of(manifest, "report", datasets)
        num_bytes = sum(len(document.text.encode("utf-8")) for document in documents)
        measures[name] = measure_text(model, encode_documents(tokenizer, documents), num_bytes)
    return measures
