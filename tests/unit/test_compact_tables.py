"""Tables reduced to rankings: the same sets as the full table everywhere, on disk, in reports, from the recipe."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints.recipe import predictor as recipe_predictor
from checkpoints.recipe import tables as recipe_tables
from checkpoints.recipe.settings import Settings
from checkpoints.recipe.stages import STAGES
from ecospec.cli import report_overlap
from ecospec.eval.overlap_counts import OverlapCounts, SequenceInfo
from ecospec.eval.overlap_rendering import main_table
from ecospec.eval.overlap_report import measure_overlap, overlap_report
from ecospec.predictor import (
    BigramRankingPredictor,
    PredictorConfig,
    PredictorSession,
    RoutingSpec,
    TokenRankingPredictor,
    load_predictor,
    top_k_experts,
)
from ecospec.predictor.bundle_files import BUNDLE_FILES, write_bundle
from ecospec.predictor.fingerprint import routing_spec_of
from ecospec.predictor.model_card import model_card
from ecospec.predictor.table_rankings import pair_key_dtype
from ecospec.trace_collection.groups_manifest import GroupsManifest
from ecospec.trace_collection.records import RoutingTrace
from ecospec.trace_collection.store import TraceStoreWriter
from ecospec.train.arrays import TraceArrays, open_stores, read_arrays
from ecospec.train.baselines import SAVED, fit_baselines, mean_overlap, save_baselines
from ecospec.train.splits import TRAINING, SplitConfig, split_arrays
from tests.predictor_fakes import path_to, random_parents
from tests.tiny_files import save_target

V, L, E, K = 24, 3, 32, 4
SPEC = RoutingSpec(L, (0, 1, 3), E, K, V, "a" * 64, "test", "b" * 64)


def random_arrays(spec, tokens=600, seed=0):
    """Random traces in which an expert set leans on the pair; the last three tokens never occur."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, spec.vocab_size - 3, tokens, dtype=np.int32)
    scores = rng.random((tokens, spec.num_layers, spec.num_experts))
    for offset, stream in ((0, ids), (1, ids + np.roll(ids, 1))):
        scores[np.arange(tokens), :, (stream + offset) % spec.num_experts] += 0.6
    experts = np.sort(np.argsort(-scores, axis=-1)[..., : spec.top_k], axis=-1).astype(spec.expert_dtype)
    offsets = np.array([0, tokens // 3, tokens // 2, tokens], dtype=np.int64)
    return TraceArrays(spec, ids, experts, offsets, ("g0", "g1", "g1"), ("d",) * 3)


def fit_tables(arrays, **options) -> dict[str, Any]:
    """`fit_baselines`; Any, because only the tables among them have ``compact``."""
    return dict(fit_baselines(arrays, **options))


@pytest.fixture(scope="module")
def fitted():
    return fit_tables(random_arrays(SPEC))


def all_pairs(spec):
    """Every (previous, token), a start among the previous ones."""
    pairs = torch.cartesian_prod(torch.arange(-1, spec.vocab_size), torch.arange(spec.vocab_size))
    return pairs[:, 1], pairs[:, 0]


def assert_same_sets(full, compact, spec):
    tokens, previous = all_pairs(spec)
    mine, theirs = (
        one.calibrated(one.node_scores(tokens, previous[:, None], tokens, None)) for one in (full, compact)
    )
    assert theirs.shape == mine.shape
    assert theirs.dtype == torch.float32
    assert torch.equal(top_k_experts(mine, spec.top_k), top_k_experts(theirs, spec.top_k))
    ordered = mine.topk(spec.top_k).indices
    assert torch.equal(theirs.topk(spec.top_k).indices, ordered)
    for fewer in range(1, spec.top_k):
        assert torch.equal(theirs.topk(fewer).indices, ordered[..., :fewer])


@pytest.mark.parametrize("name", ["token_table", "bigram_table"])
def test_same_experts_for_every_pair(fitted, name):
    compact = fitted[name].compact()
    assert_same_sets(fitted[name], compact, SPEC)
    assert compact.ranks_only
    assert compact.config.options == fitted[name].config.options
    assert compact.config.training_data == fitted[name].config.training_data


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("layers", "experts", "top_k"), [(1, 4, 4), (2, 300, 6), (2, 256, 1)])
def test_same_experts_at_other_sizes(seed, layers, experts, top_k):
    spec = RoutingSpec(layers, tuple(range(layers)), experts, top_k, V, "a" * 64, "test", "b" * 64)
    for shrinkage in (0.3, 5.0):
        fitted = fit_tables(random_arrays(spec, 200, seed), pair_shrinkage=shrinkage)
        for name in ("token_table", "bigram_table"):
            compact = fitted[name].compact()
            assert_same_sets(fitted[name], compact, spec)
            assert compact.token_experts.dtype == (torch.uint16 if experts > 256 else torch.uint8)


def test_whole_sequences_and_sessions(fitted):
    full, compact = fitted["bigram_table"], fitted["bigram_table"].compact()
    ids = torch.from_numpy(random_arrays(SPEC, seed=7).tokens.astype(np.int64))
    ids[5] = V - 1  # never seen
    expected = top_k_experts(full.score_sequence(ids), K)
    assert torch.equal(top_k_experts(compact.score_sequence(ids), K), expected)
    sessions = [full.session(), compact.session()]
    assert all(isinstance(session, PredictorSession) for session in sessions)
    generator = torch.Generator().manual_seed(0)
    for step in range(5):
        tokens, parents = torch.randint(V, (6,), generator=generator), random_parents(6, generator)
        scores = [session.score(tokens, parents) for session in sessions]
        assert torch.equal(*(top_k_experts(one, K) for one in scores))
        for session in sessions:
            session.commit(torch.tensor(path_to(5, parents)))
            session.prefill(ids[step : step + 2])


def test_overlap_is_the_full_tables(fitted):
    held_out = random_arrays(SPEC, seed=3)
    for name in ("token_table", "bigram_table"):
        assert mean_overlap(fitted[name].compact(), held_out) == mean_overlap(fitted[name], held_out)


def test_pairs_that_rank_as_their_token_are_left_out(fitted):
    full = fitted["bigram_table"]
    strong = fit_tables(random_arrays(SPEC), pair_shrinkage=1e6)["bigram_table"]  # pairs say nothing
    assert len(strong.compact().pair_keys) < len(strong.pair_keys) / 2
    assert_same_sets(strong, strong.compact(), SPEC)
    compact = full.compact()
    assert compact.pair_keys.dtype == torch.int32
    bytes_kept = sum(t.numel() * t.element_size() for t in compact.bundle_tensors().values())
    assert bytes_kept <= 4 * V + (V + 1) * L * K + len(full.pair_keys) * (L * K + 4)


def test_keys_of_a_large_vocabulary_are_int64(fitted):
    for vocabulary, dtype in ((46_340, torch.int32), (46_341, torch.int64)):
        assert pair_key_dtype(dataclasses.replace(SPEC, vocab_size=vocabulary)) == dtype
    spec = dataclasses.replace(SPEC, vocab_size=50_000)
    config = PredictorConfig(kind="bigram_ranking", spec=spec)
    source = fitted["bigram_table"].compact()
    rows = torch.zeros(spec.vocab_size, dtype=torch.int32)
    keys = torch.tensor([3, 49_999 * 50_000 + 49_999])
    table = BigramRankingPredictor(config, rows, source.token_experts, keys, source.pair_experts[:2])
    found = table.node_experts(torch.tensor([49_999, 3, 3]), torch.tensor([49_999, 0, -1]))
    assert torch.equal(found[:2], source.pair_experts[[1, 0]].long())
    assert torch.equal(found[2], source.token_experts[0].long())


def test_bundles(fitted, tmp_path):
    overlaps = save_baselines(fitted, tmp_path, validation=random_arrays(SPEC, seed=1), provenance={"git_sha": "1"})
    assert tuple(overlaps) == SAVED == report_overlap.FITTED
    save_baselines(fitted, tmp_path)  # replaces
    save_baselines(fitted, tmp_path, validation=random_arrays(SPEC, seed=1), provenance={"git_sha": "1"})
    kinds = {}
    for name in SAVED:
        loaded = load_predictor(tmp_path / name, require_spec=SPEC)
        kinds[name] = loaded.kind
        assert loaded.config.training_data["group_ids"] == ["g0", "g1"]
        assert loaded.config.training_data["tokens"] == 600
        assert loaded.config.metrics == {"val_overlap": overlaps[name], "val_tokens": 600}
        assert loaded.config.provenance == {"git_sha": "1"}
        assert {(tmp_path / name / file).stat().st_mode & 0o044 for file in BUNDLE_FILES} == {0o044}
        assert "val_overlap" in (tmp_path / name / "README.md").read_text()
    assert kinds == {
        "frequency": "frequency",
        "token_table": "token_ranking",
        "bigram_table": "bigram_ranking",
        "last_token": "last_token",
    }
    loaded = load_predictor(tmp_path / "bigram_table")
    assert isinstance(loaded, BigramRankingPredictor)
    assert_same_sets(fitted["bigram_table"], loaded, SPEC)
    assert not fitted["frequency"].config.metrics  # what was passed in stays as it was


def test_card_leaves_long_lists_to_the_config(fitted):
    config = fitted["bigram_table"].compact().config
    assert '["g0", "g1"]' in model_card(config)
    many = dataclasses.replace(config, training_data={"group_ids": [f"g{i}" for i in range(500)]})
    card = model_card(many)
    assert "500 entries, in config.json" in card
    assert "g499" not in card
    assert "ids only, no probabilities" in card


def changed(name, change):
    def apply(tensors):
        return tensors | {name: change(tensors[name])}

    return apply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("pair_experts", lambda t: t.to(torch.int32)), "pair_experts must be uint8, got torch.int32"),
        (changed("pair_experts", lambda t: t + E), "pair_experts must hold expert ids below 32"),
        (changed("token_experts", torch.zeros_like), "token_experts names one expert twice"),
        (changed("token_experts", lambda t: t[:, :, :2]), r"'token_experts' is \(22, 3, 2\), config.json says"),
        (changed("token_experts", lambda t: t[:2]), "row_of_token must be int32 and below the 2 rows"),
        (changed("row_of_token", lambda t: t.long()), "row_of_token must be int32"),
        (changed("row_of_token", lambda t: t - 1), "row_of_token must be int32 and below"),
        (changed("pair_keys", lambda t: t.long()), "pair_keys must be torch.int32 at V = 24, got torch.int64"),
        (changed("pair_keys", lambda t: t.flip(0)), "pair_keys must be ascending"),
        (changed("pair_keys", lambda t: t + V * V), r"pair_keys must be previous \* V \+ token"),
        (changed("pair_keys", lambda t: t[1:]), "rows of pair_experts"),
        (lambda t: {n: v for n, v in t.items() if n != "pair_keys"}, "tensor 'pair_keys' is missing"),
    ],
)
def test_damaged_bundles_are_refused_by_file(fitted, tmp_path, change, message):
    compact = fitted["bigram_table"].compact()
    write_bundle(tmp_path / "table", compact.config, change(compact.bundle_tensors()))
    with pytest.raises(ValueError, match=message) as error:
        load_predictor(tmp_path / "table")
    assert str(error.value).startswith(str(tmp_path / "table" / "model.safetensors"))


@dataclasses.dataclass(frozen=True)
class Row:
    token_ids: np.ndarray
    experts: np.ndarray
    group_id: str
    dataset: str = "d"
    prompt_length: int = 4
    origin: str = "generated"


def test_reports_leave_out_what_rankings_do_not_say(fitted):
    arrays = random_arrays(SPEC, seed=5)
    rows = [
        Row(arrays.tokens[first:last], arrays.experts[first:last], group)
        for first, last, group in zip(arrays.offsets, arrays.offsets[1:], ("a", "b", "c"), strict=False)
    ]
    tables = {name: fitted[name] for name in ("frequency", "token_table", "bigram_table")}
    compact = tables | {name: tables[name].compact() for name in ("token_table", "bigram_table")}
    full, ranked = (
        overlap_report(measure_overlap(rows, t, SPEC), inputs={}, provenance={}) for t in (tables, compact)
    )
    assert ranked["predictors"]["frequency"] == full["predictors"]["frequency"]
    for name in ("token_table", "bigram_table"):
        mine, theirs = ranked["predictors"][name], full["predictors"][name]
        # Not the same to the last digit: a report ranks 4 K experts at once, and ties fall differently then.
        assert mine["overlap"]["mean"] == pytest.approx(theirs["overlap"]["mean"], abs=0.01)
        assert mine["set_exact"] == pytest.approx(theirs["set_exact"], abs=0.01)
        assert mine["calibration_error"] is None
        assert mine["reliability"] == []
        assert mine["recall"] == {"4": pytest.approx(mine["overlap"]["mean"]), "6": None, "8": None, "16": None}
    table = main_table(ranked)
    assert any("without probabilities" in note for note in table.notes)
    assert next(row for row in table.rows if row[0] == "bigram_table")[-1] == "–"
    assert not any("without probabilities" in note for note in main_table(full).notes)


def test_counts_of_rankings_hold_no_calibration(fitted):
    counts = OverlapCounts(SPEC, ["x"], {"x"})
    arrays = random_arrays(SPEC, tokens=30)
    experts = torch.from_numpy(arrays.experts.astype(np.int64))
    scores = fitted["token_table"].compact().score_sequence(torch.from_numpy(arrays.tokens.astype(np.int64)))
    counts.add(SequenceInfo("g", "d", 0, "generated"), experts, {"x": scores})
    assert counts.predictors["x"].calibration.sum() == 0


def write_store(path, spec, groups, seed):
    rng = np.random.default_rng(seed)
    with TraceStoreWriter(path, spec) as writer:
        for number in groups:
            size = int(rng.integers(20, 60))
            tokens = rng.integers(0, spec.vocab_size, size, dtype=np.int32)
            ranked = np.argsort(rng.random((size, spec.num_layers, spec.num_experts)), axis=-1)
            experts = np.sort(ranked[..., : spec.top_k], axis=-1).astype(np.uint8)
            trace = RoutingTrace(
                f"s{number}-{seed}", f"{number:016x}", "d", "", tokens, size, "teacher_forced", experts, None,
                "text",
            )  # fmt: skip
            writer.append([trace])


def test_recipe_fits_the_predictors_training_split(tmp_path, capsys):
    settings = Settings(tmp_path / "out", tmp_path / "work", threads=1, seed=0)
    spec = routing_spec_of(save_target(settings.target))
    jobs = [job for job in recipe_predictor.JOBS if job.split == "predictor_train"]
    for seed, job in enumerate(jobs):
        write_store(job.folder(settings), spec, range(40), seed)
    assert list(STAGES).index("traces") < list(STAGES).index("tables")
    assert not recipe_tables.tables_complete(settings)
    recipe_tables.make_tables(settings)
    assert recipe_tables.tables_complete(settings)
    assert "bigram_table" in capsys.readouterr().out
    config = recipe_predictor.training_config(settings)
    arrays = read_arrays(open_stores(config.trace_paths()))
    splits = split_arrays(
        arrays, SplitConfig(config.validation_fraction, config.calibration_fraction, seed=config.seed)
    )
    held_out = splits != TRAINING
    training = arrays.subset(~held_out)
    full = fit_tables(training)["bigram_table"]
    loaded = load_predictor(settings.tables / "bigram_table")
    assert_same_sets(full, loaded, spec)
    data = json.loads((settings.tables / "bigram_table" / "config.json").read_text())["training_data"]
    assert data["fingerprint"] == training.fingerprint()
    assert data["group_ids"] == sorted(set(training.group_ids))
    assert not set(data["group_ids"]) & {g for g, out in zip(arrays.group_ids, held_out, strict=True) if out}


def test_shipped_tables(checkpoints):
    folder = checkpoints / "tables"
    spec = routing_spec_of(checkpoints / "target")
    splits = GroupsManifest.load(checkpoints / "groups.json").splits()
    for name in SAVED:
        data = load_predictor(folder / name, require_spec=spec).config.training_data
        assert data["tokens"] > 2_000_000
        assert {splits[group] for group in data["group_ids"]} == {"predictor_train"}
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 6_000_000


def test_shipped_tables_and_predictor_were_fitted_on_the_same_traces(checkpoints):
    if not (checkpoints / "predictor" / "config.json").is_file():
        pytest.skip("the recipe's stage predictor has not run here")
    wanted = PredictorConfig.read(checkpoints / "predictor").training_data["fingerprint"]
    for name in SAVED:
        assert PredictorConfig.read(checkpoints / "tables" / name).training_data["fingerprint"] == wanted


def test_token_ranking_alone(fitted):
    compact = fitted["token_table"].compact()
    assert isinstance(compact, TokenRankingPredictor)
    assert not isinstance(compact, BigramRankingPredictor)
    scores = compact.score_sequence(torch.tensor([1, V - 1]))
    assert scores.sort(-1).values[..., -K:].tolist() == [[[1.0, 2.0, 3.0, 4.0]] * L] * 2
    assert scores.sum() == 2 * L * 10
