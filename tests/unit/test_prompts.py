"""Prompt sources and their layouts."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ecospec.trace_collection import stdlib_corpus
from ecospec.trace_collection.groups_manifest import group_id_of
from ecospec.trace_collection.prompts import Prompt, datasets_of, leading_ids, load_prompts, prompt_ids
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
