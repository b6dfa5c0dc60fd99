"""``report-tree-overlap``: every column against scores made token by token along each node's path; refusals."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ecospec.cli.main import main, run_verb
from ecospec.decoding import TargetModel
from ecospec.decoding.drafter_states import text_states
from ecospec.decoding.drafters import Eagle3Drafter
from ecospec.predictor import DrafterAttachedPredictor, ExpertPredictor, load_predictor
from ecospec.predictor.attached import AttachedHeads
from ecospec.predictor.fingerprint import routing_spec_of
from ecospec.trace_collection.store import TraceStore
from ecospec.trace_collection.tree_store import TreeStore
from tests.tiny_files import HIDDEN, TOP_K, save_head, save_predictor, save_prompts, save_tables, save_target

SIZES = {"depth": 2, "top_k": 2, "beam": 2}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("tree-overlap")
    target = save_target(root / "target")
    for name, seed in (("drafter", 1), ("other", 9)):
        save_head(root / name, target, seed=seed)
    save_predictor(root / "neural", target)
    save_tables(root / "tables", target)
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    drafter = Eagle3Drafter.from_pretrained(root / "drafter", model)
    heads = AttachedHeads(routing_spec_of(target), 2 * HIDDEN, rank=4)
    DrafterAttachedPredictor.from_heads(heads, drafter.state_fingerprint).save_pretrained(root / "attached")
    save_prompts(root / "prompts.jsonl", 4, seed=1)
    common = ["--target", str(target), "--out"]
    run_verb("collect-traces", [*common, str(root / "traces"), "--prompts", str(root / "prompts.jsonl"),
                                "--max-new-tokens", "8"])  # fmt: skip
    shape = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    run_verb("collect-trees", [*common, str(root / "trees"), "--traces", str(root / "traces"),
                               "--drafter", str(root / "drafter"), *shape])  # fmt: skip
    return root


def _arguments(place, out, **changes):
    tables = place / "tables"
    predictors = f"{place / 'attached'},{place / 'neural'},{tables / 'bigram_table'},{tables / 'last_token'}"
    values = {"target": place / "target", "trees": place / "trees", "traces": place / "traces"}
    values |= {"predictor": predictors, "drafter": place / "drafter", "out": out} | changes
    return [part for name, value in values.items() if value is not None for part in (f"--{name}", str(value))]


def _node_scores(place):
    """Functions from (text up to a node, its depth, experts before the root) to scores ``[L, E]``."""
    model = AutoModelForCausalLM.from_pretrained(place / "target", dtype=torch.float32).eval()
    target = TargetModel(model, routing_spec_of(place / "target"))
    drafter = Eagle3Drafter.from_pretrained(place / "drafter", model)
    attached = DrafterAttachedPredictor.from_pretrained(place / "attached")
    neural = ExpertPredictor.from_pretrained(place / "neural", target_embedding=model.get_input_embeddings())
    bigram, last = (load_predictor(place / "tables" / name) for name in ("bigram_table", "last_token"))

    def of_attached(ids, depth, used):
        before = text_states(target, drafter, ids, depth=depth)[depth, -1]
        return attached.score_states(torch.cat((drafter.token_states(ids[-1:])[0], before)))

    def of_last(ids, depth, used):
        return last.score_sequence(ids[:2], used[-1:].expand(2, -1, -1))[1]

    return {
        "attached": of_attached,
        "neural": lambda ids, depth, used: neural.score_sequence(ids)[-1],
        "bigram_table": lambda ids, depth, used: bigram.score_sequence(ids)[-1],
        "last_token": of_last,
    }


def test_every_column_is_that_of_scores_along_the_paths(place, tmp_path, capsys):
    run_verb("report-tree-overlap", _arguments(place, tmp_path / "out"))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    texts = {text.sequence_id: text for text in TraceStore(place / "traces").iter_sequences(["experts"])}
    hits: defaultdict[Any, int] = defaultdict(int)
    nodes: defaultdict[Any, int] = defaultdict(int)
    functions = _node_scores(place)
    trees = list(TreeStore(place / "trees").iter_trees())
    for tree in trees:
        text = texts[tree.sequence_id]
        ids = text.token_ids[: tree.position].astype(np.int64).tolist()
        used = torch.from_numpy(text.experts[: tree.position].astype(np.int64))
        paths: list[list[int]] = []
        for node, (token, parent) in enumerate(zip(tree.token.tolist(), tree.parent.tolist(), strict=True)):
            paths.append([*(paths[parent] if node else []), token])
            depth = len(paths[node]) - 1
            fate = "accepted" if tree.accepted[node] else "rejected"
            columns = ["candidates", f"{fate} {depth}"] if depth else ["root"]
            for name, score in functions.items():
                scores = score(torch.tensor(ids + paths[node]), depth, used).numpy()
                found = np.argsort(-scores, axis=-1, kind="stable")[..., :TOP_K]
                for column in columns:
                    hits[name, column] += (found[..., None] == tree.experts[node][..., None, :]).sum()
                    nodes[name, column] += tree.experts[node].size
    assert report["trees"] == len(trees) > 20
    assert report["other_trees"] == 0
    assert len(report["nodes"]) >= 4
    for name in functions:
        assert set(report["overlap"][name]) == set(report["nodes"])
        for column, entry in report["overlap"][name].items():
            assert entry["mean"] == pytest.approx(hits[name, column] / nodes[name, column]), (name, column)
    shown = capsys.readouterr().out
    assert "rej. 1" in shown
    assert f"{len(trees):,} trees; random sets reach 25.0 %." in (tmp_path / "out" / "report.md").read_text()


def _refused(arguments, capsys):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(["report-tree-overlap", *arguments])
    error = capsys.readouterr().err.strip()
    assert stopped.value.code == 2
    assert "\n" not in error
    return error


def test_refusals(place, tmp_path, capsys):
    error = _refused(_arguments(place, tmp_path / "a", drafter=None), capsys)
    assert "predictor attached reads the hidden states of a drafter; name it with --drafter" in error
    error = _refused(_arguments(place, tmp_path / "b", drafter=place / "other"), capsys)
    assert "were proposed by another drafter than" in error
    save_prompts(tmp_path / "others.jsonl", 2, seed=7)
    run_verb("collect-traces", ["--target", str(place / "target"), "--prompts", str(tmp_path / "others.jsonl"),
                                "--max-new-tokens", "4", "--out", str(tmp_path / "others")])  # fmt: skip
    arguments = _arguments(place, tmp_path / "c", traces=tmp_path / "others", predictor=place / "neural")
    capsys.readouterr()
    with pytest.raises(
        ValueError, match="lie on a text that the traces do not hold; name the traces that they were"
    ):
        run_verb("report-tree-overlap", arguments)
