"""Records of `datasets` datasets: on the hub, in a local folder, or saved with ``save_to_disk``.

Hub datasets and folders are streamed, saved ones are memory-mapped: memory does not grow with their size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from ecospec.trace_collection.prompt_files import SAVED_MARKS, Records, wanted_columns

#: Seconds the hub may take to answer whether a dataset exists, before anything is loaded.
_HUB_TIMEOUT = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class DatasetSource:
    """A split of a dataset.

    Attributes:
        name: Name on the hub, or path of a folder.
        split: Name of the split.
        config: Name of the configuration ("subset"), where there are several.
    """

    name: str
    split: str
    config: str | None = None

    @classmethod
    def parse(cls, text: str) -> DatasetSource:
        """Read ``<name>[@config]:<split>``.

        >>> DatasetSource.parse("openai/gsm8k@main:test")
        DatasetSource(name='openai/gsm8k', split='test', config='main')

        Raises:
            ValueError: A part is missing.
        """
        place, _, split = text.rpartition(":")
        name, _, config = place.partition("@")
        if not name or not split or "/" in split or place.endswith("@"):
            raise ValueError(
                f"hf:{text} is incomplete; write hf:<name or folder>[@config]:<split>[#column], "
                "for example hf:openai/gsm8k@main:test"
            )
        return cls(name, split, config or None)

    def __str__(self) -> str:
        return f"hf:{self.name}{f'@{self.config}' if self.config else ''}:{self.split}"

    @property
    def label(self) -> str:
        """Last part of the name."""
        return Path(self.name).name


def dataset_records(source: DatasetSource, columns: Collection[str]) -> Records:
    """Open a dataset at once and return its records.

    Args:
        source: What to read.
        columns: Keys that are wanted; no other column is decoded.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: The dataset, configuration or split is not there or not readable, or the hub cannot be reached;
            the message says which and what to do.
    """
    dataset = _open(source)
    names = dataset.column_names
    if names is not None:  # a stream may not know its columns before the first record
        dataset = dataset.select_columns(wanted_columns(names, columns, str(source)))
    return _rows(dataset, str(source))


def _rows(dataset: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    row = -1
    try:
        for row, record in enumerate(dataset):
            yield f"{where}: row {row}", record
    except Exception as error:  # datasets lets through what each reader raises: EOFError, pandas', pyarrow's
        raise ValueError(f"{where}: cannot be read after {row + 1} rows ({_one_line(error)})") from error
    if row < 0:
        raise ValueError(f"{where} holds no prompts")


def _open(source: DatasetSource) -> Any:
    folder = Path(source.name).expanduser()
    local = folder.exists() or source.name.startswith((".", "/", "~"))
    if local and not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder; {source} needs an existing folder or a name on the hub")
    if any((folder / name).is_file() for name in SAVED_MARKS):
        return _saved(folder, source)
    if not local:
        _require_on_hub(source)
    from datasets import load_dataset  # noqa: PLC0415 - takes seconds, and few sources need it

    try:
        return load_dataset(
            str(folder) if local else source.name, source.config, split=source.split, streaming=True
        )
    except Exception as error:  # datasets lets through what each reader raises: EOFError, pandas', pyarrow's
        advice = (
            "check folder, config and split" if local else "check name, config and split, or give a local folder"
        )
        raise ValueError(f"{source} cannot be opened: {_one_line(error)}; {advice}") from error


def _saved(folder: Path, source: DatasetSource) -> Any:
    """A dataset or dictionary of splits written by ``save_to_disk``."""
    from datasets import load_from_disk  # noqa: PLC0415 - takes seconds, and few sources need it

    try:
        dataset = load_from_disk(str(folder))
    except Exception as error:  # datasets lets through what each reader raises: EOFError, pandas', pyarrow's
        raise ValueError(f"{source} cannot be opened: {_one_line(error)}; save it again") from error
    if source.config is not None:
        raise ValueError(f"{source}: a folder written by save_to_disk has no configs; leave out @{source.config}")
    if isinstance(dataset, dict):
        if source.split not in dataset:
            raise ValueError(f"{source}: no split {source.split!r}; available: {', '.join(dataset)}")
        return dataset[source.split]
    if dataset.split is not None and str(dataset.split) != source.split:
        raise ValueError(f"{source}: no split {source.split!r}; available: {dataset.split}")
    return dataset


def _require_on_hub(source: DatasetSource) -> None:
    """Ask the hub once whether a dataset exists: loading would retry for half a minute before it says so."""
    from huggingface_hub import HfApi, constants  # noqa: PLC0415 - few sources need it

    if constants.HF_HUB_OFFLINE:
        return  # what is cached may still be read; load_dataset says so if nothing is
    try:
        HfApi().dataset_info(source.name, timeout=_HUB_TIMEOUT)
    except Exception as error:  # the HTTP client's own errors differ between versions of huggingface_hub
        raise ValueError(
            f"{source}: the hub does not give {source.name} ({_one_line(error)}); check the name and the "
            "connection, set HF_HUB_OFFLINE=1 to use what is cached, or give a local folder"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
