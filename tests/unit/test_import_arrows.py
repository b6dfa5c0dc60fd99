"""The import arrows of the pipeline, asserted in subprocesses: what a serving process pays for importing us."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"lightning", "pytorch_lightning", "datasets", "peft", "pyarrow", "sklearn", "pandas", "matplotlib"}
ALLOWED = {
    "predictor": set(),
    "trace_collection": {"predictor"},
    "train": {"predictor", "trace_collection"},
    "decoding": {"predictor", "trace_collection.hooks"},
    "eval": {"predictor", "trace_collection", "train", "decoding"},
    "cli": {"predictor", "trace_collection", "train", "decoding", "eval"},
}


@pytest.mark.parametrize(
    "module",
    [
        "ecospec.predictor",
        "ecospec.decoding",
        "ecospec.decoding.drafters",
        "ecospec.decoding.policies",
        "ecospec.trace_collection.hooks",
    ],
)
def test_serving_modules_load_no_training_or_data_library(module):
    code = f"import sys, {module}; print('\\n'.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in result.stdout.split()}
    assert not loaded & HEAVY


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_packages_import_only_what_the_pipeline_allows(package):
    for path in (ROOT / package).rglob("*.py"):
        for name in _imports(path):
            if (
                not name.startswith("ecospec.")
                or name == f"ecospec.{package}"
                or name.startswith(f"ecospec.{package}.")
            ):
                continue
            target = name.removeprefix("ecospec.")
            allowed = any(target == other or target.startswith(f"{other}.") for other in ALLOWED[package])
            assert allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_hooks_import_torch_and_the_spec_only():
    parts = ("hooks", "boundaries", "choices", "discovery")
    data = ("ecospec.predictor.routing_spec", "ecospec.predictor.family_notes")
    allowed = (*data, *(f"ecospec.trace_collection.{part}" for part in parts))
    for file in (f"{part}.py" for part in parts):
        ours = {name for name in _imports(ROOT / "trace_collection" / file) if name.startswith("ecospec")}
        assert all(name.startswith(allowed) for name in ours), (file, ours)
