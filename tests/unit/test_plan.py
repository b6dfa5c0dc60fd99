"""The batch plan: what is collected, in which batches, and what is left out."""

from __future__ import annotations

import dataclasses
import itertools
import tracemalloc

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ecospec.trace_collection import plan as plan_module
from ecospec.trace_collection.plan import CollectConfig, SkippedPrompt, make_plan
from ecospec.trace_collection.planned import PlannedSequence, SequenceTable
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
        (
            {"temperature": float("inf")},
            "temperature must be a finite number, 0 .greedy. or 0.001 to 1000, got inf",
        ),
        ({"temperature": 1e-9}, "temperature must be a finite number, 0 .greedy. or 0.001 to 1000"),
        ({"temperature": 1e9}, "temperature must be a finite number, 0 .greedy. or 0.001 to 1000"),
        ({"samples_per_prompt": 2**70, "temperature": 1.0}, "samples_per_prompt must be at most 10,000,000"),
        ({"max_new_tokens": 2**31}, "max_new_tokens must be at most 10,000,000"),
        ({"samples_per_prompt": 2}, "samples_per_prompt 2 at temperature 0 repeats one text"),
    ],
)
def test_config_is_validated(changes, message):
    with pytest.raises(ValueError, match=message):
        CollectConfig(**changes)


def test_prompts_that_are_left_out_are_listed(monkeypatch):
    prompts = [
        Prompt("d", "fits", text="w1 w2"),
        Prompt("d", "long", text=" ".join(WORDS[:30])),
        Prompt("e", "no", text=""),
        Prompt("d", "fits", text="w1 w2"),
    ]
    expected = [
        SkippedPrompt(1, "d", "long", "longer than the context", 30),
        SkippedPrompt(2, "e", "no", "empty", 0),
        SkippedPrompt(3, "d", "fits", "duplicate", 2),
    ]
    plan = make_plan(tokenizer(), iter(prompts), CollectConfig(), context=30)
    assert plan.left_out.listed == expected
    assert plan.skipped == {"longer than the context": 1, "empty": 1, "duplicate": 1}
    shorter = make_plan(tokenizer(), prompts, CollectConfig(max_length=20), context=30)
    assert shorter.left_out.listed[0].reason == "longer than max_length"
    monkeypatch.setattr(plan_module, "MAX_LISTED", 1)
    bounded = make_plan(tokenizer(), prompts, CollectConfig(), context=30)
    assert bounded.left_out.listed == expected[:1]
    assert bounded.skipped == plan.skipped


def test_batches_can_be_had_one_by_one():
    plan = make_plan(tokenizer(), documents(), CollectConfig(mode="teacher_forced", max_length=20, batch_size=7))
    batches = [[sequence.sequence_id for sequence in batch] for batch in plan.batches()]
    assert len(batches) == plan.num_batches > 2
    assert sum(map(len, batches)) == plan.num_sequences
    assert [[s.sequence_id for s in plan.batch(number)] for number in range(plan.num_batches)] == batches
    assert [[s.sequence_id for s in batch] for batch in plan.batches(2)] == batches[2:]


def test_a_table_gives_back_what_was_appended_and_holds_little_more_than_the_tokens():
    def sequence(number):
        ids = np.random.default_rng(number).integers(0, 1000, 100, dtype=np.int32)
        return PlannedSequence(
            f"{number:032x}", f"group \u00e9 {number}", "d", 'a "label"', ids, number, 2**62 + number
        )

    tracemalloc.start()
    table = SequenceTable()
    for number in range(2000):
        table.append(sequence(number), prompt=number // 2)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 1.3 * 4 * 200_000 + 2000 * 150
    assert len(table) == 2000
    for number in (0, 1, 999, 1999):
        built, wanted = table[number], sequence(number)
        assert np.array_equal(built.ids, wanted.ids)
        assert dataclasses.replace(built, ids=wanted.ids).__repr__() == wanted.__repr__()
    assert table.lengths.tolist() == [100] * 2000
    assert table.prompts.tolist() == [number // 2 for number in range(2000)]
    assert [identity.hex().zfill(32) for identity in table.identities[:3].tolist()[1:]] == [
        f"{number:032x}" for number in (1, 2)
    ]


def test_modes():
    assert CollectConfig(mode="teacher-forced").mode == "teacher_forced"
    with pytest.raises(ValueError, match="temperature has no meaning in mode replay"):
        CollectConfig(mode="replay", temperature=1.0)
    with pytest.raises(ValueError, match="takes its sequences from a trace store"):
        make_plan(tokenizer(), documents(), CollectConfig(mode="replay", limit=3))
