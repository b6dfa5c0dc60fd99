"""Blocks of README and docs/python.md tagged ``bash run`` or ``python run`` run, in order, in one fresh folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = [
    block
    for page in ("README.md", "docs/python.md")
    for block in re.findall(
        r"^```(bash|python) run\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL
    )
]

INTERPRETERS = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    (folder / "checkpoints").symlink_to(ROOT / "checkpoints")
    return folder


def test_readme_has_commands_to_run():
    assert [language for language, _ in BLOCKS] == ["bash"] * 6 + ["python"] * 5


@pytest.mark.parametrize(("language", "block"), BLOCKS)
def test_readme_block(language, block, workplace):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        [*INTERPRETERS[language], block],
        cwd=workplace,
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{block}\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}"
