"""Collected rows against what the target does on each sequence alone; resuming; the command line."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from ecospec.cli.main import main
from ecospec.predictor.fingerprint import routing_spec_of
from ecospec.trace_collection.collect import CollectProgress, collect, context_of, eos_ids_of
from ecospec.trace_collection.plan import CollectConfig
from ecospec.trace_collection.prompts import Prompt
from ecospec.trace_collection.store import TraceStore
from tests.collect_targets import EOS, VOCAB, alone, doubled, make_target, make_tokenizer, texts


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("target")
    make_target().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def spec(target):
    return routing_spec_of(target)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "deepseek"])
def test_generated_rows_equal_each_sequence_alone(family, tmp_path, spec):
    """Left padding, an uneven batch, sliding windows and compaction leave no trace in the rows (float64)."""
    model = doubled(make_target(family))
    prompts = texts([1, 3, 9, 9, 20, 31, 7, 2, 40])
    config = CollectConfig(max_new_tokens=40, batch_size=5)
    if family == "deepseek":
        spec = dataclasses.replace(spec, layer_indices=(1, 2))
    store = collect(model, make_tokenizer(), prompts, config, tmp_path / "out", spec=spec)
    traces = list(store.iter_sequences())
    assert len(traces) == 9
    for trace in traces:
        logits, experts = alone(model, trace.token_ids)
        assert np.array_equal(trace.experts, experts[:-1])
        continuation = trace.token_ids[trace.prompt_length :]
        assert np.array_equal(continuation, logits.argmax(-1).numpy()[trace.prompt_length - 1 : -1])
        ended = EOS in continuation
        assert trace.finish_reason == ("eos" if ended else "length")
        assert not ended or list(continuation).index(EOS) == len(continuation) - 1
        assert ended or len(continuation) == 40


def test_sampling_does_not_depend_on_batch_mates(tmp_path, spec):
    model, tokenizer = doubled(make_target()), make_tokenizer()
    prompts = texts([4, 8, 12, 5, 9, 3])
    runs = []
    for size in (1, 6):
        config = CollectConfig(max_new_tokens=24, batch_size=size, temperature=2.0, samples_per_prompt=3, seed=5)
        store = collect(model, tokenizer, prompts, config, tmp_path / str(size), spec=spec)
        runs.append({trace.sequence_id: trace for trace in store.iter_sequences()})
    assert set(runs[0]) == set(runs[1])
    assert len(runs[0]) == 18
    for key, trace in runs[0].items():
        assert np.array_equal(trace.token_ids, runs[1][key].token_ids)
        assert np.array_equal(trace.experts, runs[1][key].experts)
    assert {trace.finish_reason for trace in runs[0].values()} == {"eos", "length"}
    assert len({tuple(trace.token_ids) for trace in runs[0].values()}) == 18
    assert len({trace.group_id for trace in runs[0].values()}) == 6


def test_samples_follow_the_targets_distribution(tmp_path, spec):
    model = doubled(make_target())
    config = CollectConfig(max_new_tokens=1, batch_size=500, temperature=1.5, samples_per_prompt=4000)
    store = collect(model, make_tokenizer(), texts([6]), config, tmp_path / "out", spec=spec)
    drawn = [int(trace.token_ids[-1]) for trace in store.iter_sequences()]
    prompt = next(store.iter_sequences()).token_ids[:6]
    expected = torch.softmax(alone(model, prompt)[0][-1] / 1.5, -1).numpy()
    observed = np.bincount(drawn, minlength=VOCAB) / len(drawn)
    assert np.abs(observed - expected).max() < 4 * 0.5 / np.sqrt(len(drawn))


def test_teacher_forced_chunks_keep_their_group(tmp_path, spec):
    model = doubled(make_target())
    prompts = [Prompt(p.dataset, p.group_id, text=p.text, document=True) for p in texts([70, 33, 10, 1], seed=1)]
    config = CollectConfig(mode="teacher_forced", max_length=32, batch_size=3, weights=True)
    store = collect(model, make_tokenizer(), prompts, config, tmp_path / "out", spec=spec)
    traces = list(store.iter_sequences())
    assert sorted(trace.num_tokens for trace in traces) == [1, 1, 6, 10, 32, 32, 32]
    assert store.num_tokens == 114
    for trace in traces:
        assert (trace.origin, trace.finish_reason) == ("teacher_forced", "text")
        assert trace.num_processed == trace.num_tokens == trace.prompt_length
        assert np.array_equal(trace.experts, alone(model, trace.token_ids)[1])
        assert trace.weights is not None
        assert np.allclose(trace.weights.astype(float).sum(-1), 1, atol=2e-3)  # norm_topk_prob
    sizes: dict[str, int] = {}
    for trace in traces:
        sizes[trace.group_id] = sizes.get(trace.group_id, 0) + trace.num_tokens
    assert sizes == {"group0": 70, "group1": 33, "group2": 10, "group3": 1}


def test_context_is_respected(tmp_path, spec):
    model, tokenizer = make_target(positions=24), make_tokenizer()
    config = CollectConfig(max_new_tokens=100)
    store = collect(model, tokenizer, texts([23, 24, 30, 5]), config, tmp_path / "out", spec=spec)
    assert store.manifest.collection["skipped"] == {"longer than the context": 2}
    assert all(trace.num_tokens <= 24 for trace in store.iter_sequences())
    assert context_of(model) == 24
    assert eos_ids_of(model, tokenizer) == {EOS}
    with pytest.raises(ValueError, match=r"nothing to collect \(1 longer than the context"):
        collect(model, tokenizer, texts([24]), config, tmp_path / "none", spec=spec)


def write_prompts(path, lengths):
    with path.open("w") as handle:
        for prompt in texts(lengths, seed=2):
            handle.write(json.dumps({"prompt": prompt.text}) + "\n")
    return path


def command(target, prompts, out, *more):
    return [
        "collect-traces",
        *("--target", str(target), "--prompts", str(prompts), "--out", str(out)),
        *("--max_new_tokens", "12", "--batch_size", "4", "--tokens_per_shard", "60", "--temperature", "1.0"),
        *("--threads", "1", *more),
    ]


def run(arguments):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return stop.value.code


def rows(store):
    return [
        (t.sequence_id, t.token_ids.tolist(), t.experts.tolist(), t.finish_reason) for t in store.iter_sequences()
    ]


def test_command_line_resume_after_a_kill_gives_the_same_rows(target, tmp_path, capsys):
    prompts = write_prompts(tmp_path / "questions.jsonl", [3, 5, 8, 2, 9, 4, 6, 7, 11, 3, 5, 10])
    assert run(command(target, prompts, tmp_path / "whole")) == 0
    assert "12 sequences" in capsys.readouterr().out
    whole = TraceStore(tmp_path / "whole")
    whole.verify()
    assert len(whole.manifest.shards) > 1
    assert whole.manifest.complete
    script = textwrap.dedent(
        f"""
        import os, signal, sys
        from ecospec.trace_collection import shard_writer
        original, seen = shard_writer.publish, []
        def publish(temporary, path):
            original(temporary, path)
            seen.append(path)
            if len(seen) == 2:      # the second shard lies there but is not listed yet
                os.kill(os.getpid(), signal.SIGKILL)
        shard_writer.publish = publish
        from ecospec.cli.main import main
        main({command(target, prompts, tmp_path / "killed")!r})
        """
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=False)
    assert process.returncode == -signal.SIGKILL
    killed = TraceStore(tmp_path / "killed")
    assert not killed.manifest.complete
    assert len(killed.manifest.shards) == 1
    assert rows(killed) == rows(whole)[: killed.num_rows]
    assert run(command(target, prompts, tmp_path / "killed")) == 2
    assert "is not empty" in capsys.readouterr().err
    assert run(command(target, prompts, tmp_path / "killed", "--resume", "true")) == 0
    resumed = TraceStore(tmp_path / "killed")
    resumed.verify()
    assert resumed.manifest.complete
    assert rows(resumed) == rows(whole)
    before = (tmp_path / "killed" / "manifest.json").read_bytes()
    assert run(command(target, prompts, tmp_path / "killed", "--resume", "true")) == 0
    assert (tmp_path / "killed" / "manifest.json").read_bytes() == before


def test_prompts_left_out_are_listed_and_survive_a_resume(target, tmp_path, capsys):
    prompts = write_prompts(tmp_path / "questions.jsonl", [3, 200, 5])
    with prompts.open("a") as handle:
        handle.write(prompts.read_text().splitlines()[0] + "\n")
    assert run(command(target, prompts, tmp_path / "out")) == 0
    shown = capsys.readouterr().out
    listing = tmp_path / "out" / "skipped.jsonl"
    assert f"skipped: 1 longer than the context, 1 duplicate; listed in {listing}" in shown
    lines = listing.read_text()
    assert [
        (entry["prompt"], entry["dataset"], entry["reason"], entry["tokens"])
        for entry in map(json.loads, lines.splitlines())
    ] == [
        (1, "questions", "longer than the context", 200),
        (3, "questions", "duplicate", 3),
    ]
    listing.unlink()  # a run killed between manifest and listing
    assert run(command(target, prompts, tmp_path / "out", "--resume")) == 0
    assert listing.read_text() == lines


def test_command_line_refuses_another_configuration(target, tmp_path, capsys):
    prompts = write_prompts(tmp_path / "questions.jsonl", [3, 5])
    assert run(command(target, prompts, tmp_path / "out")) == 0
    capsys.readouterr()
    assert run(command(target, prompts, tmp_path / "out", "--resume", "true", "--seed", "1")) == 2
    assert "was started with seed = 0, this run has 1" in capsys.readouterr().err
    write_prompts(prompts, [3, 6])
    assert run(command(target, prompts, tmp_path / "out", "--resume", "true")) == 2
    assert "another batch plan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--prompts": "missing.jsonl"}, "missing.jsonl does not exist"),
        ({"--target": "nowhere/target"}, "nowhere/target"),
        ({"--dtype": "int8"}, "dtype must be one of"),
        ({"--mode": "watch"}, "mode must be one of generate, teacher_forced, replay, got 'watch'"),
        ({"--temperature": "-1"}, "temperature must be a finite number"),
    ],
)
def test_user_errors_are_one_line(target, tmp_path, capsys, changes, message):
    prompts = write_prompts(tmp_path / "questions.jsonl", [3])
    options = {"--target": str(target), "--prompts": str(prompts), "--out": str(tmp_path / "out")} | changes
    assert run(["collect-traces", *(piece for pair in options.items() for piece in pair)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.strip().count("\n") == 0
    assert not (tmp_path / "out").exists()


def damaged(target, path, **changes):
    """A copy of a target with other values in its config."""
    shutil.copytree(target, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": None}, "config.json: transformers cannot read it: .*num_experts_per_tok"),
        ({"max_position_embeddings": "x"}, "config.json: transformers cannot read it: .*max_position_embeddings"),
        ({"hidden_act": "nonsense"}, "cannot be loaded .KeyError: 'nonsense'.: config.json and weights"),
        ({"decoder_sparse_step": 0}, "cannot be loaded .ZeroDivisionError: .*: config.json and weights"),
        ({"max_position_embeddings": 1}, "the target's context is 1 tokens; a sequence needs at least 2"),
    ],
)
def test_configs_that_make_no_sense_are_one_line(target, tmp_path, capsys, changes, message):
    prompts = write_prompts(tmp_path / "questions.jsonl", [3])
    assert run(command(damaged(target, tmp_path / "damaged", **changes), prompts, tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert error.strip().count("\n") == 0
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [["--mode", "teacher_forced"], ["--temperature", "0"], []])
def test_nan_is_refused_instead_of_recorded(target, tmp_path, capsys, options):
    """A router chooses experts for NaN as well; they mean nothing."""
    broken = tmp_path / "broken"
    shutil.copytree(target, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    prompts = write_prompts(tmp_path / "questions.jsonl", [3, 5])
    assert run(command(broken, prompts, tmp_path / "out", *options)) == 2
    assert "the target gave NaN instead of logits in float32" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.parquet"))


def test_token_ids_beyond_the_embedding_are_refused(tmp_path, spec):
    model, tokenizer = make_target().eval(), make_tokenizer()
    tokenizer.add_tokens(["stranger"])
    prompts = [Prompt("d", "g", text="w1 stranger w2")]
    with pytest.raises(ValueError, match=f"gives token id {VOCAB}, the target has embeddings for {VOCAB}"):
        collect(model, tokenizer, prompts, CollectConfig(), tmp_path / "out", spec=spec)


def test_a_manifest_that_lists_more_than_was_collected_is_refused(target, tmp_path, capsys):
    prompts = write_prompts(tmp_path / "questions.jsonl", [3, 5, 8, 2, 9, 4, 6, 7])
    out = tmp_path / "[/out]"  # which rich would take for markup
    assert run(command(target, prompts, out, "--tokens_per_shard", "1")) == 0
    assert str(out) in capsys.readouterr().out
    manifest = json.loads((out / "manifest.json").read_text())
    for units in (2, 2**40):  # as if killed after the first shard, with units that are not there
        shards = [manifest["shards"][0] | {"units": units}]
        (out / "manifest.json").write_text(json.dumps(manifest | {"complete": False, "shards": shards}))
        assert run(command(target, prompts, out, "--tokens_per_shard", "1", "--resume")) == 2
        assert "it is damaged: collect again in another folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("tokenizer*", "tokenizer"),
        ("model.safetensors", "safetensors"),
        ("config.json", "config.json"),
        ("routers", "no MoE target"),
    ],
)
def test_unusable_targets_are_refused_in_one_line(target, tmp_path, capsys, missing, message):
    broken = tmp_path / "broken"
    shutil.copytree(target, broken)
    if missing == "routers":
        shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
        config = Qwen3Config(**shape, vocab_size=VOCAB, num_key_value_heads=1, head_dim=16)
        Qwen3ForCausalLM(config).save_pretrained(broken)
    for path in broken.glob(missing):
        path.unlink()
    prompts = write_prompts(tmp_path / "questions.jsonl", [3])
    capsys.readouterr()
    assert run(command(broken, prompts, tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert message in error
    assert str(broken) in error
    assert error.strip().count("\n") == 0
    assert not (tmp_path / "out").exists()


def test_collection_is_fast_enough_to_report_progress(tmp_path, spec):
    seen: list[CollectProgress] = []
    start = time.monotonic()
    collect(
        make_target(),
        make_tokenizer(),
        texts([3, 4, 5, 6]),
        CollectConfig(max_new_tokens=4, batch_size=2),
        tmp_path / "out",
        spec=spec,
        progress=seen.append,
    )
    assert [state.sequences for state in seen] == [0, 2, 4]
    assert seen[-1].total == 4
    assert seen[-1].tokens == TraceStore(tmp_path / "out").num_tokens
    assert time.monotonic() - start < 10
