"""The paper's seven datasets as named presets: which hub dataset and split each reads, and how its prompt is built.

``preset:<name>`` reads the hub; ``preset:<name>=<path>`` reads a local copy with the same columns: a file, a folder
as it lies on the hub, or one written by ``save_to_disk``.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ecospec.trace_collection.prompt_datasets import DatasetSource, dataset_records
from ecospec.trace_collection.prompt_files import (
    SAVED_MARKS,
    Records,
    file_records,
    is_prompt_file,
    prompt_files,
)
from ecospec.trace_collection.prompt_layouts import Prompt, prompt_of

#: The 5 worked examples come from here: GSM8K's own training questions, which are never asked.
EXAMPLES_SPLIT = "train"


@dataclasses.dataclass(frozen=True, slots=True)
class Preset:
    """One dataset of the paper.

    Attributes:
        title: Its name in the paper.
        source: Hub dataset, config and split.
        column: Column that holds the prompt.
        rows: Number of rows according to the dataset's card.
        built: How the prompt is built, for the documentation.
        category: Column with a finer label, or None.
        examples: Worked examples put before each question, the first ones of `EXAMPLES_SPLIT`.
        answer: Column of the worked answers, where there are examples.
    """

    title: str
    source: DatasetSource
    column: str
    rows: int
    built: str
    category: str | None = None
    examples: int = 0
    answer: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that is read."""
        return tuple(name for name in (self.column, self.category, self.answer) if name is not None)

    def prompt(self, record: Mapping[str, Any], where: str, name: str, worked: str = "") -> Prompt:
        """Make the prompt of one record.

        Args:
            record: A row of the dataset.
            where: Source and row, for messages.
            name: Name of the preset, which becomes the dataset's.
            worked: Worked examples, as `worked_examples` joins them.

        Returns:
            The prompt; its group is the hash of the question alone, whatever examples stand before it.
        """
        label = record.get(self.category) if self.category else None
        plain = prompt_of({self.column: record.get(self.column), "category": label}, where, name, self.column)
        if not self.examples or plain.messages is None:
            return plain
        asked = f"{worked}{question_line(plain.messages[0][1])}\nAnswer:"
        return dataclasses.replace(plain, messages=(("user", asked),))

    def worked_examples(self, records: Records) -> str:
        """Join the first records as questions with their answers, an empty line after each.

        Raises:
            ValueError: A record lacks question or answer, or there are too few.
        """
        pieces = []
        for where, record in itertools.islice(records, self.examples):
            for column in (self.column, self.answer):
                if not isinstance(record.get(str(column)), str):
                    raise ValueError(f"{where}: {column} must be text, got {record.get(str(column))!r}")
            pieces.append(f"{question_line(record[self.column])}\nAnswer: {record[str(self.answer)].strip()}\n\n")
        if len(pieces) < self.examples:
            raise ValueError(
                f"split {EXAMPLES_SPLIT} of {self.title} holds {len(pieces)} records, but {self.examples} worked "
                "examples are needed; give the whole split"
            )
        return "".join(pieces)


def question_line(question: str) -> str:
    """A question as it stands in worked examples."""
    return f"Question: {question.strip()}"


PRESETS: dict[str, Preset] = {
    "gsm8k": Preset(
        title="GSM8K (5-shot)",
        source=DatasetSource("openai/gsm8k", "test", "main"),
        column="question",
        rows=1319,
        built="one user turn: the first 5 questions and answers of the split `train` (calculator marks `<<…>>` "
        "kept), then `Question: …` and `Answer:`",
        examples=5,
        answer="answer",
    ),
    "humaneval": Preset(
        title="HumanEval",
        source=DatasetSource("openai/openai_humaneval", "test"),
        column="prompt",
        rows=164,
        built="one user turn: signature and docstring, no instruction added",
    ),
    "mmstar": Preset(
        title="MMStar (text)",
        source=DatasetSource("Lin-Chen/MMStar", "val"),
        column="question",
        rows=1500,
        built="one user turn: the question, whose text ends in its options (`Options: A: …, B: …`); the image is "
        "not read",
        category="category",
    ),
    "aime25": Preset(
        title="AIME-25",
        source=DatasetSource("math-ai/aime25", "test"),
        column="problem",
        rows=30,
        built="one user turn: the problem",
    ),
    "math500": Preset(
        title="MATH500",
        source=DatasetSource("HuggingFaceH4/MATH-500", "test"),
        column="problem",
        rows=500,
        built="one user turn: the problem",
        category="subject",
    ),
    "amc": Preset(
        title="AMC22–24",
        source=DatasetSource("AI-MO/aimo-validation-amc", "train"),
        column="problem",
        rows=83,
        built="one user turn: the problem. The dataset covers AMC 12 of 2022 and 2023, reworded to ask for an "
        "integer; 2024 is not in it, so add your own file",
    ),
    "mt_bench": Preset(
        title="MT-Bench",
        source=DatasetSource("HuggingFaceH4/mt_bench_prompts", "train"),
        column="prompt",
        rows=80,
        built="one user turn: the first of the two; the second is counted as not used",
        category="category",
    ),
}


def preset_prompts(text: str) -> Iterator[Prompt]:
    """Open ``<name>`` or ``<name>=<path>`` and return its prompts.

    Raises:
        FileNotFoundError: The path does not exist.
        ValueError: There is no such preset (the message lists all with their sources), or its data is not readable.
    """
    name, given, path = text.partition("=")
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        known = "; ".join(f"{key} ({preset.title}: {preset.source})" for key, preset in PRESETS.items())
        raise ValueError(
            f"no preset {name!r}{f' (did you mean {near[0]}?)' if near else ''}; there are: {known}. "
            "preset:<name>=<path> reads a local copy"
        )
    if given and not path:
        raise ValueError(f"preset:{text} names no path; write preset:{name}=<path> or preset:{name}")
    preset = PRESETS[name]
    reader = _reader(preset, Path(path).expanduser()) if given else _hub_reader(preset)
    worked = preset.worked_examples(reader(EXAMPLES_SPLIT)) if preset.examples else ""
    return (preset.prompt(record, where, name, worked) for where, record in reader(preset.source.split))


def _hub_reader(preset: Preset) -> Callable[[str], Records]:
    return lambda split: dataset_records(dataclasses.replace(preset.source, split=split), preset.columns)


def _reader(preset: Preset, path: Path) -> Callable[[str], Records]:
    """Reader of a local copy, by split."""
    if path.is_dir():
        if not preset.examples and not any((path / name).is_file() for name in ("README.md", *SAVED_MARKS)):
            # A folder without a card has no splits but those that datasets guesses from file names: read all of it.
            return lambda _split: _folder_records(path, preset.columns)
        folder, config = _config_folder(path, preset.source.config)
        return lambda split: dataset_records(DatasetSource(str(folder), split, config), preset.columns)
    if not is_prompt_file(path) or not path.is_file():
        raise FileNotFoundError(
            f"{path} is no prompt file or folder; a local copy of {preset.title} has the columns "
            f"{', '.join(preset.columns)}"
        )
    if preset.examples:
        raise ValueError(
            f"{path} is one file, but {preset.title} also reads the split {EXAMPLES_SPLIT}; give a folder with "
            f"{EXAMPLES_SPLIT}.jsonl and {preset.source.split}.jsonl, or one written by save_to_disk"
        )
    return lambda _split: file_records(path, preset.columns)


def _folder_records(folder: Path, columns: tuple[str, ...]) -> Records:
    files = prompt_files(folder)
    return itertools.chain.from_iterable(file_records(file, columns) for file in files)


def _config_folder(folder: Path, config: str | None) -> tuple[Path, str | None]:
    """Where a config of a local copy lies: in a folder of its name, in the dataset's card, or there is only one."""
    if config is None or any((folder / name).is_file() for name in SAVED_MARKS):
        return folder, None
    if (folder / config).is_dir():
        return folder / config, None
    from datasets import get_dataset_config_names  # noqa: PLC0415 - takes seconds, and few sources need it

    try:
        names = get_dataset_config_names(str(folder))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} is no dataset folder: {' '.join(str(error).split())}") from error
    return folder, config if config in names else None
