"""Prompt sources and their layouts."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ecospec.trace_collection import stdlib_corpus
from ecospec.trace_collection.groups_manifest import group_id_of
from ecospec.trace_collection.prompts import (
    Prompt,
    datasets_of,
    iter_prompts,
    leading_ids,
    load_prompts,
    prompt_ids,
)
from ecospec.trace_collection.stdlib_corpus import Document, build_manifest

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


def test_a_list_is_a_conversation_or_a_chat(tmp_path):
    source = jsonl(
        tmp_path / "lists.jsonl",
        {"turns": ["first", "second", "third"]},
        {"prompt": ["first", "other"]},
        {"prompt": [{"role": "user", "content": "first"}, {"role": "assistant", "content": "answer"}]},
    )
    prompts = load_prompts(source)
    assert [prompt.messages for prompt in prompts[:2]] == [(("user", "first"),)] * 2
    assert [prompt.unused_turns for prompt in prompts] == [2, 1, 0]
    assert prompts[2].messages == (("user", "first"), ("assistant", "answer"))
    assert len({prompt.group_id for prompt in prompts}) == 1  # one question, whatever follows it


def test_column_names_another_key(tmp_path):
    source = jsonl(
        tmp_path / "a.jsonl", {"question": "why", "instruction": "say why", "text": "t"}, {"instruction": 3}
    )
    first, *_ = load_prompts(f"{jsonl(tmp_path / 'b.jsonl', {'instruction': 'do', 'question': 'q'})}#instruction")
    assert first.messages == (("user", "do"),)
    with pytest.raises(ValueError, match=r"a\.jsonl:2: instruction must be text, got int"):
        load_prompts(f"{source}#instruction")
    with pytest.raises(ValueError, match=r"a\.jsonl:1: nothing is absent or empty; fill it, or remove the record"):
        load_prompts(f"{source}#nothing")
    with pytest.raises(ValueError, match="names no column after #"):
        load_prompts(f"{source}#")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"answer": "x"}, "none of the keys messages, turns, question, problem, prompt, text is there and filled"),
        ({"question": ""}, "none of the keys"),
        ({"question": 5}, "question must be text, got int"),
        ({"question": " \n"}, "question holds white space only; fill it or remove the record"),
        ({"turns": ["", "second"]}, "turns holds white space only"),
        ({"turns": [1]}, "turns must be text, got int"),
        ({"text": ["a"]}, "text must be text, got list"),
        ({"messages": [{"role": "user"}]}, "messages must be a list of objects with the strings role and content"),
        ({"messages": "hello"}, "messages must be a list of objects"),
        ({"prompt": [{"role": "user", "content": None}]}, "prompt must be a list of objects with the strings"),
    ],
)
def test_records_without_a_prompt_are_named(tmp_path, record, message):
    source = jsonl(tmp_path / "bad.jsonl", {"question": "fine"}, record)
    with pytest.raises(ValueError, match=rf"bad\.jsonl:2: .*{message}"):
        load_prompts(source)


def test_bad_sources(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no\.jsonl does not exist"):
        load_prompts(str(tmp_path / "no.jsonl"))
    with pytest.raises(
        ValueError, match=r"no.csv is no prompt source; give a file that ends in .jsonl, .*preset:<name>"
    ):
        load_prompts("no.csv")
    with pytest.raises(ValueError, match="holds an empty source"):
        load_prompts("a.jsonl,")
    with pytest.raises(FileNotFoundError, match=r"groups\.json does not exist; name the manifest"):
        load_prompts("stdlib:report", groups=tmp_path / "groups.json")


def test_every_source_is_opened_before_the_first_prompt(tmp_path):
    source = jsonl(tmp_path / "good.jsonl", {"question": "why"})
    with pytest.raises(FileNotFoundError, match=r"no\.jsonl does not exist"):
        iter_prompts(f"{source},{tmp_path}/no.jsonl")


def test_records_are_read_one_at_a_time(tmp_path):
    prompts = iter_prompts(jsonl(tmp_path / "long.jsonl", {"question": "why"}, {"question": 5}))
    assert next(prompts).messages == (("user", "why"),)
    with pytest.raises(ValueError, match=r"long\.jsonl:2: question must be text"):
        next(prompts)


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
        ({"unused_turns": -1}, r"Prompt\.unused_turns must be at least 0, got -1"),
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


def test_the_target_writes_the_last_answer_itself():
    """Training chats end in an answer: a target that generates must not be asked to follow it."""
    chat = Prompt("d", "g", messages=(("user", "w1"), ("assistant", "w2"), ("user", "w3"), ("assistant", "w4")))
    assert prompt_ids(chat, tokenizer(), generate=True) == [1, 2, 3]
    assert prompt_ids(chat, tokenizer(), generate=False) == [1, 2, 3, 4]
    only = Prompt("d", "g", messages=(("assistant", "w1"),))
    assert prompt_ids(only, tokenizer(), generate=True) == []


def test_group_ids_of_records(tmp_path):
    """The number 0 is a group; NaN, pandas' way to write none, and null are not."""
    records = [{"prompt": "a", "group_id": value} for value in (0, 0, 1.5, float("nan"), None, "")]
    found = [prompt.group_id for prompt in load_prompts(jsonl(tmp_path / "a.jsonl", *records))]
    assert found[:3] == ["0", "0", "1.5"]
    assert len(found[3]) == 16
    assert found[3:] == found[3:4] * 3
    for name in ("group_id", "dataset"):
        source = jsonl(tmp_path / "b.jsonl", {"prompt": "a", name: {"id": 1}})
        with pytest.raises(ValueError, match=rf"b\.jsonl:1: {name} must be text or a number, got dict"):
            load_prompts(source)


def test_chats_that_the_template_refuses():
    made = tokenizer(chat=True)
    made.chat_template = "{{ raise_exception('roles must alternate') }}"
    chat = Prompt("mixed", "g7", messages=(("system", "w1"), ("user", "w2")))
    message = (
        r"dataset mixed, group g7: .*template takes no chat of the roles system, user \(roles must alternate\)"
    )
    with pytest.raises(ValueError, match=message):
        prompt_ids(chat, made, generate=True)
