"""Stage ``head``: train the EAGLE-3 head of the demo target, round it to bf16, measure it, save it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3MoeForCausalLM

from checkpoints.recipe.corpus import load_manifest
from checkpoints.recipe.experts import keep_freed_memory, use_sorted_experts
from checkpoints.recipe.head_acceptance import measure_acceptance, opening_prompts
from checkpoints.recipe.head_card import HeadMeasures, HeadRun, head_card
from checkpoints.recipe.head_data import (
    DataConfig,
    FeatureCache,
    add_seconds,
    build_cache,
    continued_prompts,
    draft_vocabulary,
    random_windows,
    save_array,
)
from checkpoints.recipe.head_training import HeadData, HeadModule, HeadTraining, train_head, unrolled_losses
from checkpoints.recipe.settings import Settings
from checkpoints.recipe.target_data import encode_documents
from ecospec.cli.provenance import provenance
from ecospec.decoding.drafters import Eagle3Config, Eagle3Drafter, Eagle3Head
from ecospec.predictor.fingerprint import routing_spec_of
from ecospec.trace_collection.groups_manifest import GroupsManifest
from ecospec.trace_collection.stdlib_corpus import documents_of


@dataclasses.dataclass(frozen=True)
class HeadPlan:
    """Everything that is chosen about the head; the defaults are those of the committed one.

    Attributes:
        data: Training data.
        held_out: Data for validation (``tuning``) and for the card (``report``).
        training: The run.
        draft_vocab_size: Tokens the head can propose, the most frequent of the training data.
        intermediate_size: Width of its feed-forward block.
        aux_layers: Target layers whose outputs it reads: an early, a middle and a late one. Tried on ``tuning``
            with a short run: (1, 3, 4) 2.20 tokens per step, (0, 2, 4) 2.18, (1, 3, 5) 2.14; all within noise.
        acceptance_files: Source files whose continuation measures acceptance.
        acceptance_prompt: Tokens of each that the target is given.
        acceptance_tokens: Tokens it emits.
    """

    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    held_out: DataConfig = dataclasses.field(default_factory=lambda: DataConfig(text_windows=60, continued=60))
    training: HeadTraining = dataclasses.field(default_factory=HeadTraining)
    draft_vocab_size: int = 1024
    intermediate_size: int = 512
    aux_layers: tuple[int, ...] = (1, 3, 4)
    acceptance_files: int = 64
    acceptance_prompt: int = 128
    acceptance_tokens: int = 48


def head_complete(settings: Settings) -> bool:
    """Return whether weights and card exist."""
    return all((settings.drafter / name).is_file() for name in ("config.json", "model.safetensors", "README.md"))


def load_target(folder: Path) -> Qwen3MoeForCausalLM:
    """Load the target in float32 for inference, with the fast experts of the recipe.

    Raises:
        ValueError: If it is absent (run stage ``target`` first).
    """
    if not (folder / "model.safetensors").is_file():
        raise ValueError(f"{folder}/model.safetensors does not exist; run stage `target` first")
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.requires_grad_(requires_grad=False)
    use_sorted_experts(model)
    return model


@dataclasses.dataclass(frozen=True)
class Source:
    """What the head is made from.

    Attributes:
        model: The target, float32, for inference.
        tokenizer: Its tokenizer.
        manifest: Groups and their splits.
        identity: Fingerprints of target and tokenizer.
        seed: Of everything random.
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase
    manifest: GroupsManifest
    identity: Mapping[str, str]
    seed: int

    def texts(self, split: str, datasets: Sequence[str] | None = None) -> list[NDArray[np.int32]]:
        """Return the token ids of every document of a split, each led by the end-of-text token."""
        return encode_documents(self.tokenizer, documents_of(self.manifest, split, datasets))

    def digest(self, *choices: Any) -> str:
        """Return 8 hexadecimal digits that change with the source and the given choices."""
        key = [dict(self.identity), self.manifest.digest(), self.seed, choices]
        return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:8]


def load_source(settings: Settings) -> Source:
    """Load manifest, target and tokenizer.

    Raises:
        ValueError: If one of them is absent.
    """
    manifest = load_manifest(settings)
    model = load_target(settings.target)
    spec = routing_spec_of(settings.target)
    identity = {"tokenizer_fingerprint": spec.tokenizer_fingerprint, "target_fingerprint": spec.target_fingerprint}
    return Source(model, AutoTokenizer.from_pretrained(settings.target), manifest, identity, settings.seed)


def make_head(settings: Settings, plan: HeadPlan | None = None) -> None:
    """Train (or continue training) the head and write ``<out>/drafter``.

    Args:
        settings: Folders, threads and seed.
        plan: What is chosen about the head; the committed one uses the default.

    Raises:
        ValueError: If the manifest or the target is absent.
    """
    plan = plan or HeadPlan()
    keep_freed_memory()
    torch.set_num_threads(settings.threads)
    source = load_source(settings)
    work = settings.work / "head"
    cache = make_cache(source, "target_train", plan.data, plan.aux_layers, work)
    tuning = make_cache(source, "tuning", plan.held_out, plan.aux_layers, work)
    report = make_cache(source, "report", plan.held_out, plan.aux_layers, work)
    head = new_head(source, plan, cache.tokens)
    module = HeadModule(head, output_rows(source.model, head), plan.training, plan.training.steps(len(cache)))
    folder = work / f"run-{source.digest(dataclasses.asdict(plan))}"
    progress = train_head(module, HeadData(cache, tuning, plan.training, source.seed), folder)
    head.save_pretrained(settings.drafter)
    run = HeadRun(
        plan=plan,
        config=head.config,
        parameters=sum(p.numel() for p in head.parameters()),
        sequences=len(cache),
        steps=module.total_steps,
        data_seconds=cache.seconds,
        seconds=progress.seconds,
        curve=tuple(progress.curve),
        threads=settings.threads,
        seed=source.seed,
        manifest_digest=source.manifest.digest(),
        python_version=source.manifest.python_version,
        provenance=provenance(),
    )
    measures = measure_head(source, plan, report, settings.drafter)
    temporary = settings.drafter / "README.md.tmp"
    temporary.write_text(head_card(run, measures), encoding="utf-8")
    temporary.replace(settings.drafter / "README.md")
    print(f"{measures.acceptance.mean:.3f} tokens per step on the report split")


def make_cache(
    source: Source, split: str, config: DataConfig, aux_layers: Sequence[int], work: Path
) -> FeatureCache:
    """Return the cached target states of one split: windows of its text, then prompts continued by the target.

    Args:
        source: Target, tokenizer and text.
        split: One of the manifest's.
        config: How much of what.
        aux_layers: Target layers whose outputs are kept.
        work: Scratch folder; the cache gets one of its own in it, named after everything it depends on.
    """
    console = Console(soft_wrap=True)
    start = time.perf_counter()

    def progress(what: str, done: int, total: int) -> None:
        seconds = time.perf_counter() - start
        console.print(f"{split}: {what} {done:,}/{total:,} sequences, {seconds:.0f} s")

    folder = work / f"{split}-{source.digest(list(aux_layers), dataclasses.asdict(config))}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokens.npy"
    if not path.is_file():
        texts = source.texts(split)
        windows = random_windows(texts, config.length, config.text_windows, source.seed)
        continued = continued_prompts(source.model, texts, config, source.seed, progress)
        add_seconds(folder, time.perf_counter() - start)
        save_array(path, np.concatenate([windows, continued]))
    return build_cache(source.model, np.load(path), aux_layers, folder, progress)


def output_rows(model: Any, head: Eagle3Head) -> Tensor:
    """Return the rows of the target's output embedding that belong to the draft vocabulary, ``[Vd, H]``."""
    rows: Tensor = model.get_output_embeddings().weight[head.draft_vocabulary]
    return rows


def new_head(source: Source, plan: HeadPlan, tokens: NDArray[np.int32]) -> Eagle3Head:
    """Return an untrained head for the target.

    Its output layer and final norm begin as the target's own (rows of the draft vocabulary), so that training
    starts from the target's output space instead of finding it again.

    Args:
        source: The target and its fingerprints.
        plan: Shape of the head.
        tokens: Token ids whose most frequent become the draft vocabulary.
    """
    target = source.model.config
    config = Eagle3Config(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=plan.intermediate_size,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=plan.draft_vocab_size,
        aux_layers=plan.aux_layers,
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        identity=source.identity,
    )
    L.seed_everything(source.seed, verbose=False)
    head = Eagle3Head(config, source.model.get_input_embeddings())
    vocabulary = draft_vocabulary(np.asarray(tokens), target.vocab_size, plan.draft_vocab_size)
    head.set_draft_vocabulary(torch.from_numpy(vocabulary))
    with torch.no_grad():
        head.lm_head.weight.copy_(output_rows(source.model, head))
        head.norm.weight.copy_(source.model.model.norm.weight)
    return head


def measure_head(
    source: Source, plan: HeadPlan, held_out: FeatureCache, folder: Path, *, split: str = "report"
) -> HeadMeasures:
    """Measure a saved head on held-out text: loss, coverage of its vocabulary, tokens per step.

    Args:
        source: Target, tokenizer and text.
        plan: What was chosen about the head.
        held_out: Cached target states of the split.
        folder: The saved head.
        split: The held-out split.
    """
    drafter = Eagle3Drafter.from_pretrained(folder, source.model, identity=source.identity, dtype=torch.float32)
    losses, hits = held_out_losses(drafter.head, held_out, source.model, plan.training.unroll)
    texts = source.texts(split, ["stdlib_code"])
    prompts = opening_prompts(texts, plan.acceptance_prompt, plan.acceptance_files)
    acceptance = measure_acceptance(
        source.model, drafter, prompts, new_tokens=plan.acceptance_tokens, eos=source.tokenizer.eos_token_id
    )
    known = drafter.head.t2d.numpy()
    return HeadMeasures(
        losses=losses,
        top2=hits,
        acceptance=acceptance,
        files=len(prompts),
        coverage_text=float(known[np.concatenate(texts)].mean()),
        coverage_target=float(known[np.asarray(held_out.greedy)].mean()),
    )


@torch.inference_mode()
def held_out_losses(
    head: Eagle3Head, cache: FeatureCache, model: Any, steps: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean loss and top-2 accuracy per unrolled step over cached sequences."""
    rows = output_rows(model, head)
    sums = torch.zeros(2, steps)
    for index in np.array_split(np.arange(len(cache)), max(1, len(cache) // 20)):
        losses, hits = unrolled_losses(head, cache.rows(index), rows, steps)
        sums += torch.stack([torch.stack(losses), torch.stack(hits)]) * len(index)
    means = sums / len(cache)
    return tuple(means[0].tolist()), tuple(means[1].tolist())
