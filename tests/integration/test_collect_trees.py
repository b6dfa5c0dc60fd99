"""``collect-trees``: rows against the target's own forwards, resuming after a kill, refusals in one line."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.tree_collection import TreeCollectionConfig
from benchmarks.tree_collection import run as run_benchmark
from ecospec.cli.collect_trees import CollectTreesConfig
from ecospec.cli.main import main
from ecospec.trace_collection.hooks import RoutingRecorder
from ecospec.trace_collection.store import TraceStore, TraceStoreWriter
from ecospec.trace_collection.tree_records import TreeTrace
from ecospec.trace_collection.tree_store import TreeStore
from tests.tiny_files import save_head, save_predictor, save_prompts, save_target

SEQUENCES, NEW_TOKENS = 5, 10
EXACT = ["--dtype", "float64", "--experts-implementation", "eager"]  # grouped_mm knows no float64


def run(argv):
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in argv])
    return stopped.value.code


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A target, a drafter and a predictor of it, greedy traces, and a strange target with its drafter."""
    folder = tmp_path_factory.mktemp("parts")
    for name, seed in (("target", 0), ("stranger", 9)):
        save_target(folder / name, seed)
        save_head(folder / f"{name}-drafter", folder / name)
    save_predictor(folder / "predictor", folder / "target")
    save_prompts(folder / "prompts.jsonl", SEQUENCES, seed=1)
    argv = ["collect-traces", "--target", folder / "target", "--prompts", folder / "prompts.jsonl", *EXACT]
    assert run([*argv, "--max-new-tokens", NEW_TOKENS, "--out", folder / "traces"]) == 0
    return folder


def command(place, out, *more, **changes):
    parts = {"target": place / "target", "drafter": place / "target-drafter", "traces": place / "traces"} | changes
    pairs = [word for name, value in parts.items() for word in (f"--{name}", str(value))]
    return ["collect-trees", *pairs, "--out", str(out), *map(str, more)]


def rows(path):
    """Every row as plain values."""
    return [
        {f.name: np.asarray(getattr(tree, f.name)).tolist() for f in dataclasses.fields(TreeTrace)}
        for tree in TreeStore(path).iter_trees()
    ]


@pytest.fixture(scope="module")
def everywhere(place, tmp_path_factory):
    out = tmp_path_factory.mktemp("trees") / "positions"
    assert run(command(place, out, *EXACT, "--trees-per-forward", 4)) == 0
    return TreeStore(out)


def test_every_position_with_its_true_experts(place, everywhere):
    everywhere.verify()
    everywhere.require_complete()
    traces = {trace.sequence_id: trace for trace in TraceStore(place / "traces").iter_sequences()}
    assert everywhere.num_rows == SEQUENCES * NEW_TOKENS
    model = AutoModelForCausalLM.from_pretrained(place / "target", dtype=torch.float64).eval()
    model.set_experts_implementation("eager")
    seen: dict[str, list[int]] = {}
    for number, tree in enumerate(everywhere.iter_trees()):
        trace = traces[tree.sequence_id]
        text, position = trace.token_ids, tree.position
        seen.setdefault(tree.sequence_id, []).append(position)
        assert (tree.group_id, tree.temperature, tree.seed) == (trace.group_id, 0.0, 0)
        assert tree.num_nodes == 11
        assert tree.token[0] == text[position]
        if position + 1 < text.size:  # what the collection of the traces saw, in a batch of sequences
            assert np.array_equal(tree.experts[0], trace.experts[position])
            assert tree.emitted[0] == text[position + 1]
        if number % 9 == 0:
            check_nodes(model, text[:position], tree)
    for name, positions in seen.items():
        assert positions == list(range(traces[name].prompt_length, traces[name].num_tokens))


def check_nodes(model, prefix, tree):
    """Every node against a plain forward of its prefix and path."""
    on_path = [True]
    for node in range(tree.num_nodes):
        path = [node]
        while tree.parent[path[0]] >= 0:
            path.insert(0, int(tree.parent[path[0]]))
        ids = torch.tensor([*prefix, *tree.token[path]], dtype=torch.int64)
        with torch.no_grad(), RoutingRecorder(model) as recorder:
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            assert np.array_equal(recorder.last_experts[-1].numpy(), tree.experts[node])
        assert tree.emitted[node] == int(logits[-1].argmax())
        if node:
            given = float(logits[-2].log_softmax(-1)[ids[-1]])
            assert float(tree.target_logprob[node]) == pytest.approx(given, abs=1e-6)
            on_path.append(on_path[path[-2]] and int(logits[-2].argmax()) == int(ids[-1]))
    assert tree.accepted.tolist() == on_path


def test_manifest_says_what_was_collected(everywhere, place):
    collection = everywhere.manifest.collection
    assert (collection["at"], collection["origin"], collection["temperature"]) == ("positions", "generated", 0.0)
    assert (collection["depth"], collection["top_k"], collection["beam"]) == (3, 2, 2)
    assert collection["dtype"] == "float64"
    assert collection["traces"] == TraceStore(place / "traces").manifest.collection
    assert "policy" not in collection
    assert len(collection["drafter"]) == 64


@pytest.mark.parametrize("options", [[], ["--policy", "ecospec", "--budget", "3"]])
def test_steps_are_trees_of_their_positions(place, everywhere, tmp_path, capsys, options):
    if options:
        options = [*options, "--predictor", place / "predictor"]
    assert run(command(place, tmp_path / "steps", "--at", "steps", *EXACT, *options)) == 0
    output = capsys.readouterr().out
    assert "trees with an accepted node: " in output
    assert "another token" not in output
    known = {(tree.sequence_id, tree.position): tree for tree in everywhere.iter_trees()}
    store = TreeStore(tmp_path / "steps")
    assert store.manifest.collection["policy"] == ("ecospec" if options else "probability")
    assert store.manifest.collection["budget"] == (3 if options else 4)
    previous: dict[str, TreeTrace] = {}
    for tree in store.iter_trees():
        same = known[tree.sequence_id, tree.position]
        for name in ("token", "parent", "experts", "emitted", "accepted"):
            assert np.array_equal(getattr(tree, name), getattr(same, name)), name
        for name in ("draft_logprob", "target_logprob"):
            np.testing.assert_allclose(getattr(tree, name), getattr(same, name), atol=1e-6)
        if tree.sequence_id in previous:
            before = previous[tree.sequence_id]
            assert 1 <= tree.position - before.position <= before.accepted.sum()
        previous[tree.sequence_id] = tree
    assert len(previous) == SEQUENCES


def test_resume_after_a_kill_gives_the_same_rows(place, tmp_path, capsys):
    options = [*EXACT, "--limit", 3, "--nodes-per-shard", 110]
    assert run(command(place, tmp_path / "whole", *options)) == 0
    assert len(TreeStore(tmp_path / "whole").manifest.shards) > 2
    script = textwrap.dedent(
        f"""
        import os, signal
        from ecospec.trace_collection import shard_writer
        original, seen = shard_writer.publish, []
        def publish(temporary, path):
            original(temporary, path)
            seen.append(path)
            if len(seen) == 2:      # the second shard lies there but is not listed yet
                os.kill(os.getpid(), signal.SIGKILL)
        shard_writer.publish = publish
        from ecospec.cli.main import main
        main({command(place, tmp_path / "killed", *options)!r})
        """
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=False)
    assert process.returncode == -signal.SIGKILL
    assert len(TreeStore(tmp_path / "killed").manifest.shards) == 1
    assert run(command(place, tmp_path / "killed", *options)) == 2
    assert "is not empty" in capsys.readouterr().err
    assert run(command(place, tmp_path / "killed", *options, "--resume", "--depth", 2)) == 2
    assert "was started with depth = 3, this run has 2" in capsys.readouterr().err
    assert run(command(place, tmp_path / "killed", *options, "--resume")) == 0
    TreeStore(tmp_path / "killed").verify()
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
    before = (tmp_path / "killed" / "manifest.json").read_bytes()
    assert run(command(place, tmp_path / "killed", *options, "--resume")) == 0
    assert (tmp_path / "killed" / "manifest.json").read_bytes() == before


def changed_store(place, path, **changes):
    """The greedy traces, changed and written again; texts of teacher-forced traces are cut to processed tokens."""
    source = TraceStore(place / "traces")
    collection = dict(source.manifest.collection) | changes.pop("collection", {})
    with TraceStoreWriter(path, source.spec, collection=collection) as writer:
        for trace in source.iter_sequences():
            size = trace.num_processed
            read: dict[str, Any] = {"origin": "teacher_forced", "finish_reason": "text", "prompt_length": size}
            read |= {"token_ids": trace.token_ids[:size]}
            writer.append([dataclasses.replace(trace, **(read if changes.get("read") else {}))])
    return path


def test_teacher_forced_text_must_be_allowed(place, tmp_path, capsys):
    traces = changed_store(place, tmp_path / "read", read=True)
    assert run(command(place, tmp_path / "trees", traces=traces)) == 2
    assert "allow them for training with --allow-teacher-forced" in capsys.readouterr().err
    assert run(command(place, tmp_path / "steps", "--at", "steps", "--allow-teacher-forced", traces=traces)) == 2
    assert "have no prompt to run from" in capsys.readouterr().err
    assert run(command(place, tmp_path / "trees", "--allow-teacher-forced", "--limit", 1, traces=traces)) == 0
    store = TreeStore(tmp_path / "trees")
    assert store.manifest.collection["origin"] == "teacher_forced"
    positions = [tree.position for tree in store.iter_trees()]
    assert positions == list(range(1, len(positions) + 1))


def test_wrong_pairs_and_stores_are_one_line(place, tmp_path, capsys):
    empty = tmp_path / "empty"
    source = TraceStore(place / "traces")
    TraceStoreWriter(empty, source.spec, collection={"temperature": 0.0}).close()
    unfinished = tmp_path / "unfinished"
    TraceStoreWriter(unfinished, source.spec, collection={"temperature": 0.0})
    sampled = changed_store(place, tmp_path / "sampled", collection={"temperature": 0.8})
    long = tmp_path / "long"
    trace = next(source.iter_sequences())
    text = np.resize(trace.token_ids, 255)
    experts = np.resize(trace.experts, (254, *trace.experts.shape[1:]))
    with TraceStoreWriter(long, source.spec, collection={"temperature": 0.0}) as writer:
        writer.append([dataclasses.replace(trace, token_ids=text, experts=experts)])
    file = tmp_path / "file"
    file.write_text("x")
    cases: list[tuple[dict[str, Any], list[Any], str]] = [
        ({"target": place / "stranger"}, [], "traces .*was made for another target .*target_fingerprint"),
        ({"drafter": place / "stranger-drafter"}, [], "drafter .*another target"),
        ({"drafter": place / "nowhere"}, [], "--drafter .*nowhere does not exist"),
        ({"traces": place / "nowhere"}, [], "nowhere does not exist; give the folder of a trace store"),
        ({"traces": place / "target"}, [], "is not a trace store"),
        ({"traces": empty}, [], "holds no sequences"),
        ({"traces": unfinished}, [], "is incomplete"),
        ({"traces": sampled}, [], "was sampled at temperature 0.8"),
        ({"traces": long}, [], f"sequence {trace.sequence_id}: .*exceeds the target's 256 positions"),
        ({}, ["--at", "everywhere"], "--at names unknown 'everywhere'; allowed: positions, steps"),
        ({}, ["--policy", "probability"], "--policy has no meaning at positions"),
        ({}, ["--budget", 4], "--budget has no meaning at positions"),
        ({}, ["--at", "steps", "--policy", "evict"], "--policy names unknown 'evict'; .*allowed: probability, "),
        ({}, ["--at", "steps", "--policy", "ecospec"], "policy ecospec needs a predictor"),
        ({}, ["--depth", 0], "--depth must be at least 1, got 0"),
        ({}, ["--beam", 10**8], "--beam must be at most 32,767"),
        ({}, ["--top-k", 6000], "--top-k must be at most .*, the draft vocabulary of .*, got 6000"),
        ({}, ["--top-k", 4096, "--beam", 9], "give trees of more than 32,767 nodes; choose smaller ones"),
        ({}, ["--trees-per-forward", 0], "--trees-per-forward must be at least 1, got 0"),
        ({}, ["--device", "tpu"], "--device 'tpu' is not supported"),
        ({}, ["--out", place], "is not empty; name a new folder, or add --resume"),
        ({}, ["--out", file], "is a file; name a folder"),
    ]
    for number, (changes, options, message) in enumerate(cases):
        out = tmp_path / f"out{number}"
        assert run(command(place, out, *options, **changes)) == 2, message
        error = capsys.readouterr().err
        assert len(error.strip().splitlines()) == 1, error
        assert re.search(message, error), error
        assert not out.exists(), message


def test_the_benchmark_measures_every_method(place, tmp_path):
    options = {"target": place / "target", "drafter": place / "target-drafter", "traces": place / "traces"}
    run_benchmark(TreeCollectionConfig(**options, limit=2, batches=(1, 4), paths=2, out=tmp_path, allow_load=True))
    rows = json.loads((tmp_path / "tree_collection.json").read_text())["results"]["rows"]
    everything, some = 2 * NEW_TOKENS * 11, 2 * 2 * 11
    assert {row["method"]: row["nodes"] for row in rows} == {
        "1 tree per forward": everything,
        "4 trees per forward": everything,
        "drafting alone": everything,
        "one forward per path": some,
    }
    assert all(row["nodes_per_second"] > 0 for row in rows)


def test_options_are_pinned():
    names = [field.name for field in dataclasses.fields(CollectTreesConfig)]
    assert names == [
        "target", "drafter", "traces", "out", "at", "policy", "budget", "predictor", "depth", "top_k", "beam",
        "limit", "allow_teacher_forced", "trees_per_forward", "device", "dtype", "experts_implementation",
        "nodes_per_shard", "threads", "resume",
    ]  # fmt: skip
