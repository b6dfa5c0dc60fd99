"""Trivial predictors: against literal re-implementations, and sessions against whole sequences."""

import itertools

import pytest
import torch

from ecospec.predictor import (
    BigramTablePredictor,
    FrequencyPredictor,
    LastTokenPredictor,
    PredictorSession,
    RandomPredictor,
    TokenTablePredictor,
    load_predictor,
    top_k_experts,
)
from tests.predictor_fakes import SPEC, path_to, random_parents

V, L, E, K = SPEC.vocab_size, SPEC.num_layers, SPEC.num_experts, SPEC.top_k
TOKENS = 400


def traces():
    """Random token ids (the upper ten never occur) and expert sets that lean on the token."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(V - 10, (TOKENS,), generator=generator)
    noise = torch.rand(TOKENS, L, E, generator=generator)
    noise[torch.arange(TOKENS), :, ids % E] += 0.5
    return ids, noise.topk(K).indices.sort().values


def counted(rows, keys, experts):
    counts = torch.zeros(rows, L, E, dtype=torch.int32)
    for key, sets in zip(keys.tolist(), experts, strict=True):
        for layer in range(L):
            counts[key, layer, sets[layer]] += 1
    return counts


IDS, EXPERTS = traces()
TOKEN_COUNTS = counted(V, IDS, EXPERTS)
PAIRS = IDS[:-1] * V + IDS[1:]
PAIR_KEYS, PAIR_INDEX, PAIR_OCCURRENCES = torch.unique(PAIRS, return_inverse=True, return_counts=True)
PAIR_COUNTS = counted(len(PAIR_KEYS), PAIR_INDEX, EXPERTS[1:])
FREQUENCY = TOKEN_COUNTS.sum(0)


def token_table(**options):
    return TokenTablePredictor.from_counts(SPEC, TOKEN_COUNTS, **options)


def bigram_table(**options):
    return BigramTablePredictor.from_counts(token_table(), PAIR_KEYS, PAIR_COUNTS, **options)


PREDICTORS = {
    "random": lambda: RandomPredictor.create(SPEC, seed=3),
    "frequency": lambda: FrequencyPredictor.from_counts(SPEC, FREQUENCY),
    "last_token": lambda: LastTokenPredictor.from_counts(SPEC, FREQUENCY),
    "token_table": token_table,
    "bigram_table": bigram_table,
}


def overlap(scores, experts):
    return float((top_k_experts(scores, K).unsqueeze(-1) == experts.unsqueeze(-2)).float().sum((-1, -2)).mean() / K)


def test_frequency_is_the_log_share():
    scores = PREDICTORS["frequency"]().score_sequence(IDS[:5])
    expected = (FREQUENCY / FREQUENCY.sum(-1, keepdim=True)).log()
    torch.testing.assert_close(scores, expected.expand(5, L, E), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shrinkage", [0.5, 4.0])
def test_tables_against_the_formula(shrinkage):
    share = (FREQUENCY / FREQUENCY.sum(-1, keepdim=True)).double()

    def token_row(token):
        seen = int((token == IDS).sum())
        return (TOKEN_COUNTS[token].double() / K + shrinkage * share) / (seen + shrinkage)

    def pair_row(previous, token):
        index = (previous * V + token == PAIR_KEYS).nonzero().flatten()
        if not len(index):
            return token_row(token)
        seen, counts = int(PAIR_OCCURRENCES[index]), PAIR_COUNTS[index[0]].double() / K
        return (counts + 2.0 * token_row(token)) / (seen + 2.0)

    tokens = token_table(shrinkage=shrinkage)
    probe = torch.cat([IDS[:30], torch.tensor([V - 1, 3, V - 2])])  # the last ones: never seen
    expected = torch.stack([token_row(int(token)) for token in probe])
    torch.testing.assert_close(tokens.score_sequence(probe).exp().double(), expected, rtol=0.01, atol=1e-5)
    pairs = BigramTablePredictor.from_counts(tokens, PAIR_KEYS, PAIR_COUNTS, shrinkage=2.0)
    rows = [token_row(int(probe[0]))] + [pair_row(a, b) for a, b in itertools.pairwise(probe.tolist())]
    torch.testing.assert_close(pairs.score_sequence(probe).exp().double(), torch.stack(rows), rtol=0.02, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_and_narrow_counts_give_the_same_tables():
    dense = bigram_table().score_sequence(IDS)
    flat = PAIR_COUNTS.view(len(PAIR_KEYS), -1)
    sparse = flat.float().to_sparse_csr()
    tokens = TokenTablePredictor.from_counts(SPEC, TOKEN_COUNTS.view(V, -1).float().to_sparse_csr())
    torch.testing.assert_close(tokens.score_sequence(IDS), token_table().score_sequence(IDS))
    for counts, occurrences in ((sparse, None), (flat.to(torch.uint16), PAIR_OCCURRENCES)):
        table = BigramTablePredictor.from_counts(tokens, PAIR_KEYS, counts, occurrences)
        torch.testing.assert_close(table.score_sequence(IDS), dense)


def test_chunks_do_not_show(monkeypatch):
    whole = bigram_table().score_sequence(IDS)
    monkeypatch.setattr("ecospec.predictor.table_predictors._CHUNK_ROWS", 7)
    torch.testing.assert_close(bigram_table().score_sequence(IDS), whole)


def test_pair_table_without_pairs_is_the_token_table():
    empty = BigramTablePredictor.from_counts(token_table(), PAIR_KEYS[:0], PAIR_COUNTS[:0])
    assert torch.equal(empty.score_sequence(IDS), token_table().score_sequence(IDS))


def test_each_table_beats_the_broader_one_on_its_own_traces():
    means = {name: overlap(make().score_sequence(IDS, EXPERTS), EXPERTS) for name, make in PREDICTORS.items()}
    assert means["bigram_table"] > means["token_table"] > means["frequency"] > means["random"]
    assert abs(means["random"] - K / E) < 0.05


def test_last_token_predicts_the_set_before():
    predictor = PREDICTORS["last_token"]()
    assert predictor.needs_experts
    scores = predictor.score_sequence(IDS, EXPERTS)
    assert torch.equal(top_k_experts(scores[1:], K), EXPERTS[:-1])
    frequency = PREDICTORS["frequency"]().score_sequence(IDS)
    torch.testing.assert_close(scores[0], frequency[0])
    torch.testing.assert_close(predictor.score_sequence(IDS), frequency)
    torch.testing.assert_close(scores.exp().sum(-1), torch.ones(TOKENS, L), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", PREDICTORS)
def test_session_agrees_with_whole_sequences(kind):
    predictor = PREDICTORS[kind]()
    session = predictor.session()
    assert isinstance(session, PredictorSession)
    generator = torch.Generator().manual_seed(1)
    session.prefill(torch.empty(0, dtype=torch.int64))
    context, experts = IDS[:0], EXPERTS[:0]
    for step in range(6):
        if step in {1, 4}:
            session.prefill(IDS[step : step + 2], EXPERTS[step : step + 2])
            context, experts = (
                torch.cat([context, IDS[step : step + 2]]),
                torch.cat([experts, EXPERTS[step : step + 2]]),
            )
        nodes = 1 + 2 * step
        tokens = torch.randint(V, (nodes,), generator=generator)
        parents = random_parents(nodes, generator)
        scores = session.score(tokens, parents)
        assert scores.shape == (nodes, L, E)
        assert scores.dtype == torch.float32
        for node in range(nodes):
            path = path_to(node, parents)
            known = experts if len(experts) else None
            # Along a path only verified experts are known: the last token's predictor repeats them.
            repeated = None if known is None else torch.cat([known, known[-1:].expand(len(path), L, K)])
            expected = predictor.score_sequence(torch.cat([context, tokens[path]]), repeated)[-1]
            torch.testing.assert_close(scores[node], expected)
        path = path_to(nodes - 1, parents)
        verified = EXPERTS[50 + step : 50 + step + len(path)]
        session.commit(torch.tensor(path), experts=verified)
        context, experts = torch.cat([context, tokens[path]]), torch.cat([experts, verified])


@pytest.mark.parametrize("kind", PREDICTORS)
def test_bundles_of_every_kind(kind, tmp_path):
    predictor = PREDICTORS[kind]()
    predictor.save_pretrained(tmp_path / kind)
    loaded = load_predictor(tmp_path / kind, require_spec=SPEC)
    assert type(loaded) is type(predictor)
    assert loaded.config == predictor.config
    assert torch.equal(loaded.score_sequence(IDS, EXPERTS), predictor.score_sequence(IDS, EXPERTS))
    assert f"Predicts which {K} of {E} experts" in (tmp_path / kind / "README.md").read_text()


def test_random_is_a_function_of_seed_position_and_token():
    scores = RandomPredictor.create(SPEC, seed=1).score_sequence(IDS)
    assert torch.equal(scores, RandomPredictor.create(SPEC, seed=1).score_sequence(IDS))
    assert not torch.equal(scores, RandomPredictor.create(SPEC, seed=2).score_sequence(IDS))
    assert 0.48 < float(scores.mean()) < 0.52
    usage = torch.zeros(E).scatter_add(0, top_k_experts(scores, K).flatten(), torch.ones(TOKENS * L * K))
    assert usage.min() > 0.8 * usage.mean()
    assert usage.max() < 1.2 * usage.mean()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FrequencyPredictor.from_counts(SPEC, FREQUENCY[:2]), r"must be \[L, E\] = \(3, 8\)"),
        (lambda: FrequencyPredictor.from_counts(SPEC, FREQUENCY * 0), "empty for some layer"),
        (lambda: TokenTablePredictor.from_counts(SPEC, TOKEN_COUNTS[:3]), "token counts must be"),
        (lambda: token_table(shrinkage=0.0), "shrinkage must be positive"),
        (lambda: token_table(token_counts=torch.ones(3)), r"token_counts must be \[V\]"),
        (
            lambda: TokenTablePredictor.from_counts(SPEC, TOKEN_COUNTS.view(V, -1).to_sparse()),
            "dense or sparse CSR",
        ),
        (lambda: bigram_table(pair_counts=torch.ones(2)), r"pair_counts must be \[P\]"),
        (lambda: BigramTablePredictor.from_counts(token_table(), PAIR_KEYS.flip(0), PAIR_COUNTS), "ascending"),
        (lambda: BigramTablePredictor.from_counts(token_table(), PAIR_KEYS + V * V, PAIR_COUNTS), "previous \\* V"),
        (
            lambda: BigramTablePredictor.from_counts(token_table(), PAIR_KEYS, PAIR_COUNTS[:2]),
            "pair counts must be",
        ),
    ],
)
def test_wrong_counts(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_misuse_of_sessions():
    session = PREDICTORS["frequency"]().session()
    with pytest.raises(ValueError, match="call score first"):
        session.commit(torch.tensor([0]))
    with pytest.raises(ValueError, match=r"of shape \[T\]"):
        session.prefill(torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="one shape"):
        session.score(torch.tensor([1]), torch.tensor([-1, 0]))
    with pytest.raises(ValueError, match=r"experts must be \[tokens, L, K\]"):
        session.prefill(torch.tensor([1]), EXPERTS[:2])
    session.score(torch.tensor([1]), torch.tensor([-1]))
    with pytest.raises(ValueError, match="commit takes a path"):
        session.commit(torch.tensor([0, 1]))
    session.close()
    with pytest.raises(ValueError, match="session is closed"):
        session.score(torch.tensor([1]), torch.tensor([-1]))
