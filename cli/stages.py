"""Stages of a longer run: each writes its own folder, is skipped when nothing it depends on has changed.

Below the run's folder::

    stages/<name>.json     # written last: the key of the finished stage, when and how long it ran
    <output of the stage>  # a folder or file of its own

A stage's *key* is a hash of its options, of the files it reads and of the marks of the stages it builds on. A stage
with a matching mark is reused. Without one, what lies in its place is the torn end of a killed run: a stage that
can resume is started with it, any other starts from nothing. Finished stages are never touched by a later one.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ecospec.eval.report_files import write_text

FOLDER = "stages"


@dataclasses.dataclass(frozen=True)
class Stage:
    """One step of a run.

    Attributes:
        name: Name of its mark.
        title: What it does, for the terminal.
        options: What shapes its result; JSON values.
        run: Does the work; told whether it goes on with output of a killed run.
        output: Folder or file it writes.
        inputs: Files it reads, hashed into the key.
        after: Stages whose output it reads.
        resumable: Whether ``run`` can go on with partial output; otherwise that is removed first.
    """

    name: str
    title: str
    options: Mapping[str, Any]
    run: Callable[[bool], None]
    output: Path
    inputs: Sequence[Path] = ()
    after: Sequence[str] = ()
    resumable: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """What is written when a stage has finished.

    Attributes:
        key: See the top of this file.
        finished: Date and time, ISO 8601, UTC.
        seconds: How long it ran.
    """

    key: str
    finished: str
    seconds: float


class StageRunner:
    """Runs stages in order, reusing those that are done.

    Args:
        out: Folder of the run; it exists.
        say: Told about every stage as it starts, is reused or ends.
    """

    def __init__(self, out: Path, say: Callable[[str], None]) -> None:
        self._out = out
        self._say = say
        self._marks: dict[str, str] = {}

    def run(self, stages: Sequence[Stage]) -> None:
        """Run all stages.

        Args:
            stages: In order; a stage's ``after`` names earlier ones.
        """
        for number, stage in enumerate(stages, start=1):
            key = self._key(stage)
            head = f"{number}/{len(stages)} {stage.title}"
            mark = self._mark(stage)
            if mark is not None and mark.key == key and stage.output.exists():
                self._say(f"{head}: reused, {stage.output} was made on {mark.finished} in {mark.seconds:.0f} s")
            else:
                mark = self._start(stage, key, head)
            # The date too: what is built on output that was made again is made again.
            self._marks[stage.name] = f"{key} {mark.finished}"

    def _start(self, stage: Stage, key: str, head: str) -> Mark:
        started = self._out / FOLDER / f"{stage.name}.started"
        found = stage.output.exists()
        same = started.is_file() and started.read_text(encoding="utf-8") == key
        resume = found and same and stage.resumable
        if found and not resume:
            reason = "what a killed run left" if same else "made with other options or inputs"
            self._say(f"{head}: {stage.output} is made anew ({reason})")
            _remove(stage.output)
        elif resume:
            self._say(f"{head}: goes on with {stage.output}")
        else:
            self._say(head)
        self._path(stage).unlink(missing_ok=True)
        started.parent.mkdir(exist_ok=True)
        write_text(started, key)
        begin = time.monotonic()
        stage.run(resume)
        mark = Mark(key, _now(), time.monotonic() - begin)
        write_text(self._path(stage), json.dumps(dataclasses.asdict(mark), indent=1) + "\n")
        started.unlink(missing_ok=True)
        self._say(f"{head}: done in {mark.seconds:.0f} s")
        return mark

    def _path(self, stage: Stage) -> Path:
        return self._out / FOLDER / f"{stage.name}.json"

    def _mark(self, stage: Stage) -> Mark | None:
        """The mark of a finished stage; anything unreadable counts as none."""
        try:
            return Mark(**json.loads(self._path(stage).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def _key(self, stage: Stage) -> str:
        digest = hashlib.sha256(json.dumps(stage.options, sort_keys=True).encode())
        for path in stage.inputs:
            digest.update(file_digest(path).encode())
        for name in stage.after:
            digest.update(self._marks[name].encode())
        return digest.hexdigest()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def file_digest(path: Path) -> str:
    """SHA-256 of a file, or of all files of a folder with their names.

    Args:
        path: File or folder.

    Raises:
        FileNotFoundError: It does not exist.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist, but a stage reads it")
    digest = hashlib.sha256()
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    for file in files:
        digest.update(str(file.relative_to(path.parent)).encode())
        with file.open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()
