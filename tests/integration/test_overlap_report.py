"""The overlap report on synthetic traces: numbers against a literal count, rendering, refusals, memory."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import defaultdict
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from ecospec.eval.bootstrap import paired_difference, ratio_interval
from ecospec.eval.overlap_counts import POSITION_LABELS, OverlapCounts, SequenceInfo
from ecospec.eval.overlap_report import (
    measure_overlap,
    overlap_report,
    require_disjoint,
    write_overlap_report,
)
from ecospec.eval.report_files import read_report
from ecospec.predictor.routing_spec import RoutingSpec

V, L, E, K = 50, 3, 12, 2
SPEC = RoutingSpec(L, (1, 2, 4), E, K, V, "a" * 64, "tests/tiny", "b" * 64)


@dataclasses.dataclass
class Row:
    token_ids: np.ndarray
    experts: np.ndarray
    group_id: str
    dataset: str
    prompt_length: int
    origin: str


class Fake:
    """Scores depend on the token alone."""

    def __init__(self, noise, spec=SPEC):
        generator = torch.Generator().manual_seed(1)
        self.spec = spec
        self.table = torch.randn(V, L, E, generator=generator)
        self.table = self.table + noise * torch.randn(V, L, E, generator=torch.Generator().manual_seed(2))

    def score_sequence(self, ids, experts):
        assert experts.shape == (len(ids), L, K)
        return self.table[ids]


class Batched(Fake):
    def score_batch(self, ids):
        assert ids.ndim == 2
        return self.table[ids]


def rows(count=14, seed=0):
    generator = np.random.default_rng(seed)
    truth = Fake(0.0).table
    for index in range(count):
        length = int(generator.integers(10, 90))
        ids = generator.integers(0, V, size=length + 1).astype(np.int32)
        noisy = truth[torch.as_tensor(ids[:-1].astype(np.int64))]
        noisy = noisy + 0.8 * torch.randn(noisy.shape, generator=torch.Generator().manual_seed(index))
        experts = noisy.topk(K, -1).indices.sort(-1).values.numpy().astype(np.uint8)
        origin = "generated" if index % 3 else "teacher_forced"
        yield Row(ids, experts.reshape(length, L * K), f"g{index // 2:02}", f"set{index % 2}", 12, origin)


PREDICTORS = {"trained": Batched(0.1), "frequency": Fake(9.0), "bigram_table": Fake(1.0)}


@pytest.fixture(scope="module")
def report():
    counts = measure_overlap(rows(), PREDICTORS, SPEC, batch_tokens=200)
    return overlap_report(
        counts, inputs={"traces": "memory"}, provenance={"git_sha": "0" * 40}, notes=["A caveat."]
    )


def _literal(predictor):
    """Hits and (token, layer, K) pairs by group, dataset, layer, segment and position, with Python sets."""
    hits: dict[tuple[object, str], float] = defaultdict(float)
    pairs: dict[tuple[object, str], float] = defaultdict(float)
    for row in rows():
        ids = torch.as_tensor(row.token_ids[:-1].astype(np.int64))
        order = np.argsort(-predictor.table[ids].numpy(), axis=-1)[..., :K]
        experts = row.experts.reshape(-1, L, K)
        for t in range(len(ids)):
            place = "text" if row.origin == "teacher_forced" else ("prompt" if t < 12 else "generated")
            position = POSITION_LABELS[0 if t < 16 else 1 if t < 64 else 2]
            for layer in range(L):
                common = len(set(order[t, layer].tolist()) & set(experts[t, layer].tolist()))
                for key in ("all", row.dataset, layer, place, position, "exact"):
                    value = (common == K) if key == "exact" else common / K
                    hits[key, row.group_id] += value
                    pairs[key, row.group_id] += 1
    return hits, pairs


def _vectors(hits, pairs, key):
    groups = sorted({group for name, group in pairs if name == key})
    return [hits[key, g] for g in groups], [pairs[key, g] for g in groups]


@pytest.mark.parametrize("name", PREDICTORS)
def test_numbers_equal_a_literal_count(report, name):
    hits, pairs = _literal(PREDICTORS[name])
    found = report["predictors"][name]

    def same(entry, key):
        expected = ratio_interval(*_vectors(hits, pairs, key))
        for field in ("mean", "low", "high"):
            assert entry[field] == pytest.approx(getattr(expected, field)), (key, field)
        assert entry["groups"] == expected.groups

    same(found["overlap"], "all")
    for dataset in ("set0", "set1"):
        same(found["per_dataset"][dataset], dataset)
    for layer in range(L):
        same(found["per_layer"][layer], layer)
    for segment in ("prompt", "generated", "text"):
        same(found["per_segment"][segment], segment)
    assert list(found["per_position"]) == list(POSITION_LABELS[:3])
    for label in POSITION_LABELS[:3]:
        same(found["per_position"][label], label)
    exact = _vectors(hits, pairs, "exact")
    assert found["set_exact"] == pytest.approx(sum(exact[0]) / sum(exact[1]))
    assert found["recall"][str(K)] == pytest.approx(found["overlap"]["mean"])
    recalls = [found["recall"][rank] for rank in sorted(found["recall"], key=int)]
    assert recalls == sorted(recalls)


def test_gain_is_paired_and_over_the_best_table(report):
    ours, theirs = _literal(PREDICTORS["trained"]), _literal(PREDICTORS["bigram_table"])
    mine, pairs = _vectors(ours[0], ours[1], "all")
    expected = paired_difference(mine, _vectors(theirs[0], theirs[1], "all")[0], pairs)
    gain = report["gain_over_best_table"]
    assert list(gain) == ["trained"]
    assert gain["trained"]["best_table"] == "bigram_table"
    assert [gain["trained"][k] for k in ("mean", "low", "high")] == pytest.approx(
        [expected.mean, expected.low, expected.high]
    )


def test_random_is_the_exact_expectation(report):
    found = report["predictors"]["random"]
    assert found["overlap"]["mean"] == pytest.approx(K / E)
    assert (found["overlap"]["low"], found["overlap"]["high"]) == pytest.approx((K / E, K / E))
    assert found["set_exact"] == pytest.approx(1 / math.comb(E, K))
    assert found["recall"]["4"] == pytest.approx(4 / E)
    assert found["unions"][1]["predicted"] == pytest.approx(E * (1 - (1 - K / E) ** 4))


def test_totals(report):
    lengths = [len(row.experts) for row in rows()]
    assert (report["tokens"], report["sequences"], report["groups"]) == (sum(lengths), 14, 7)
    assert sum(report["datasets"].values()) == sum(report["segments"].values()) == sum(lengths)
    assert sum(report["routing"]["used"][0]) == sum(lengths) * K


def test_batching_changes_nothing(report):
    counts = measure_overlap(rows(), PREDICTORS, SPEC, batch_tokens=1)
    again = overlap_report(counts, inputs={}, provenance={})
    assert again["predictors"] == report["predictors"]


class _Checker(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.images, self.addresses = [], [], []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag not in {"meta", "img"}:
            self.open.append(tag)
        if tag == "img":
            self.images.append(values)
        self.addresses += [v for k, v in attrs if k in {"src", "href"}]
        assert tag not in {"script", "link", "iframe"}

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_files_and_page(report, tmp_path):
    write_overlap_report(report, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "report.json", "report.md"]
    assert read_report(tmp_path / "report.json", "overlap") == json.loads(json.dumps(report))
    page = (tmp_path / "report.html").read_text()
    checker = _Checker()
    checker.feed(page)
    assert checker.open == []
    assert len(checker.images) == 3
    assert all(image["alt"] for image in checker.images)
    assert all(a.startswith(("#", "data:image/svg+xml;base64,")) for a in checker.addresses)
    assert not re.search(r"https?://|//[a-z]", re.sub(r"base64,[A-Za-z0-9+/=]+", "", page))
    assert "A caveat." in page
    text = (tmp_path / "report.md").read_text()
    for name in (*PREDICTORS, "random"):
        assert f"| {name} |" in text or f"| **{name}** |" in text
    assert "Gain over the best table baseline" in text


def test_report_keys_are_stable(report):
    assert sorted(report) == [
        "datasets",
        "format_version",
        "gain_over_best_table",
        "groups",
        "inputs",
        "kind",
        "notes",
        "predictors",
        "provenance",
        "ranks",
        "routing",
        "segments",
        "sequences",
        "spec",
        "tokens",
    ]
    assert sorted(report["predictors"]["trained"]) == [
        "calibration_error",
        "overlap",
        "per_dataset",
        "per_layer",
        "per_position",
        "per_segment",
        "predicted",
        "recall",
        "reliability",
        "set_exact",
        "unions",
    ]


def test_one_group_says_that_there_is_no_interval(tmp_path):
    single = [dataclasses.replace(row, group_id="only") for row in rows(3)]
    counts = measure_overlap(single, PREDICTORS, SPEC)
    report = overlap_report(counts, inputs={}, provenance={})
    assert report["predictors"]["trained"]["overlap"]["note"] == "no interval: it needs at least 2 groups"
    write_overlap_report(report, tmp_path)


def test_refusals():
    with pytest.raises(ValueError, match=r"2 of the 3 groups of runs/report are among the 4 groups of runs/train"):
        require_disjoint({"a", "b", "c", "d"}, {"b", "c", "x"}, training="runs/train", report="runs/report")
    require_disjoint({"a"}, {"b"}, training="t", report="r")
    other = dataclasses.replace(SPEC, target_fingerprint="c" * 64)
    with pytest.raises(ValueError, match="predictor trained was made for another target"):
        measure_overlap(rows(), {"trained": Fake(0.0, other)}, SPEC)
    with pytest.raises(ValueError, match="'random' is taken"):
        measure_overlap(rows(), {"random": Fake(0.0)}, SPEC)
    with pytest.raises(ValueError, match="no processed token"):
        overlap_report(measure_overlap([], PREDICTORS, SPEC), inputs={}, provenance={})
    counts = OverlapCounts(SPEC, ["x"])
    info = SequenceInfo("g", "d", 0, "generated")
    with pytest.raises(ValueError, match=r"scores of predictor 'x' have shape None, expected \(2, 3, 12\)"):
        counts.add(info, torch.tensor([[[0, 1]] * L] * 2), {})
    with pytest.raises(ValueError, match="the spec asks for"):
        counts.add(info, torch.zeros(2, 1, K, dtype=torch.long), {})


def test_broken_report_files(tmp_path):
    path = tmp_path / "report.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="not a JSON file"):
        read_report(path, "overlap")
    path.write_text('{"kind": "decoding", "format_version": 1}')
    with pytest.raises(ValueError, match=r"expected \('overlap', 1\)"):
        read_report(path, "overlap")


def test_memory_does_not_grow_with_tokens():
    """Ten times the sequences of the same groups: the kept state has the same size."""

    def state_size(count):
        sequences = (dataclasses.replace(row, group_id="g", dataset="d") for row in rows(count))
        counts = measure_overlap(sequences, {"frequency": PREDICTORS["frequency"]}, SPEC)
        return sum(a.nbytes for c in counts.predictors.values() for a in (*c.layer_hits, *c.cell_hits))

    assert state_size(4) == state_size(40)
