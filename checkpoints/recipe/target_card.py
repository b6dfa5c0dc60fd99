"""The target's model card: every number in it was measured by the run that wrote it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from checkpoints.recipe.language_training import TrainingConfig
from checkpoints.recipe.target_data import Phase
from checkpoints.recipe.target_measures import UNION_TOKENS, TextMeasures, independent_union


@dataclass(frozen=True)
class TargetRun:
    """What a training run was and how it went.

    Attributes:
        config: Numbers of the run.
        phases: Steps and sequence lengths.
        text_tokens: Tokens of distinct training text.
        seconds: Time spent in training steps, over all resumes.
        curve: (step, held-out loss in nats per token) on a sample of the ``tuning`` split.
        threads: CPU threads.
        seed: Seed of initialisation and data order.
        manifest_digest: See `GroupsManifest.digest`.
        python_version: The Python whose library is the text.
        provenance: Git SHA, versions and command line.
    """

    config: TrainingConfig
    phases: tuple[Phase, ...]
    text_tokens: int
    seconds: float
    curve: tuple[tuple[int, float], ...]
    threads: int
    seed: int
    manifest_digest: str
    python_version: str
    provenance: Mapping[str, Any]


_TEMPLATE = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
language: en
tags: [mixture-of-experts, qwen3_moe, speculative-decoding, demo]
---

# EcoSpec demo target

A small but genuinely trained Qwen3-MoE ({million:.1f} M parameters), so that every part of EcoSpec runs on a laptop
CPU, offline, from a fresh clone. It writes plausible Python and reference prose; it knows nothing and is of no use
as an assistant. What it is for is its *routing*: {experts} experts, {top_k} per token, {layers} MoE layers
(E/K = {ratio:.0f}, as in Qwen3-235B).

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("checkpoints/target")
model = AutoModelForCausalLM.from_pretrained("checkpoints/target", dtype="float32")
```

bf16 on disk. Load it as above: casting a loaded model rounds its rotary buffers too. Every document of the
training text begins with `<|endoftext|>`, which is also the end-of-sequence and padding token; the tokenizer does
not add it.

## Held-out loss

On the `report` split, windows of 512 tokens, after rounding to bf16.

| text | tokens | nats per token | bits per byte |
|---|---:|---:|---:|
{losses}

## Routing

On the same text ({tokens:,} tokens). Entropy is that of the experts' shares of the load (even: {even:.2f} bits);
the effective number is 2 to the power of it; the union counts the distinct experts of {union} consecutive tokens,
which is E·(1−(1−K/E)^{union}) = {expected:.2f} if tokens route independently and evenly.
Experts never used: {dead:.1%}.

| layer | entropy, bits | effective experts | never used | union of {union} | over independence |
|---:|---:|---:|---:|---:|---:|
{routing}

## Training

{training}

Held-out loss on a sample of `tuning`, nats per token: {curve}.

Made by `{argv}` at commit `{git_sha}` with {versions}.

## Text and licence

The text is the standard library of Python {python} (source files, docstrings and language topics), without its
tests: Copyright © 2001 Python Software Foundation, under the
[PSF License Agreement, version 2](https://docs.python.org/3/license.html). The weights are under this repository's
licence (Apache-2.0). `checkpoints/groups.json` (digest `{digest}`) lists which text was used for what; the four
splits are disjoint in files and topics: this model and its tokenizer saw `target_train` only ({text_tokens:,}
tokens), losses during training are from `tuning`, the tables above from `report`. Files of the library borrow from
each other (a pure-Python twin quotes its C module's docstrings), so held-out text is held out by file, not by idea.

## Rebuild

```bash
python -m checkpoints.recipe manifest tokenizer target --out rebuilt --work runs/rebuilt
```

The same seed, thread count and library versions give the same weights, also when the run is killed and started
again.
"""

_TRAINING = """\
{tokens:,} tokens ({epochs:.1f} epochs) in {minutes:.0f} minutes of wall clock on {threads} CPU threads:
{speed:,.0f} tokens/s, not measured on a quiet machine. {steps} steps of {batch:,} tokens ({lengths}; longer
contexts were never seen), float32, AdamW (0.9, 0.95), weight decay {decay} on matrices, peak learning rate {rate},
{warmup} steps of warm-up, cosine to zero,
gradient norm clipped at 1; load-balancing loss per layer with weight {balance}. Seed {seed}."""


def target_card(
    run: TargetRun, model_config: Any, num_parameters: int, measures: Mapping[str, TextMeasures]
) -> str:
    """Return the card as Markdown.

    Args:
        run: The training run.
        model_config: ``Qwen3MoeConfig`` of the model.
        num_parameters: Parameters, the tied head counted once.
        measures: Per kind of text and ``all``, on the report split after rounding to bf16.
    """
    experts, top_k = model_config.num_experts, model_config.num_experts_per_tok
    expected = independent_union(experts, top_k, UNION_TOKENS)
    whole = measures["all"]
    made = run.provenance
    return _TEMPLATE.format(
        million=num_parameters / 1e6,
        experts=experts,
        top_k=top_k,
        layers=model_config.num_hidden_layers,
        ratio=experts / top_k,
        losses="\n".join(
            f"| {name} | {m.tokens:,} | {m.loss:.3f} | {m.bits_per_byte:.3f} |" for name, m in measures.items()
        ),
        tokens=whole.tokens,
        even=math.log2(experts),
        union=UNION_TOKENS,
        expected=expected,
        dead=sum(layer.dead_experts for layer in whole.layers) / (experts * len(whole.layers)),
        routing=_routing_rows(whole, expected),
        training=_training(run),
        curve=_curve(run),
        argv=" ".join(["python -m checkpoints.recipe", *made["argv"][1:]]),
        git_sha=made["git_sha"],
        versions=", ".join(f"{name} {version}" for name, version in made["versions"].items()),
        python=run.python_version,
        digest=run.manifest_digest,
        text_tokens=run.text_tokens,
    )


def _routing_rows(measures: TextMeasures, expected: float) -> str:
    return "\n".join(
        f"| {index} | {layer.entropy_bits:.2f} | {layer.effective_experts:.1f} | {layer.dead_experts} "
        f"| {layer.union:.2f} | {layer.union / expected:.2f} |"
        for index, layer in enumerate(measures.layers)
    )


def _training(run: TargetRun) -> str:
    config = run.config
    tokens = config.total_steps * config.tokens_per_batch
    return _TRAINING.format(
        tokens=tokens,
        epochs=tokens / run.text_tokens,
        minutes=run.seconds / 60,
        threads=run.threads,
        speed=tokens / run.seconds,
        steps=config.total_steps,
        batch=config.tokens_per_batch,
        lengths=", ".join(f"{phase.steps} of length {phase.length}" for phase in run.phases),
        decay=config.weight_decay,
        rate=config.learning_rate,
        warmup=config.warmup_steps,
        balance=config.router_aux_loss,
        seed=run.seed,
    )


def _curve(run: TargetRun) -> str:
    stride = max(1, len(run.curve) // 6)
    picked = sorted({*run.curve[::stride], *run.curve[-1:]})
    return ", ".join(f"{loss:.2f} at {step * run.config.tokens_per_batch / 1e6:.1f} M" for step, loss in picked)
