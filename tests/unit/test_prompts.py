"""Prompt sources, their layouts, and the batch plan made from them."""

from __future__ import annotations

import dataclasses
import itertools
import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ecospec.trace_collection import stdlib_corpus
from ecospec.trace_collection.plan import CollectConfig, make_plan
from ecospec.trace_collection.prompts import Prompt, datasets_of, leading_ids, load_prompts, prompt_ids
from ecospec.trace_collection.stdlib_corpus import Document, build_manifest, group_id_of

WORDS = [f"w{i}" for i in range(100)]


def tokenizer(*, bos=False, chat=False):
    vocab = {word: i for i, word in enumerate(WORDS)} | {"<unk>": 100, "<bos>": 101, "user": 102}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 101)])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<bos>" if bos else None)
    if chat:
        made.chat_template = (
            "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
            "{% if add_generation_prompt %}w99{% endif %}"
        )
    return made


def jsonl(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + "\n")
    return str(path)


def test_layouts(tmp_path):
    source = jsonl(
        tmp_path / "mixed.jsonl",
        {"turns": ["first", "second"], "category": "writing"},
        {"question": "why", "answer": "because"},
        {"problem": "prove", "subject": "algebra"},
        {"prompt": "def f():", "dataset": "humaneval"},
        {"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]},
        {"text": "a document", "group_id": "file1"},
    )
    prompts = load_prompts(source)
    assert [prompt.messages for prompt in prompts[:4]] == [
        (("user", "first"),),
        (("user", "why"),),
        (("user", "prove"),),
        (("user", "def f():"),),
    ]
    assert prompts[4].messages == (("system", "be"), ("user", "hi"))
    assert (prompts[5].text, prompts[5].document, prompts[5].group_id) == ("a document", True, "file1")
    assert [prompt.category for prompt in prompts[:3]] == ["writing", "", "algebra"]
    assert datasets_of(prompts) == ["humaneval", "mixed"]
    assert len({prompt.group_id for prompt in prompts}) == 6
    again = jsonl(tmp_path / "again.jsonl", {"question": "why", "answer": "who knows"})
    assert load_prompts(f"{again}, {source}")[0].group_id == prompts[1].group_id  # by prompt, not by file


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"bad.jsonl:1: not JSON"),
        ("[1]", "bad.jsonl:1: expected a JSON object, got list"),
        ('{"answer": "x"}', "none of the keys messages, turns, question, problem, prompt, text"),
        ('{"question": ""}', "none of the keys"),
        ('{"question": 5}', "question must be text, got int"),
        ('{"messages": [{"role": "user"}]}', "messages must be a list of objects"),
        ("", "holds no prompts"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        load_prompts(str(path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"\x93NUMPY\xff\xfe", r"bad.jsonl:2: not UTF-8 text .*; write one JSON object per line"),
        (b'{"text": "\\ud800"}', r"bad.jsonl:2: holds a lone surrogate such as \\ud800; remove it"),
    ],
)
def test_lines_that_are_no_text_are_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line)
    with pytest.raises(ValueError, match=message):
        load_prompts(str(path))


def test_bad_sources(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no\.jsonl does not exist"):
        load_prompts(str(tmp_path / "no.jsonl"))
    with pytest.raises(ValueError, match=r"no.csv is no prompt source; give stdlib:<split> or a file that ends in"):
        load_prompts("no.csv")
    with pytest.raises(ValueError, match="holds an empty source"):
        load_prompts("a.jsonl,")
    with pytest.raises(FileNotFoundError, match=r"groups\.json does not exist; name the manifest"):
        load_prompts("stdlib:report", groups=tmp_path / "groups.json")


def test_stdlib_prompts(tmp_path, monkeypatch):
    """A made-up library of 60 files, each with docstrings, and 60 topics."""
    library = [
        Document(dataset, group_id_of(f"{name}{i}"), f"{name}{i}", f"{dataset} {i} " * 50)
        for i in range(60)
        for dataset, name in (("stdlib_code", "file"), ("stdlib_docs", "file"), ("stdlib_topics", "topic"))
    ]
    monkeypatch.setattr(stdlib_corpus, "find_documents", lambda: library)
    build_manifest(library, "3.11").save(tmp_path / "groups.json")
    prompts = load_prompts("stdlib:tuning", groups=tmp_path / "groups.json")
    assert datasets_of(prompts) == ["stdlib_code", "stdlib_docs", "stdlib_topics"]
    assert all(prompt.document for prompt in prompts)
    topics = load_prompts("stdlib:tuning/stdlib_topics", groups=tmp_path / "groups.json")
    assert [p for p in prompts if p.dataset == "stdlib_topics"] == topics
    with pytest.raises(ValueError, match="unknown split 'nothing'"):
        load_prompts("stdlib:nothing", groups=tmp_path / "groups.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": ""}, r"Prompt\.dataset must be a non-empty string"),
        ({"group_id": 3}, r"Prompt\.group_id must be a non-empty string"),
        ({"category": None}, r"Prompt\.category must be a string"),
        ({"text": None}, "exactly one of text and messages"),
        ({"messages": (("user", "x"),)}, "exactly one of text and messages"),
        ({"text": None, "messages": (("user", "x"),), "document": True}, "a document needs text"),
    ],
)
def test_prompts_are_validated(changes, message):
    with pytest.raises(ValueError, match=message):
        Prompt(**{"dataset": "d", "group_id": "g", "text": "x"} | changes)


def test_token_ids_of_prompts():
    chat = Prompt("d", "g", messages=(("user", "w1 w2"),))
    plain = Prompt("d", "g", text="w1 w2")
    document = dataclasses.replace(plain, document=True)
    assert prompt_ids(chat, tokenizer(), generate=True) == [1, 2]
    assert prompt_ids(chat, tokenizer(bos=True), generate=True) == [101, 1, 2]
    assert prompt_ids(chat, tokenizer(bos=True, chat=True), generate=True) == [102, 1, 2, 99]
    assert prompt_ids(chat, tokenizer(chat=True), generate=False) == [102, 1, 2]
    assert prompt_ids(plain, tokenizer(bos=True), generate=True) == [101, 1, 2]
    assert prompt_ids(document, tokenizer(bos=True), generate=True) == [1, 2]
    assert leading_ids(tokenizer(bos=True)) == [101]
    assert leading_ids(tokenizer()) == []


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
    for batch in plan.batches:
        for sequence in batch:
            assert sequence.ids[0] == 101
            assert sequence.seed == 0
            of_group.setdefault(sequence.prompt.group_id, []).append(sequence.ids[1:].tolist())
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
    sizes = [[sequence.ids.size for sequence in batch] for batch in plan.batches]
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
    assert [sequence.max_new for batch in plan.batches for sequence in batch] == [29]
    with pytest.raises(ValueError, match=r"nothing to collect \(1 empty\); raise max_length or give other prompts"):
        make_plan(tokenizer(), prompts[2:], CollectConfig())
    with pytest.raises(ValueError, match=r"nothing to collect \(no prompts\)"):
        make_plan(tokenizer(), [], CollectConfig())


def test_samples_have_their_own_seeds():
    config = CollectConfig(temperature=1.0, samples_per_prompt=4)
    plan = make_plan(tokenizer(), [Prompt("d", "g", text="w1 w2")], config)
    (batch,) = plan.batches
    assert len({sequence.seed for sequence in batch}) == len({sequence.sequence_id for sequence in batch}) == 4
    assert {sequence.prompt.group_id for sequence in batch} == {"g"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "watch"}, "mode must be one of generate, teacher_forced, got 'watch'"),
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
