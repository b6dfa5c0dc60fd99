"""Presets of the paper's datasets, on hand-written records with the columns that the datasets' cards list."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, disable_progress_bars

from ecospec.cli.main import build_parser
from ecospec.trace_collection.prompt_files import FILE_ENDINGS
from ecospec.trace_collection.prompt_layouts import LAYOUTS
from ecospec.trace_collection.prompt_presets import PRESETS
from ecospec.trace_collection.prompts import load_prompts

disable_progress_bars()
DOCS = Path(__file__).parents[2] / "docs" / "prompts.md"


def gsm8k(number):
    return {
        "question": f"What is {number} + 1?",
        "answer": f"It is <<{number}+1={number + 1}>>.\n#### {number + 1}",
    }


RECORDS: dict[str, dict[str, Any]] = {
    "humaneval": {
        "task_id": "HumanEval/0",
        "prompt": 'def add(a, b):\n    """Return the sum."""\n',
        "canonical_solution": "    return a + b\n",
        "test": "def check(candidate): ...",
        "entry_point": "add",
    },
    "mmstar": {
        "index": 0,
        "question": "Where is the cat?\nOptions: A: on the mat, B: under it, C: outside, D: nowhere",
        "image": {"bytes": b"\xff\xd8", "path": None},
        "answer": "A",
        "category": "coarse perception",
        "l2_category": "image scene",
        "meta_info": {"source": "x", "split": "val", "image_path": "0.jpg"},
    },
    "aime25": {"problem": "Find $n$.", "answer": "70", "id": "0"},
    "math500": {
        "problem": "Convert $(0,3)$ to polar coordinates.",
        "solution": "We have ...",
        "answer": "x",
        "subject": "Precalculus",
        "level": 2,
        "unique_id": "test/precalculus/807.json",
    },
    "amc": {"id": 0, "problem": "How many?", "answer": 142.0, "url": "https://example.org"},
    "mt_bench": {
        "prompt": ["Write a story.", "Shorten it."],
        "prompt_id": 15896981,
        "category": "writing",
        "reference": [],
    },
}
ASKED = {
    "humaneval": 'def add(a, b):\n    """Return the sum."""\n',
    "mmstar": "Where is the cat?\nOptions: A: on the mat, B: under it, C: outside, D: nowhere",
    "aime25": "Find $n$.",
    "math500": "Convert $(0,3)$ to polar coordinates.",
    "amc": "How many?",
    "mt_bench": "Write a story.",
}


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"gsm8k"}))
def test_presets_read_local_copies_of_every_kind(tmp_path, name):
    record = RECORDS[name]
    split = PRESETS[name].source.split
    pq.write_table(pa.Table.from_pylist([record]), tmp_path / "copy.parquet")
    Dataset.from_list([record], split=split).save_to_disk(tmp_path / "saved")
    for folder in ("bare", "card"):
        (tmp_path / folder).mkdir()
        pq.write_table(pa.Table.from_pylist([record]), tmp_path / folder / f"{split}-00000-of-00001.parquet")
    files = f"  data_files:\n  - split: {split}\n    path: {split}-*"
    (tmp_path / "card" / "README.md").write_text(f"---\nconfigs:\n- config_name: any\n{files}\n---\n")
    for source in ("copy.parquet", "saved", "bare", "card"):
        (prompt,) = load_prompts(f"preset:{name}={tmp_path / source}")
        assert prompt.dataset == name
        assert prompt.messages == (("user", ASKED[name]),)
        assert prompt.category == str(record.get("category") or record.get("subject") or "")
        assert prompt.unused_turns == (1 if name == "mt_bench" else 0)
        asked = json.dumps([["user", ASKED[name]]])
        assert prompt.group_id == hashlib.sha256(asked.encode()).hexdigest()[:16]


def five_shot(question):
    worked = "".join(
        f"Question: What is {i} + 1?\nAnswer: It is <<{i}+1={i + 1}>>.\n#### {i + 1}\n\n" for i in range(5)
    )
    return f"{worked}Question: {question}\nAnswer:"


def test_gsm8k_shows_the_first_five_training_questions(tmp_path):
    train, test = [gsm8k(i) for i in range(8)], [gsm8k(i) for i in (100, 101)]
    DatasetDict(train=Dataset.from_list(train), test=Dataset.from_list(test)).save_to_disk(tmp_path / "saved")
    for folder in ("main", "socratic"):  # as the hub's folder holds two configs
        (tmp_path / "hub" / folder).mkdir(parents=True)
        rows = {"train": train, "test": test} if folder == "main" else {"train": test, "test": train}
        for split, records in rows.items():
            pq.write_table(
                pa.Table.from_pylist(records), tmp_path / "hub" / folder / f"{split}-00000-of-00001.parquet"
            )
    (tmp_path / "plain").mkdir()
    for split, records in (("train", train), ("test", test)):
        (tmp_path / "plain" / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    question = tmp_path / "question.jsonl"
    question.write_text(json.dumps({"question": "What is 100 + 1?"}) + "\n")
    for source in ("saved", "hub", "plain"):
        prompts = load_prompts(f"preset:gsm8k={tmp_path / source}")
        assert [p.messages for p in prompts] == [
            (("user", five_shot("What is 100 + 1?")),),
            (("user", five_shot("What is 101 + 1?")),),
        ]
        assert (
            prompts[0].group_id == load_prompts(str(question))[0].group_id
        )  # the question's, with or without shots


def test_gsm8k_finds_its_config_in_the_card(tmp_path):
    files = {"a.jsonl": [gsm8k(i) for i in range(5)], "b.jsonl": [gsm8k(100)]}
    for name, records in files.items():
        (tmp_path / name).write_text("".join(json.dumps(r) + "\n" for r in records))
    card = "configs:\n" + "".join(
        f"- config_name: {config}\n  data_files:\n  - split: train\n    path: {train}\n"
        f"  - split: test\n    path: {test}\n"
        for config, train, test in (("main", "a.jsonl", "b.jsonl"), ("socratic", "b.jsonl", "a.jsonl"))
    )
    (tmp_path / "README.md").write_text(f"---\n{card}---\n")
    (prompt,) = load_prompts(f"preset:gsm8k={tmp_path}")
    assert prompt.messages == (("user", five_shot("What is 100 + 1?")),)


def test_gsm8k_errors(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(gsm8k(i)) + "\n" for i in range(4)))
    with pytest.raises(ValueError, match=r"split train of GSM8K \(5-shot\) holds 4 records, but 5 worked examples"):
        load_prompts(f"preset:gsm8k={tmp_path}")
    with pytest.raises(
        ValueError, match=r"test\.jsonl is one file, but GSM8K .* also reads the split train; give a fo"
    ):
        load_prompts(f"preset:gsm8k={tmp_path}/test.jsonl")
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "q", "solution": "s"}) + "\n")
    with pytest.raises(ValueError, match=r"row 0: answer must be text, got None"):
        load_prompts(f"preset:gsm8k={tmp_path}")


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (
            "preset:gsm9k",
            ValueError,
            r"no preset 'gsm9k' \(did you mean gsm8k\?\); there are: gsm8k \(GSM8K .*mt_bench",
        ),
        (
            "preset:list",
            ValueError,
            r"no preset 'list'; .*humaneval \(HumanEval: hf:openai/openai_humaneval:test\)",
        ),
        ("preset:amc=", ValueError, r"names no path; write preset:amc=<path> or preset:amc"),
        (
            "preset:amc=no.jsonl",
            FileNotFoundError,
            r"no\.jsonl is no prompt file or folder; .* has the columns problem",
        ),
    ],
)
def test_preset_errors(source, error, message):
    with pytest.raises(error, match=message):
        load_prompts(source)


def test_a_copy_without_the_column(tmp_path):
    (tmp_path / "amc.jsonl").write_text('{"question": "why"}\n')
    with pytest.raises(
        ValueError, match=r"amc\.jsonl:1: problem is absent or empty; fill it, or remove the record"
    ):
        load_prompts(f"preset:amc={tmp_path}/amc.jsonl")


def test_the_papers_seven_datasets_are_there():
    titles = ["GSM8K (5-shot)", "HumanEval", "MMStar (text)", "AIME-25", "MATH500", "AMC22–24", "MT-Bench"]
    assert [preset.title for preset in PRESETS.values()] == titles


def test_the_documentation_lists_every_preset_and_layout():
    page = DOCS.read_text(encoding="utf-8")
    for name, preset in PRESETS.items():
        source = preset.source
        row = (
            f"| `preset:{name}` | {preset.title} | `{source.name}` | {source.config or '–'} | `{source.split}` | "
            f"{', '.join(f'`{column}`' for column in preset.columns)} | {preset.rows:,} | {preset.built} |"
        )
        assert row in page, f"docs/prompts.md lacks this row:\n{row}"
    assert len(re.findall(r"^\| `preset:\w+`", page, re.MULTILINE)) == len(PRESETS)
    assert ", ".join(f"`{layout}`" for layout in LAYOUTS) in page
    assert all(f"`{ending}`" in page for ending in FILE_ENDINGS)


def test_the_help_names_every_preset():
    text = " ".join(build_parser("collect-traces").format_help().split())
    assert f"preset:<name>[=<local copy>] of the paper ({', '.join(PRESETS)})" in text
