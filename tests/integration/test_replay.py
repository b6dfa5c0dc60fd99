"""Replay: identical in float64, near ties only in float32, exactly the known share where sets were changed."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from ecospec.cli.main import main
from ecospec.predictor.fingerprint import routing_spec_of
from ecospec.trace_collection.collect import collect, open_engine
from ecospec.trace_collection.plan import CollectConfig
from ecospec.trace_collection.replay import replay
from ecospec.trace_collection.store import TraceStore, TraceStoreWriter
from tests.collect_targets import doubled, make_target, make_tokenizer, texts
from tests.tiny_files import save_prompts, save_target


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    make_target().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def spec(target):
    return routing_spec_of(target)


def collected(model, spec, out, *, lengths=(1, 3, 9, 9, 20, 31), **changes):
    """A store of generated sequences and one of texts, of the same prompts."""
    options: dict[str, Any] = {"max_new_tokens": 24, "batch_size": 4} | changes
    config = CollectConfig(**options)
    return collect(model, make_tokenizer(), texts(lengths), config, out, spec=spec, options={"dtype": "float32"})


def replayed(model, spec, source, out, **changes):
    options: dict[str, Any] = {"mode": "replay", "batch_size": 3} | changes
    config = CollectConfig(**options)
    with open_engine(model, make_tokenizer(), config, spec=spec) as engine:
        return replay(engine, source, out, config, spec=spec, options={"dtype": "float32"})


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "deepseek"])
@pytest.mark.parametrize("mode", ["generate", "teacher_forced"])
def test_replay_in_float64_is_identical(family, mode, tmp_path, spec):
    """Left-padded generation and a right-padded forward of other batches give the same experts."""
    model = doubled(make_target(family))
    if family == "deepseek":
        spec = dataclasses.replace(spec, layer_indices=(1, 2))
    store = collected(model, spec, tmp_path / "store", mode=mode)
    report = replayed(model, spec, store, tmp_path / "again")
    assert report.total.tokens == store.num_tokens
    assert report.total.identical.tolist() == [report.total.whole] * 2 == [store.num_tokens] * 2
    assert report.total.shared.tolist() == [2 * store.num_tokens] * 2
    assert {(group.dataset, group.origin) for group in report.groups} == {
        (dataset, "generated" if mode == "generate" else "teacher_forced") for dataset in ("set0", "set1")
    }
    assert report.low() == []


def test_replay_in_float32_differs_at_near_ties_only(tmp_path, spec):
    model = make_target()
    store = collected(model, spec, tmp_path / "store", lengths=(5, 17, 31, 8))
    replayed(model, spec, store, tmp_path / "again")
    for old, new in zip(store.iter_sequences(), TraceStore(tmp_path / "again").iter_sequences(), strict=True):
        with torch.no_grad():
            ids = torch.tensor(old.token_ids[:-1])[None].long()
            logits = torch.stack(model(ids, output_router_logits=True).router_logits, dim=1)
        ordered = torch.softmax(logits, -1).sort(dim=-1, descending=True).values
        ties = (ordered[..., 1] - ordered[..., 2] < 1e-5).numpy()
        differs = (old.experts != new.experts).any(-1)
        assert not (differs & ~np.maximum.accumulate(ties.any(-1))[:, None]).any()


def swapped(store, out, chosen):
    """A copy of a store in which one expert of each chosen (processed token, layer) is another one."""
    with TraceStoreWriter(out, store.spec, collection=store.manifest.collection) as writer:
        first = 0
        for trace in store.iter_sequences():
            experts = trace.experts.copy()
            for token, layer in chosen:
                if first <= token < first + trace.num_processed:
                    row = experts[token - first, layer]
                    row[0] = next(expert for expert in range(8) if expert not in row)
                    row.sort()
            first += trace.num_processed
            writer.append([dataclasses.replace(trace, experts=experts)])
    return TraceStore(out)


def test_changed_sets_are_counted_exactly(tmp_path, spec):
    model = doubled(make_target())
    store = collected(model, spec, tmp_path / "store", mode="teacher_forced", lengths=(40, 31, 20, 9))
    wrong = swapped(store, tmp_path / "wrong", [(0, 0), (1, 0), (2, 0), (50, 0), (2, 1)])
    report = replayed(model, spec, wrong, tmp_path / "again")
    assert store.num_tokens == report.total.tokens == 100
    assert report.total.shares().tolist() == [0.96, 0.99]
    assert report.total.overlaps(2).tolist() == [0.98, 0.995]
    assert report.total.whole == 96
    low = report.low()
    assert {layer for _, layer, _ in low} == {0, 1}  # below 0.99 in one of the two datasets
    assert all(share == group.shares()[layer] < 0.99 for group, layer, share in low)
    assert sum(group.identical[0] for group in report.groups) == 96


def test_limit_and_resume(tmp_path, spec):
    model = doubled(make_target())
    store = collected(model, spec, tmp_path / "store")
    half = replayed(model, spec, store, tmp_path / "half", limit=2)
    assert half.total.sequences == 2
    config = CollectConfig(mode="replay", batch_size=2)
    with open_engine(model, make_tokenizer(), config, spec=spec) as engine:

        class Dies:
            uses_host = True

            def __init__(self):
                self.left = 2

            def process(self, batch):
                self.left -= 1
                if self.left < 0:
                    raise KeyboardInterrupt
                return engine.process(batch)

        with pytest.raises(KeyboardInterrupt):
            replay(Dies(), store, tmp_path / "cut", config, spec=spec, tokens_per_shard=1)
        assert TraceStore(tmp_path / "cut").num_rows == 4
        report = replay(Dies(), store, tmp_path / "cut", config, spec=spec, resume=True, tokens_per_shard=1)
        with pytest.raises(ValueError, match="another batch plan"):
            replay(
                engine,
                swapped(store, tmp_path / "x", [(0, 0)]),
                tmp_path / "cut",
                config,
                spec=spec,
                resume=True,
                options={"replay_of": str(store.path)},
            )
    assert report.total.tokens == store.num_tokens
    assert report.total.whole == store.num_tokens


def run(*arguments):
    with pytest.raises(SystemExit) as stop:
        main(["collect-traces", *map(str, arguments)])
    return stop.value.code


def test_command_line(target, tmp_path, capsys):
    prompts = save_prompts(tmp_path / "p.jsonl", 6, 0)
    common = ("--target", target, "--threads", 1)
    assert run(*common, "--prompts", prompts, "--out", tmp_path / "store", "--max-new-tokens", 9) == 0
    replay_options = (*common, "--mode", "replay", "--traces", tmp_path / "store", "--out", tmp_path / "replay",
                      "--compression", "zstd-1")  # fmt: skip
    assert run(*replay_options, "--dtype", "bfloat16", "--batch-size", 2, "--low-share", 1) == 0
    shown = capsys.readouterr().out
    report = json.loads((tmp_path / "replay" / "replay.json").read_text())
    assert list(report) == ["format_version", "low_share", "recorded", "replayed", "total", "groups", "low"]
    store = TraceStore(tmp_path / "store")
    assert report["total"]["tokens"] == store.num_tokens == TraceStore(tmp_path / "replay" / "traces").num_tokens
    assert (report["recorded"]["dtype"], report["replayed"]["dtype"]) == ("float32", "bfloat16")
    keys = ["dataset", "origin", "sequences", "tokens", "identical_share", "all_layers_identical_share", "overlap"]
    assert all(list(group) == [*keys, "layers"] for group in [report["total"], *report["groups"]])
    assert [entry["layer"] for entry in report["total"]["layers"]] == list(store.spec.layer_indices)
    assert report["total"]["identical_share"] > 0.7
    assert ("low: layer" in shown) == bool(report["low"])
    assert "identical sets" in shown
    before = json.dumps(report["total"])
    assert run(*replay_options, "--dtype", "bfloat16", "--batch-size", 2, "--resume") == 0
    report = json.loads((tmp_path / "replay" / "replay.json").read_text())
    assert json.dumps(report["total"]) == before
    assert report["low_share"] == 0.9
    assert report["replayed"]["compression"] == "zstd-1"
    shard = pq.ParquetFile(tmp_path / "replay" / "traces" / "shard-00000.parquet")
    assert shard.metadata.row_group(0).column(0).compression == "ZSTD"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--mode", "replay"), "--traces is needed in mode replay"),
        (("--mode", "replay", "--traces", "nowhere"), "nowhere does not exist"),
        (("--mode", "replay", "--traces", "x", "--prompts", "p.jsonl"), "--prompts has no meaning in mode replay"),
        (("--mode", "replay", "--traces", "x", "--temperature", "1"), "temperature has no meaning in mode replay"),
        (("--mode", "replay", "--traces", "x", "--low-share", "2"), "--low-share must be a share from 0 to 1"),
        (("--traces", "x", "--prompts", "p.jsonl"), "--traces has no meaning in mode generate"),
        (("--mode", "teacher-forced"), "--prompts is needed in mode teacher_forced"),
        (("--prompts", "p.jsonl", "--low-share", "0.5"), "--low-share has no meaning in mode generate"),
    ],
)
def test_user_errors(target, tmp_path, capsys, options, message):
    assert run("--target", target, "--out", tmp_path / "out", *options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.strip().count("\n") == 0


def test_store_of_another_target_is_refused(target, tmp_path, capsys):
    other = save_target(tmp_path / "other")
    prompts = save_prompts(tmp_path / "p.jsonl", 2, 0)
    assert run("--target", other, "--prompts", prompts, "--out", tmp_path / "store", "--max-new-tokens", 3) == 0
    capsys.readouterr()
    options = ("--mode", "replay", "--traces", tmp_path / "store", "--out", tmp_path / "out")
    assert run("--target", target, *options) == 2
    assert "was made for another target" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
