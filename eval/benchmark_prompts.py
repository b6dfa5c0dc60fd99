"""Prompts of a decoding benchmark: a seeded choice, one per group, spread over the datasets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from ecospec.eval.decoding_benchmark import BenchmarkPrompt
from ecospec.trace_collection.prompts import Prompt, leading_ids, prompt_ids


def select_prompts(
    prompts: Sequence[Prompt], tokenizer: Any, *, number: int, max_tokens: int, seed: int = 0
) -> list[BenchmarkPrompt]:
    """Choose and tokenise prompts.

    Datasets take turns, so that a small number of prompts covers all of them; a group gives at most one prompt, so
    that prompts are independent. Of a document a window of ``max_tokens`` tokens is taken at a random place; other
    prompts are used whole, and left out where they are longer.

    Args:
        prompts: From `load_prompts`.
        tokenizer: The target's.
        number: Prompts wanted; fewer where the source has fewer groups.
        max_tokens: Tokens of a window, and the most of a whole prompt.
        seed: Seed of the choice and of the windows.

    Raises:
        ValueError: A number is below 1 or no prompt fits.
    """
    if number < 1 or max_tokens < 1:
        raise ValueError(f"prompts and tokens per prompt must be at least 1, got {number} and {max_tokens}")
    source = random.Random(seed)
    queues: dict[str, list[Prompt]] = {}
    for prompt in source.sample(list(prompts), len(prompts)):
        queues.setdefault(prompt.dataset, []).append(prompt)
    chosen: list[BenchmarkPrompt] = []
    seen: set[str] = set()
    turns = sorted(queues)
    while turns and len(chosen) < number:
        dataset = turns.pop(0)
        while queues[dataset]:
            prompt = queues[dataset].pop()
            ids = () if prompt.group_id in seen else _ids(prompt, tokenizer, max_tokens, source)
            if ids:
                seen.add(prompt.group_id)
                chosen.append(BenchmarkPrompt(ids, prompt.group_id, dataset))
                turns.append(dataset)
                break
    if not chosen:
        raise ValueError(
            f"none of the {len(prompts)} prompts has a length of 1 to {max_tokens} tokens (documents: at least "
            "that many); raise --prompt-tokens or name other prompts"
        )
    return chosen


def _ids(prompt: Prompt, tokenizer: Any, max_tokens: int, source: random.Random) -> tuple[int, ...]:
    ids = prompt_ids(prompt, tokenizer, generate=True)
    if not prompt.document:
        return tuple(ids) if len(ids) <= max_tokens else ()
    lead = leading_ids(tokenizer)
    width = max_tokens - len(lead)
    if width < 1 or len(ids) < width:
        return ()
    begin = source.randrange(len(ids) - width + 1)
    return (*lead, *ids[begin : begin + width])
