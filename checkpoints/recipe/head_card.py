"""The head's model card: every number in it was measured by the run that wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from checkpoints.recipe.head_acceptance import Acceptance
from ecospec.decoding.drafters import Eagle3Config

if TYPE_CHECKING:
    from checkpoints.recipe.head import HeadPlan


@dataclass(frozen=True)
class HeadMeasures:
    """What was measured on the report split, after rounding to bf16.

    Attributes:
        losses: Cross-entropy in nats per unrolled step, over the draft vocabulary.
        top2: Share of positions whose greedy token is among the head's best two, per unrolled step.
        acceptance: Tokens per step on greedy continuations.
        files: Number of continuations.
        coverage_text: Share of text tokens in the draft vocabulary.
        coverage_target: Share of the target's greedy next tokens in the draft vocabulary.
    """

    losses: tuple[float, ...]
    top2: tuple[float, ...]
    acceptance: Acceptance
    files: int
    coverage_text: float
    coverage_target: float


@dataclass(frozen=True)
class HeadRun:
    """What a training run was and how it went.

    Attributes:
        plan: What was chosen.
        config: Shape of the head.
        parameters: Trained parameters.
        sequences: Cached training sequences.
        steps: Optimiser steps.
        data_seconds: Wall clock of continuing prompts and caching target states (0 where reused).
        seconds: Time spent in training steps, over all resumes.
        curve: (step, held-out loss, held-out top-2 accuracy) of the first draft step on ``tuning``.
        threads: CPU threads.
        seed: Seed of data, initialisation and order.
        manifest_digest: See `GroupsManifest.digest`.
        python_version: The Python whose library is the text.
        provenance: Git SHA, versions and command line.
    """

    plan: HeadPlan
    config: Eagle3Config
    parameters: int
    sequences: int
    steps: int
    data_seconds: float
    seconds: float
    curve: tuple[tuple[int, float, float], ...]
    threads: int
    seed: int
    manifest_digest: str
    python_version: str
    provenance: Mapping[str, Any]


_TEMPLATE = """\
---
license: apache-2.0
library_name: ecospec
tags: [eagle3, speculative-decoding, draft-model, demo]
---

# EcoSpec demo EAGLE-3 head

The draft model of the [demo target](../target/README.md): one decoder layer ({parameters:.2f} M parameters), hidden
{hidden}, feed-forward {ffn}, draft vocabulary {draft_vocab:,} of {vocab:,} tokens (the most frequent in its
training data). It reads the target's hidden states after layers {layers} (**outputs**, counted from 0, as in
SpecForge) and the target's own embedding, which is not stored here. Tensors and `config.json` are in SpecForge's
layout; `d2t` is an offset (target id = i + d2t[i]).

```python
from ecospec.decoding.drafters import Eagle3Drafter

drafter = Eagle3Drafter.from_pretrained("checkpoints/drafter", target_model)
```

## Acceptance

Greedy continuation by the target of {files} held-out source files (split `report`, the first {prompt} tokens given,
{tokens} emitted), {budget} tokens verified per step, the root included, chosen by cumulative probability from a
beam tree of 3 × top-2 (10 candidates), bf16 weights computed in float32:

**{mean:.3f} tokens per step** (bonus token included; {emitted:,} tokens in {steps:,} steps).

| candidates | steps that accept at least as many | whole tree, before selection |
|---:|---:|---:|
{depths}

## Held-out loss

On {held_out} sequences of `report` (half text, half continued by the target), in nats, against the target's
distribution over the draft vocabulary; top-2 is the share of positions whose greedy target token is among the
head's best two. Positions whose greedy token lies outside the draft vocabulary do not count.

| draft step | loss | top-2 |
|---:|---:|---:|
{losses}

The draft vocabulary covers {coverage_text:.1%} of the tokens of held-out source files and {coverage_target:.1%} of
the target's greedy next tokens.

## Training

{training}

Held-out loss and top-2 of the first draft step on `tuning`: {curve}.

Made by `{argv}` at commit `{git_sha}` with {versions}.

## Text and licence

The text is the standard library of Python {python}: Copyright © 2001 Python Software Foundation, under the
[PSF License Agreement, version 2](https://docs.python.org/3/license.html). Training saw the split `target_train` of
`checkpoints/groups.json` (digest `{digest}`) only; choices were made on `tuning`, the numbers above are from
`report`. The weights are under this repository's licence (Apache-2.0).

## Rebuild

```bash
python -m checkpoints.recipe head --out rebuilt --work runs/rebuilt
```

after the stages before it (`manifest tokenizer target`). A killed run continues where it stopped.
"""

_TRAINING = """\
{sequences:,} sequences of {length} tokens ({text:,} windows of text; {continued:,} prompts of {prompts} tokens
continued by the target, {sampled:.0%} sampled at temperature {temperature}, the others greedily), {million:.1f} M
tokens in {epochs} epochs. Training-time test over {unroll} steps: the head is fed its own hidden states as in
drafting; soft cross-entropy, step weights {decay}^k. {steps:,} steps of {batch} sequences, float32, AdamW (0.9,
0.95), weight decay {weight_decay} on matrices, peak learning rate {rate}, {warmup} steps of warm-up, cosine to
zero, gradient norm clipped at 1. The output layer and final norm begin as the target's. CPU threads: {threads}, not
on a quiet machine; {data_minutes:.0f} minutes for continuations and target states, {minutes:.0f} minutes of
training. Seed {seed}."""


def head_card(run: HeadRun, measures: HeadMeasures) -> str:
    """Return the card as Markdown."""
    config, plan, accepted = run.config, run.plan, measures.acceptance
    made = run.provenance
    depths = [
        f"| {depth} | {accepted.at_least(depth):.3f} | {accepted.in_tree[depth - 1] / accepted.steps:.3f} |"
        for depth in range(1, len(accepted.in_tree) + 1)
    ]
    losses = zip(measures.losses, measures.top2, strict=True)
    return _TEMPLATE.format(
        parameters=run.parameters / 1e6,
        hidden=config.hidden_size,
        ffn=config.intermediate_size,
        draft_vocab=config.draft_vocab_size,
        vocab=config.vocab_size,
        layers=", ".join(map(str, config.aux_layers)),
        files=measures.files,
        prompt=plan.acceptance_prompt,
        tokens=plan.acceptance_tokens,
        budget=len(accepted.accepted),
        mean=accepted.mean,
        emitted=accepted.emitted,
        steps=accepted.steps,
        depths="\n".join(depths),
        held_out=plan.held_out.text_windows + plan.held_out.continued,
        losses="\n".join(
            f"| {step} | {loss:.3f} | {hit:.3f} |" for step, (loss, hit) in enumerate(losses, start=1)
        ),
        coverage_text=measures.coverage_text,
        coverage_target=measures.coverage_target,
        training=_training(run),
        curve=", ".join(
            f"{loss:.3f} and {hit:.2f} at step {step:,}"
            for step, loss, hit in run.curve[:: max(1, len(run.curve) // 5)]
        ),
        argv=" ".join(made["argv"]),
        git_sha=made["git_sha"],
        versions=", ".join(f"{name} {version}" for name, version in made["versions"].items()),
        python=run.python_version,
        digest=run.manifest_digest,
    )


def _training(run: HeadRun) -> str:
    data, training = run.plan.data, run.plan.training
    return _TRAINING.format(
        sequences=run.sequences,
        length=data.length,
        text=data.text_windows,
        continued=data.continued,
        prompts=", ".join(map(str, data.prompt_lengths)),
        sampled=data.sampled_share,
        temperature=data.temperature,
        million=run.steps * training.batch * data.length / 1e6,
        epochs=training.epochs,
        unroll=training.unroll,
        decay=training.decay,
        steps=run.steps,
        batch=training.batch,
        weight_decay=training.weight_decay,
        rate=training.learning_rate,
        warmup=training.warmup_steps,
        threads=run.threads,
        data_minutes=run.data_seconds / 60,
        minutes=run.seconds / 60,
        seed=run.seed,
    )
