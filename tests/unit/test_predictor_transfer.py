"""The benchmark of how far a predictor carries: its division of texts, and its sums beside plain loops."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from benchmarks import transfer_training
from benchmarks.predictor_transfer import PredictorTransferConfig
from benchmarks.transfer_measures import (
    TestText,
    by_position,
    by_window,
    cache_bytes,
    matrix,
    sample_positions,
    window_hits,
)
from benchmarks.transfer_training import divided, epochs_of, named_files, once, store_of_kind, validation_share
from ecospec.predictor.backbones import build_backbone
from ecospec.trace_collection.store import TraceStore
from ecospec.train.arrays import open_stores
from ecospec.train.splits import group_position
from tests.predictor_fakes import BACKBONE, SPEC, tiny_predictor
from tests.trace_files import make_arrays, write_store

LENGTHS = [40, 70, 25, 30, 90, 12]
GROUPS = ["g0", "g1", "g1", "g2", "g3", "g3"]
WIDTH = int(str(BACKBONE["hidden_size"]))
DATASETS = ["code", "code", "docs", "docs", "docs", "code"]


class Fixed:
    """Scores that are a fixed function of the token, so that a plain loop can look them up."""

    def __init__(self, spec, seed):
        self.spec = spec
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.rand(spec.vocab_size, spec.num_layers, spec.num_experts, generator=generator)

    def score_sequence(self, ids, experts):
        return self.table[ids]


@pytest.fixture
def arrays():
    return make_arrays(LENGTHS, GROUPS, DATASETS, spec=SPEC)


@pytest.fixture
def store(tmp_path, arrays):
    return write_store(tmp_path / "store", arrays)


def share(arrays, scorer, rows, start=0, end=1000):
    """Top-K overlap over sequences, tokens and layers, one set at a time."""
    hits = total = 0
    for row in rows:
        first, last = arrays.offsets[row], arrays.offsets[row + 1]
        for place in range(first + start, min(last, first + end)):
            for layer in range(SPEC.num_layers):
                best = scorer.table[arrays.tokens[place], layer].topk(SPEC.top_k).indices.tolist()
                hits += len(set(best) & set(arrays.experts[place, layer].tolist()))
                total += SPEC.top_k
    return hits / total


def test_matrix_counts_as_a_plain_loop_does(arrays, store):
    networks = {name: Fixed(SPEC, seed) for seed, name in enumerate(("code", "docs", "all"))}
    tables = {name: Fixed(SPEC, seed + 10) for seed, name in enumerate(networks)}
    found = matrix(networks, tables, TestText([store], SPEC, 1000), SPEC)
    assert found["test"] == {"code": {"tokens": 122, "groups": 3}, "docs": {"tokens": 145, "groups": 3}}
    for kind in ("code", "docs"):
        rows = [row for row, dataset in enumerate(DATASETS) if dataset == kind]
        own = share(arrays, networks[kind], rows)
        for name in networks:
            network, table = (share(arrays, some[name], rows) for some in (networks, tables))
            assert found["network"][name][kind]["mean"] == pytest.approx(network)
            assert found["bigram_table"][name][kind]["mean"] == pytest.approx(table)
            assert found["network_minus_table"][name][kind]["mean"] == pytest.approx(network - table)
            if name == kind:
                assert kind not in found["network_minus_own"][name]
            else:
                assert found["network_minus_own"][name][kind]["mean"] == pytest.approx(network - own)
    assert found["network"]["code"]["docs"]["groups"] == 3


def test_positions_count_as_a_plain_loop_does(arrays, store):
    predictors = {"a": Fixed(SPEC, 1), "b": Fixed(SPEC, 2)}
    found = by_position(predictors, TestText([store], SPEC, 1000, least=30), SPEC)
    rows = [row for row, length in enumerate(LENGTHS) if length >= 30]
    assert found["tokens"] == {"0–15": 64, "16–63": 24 + 48 + 14 + 48, "64–255": 6 + 26}
    for label, start, end in (("0–15", 0, 16), ("16–63", 16, 64), ("64–255", 64, 256)):
        means = {name: share(arrays, one, rows, start, end) for name, one in predictors.items()}
        for name, mean in means.items():
            assert found["overlap"][name][label]["mean"] == pytest.approx(mean)
        assert found["difference"]["a"][label]["mean"] == pytest.approx(means["a"] - means["b"])
    assert list(found["difference"]) == ["a"]


def test_text_takes_no_more_of_a_dataset_than_asked_for(store):
    text = TestText([store], SPEC, 100)
    rows = list(text)
    for dataset in ("code", "docs"):
        assert sum(len(row.experts) for row in rows if row.dataset == dataset) == text.tokens[dataset] <= 100
    assert {row.sequence_id for row in rows} == {row.sequence_id for row in TestText([store], SPEC, 100)}
    with pytest.raises(ValueError, match=r"no sequence of .*store has 91 to 1000 tokens"):
        TestText([store], SPEC, 1000, least=91)


@pytest.mark.parametrize("window", [1, 5, 16])
def test_a_window_scores_as_the_last_tokens_alone_do(arrays, window):
    predictor = tiny_predictor()
    ids = torch.from_numpy(arrays.tokens[:40].astype(np.int64))
    experts = torch.from_numpy(arrays.experts[:40].astype(np.int64))
    positions = torch.tensor([15, 16, 22, 39])
    found = window_hits(predictor, ids, experts, positions, window)
    for place, hits in zip(positions.tolist(), found.tolist(), strict=True):
        alone = predictor.score_sequence(ids[place - window + 1 : place + 1])[-1].topk(SPEC.top_k).indices
        pairs = zip(alone.tolist(), experts[place].tolist(), strict=True)
        assert hits == sum(len(set(best) & set(used)) for best, used in pairs)


def test_windows_share_their_positions_and_full_is_the_whole_text(arrays, store):
    predictor = tiny_predictor()
    found = by_window(predictor, TestText([store], SPEC, 1000), SPEC, (4, 16), first=20, count=10_000, seed=0)
    rows = [row for row, length in enumerate(LENGTHS) if length > 20]
    assert found["positions"] == sum(LENGTHS[row] - 20 for row in rows)
    hits = 0
    for row in rows:
        part = slice(arrays.offsets[row], arrays.offsets[row + 1])
        ids = torch.from_numpy(arrays.tokens[part].astype(np.int64))
        for place in range(20, len(ids)):
            best = predictor.score_sequence(ids[: place + 1])[-1].topk(SPEC.top_k).indices.tolist()
            used = arrays.experts[part][place].tolist()
            hits += sum(len(set(one) & set(other)) for one, other in zip(best, used, strict=True))
    mean = hits / (found["positions"] * SPEC.num_layers * SPEC.top_k)
    assert found["overlap"]["full"]["mean"] == pytest.approx(mean)
    for name in ("4", "16"):
        less = found["overlap"][name]["mean"] - mean
        assert found["difference"][name]["mean"] == pytest.approx(less)
    assert list(found["overlap"]) == ["4", "16", "full"]


def test_positions_are_drawn_once_each_and_far_enough_in():
    lengths = [100, 3, 60, 51]
    places = sample_positions(lengths, 50, 30, seed=1)
    assert sum(map(len, places)) == 30
    for found, length in zip(places, lengths, strict=True):
        assert len(set(found.tolist())) == len(found)
        assert all(50 <= place < length for place in found)
    assert [p.tolist() for p in places] == [p.tolist() for p in sample_positions(lengths, 50, 30, seed=1)]
    everything = sample_positions(lengths, 50, 1000, seed=1)
    assert [list(p) for p in everything] == [list(range(50, 100)), [], list(range(50, 60)), [50]]


@pytest.mark.parametrize("heads", [2, 4])
def test_cache_bytes_are_those_of_a_cache(heads):
    config = BACKBONE | {"num_key_value_heads": heads}
    backbone = build_backbone(config).to(torch.bfloat16)
    out = backbone(inputs_embeds=torch.zeros(1, 7, WIDTH, dtype=torch.bfloat16), use_cache=True)
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in out.past_key_values.layers)
    assert cache_bytes(config, 7) == kept
    assert cache_bytes({name: value for name, value in config.items() if name != "head_dim"}, 7) == kept


def test_lines_are_divided_by_themselves():
    lines = [f"question {number}" for number in range(400)] + ["question 3"]
    training, test = divided(lines)
    assert sorted(training + test) == sorted(lines)
    assert not set(training) & set(test)
    assert 0.15 < len(test) / len(lines) < 0.25
    assert divided(reversed(lines)) == (training[::-1], test[::-1])


@pytest.mark.parametrize("batches", [1, 7, 17, 239, 500])
def test_every_set_is_trained_for_the_same_steps(batches):
    epochs, each = epochs_of(240, iter([batches] * 240))
    assert epochs * each == 240
    assert each <= batches
    fewer = [e for e in range(1, epochs) if 240 % e == 0 and 240 // e <= batches]
    assert not fewer
    with pytest.raises(ValueError, match="1 batches a pass are too few for 4 steps"):
        epochs_of(4, iter([1, 1, 1]))


def test_validation_is_small_but_never_empty():
    for count in (5, 13, 300):
        groups = [f"group{number}" for number in range(count)]
        share = validation_share(groups * 2, 0)
        assert 2 <= sum(group_position(group, 0) < share for group in groups) < count
    assert share == 0.05
    with pytest.raises(ValueError, match="2 groups are too few to keep 2"):
        validation_share(["a", "b"], 0)


def test_each_kind_is_trained_on_alone(tmp_path, arrays, store):
    path = store_of_kind(tmp_path, open_stores([store]), "docs")
    kept = list(TraceStore(path).iter_sequences())
    assert [row.sequence_id for row in kept] == [
        "sequence2",
        "sequence3",
        "sequence4",
    ]  # groups shared with code too
    for row, index in zip(kept, (2, 3, 4), strict=True):
        part = slice(arrays.offsets[index], arrays.offsets[index + 1])
        assert np.array_equal(row.experts, arrays.experts[part])
    before = (path / "manifest.json").stat().st_mtime_ns
    assert store_of_kind(tmp_path, open_stores([store]), "docs") == path
    assert (path / "manifest.json").stat().st_mtime_ns == before
    other = write_store(tmp_path / "other", arrays, [2])
    assert TraceStore(store_of_kind(tmp_path, open_stores([other]), "docs")).num_rows == 1


def test_a_step_that_ended_is_not_repeated(tmp_path, monkeypatch):
    calls: list[list[str]] = []

    def ecospec(arguments):
        calls.append(list(arguments))
        return 1.5

    monkeypatch.setattr(transfer_training, "ecospec", ecospec)
    out = tmp_path / "bundle"
    out.mkdir()
    for _ in range(2):
        once(tmp_path, "export", ["export-predictor", "--out", out], out)
    assert calls == [["export-predictor", "--out", str(out)]]
    assert not out.exists()  # what an export left half made is removed
    out.mkdir()
    once(tmp_path, "train", ["train-predictor", "--out", out], out, resumable=True)
    assert calls[-1] == ["train-predictor", "--out", str(out), "--resume", "true"]
    with pytest.raises(ValueError, match="was made with other options; name another --work"):
        once(tmp_path, "export", ["export-predictor", "--out", out, "--dtype", "bfloat16"], out)


def test_new_groups_are_required(tmp_path, arrays, store):
    other = write_store(tmp_path / "other", dataclasses.replace(arrays, group_ids=tuple("abcdef")))
    transfer_training.require_new_groups([store], [other], SPEC)
    with pytest.raises(ValueError, match="groups of the test stores are among"):
        transfer_training.require_new_groups([store, other], [other], SPEC)


@pytest.mark.parametrize("text", ["questions", "=a.jsonl", "a=x+", "a=x,a=y"])
def test_prompts_that_name_no_kind_or_file_are_refused(text):
    with pytest.raises(ValueError, match="must be KIND=FILE"):
        named_files(text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"parts": "matrix,width"}, "--parts must be some of matrix, length, window"),
        ({"parts": ""}, "--parts must be some of"),
        ({"windows": (64, 16)}, "--windows must be ascending"),
        ({"lengths": ()}, "--lengths must be ascending"),
        ({"steps": 0}, "--steps must be at least 1"),
        ({"prompts": "a"}, "--prompts entry 'a'"),
    ],
)
def test_options_out_of_range_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        PredictorTransferConfig(**values)
