"""The corpus of the demo: documents, splits by hash, the manifest and its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ecospec.trace_collection.groups_manifest import KINDS, SPLITS, Group, GroupsManifest, group_id_of
from ecospec.trace_collection.stdlib_corpus import (
    DATASETS,
    SPLIT_SHARES,
    Document,
    build_manifest,
    coverage,
    docstrings_of,
    documents_of,
    find_documents,
    split_of,
)

COMMITTED = Path(__file__).parents[2] / "checkpoints" / "groups.json"


@pytest.fixture(scope="module")
def local() -> list[Document]:
    return find_documents()


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small library: two copies of one file, a documented one, and everything that must be left out."""
    body = "x = 1\n" * 60
    files = {
        "a.py": body,
        "copy_of_a.py": body,
        "package/documented.py": '"""' + "About the module. " * 20 + '"""\n\n\ndef f():\n    """Return f."""\n',
        "tiny.py": "x = 1\n",
        "test/test_a.py": body + "# test",
        "package/tests/test_b.py": body + "# tests",
        "idlelib/idle_test/c.py": body + "# idle",
        "site-packages/d.py": body + "# site",
        "encodings/cp1252.py": body + "# cp",
        "encodings/iso8859_1.py": body + "# iso",
        "encodings/mac_roman.py": body + "# mac",
        "encodings/koi8_r.py": body + "# koi",
        "encodings/utf_8.py": body + "# utf-8 stays",
        "html/entities.py": body + "# table",
        "pydoc_data/topics.py": body + "# topics",
        "__pycache__/a.py": body + "# cache",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def write_manifest(path: Path, **changes: Any) -> Path:
    group = {"id": "0" * 16, "kind": "file", "name": "a.py", "split": "report", "num_bytes": 10}
    raw: dict[str, Any] = {"format_version": 1, "python_version": "3.11.7", "split_seed": 3, "groups": [group]}
    raw.update(changes)
    path.write_text(json.dumps({name: value for name, value in raw.items() if value is not ...}), encoding="utf-8")
    return path


def test_finds_what_belongs_and_nothing_else(library: Path) -> None:
    files = [d for d in find_documents(library) if d.dataset != "stdlib_topics"]
    assert [(d.dataset, d.name) for d in files] == [
        ("stdlib_code", "a.py"),
        ("stdlib_code", "encodings/utf_8.py"),
        ("stdlib_code", "package/documented.py"),
        ("stdlib_docs", "package/documented.py"),
    ]


def test_docs_share_the_group_of_their_file(local: list[Document]) -> None:
    code = {d.name: d.group_id for d in local if d.dataset == "stdlib_code"}
    docs = [d for d in local if d.dataset == "stdlib_docs"]
    assert len(docs) > 100
    assert all(d.group_id == code[d.name] for d in docs)
    assert all(group_id_of(d.text) == d.group_id for d in local if d.dataset != "stdlib_docs")


def test_every_kind_of_text_is_there_and_no_text_twice(local: list[Document]) -> None:
    assert {d.dataset for d in local} == set(DATASETS)
    assert len({(d.dataset, d.group_id) for d in local}) == len(local)
    assert not any({"test", "tests", "site-packages"} & set(d.name.split("/")) for d in local)


def test_newlines_do_not_change_the_group(tmp_path: Path) -> None:
    for folder, newline in (("unix", b"\n"), ("windows", b"\r\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_bytes((b"value = 1" + newline) * 40)
    unix, windows = (find_documents(tmp_path / folder)[0] for folder in ("unix", "windows"))
    assert unix.group_id == windows.group_id
    assert unix.text == windows.text


def test_docstrings_are_named_and_in_source_order() -> None:
    source = (
        '"""Module."""\nclass A:\n    """Class."""\n    def f(self):\n        """\n        Method.\n        """\n'
    )
    assert docstrings_of(source) == "Module.\n\nA\n\nClass.\n\nA.f\n\nMethod."
    assert docstrings_of("x = 1") == ""
    assert docstrings_of("print 'python 2'") == ""


def test_split_depends_on_text_and_seed_only(local: list[Document]) -> None:
    ids = sorted({d.group_id for d in local})
    assert [split_of(i, 7) for i in ids] == [split_of(i, 7) for i in reversed(ids)][::-1]
    assert [split_of(i, 7) for i in ids] != [split_of(i, 8) for i in ids]
    forward, backward = build_manifest(local, "3", seed=7), build_manifest(local[::-1], "3", seed=7)
    assert forward.splits() == backward.splits()


def test_split_shares_hold_for_many_hashes() -> None:
    splits = [split_of(group_id_of(str(i)), 0) for i in range(20_000)]
    for split, share in SPLIT_SHARES.items():
        assert splits.count(split) / len(splits) == pytest.approx(share, abs=0.012)
    assert sum(SPLIT_SHARES.values()) == pytest.approx(1)


def test_manifest_round_trip(tmp_path: Path, library: Path) -> None:
    manifest = build_manifest(find_documents(library), "3.11.7")
    manifest.save(tmp_path / "groups.json")
    loaded = GroupsManifest.load(tmp_path / "groups.json")
    assert loaded == manifest
    assert loaded.digest() == manifest.digest()
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, r"groups\.json: format_version is 2, this version reads 1; rebuild"),
        ({"split_seed": ...}, r"groups\.json: missing field 'split_seed'; required fields: .*split_seed"),
        ({"surprise": 1}, r"groups\.json: unknown field 'surprise'; allowed fields: .*groups"),
        ({"split_seed": -1}, r"groups\.json: .*split_seed must be an integer >= 0, got -1"),
        ({"split_seed": True}, r"split_seed must be an integer >= 0, got True"),
        ({"python_version": ""}, r"python_version must be a non-empty string, got ''"),
        ({"groups": {}}, r"groups\.json: groups must be a list of objects, got dict"),
        ({"groups": []}, r"groups is empty; list at least one group"),
        ({"groups": [3]}, r"groups\.json: groups\[0\]: expected a JSON object, got int"),
    ],
)
def test_manifest_errors(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GroupsManifest.load(write_manifest(tmp_path / "groups.json", **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": "validation"}, r"groups\[0\]: split must be one of target_train, .*report, got 'validation'"),
        ({"kind": "page"}, r"groups\[0\]: kind must be one of file, topic, got 'page'"),
        ({"id": "xyz"}, r"groups\[0\]: id must be 16 hexadecimal digits, got 'xyz'"),
        ({"name": ""}, r"groups\[0\]: name must be a non-empty string, got ''"),
        ({"num_bytes": 0}, r"groups\[0\]: num_bytes must be a positive integer, got 0"),
        ({"num_bytes": ...}, r"groups\.json: groups\[0\]: missing field 'num_bytes'"),
        ({"licence": "PSF"}, r"groups\.json: groups\[0\]: unknown field 'licence'; allowed fields: id, kind"),
    ],
)
def test_manifest_group_errors(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    group = {"id": "0" * 16, "kind": "file", "name": "a.py", "split": "report", "num_bytes": 10} | changes
    path = write_manifest(tmp_path / "groups.json", groups=[{k: v for k, v in group.items() if v is not ...}])
    with pytest.raises(ValueError, match=message):
        GroupsManifest.load(path)


def test_manifest_refuses_repeated_and_unsorted_ids() -> None:
    first, second = Group("0" * 16, "file", "a.py", "report", 1), Group("1" * 16, "file", "b.py", "report", 1)
    with pytest.raises(ValueError, match="id '0000000000000000' appears twice; ids must be unique"):
        GroupsManifest("3", 0, (first, first))
    with pytest.raises(ValueError, match="id '0000000000000000' is out of order"):
        GroupsManifest("3", 0, (second, first))


def test_manifest_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "groups.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"groups\.json: not a JSON file .*; restore it or rebuild it"):
        GroupsManifest.load(tmp_path / "groups.json")
    (tmp_path / "groups.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match=r"groups\.json: expected a JSON object, got list"):
        GroupsManifest.load(tmp_path / "groups.json")


def test_documents_of_keeps_listed_texts_only(library: Path) -> None:
    documents = find_documents(library)
    manifest = build_manifest(documents, "3.11.7")
    newer = [*documents, Document("stdlib_code", group_id_of("new"), "new.py", "new")]
    chosen = [d for split in SPLITS for d in documents_of(manifest, split, documents=newer, minimum_coverage=0)]
    assert sorted((d.dataset, d.group_id) for d in chosen) == sorted((d.dataset, d.group_id) for d in documents)


def test_documents_of_errors(local: list[Document]) -> None:
    manifest = GroupsManifest("2.0", 0, (Group("0" * 16, "file", "a.py", "report", 1),))
    with pytest.raises(ValueError, match="unknown split 'test'; allowed: target_train, predictor_train"):
        documents_of(manifest, "test")
    with pytest.raises(ValueError, match="unknown dataset 'wikipedia'; allowed: stdlib_code"):
        documents_of(manifest, "report", ["wikipedia"])
    with pytest.raises(
        ValueError, match=r"only 0 of 1 groups \(0% of the bytes\) of split 'report' .* Python 2\.0"
    ):
        documents_of(manifest, "report", documents=local)


def test_coverage_counts_groups_and_bytes(library: Path) -> None:
    documents = find_documents(library)
    manifest = build_manifest(documents, "3.11.7")
    whole = coverage(manifest, documents)
    assert sum(c.groups_found for c in whole.values()) == len(manifest.groups)
    assert all(c.fraction == 1 for c in whole.values() if c.groups_listed)
    assert all(c.groups_found == 0 and c.fraction == 0 for c in coverage(manifest, []).values())


def test_committed_manifest_is_disjoint_and_follows_the_hash(local: list[Document]) -> None:
    manifest = GroupsManifest.load(COMMITTED)
    assert len(manifest.splits()) == len(manifest.groups)
    assert all(group.split == split_of(group.id, manifest.split_seed) for group in manifest.groups)
    kinds = {(group.split, group.kind) for group in manifest.groups}
    assert kinds == {(split, kind) for split in SPLITS for kind in KINDS}
    total = sum(group.num_bytes for group in manifest.groups)
    for split, share in SPLIT_SHARES.items():
        found = sum(group.num_bytes for group in manifest.groups if group.split == split)
        assert found / total == pytest.approx(share, rel=0.2)


def test_committed_manifest_agrees_with_this_python(local: list[Document]) -> None:
    manifest = GroupsManifest.load(COMMITTED)
    listed = {group.id: group for group in manifest.groups}
    matching = [d for d in local if d.group_id in listed and d.dataset != "stdlib_docs"]
    for document in matching:
        group = listed[document.group_id]
        assert group.num_bytes == len(document.text.encode("utf-8"))
        assert group.kind == ("topic" if document.dataset == "stdlib_topics" else "file")
    split_of_text = {
        (document.dataset, document.group_id): split
        for split in SPLITS
        for document in documents_of(manifest, split, documents=local)
    }
    assert sum(len(documents_of(manifest, s, documents=local)) for s in SPLITS) == len(split_of_text)


def test_import_stays_light() -> None:
    code = (
        "import sys; import ecospec.trace_collection.stdlib_corpus; "
        "print([m for m in ('torch', 'numpy', 'pyarrow', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
