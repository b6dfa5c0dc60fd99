"""What `ecospec traces info` says, against sums made with plain NumPy, and what it warns of."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from scipy.stats import entropy

from ecospec.cli.main import main
from ecospec.trace_collection import routing_statistics as statistics
from ecospec.trace_collection.inspection import inspect_store
from ecospec.trace_collection.records import RoutingTrace
from ecospec.trace_collection.store import TraceStore, TraceStoreWriter
from ecospec.trace_collection.tree_store import TreeStoreWriter
from tests.store_rows import SPEC, interrupted, trace, write
from tests.unit.test_tree_store import tree


def write_rows(path, route, *, spec=SPEC, origin="generated", rows=12, size=60):
    """A store whose experts are ``route(rng, tokens)``, ``[t, L, K]``."""
    rng = np.random.default_rng(5)
    with TraceStoreWriter(path, spec) as writer:
        for number in range(rows):
            tokens = rng.integers(0, spec.vocab_size, size).astype(np.int32)
            used = tokens[:-1] if origin == "generated" else tokens
            writer.append(
                [
                    RoutingTrace(
                        sequence_id=f"s{number}",
                        group_id=f"g{number}",
                        dataset="d",
                        category="",
                        token_ids=tokens,
                        prompt_length=1 if origin == "generated" else size,
                        origin=origin,
                        experts=np.sort(route(rng, used), axis=-1).astype(spec.expert_dtype),
                        weights=None,
                        finish_reason="length" if origin == "generated" else "text",
                    )
                ]
            )
    return path


def uniform(rng, tokens, spec=SPEC):
    return np.argsort(rng.random((len(tokens), spec.num_layers, spec.num_experts)))[..., : spec.top_k]


def by_token(rng, tokens, spec=SPEC):
    table = np.argsort(np.random.default_rng(1).random((spec.vocab_size, spec.num_layers, spec.num_experts)))
    return table[tokens][..., : spec.top_k]


def test_numbers_are_those_of_numpy(tmp_path):
    path = write(tmp_path / "store", tokens_per_shard=60, collection={"skipped": {"empty": 2}})
    found = inspect_store(path)
    rows = [trace(number) for number in range(10)]
    experts = np.concatenate([row.experts for row in rows])
    assert (found.rows, found.sequences, found.groups, found.tokens) == (10, 10, 5, len(experts))
    assert found.bytes_per_token == sum(p.stat().st_size for p in path.glob("*.parquet")) / len(experts)
    assert 0 < sum(found.bytes_by_column.values()) < found.bytes_per_token
    assert set(found.bytes_by_column) == {f.name for f in dataclasses.fields(RoutingTrace)} - {"weights"}
    assert found.skipped == {"empty": 2}
    for place, layer in enumerate(found.layers):
        counts = np.bincount(experts[:, place].ravel(), minlength=16)
        assert layer.layer == SPEC.layer_indices[place]
        assert layer.entropy_bits == pytest.approx(entropy(counts, base=2))
        assert layer.effective_experts == pytest.approx(math.exp(entropy(counts)))
        assert layer.dead == tuple(np.flatnonzero(counts == 0))
    for name, parity in (("code", 0), ("docs", 1)):
        mine = [row for number, row in enumerate(rows) if number % 2 == parity]
        dataset = found.datasets[name]
        assert (dataset.sequences, dataset.groups) == (5, 5)
        assert dataset.tokens == sum(row.num_processed for row in mine)
        assert dataset.teacher_forced == sum(row.num_processed for row in mine if row.origin == "teacher_forced")


def test_healthy_routing_has_no_warning(tmp_path):
    found = inspect_store(write_rows(tmp_path / "store", by_token))
    assert found.warnings == ()
    assert all(layer.same_token == pytest.approx(1) for layer in found.layers)


def test_uniform_routing(tmp_path):
    (warning,) = inspect_store(write_rows(tmp_path / "all", uniform)).warnings
    assert "routing looks uniform in MoE layers all" in warning

    def last_layer(rng, tokens):
        routes = by_token(rng, tokens)
        routes[:, 2] = uniform(rng, tokens)[:, 2]
        return routes

    (warning,) = inspect_store(write_rows(tmp_path / "one", last_layer)).warnings
    assert "routing looks uniform in MoE layers 3:" in warning  # its decoder layer
    few = inspect_store(write_rows(tmp_path / "few", uniform, rows=1, size=20))
    assert few.warnings == ()
    assert few.layers[0].same_token is None


def test_experts_shifted_against_their_tokens_look_uniform(tmp_path):
    (warning,) = inspect_store(
        write_rows(tmp_path / "store", lambda rng, tokens: by_token(rng, np.roll(tokens, 1)))
    ).warnings
    assert "are the rows aligned with the tokens" in warning


def test_all_zero_and_stuck_routing(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:  # as a writer without the contract would store a serving engine's rows
        patch.setattr(RoutingTrace, "require", lambda *_: None)

        def half_zero(rng, tokens):
            routes = by_token(rng, tokens)
            routes[::2] = 0
            return routes

        path = write_rows(tmp_path / "zero", half_zero)
    found = inspect_store(path).warnings
    assert "all zero: 50.8% of the tokens have expert 0 in every place" in found[0]
    single = dataclasses.replace(SPEC, top_k=1)
    path = write_rows(tmp_path / "single", lambda _, tokens: np.zeros((len(tokens), 3, 1)), spec=single)
    assert any("used the same 1 expert(s) for every token (all zero)" in w for w in inspect_store(path).warnings)
    stuck = write_rows(tmp_path / "stuck", lambda _, tokens: np.tile([3, 9], (len(tokens), 3, 1)))
    (warning,) = inspect_store(stuck).warnings
    assert warning == "MoE layers all used the same 2 expert(s) for every token"


def test_text_of_others_and_unfinished_stores(tmp_path):
    (warning,) = inspect_store(write_rows(tmp_path / "forced", by_token, origin="teacher_forced")).warnings
    assert warning.startswith("100% of the tokens are not the model's own text (teacher_forced)")
    interrupted(tmp_path / "part", tokens_per_shard=60)
    assert "has not finished: resume it" in inspect_store(tmp_path / "part").warnings[0]
    with TraceStoreWriter(tmp_path / "empty", SPEC):
        pass
    assert inspect_store(tmp_path / "empty").warnings == ("no token has experts",)


def test_trees(tmp_path):
    with TreeStoreWriter(tmp_path / "trees", SPEC) as writer:
        writer.append([tree(number) for number in range(20)])
    found = inspect_store(tmp_path / "trees")
    assert (found.rows, found.sequences, found.groups, found.datasets) == (20, 7, 4, {})
    assert found.tokens == sum(tree(number).num_nodes for number in range(20))


def test_command(tmp_path, capsys):
    path = write(tmp_path / "store")
    with pytest.raises(SystemExit) as stop:
        main(["traces", "info", str(path), "--json", str(tmp_path / "info.json")])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for words in ("effective experts", "dead experts", "teacher-forced", "bytes per token", "warning: "):
        assert words in shown
    data = json.loads((tmp_path / "info.json").read_text())
    assert data["tokens"] == TraceStore(path).num_tokens
    assert data["spec"]["top_k"] == 2
    assert len(data["layers"]) == 3


def test_beyond_chance_is_zero_for_independent_and_one_for_equal_sets():
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.ones(16), 3)
    sets = np.stack([[rng.choice(16, 2, replace=False, p=p) for p in shares] for _ in range(4000)]).astype(np.uint8)
    counts = statistics.expert_counts(sets, 16)
    independent = statistics.shared_experts(sets[::2], sets[1::2])
    assert np.abs(statistics.beyond_chance(independent, counts, 2)).max() < 0.05
    assert statistics.beyond_chance(statistics.shared_experts(sets, sets), counts, 2) == pytest.approx(np.ones(3))
    assert np.isnan(statistics.beyond_chance(np.array([2.0]), np.array([[5, 5, 0]]), 2)).all()


def test_set_entropy():
    """Against scipy where sets are common; where they are rare, Chao-Shen is nearer to the truth."""
    rng = np.random.default_rng(0)
    few = np.sort(np.argsort(rng.random((5000, 4)))[:, :2]).astype(np.uint8)
    plug_in, chao_shen = statistics.set_entropy(few, 4)
    counts = np.unique(few, axis=0, return_counts=True)[1]
    assert plug_in == pytest.approx(entropy(counts, base=2))
    assert chao_shen == pytest.approx(plug_in, abs=1e-3)
    many = np.sort(np.argsort(rng.random((3000, 16)))[:, :4]).astype(np.uint8)
    plug_in, chao_shen = statistics.set_entropy(many, 16)
    truth = math.log2(math.comb(16, 4))
    assert plug_in < truth < chao_shen < truth + 0.3
    assert abs(chao_shen - truth) < abs(plug_in - truth)
    alone = np.array([[0, 1], [0, 2], [1, 2]], np.uint8)  # every set once
    assert all(math.isfinite(value) for value in statistics.set_entropy(alone, 3))
