"""The batch plan: what is collected, in which batches, and what is left out."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ecospec.trace_collection.plan import CollectConfig, SkippedPrompt, make_plan
from ecospec.trace_collection.prompts import Prompt, prompt_ids

WORDS = [f"w{i}" for i in range(100)]


def tokenizer(*, bos=False):
    """One token per word, and on request a leading special token."""
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*WORDS, "<unk>", "<bos>"])}, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 101)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<bos>" if bos else None)


def documents(count=6, words=95):
    rng = np.random.default_rng(0)
    return [
        Prompt("d", f"g{i}", text=" ".join(rng.choice(WORDS, size=words - 15 * i)), document=True)
        for i in range(count)
    ]


def test_windows_of_documents():
    prompts = documents()
    config = CollectConfig(max_prompt_tokens=10, windows_per_document=3, max_new_tokens=5, batch_size=4)
    plan = make_plan(tokenizer(bos=True), prompts, config)
    of_group: dict[str, list[list[int]]] = {}
    for batch in plan.batches():
        for sequence in batch:
            assert sequence.ids[0] == 101
            assert sequence.seed == 0
            of_group.setdefault(sequence.group_id, []).append(sequence.ids[1:].tolist())
    for prompt in prompts:
        ids = prompt_ids(prompt, tokenizer(), generate=True)
        grid = [ids[start : start + 10] for start in range(0, max(len(ids) - 9, 1), 10)]
        windows = of_group[prompt.group_id]
        assert grid[0] in windows
        assert all(window in grid for window in windows)
        assert len(windows) == min(3, len(grid))
    other = make_plan(tokenizer(bos=True), prompts, dataclasses.replace(config, seed=1))
    assert other.digest() != plan.digest()
    assert make_plan(tokenizer(bos=True), prompts, config).digest() == plan.digest()


def test_plan_is_sorted_into_batches_without_duplicates():
    prompts = documents()
    config = CollectConfig(mode="teacher_forced", max_length=20, batch_size=7)
    plan = make_plan(tokenizer(), [*prompts, prompts[0]], config)
    sizes = [[sequence.ids.size for sequence in batch] for batch in plan.batches()]
    assert sum(map(sum, sizes)) == sum(95 - 15 * i for i in range(6))
    assert all(size <= 20 for batch in sizes for size in batch)
    ranges = sorted((min(batch), max(batch)) for batch in sizes)
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(ranges))
    assert plan.skipped == {"duplicate": 5}
    limited = make_plan(tokenizer(), prompts, dataclasses.replace(config, limit=3))
    assert limited.num_sequences == 3


def test_prompts_that_do_not_fit_are_counted():
    prompts = [
        Prompt("d", "long", text=" ".join(WORDS[:30])),
        Prompt("d", "short", text="w1"),
        Prompt("d", "no", text=""),
    ]
    plan = make_plan(tokenizer(), prompts, CollectConfig(max_new_tokens=50), context=30)
    assert plan.skipped == {"longer than the context": 1, "empty": 1}
    assert [sequence.max_new for batch in plan.batches() for sequence in batch] == [29]
    with pytest.raises(ValueError, match=r"nothing to collect \(1 empty\); raise max_length or give other prompts"):
        make_plan(tokenizer(), prompts[2:], CollectConfig())
    with pytest.raises(ValueError, match=r"nothing to collect \(no prompts\)"):
        make_plan(tokenizer(), [], CollectConfig())


def test_later_turns_are_counted():
    prompts = [Prompt("d", "g", messages=(("user", "w1"),), unused_turns=2), Prompt("d", "h", text="w2")]
    plan = make_plan(tokenizer(), prompts, CollectConfig())
    assert plan.num_sequences == 2
    assert plan.skipped == {"later turns of a conversation": 2}
    assert plan.left_out.listed == [SkippedPrompt(0, "d", "g", "later turns of a conversation", 0)] * 2


def test_samples_have_their_own_seeds():
    config = CollectConfig(temperature=1.0, samples_per_prompt=4)
    plan = make_plan(tokenizer(), [Prompt("d", "g", text="w1 w2")], config)
    (batch,) = plan.batches()
    assert len({sequence.seed for sequence in batch}) == len({sequence.sequence_id for sequence in batch}) == 4
    assert {sequence.group_id for sequence in batch} == {"g"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "watch"}, "mode must be one of generate, teacher_forced, replay, got 'watch'"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"windows_per_document": 0}, "windows_per_document must be at least 1"),
        ({"max_length": 1}, "max_length must be at least 2"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"temperature": float("inf")}, "temperature must be a finite number of at least 0, got inf"),
        ({"samples_per_prompt": 2}, "samples_per_prompt 2 at temperature 0 repeats one text"),
    ],
)
def test_config_is_validated(changes, message):
    with pytest.raises(ValueError, match=message):
        CollectConfig(**changes)
