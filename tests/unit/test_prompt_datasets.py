"""Prompts from `datasets`: local folders, saved datasets, and a hub that does not answer."""

from __future__ import annotations

import gzip
import json

import pytest
from datasets import Dataset, DatasetDict, disable_progress_bars
from huggingface_hub import HfApi, constants

from ecospec.cli.main import main
from ecospec.trace_collection.prompt_datasets import DatasetSource
from ecospec.trace_collection.prompts import iter_prompts, load_prompts

disable_progress_bars()
RECORDS = [{"question": f"why {i}", "answer": f"because {i}", "id": i} for i in range(3)]
QUESTIONS = [(("user", f"why {i}"),) for i in range(3)]


@pytest.fixture
def folder(tmp_path):
    """A folder with a file per split, as it lies on the hub."""
    for split in ("train", "test"):
        (tmp_path / "maths").mkdir(exist_ok=True)
        (tmp_path / "maths" / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in RECORDS))
    return tmp_path / "maths"


def test_a_folder_is_read_by_split(folder):
    prompts = load_prompts(f"hf:{folder}:test")
    assert [prompt.messages for prompt in prompts] == QUESTIONS
    assert {prompt.dataset for prompt in prompts} == {"maths"}
    assert prompts == [*load_prompts(f"hf:{folder}:train")]  # the same records: a group is its question
    answers = load_prompts(f"hf:{folder}:test#answer")
    assert answers[0].messages == (("user", "because 0"),)


def test_a_folder_with_configs(folder):
    card = """configs:
- config_name: main
  data_files:
  - split: test
    path: test.jsonl
- config_name: other
  data_files:
  - split: test
    path: train.jsonl"""
    (folder / "README.md").write_text(f"---\n{card}\n---\n")
    assert [p.messages for p in load_prompts(f"hf:{folder}@main:test")] == QUESTIONS
    with pytest.raises(
        ValueError, match=r"hf:.*@third:test cannot be opened: .*'main', 'other'.*; check folder, conf"
    ):
        load_prompts(f"hf:{folder}@third:test")


def test_saved_datasets(tmp_path):
    rows = Dataset.from_list([*RECORDS])
    rows.save_to_disk(tmp_path / "one")
    DatasetDict(train=rows, test=rows.select([1])).save_to_disk(tmp_path / "splits")
    assert [p.messages for p in load_prompts(f"hf:{tmp_path}/one:train")] == QUESTIONS
    assert [p.messages for p in load_prompts(f"hf:{tmp_path}/splits:test")] == QUESTIONS[1:2]
    with pytest.raises(ValueError, match=r"no split 'validation'; available: train, test"):
        load_prompts(f"hf:{tmp_path}/splits:validation")
    with pytest.raises(ValueError, match=r"has no configs; leave out @main"):
        load_prompts(f"hf:{tmp_path}/one@main:train")
    (tmp_path / "one" / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"hf:.*one:train cannot be opened: .*; save it again"):
        load_prompts(f"hf:{tmp_path}/one:train")


def test_saved_datasets_of_a_named_split(tmp_path):
    Dataset.from_list(RECORDS, split="test").save_to_disk(tmp_path / "one")
    assert len(load_prompts(f"hf:{tmp_path}/one:test")) == 3
    with pytest.raises(ValueError, match="no split 'train'; available: test"):
        load_prompts(f"hf:{tmp_path}/one:train")


def test_errors_of_folders(folder, tmp_path):
    with pytest.raises(ValueError, match=r"hf:.*:dev cannot be opened: Bad split: dev. .*'test'.*; check folder"):
        load_prompts(f"hf:{folder}:dev")
    with pytest.raises(
        FileNotFoundError, match=r"nothing is no folder; hf:.*nothing:test needs an existing folder"
    ):
        load_prompts(f"hf:{tmp_path}/nothing:test")
    Dataset.from_list([{"image": "x", "label": "y"}]).save_to_disk(tmp_path / "pictures")
    with pytest.raises(ValueError, match=r"none of the columns .* with #column: image, label"):
        load_prompts(f"hf:{tmp_path}/pictures:train")
    (folder / "test.jsonl").write_text('{"question": "why"}\n{"quest')
    with pytest.raises(ValueError, match=r"hf:.*maths:test(: cannot be read after 0 rows \(| cannot be opened: )"):
        load_prompts(f"hf:{folder}:test")


def test_broken_records_in_the_middle_of_a_stream(folder):
    (folder / "test.jsonl").write_text('{"question": "why"}\n{"question": "how"}\n{"question": ""}\n')
    prompts = iter_prompts(f"hf:{folder}:test")
    assert [next(prompts).messages, next(prompts).messages] == [(("user", "why"),), (("user", "how"),)]
    with pytest.raises(ValueError, match=r"hf:.*maths:test: row 2: none of the keys"):
        next(prompts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("openai/gsm8k@main:test", DatasetSource("openai/gsm8k", "test", "main")),
        ("openai/openai_humaneval:test", DatasetSource("openai/openai_humaneval", "test")),
        ("/data/a:b/c:train", DatasetSource("/data/a:b/c", "train")),
    ],
)
def test_names_are_parsed(text, expected):
    assert DatasetSource.parse(text) == expected
    assert str(expected) == f"hf:{text}"


@pytest.mark.parametrize("text", ["", "openai/gsm8k", ":test", "openai/gsm8k:", "a@:test", "/data/a:b/c"])
def test_incomplete_names(text):
    with pytest.raises(ValueError, match=r"is incomplete; write hf:<name or folder>\[@config\]:<split>\[#column\]"):
        load_prompts(f"hf:{text}")


def test_an_unknown_name_is_one_line_and_status_2(monkeypatch, tmp_path, capsys):
    """The hub is asked once and briefly: loading would retry for half a minute."""
    asked = []

    def no_answer(self, name, timeout):
        asked.append((name, timeout))
        raise ConnectionRefusedError("no route\nto host")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(HfApi, "dataset_info", no_answer)
    options = ["--target", "checkpoints/target", "--out", str(tmp_path / "out"), "--prompts"]
    with pytest.raises(SystemExit) as stopped:
        main(["collect-traces", *options, "hf:nobody/nothing:test"])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert (
        "hf:nobody/nothing:test: the hub does not give nobody/nothing (no route to host); check the name" in error
    )
    assert "set HF_HUB_OFFLINE=1 to use what is cached, or give a local folder" in error
    assert asked == [("nobody/nothing", 10.0)]


def test_offline_the_cache_is_tried_and_missed(monkeypatch):
    import datasets

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match=r"hf:nobody/nothing:test cannot be opened: .*; check name, config and split"
    ):
        load_prompts("hf:nobody/nothing:test")


def test_a_truncated_file_in_a_folder(tmp_path):
    whole = gzip.compress(b"".join(b'{"question": "why %d"}\n' % number for number in range(1000)))
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"hf:.*:train cannot be opened: Compressed file ended before"):
        load_prompts(f"hf:{tmp_path}:train")
