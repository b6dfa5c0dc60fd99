"""The wheel holds exactly the folders of the pipeline, works elsewhere, and every command answers --help."""

import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE_FOLDERS = ("predictor", "trace_collection", "train", "decoding", "eval", "cli")


def test_listed_packages_are_the_folders_on_disk():
    on_disk = set()
    for top in PACKAGE_FOLDERS:
        for init in (ROOT / top).rglob("__init__.py"):
            on_disk.add("ecospec." + ".".join(init.parent.relative_to(ROOT).parts))
    setuptools = PROJECT["tool"]["setuptools"]
    assert set(setuptools["packages"]) == on_disk
    assert {name: "ecospec." + name.removeprefix("ecospec.") for name in setuptools["package-dir"]} == {
        name: name for name in setuptools["packages"]
    }
    for name, folder in setuptools["package-dir"].items():
        assert name == "ecospec." + folder.replace("/", ".")
        assert (ROOT / folder / "py.typed").is_file(), f"{folder}/py.typed is missing"


def test_typings_links_point_at_the_packages():
    for top in PACKAGE_FOLDERS:
        assert (ROOT / "typings" / "ecospec" / top).resolve() == ROOT / top


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source") / "ecospec"
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, tracked.split("\0")):
        path = ROOT / name
        if path.is_file() and not path.is_symlink() and name.split("/")[0] not in {"checkpoints", "tests", "docs"}:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(path.read_bytes())
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)],
        check=True,
        capture_output=True,
    )
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_only_ecospec(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"ecospec"}
    for package in PROJECT["tool"]["setuptools"]["packages"]:
        assert f"{package.replace('.', '/')}/py.typed" in names


def test_wheel_installed_elsewhere_imports_and_helps(wheel, tmp_path):
    """A new environment that borrows the dependencies installed here, but not this checkout."""
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    purelib = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    zipfile.ZipFile(wheel).extractall(purelib)
    ours = subprocess.run(
        [sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    # sys.path.append, not a .pth file: the editable install of this checkout must stay out of sight.
    check = (
        f"import sys; sys.path.append({ours!r})\n"
        "import ecospec.predictor, ecospec.decoding, ecospec.trace_collection\n"
        "import ecospec.eval, ecospec.train, ecospec.cli\n"
        f"assert ecospec.predictor.__file__.startswith({str(environment)!r}), ecospec.predictor.__file__\n"
        "from ecospec.cli.main import main\n"
        "main(sys.argv[1:])\n"
    )
    for arguments in (["--help"], ["--version"], ["collect-traces", "--help"], ["benchmark-decoding", "--help"]):
        result = subprocess.run(
            [python, "-c", check, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
        assert "ecospec" in result.stdout
