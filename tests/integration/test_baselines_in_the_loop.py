"""Every baseline in the decoding loop: what it is told, what that does to its scores, and what the target emits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ecospec.decoding import DecodingLoop, TargetModel, make_policy
from ecospec.predictor import MlpModel, MlpPredictor, TokenTablePredictor, top_k_experts
from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.train.arrays import TraceArrays
from ecospec.train.baselines import fit_baselines
from tests.decoding_fakes import VOCAB, ScriptedDrafter, tiny_target
from tests.trace_files import random_experts

LAYERS, EXPERTS, TOP_K = 3, 8, 2
SPEC = RoutingSpec(LAYERS, (0, 1, 2), EXPERTS, TOP_K, VOCAB, "0" * 64, "tiny", "1" * 64)
PROMPT = torch.randint(0, VOCAB, (7,), generator=torch.Generator().manual_seed(0))
NEW_TOKENS = 32


@pytest.fixture(scope="module")
def target():
    return TargetModel(tiny_target("qwen3_moe"), SPEC)


@pytest.fixture(scope="module")
def plain_tokens(target):
    return DecodingLoop(target, None, None, make_policy("autoregressive")).generate(PROMPT, NEW_TOKENS).tokens


@pytest.fixture(scope="module")
def predictors(target):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, 500, dtype=np.int32)
    traces = TraceArrays(
        SPEC, tokens, random_experts(rng, 500, SPEC), np.array([0, 200, 500]), ("a", "b"), ("d", "d")
    )
    fitted = fit_baselines(traces)
    for name in ("token_table", "bigram_table"):
        table = fitted[name]
        assert isinstance(table, TokenTablePredictor)
        fitted[f"{name}, compact"] = table.compact()
    torch.manual_seed(0)
    model = MlpModel(SPEC, embedding_size=32, hidden_size=16)
    model.set_target_embedding(dict(target.model.named_modules())["model.embed_tokens"])
    return fitted | {"mlp": MlpPredictor.from_model(model.double().eval())}


class Told:
    """A predictor that keeps what its session is told and what it answers."""

    def __init__(self, predictor):
        self.predictor, self.spec = predictor, predictor.spec
        self.tokens, self.experts, self.scored = [], [], []

    def session(self):
        self._session = self.predictor.session()
        return self

    def prefill(self, ids, experts=None):
        self.tokens += ids.tolist()
        self.experts.append(experts)
        self._session.prefill(ids, experts)

    def score(self, tokens, parents):
        scores = self._session.score(tokens, parents)
        self._tree = tokens
        self.scored.append((len(self.tokens), tokens.tolist(), parents.tolist(), scores))
        return scores

    def commit(self, path, experts=None):
        self.tokens += self._tree[path].tolist()
        self.experts.append(experts)
        self._session.commit(path, experts)

    def close(self):
        self._session.close()


def executed(model, ids):
    """Expert sets with which a plain forward calls its experts modules, int64 ``[T, L, K]``."""
    seen = []
    handles = [
        layer.mlp.experts.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
        for layer in model.model.layers
    ]
    try:
        with torch.no_grad():
            model(torch.tensor([ids]))
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(seen, dim=1).sort(dim=-1).values


KINDS = ("random", "frequency", "last_token", "token_table", "bigram_table", "token_table, compact",
         "bigram_table, compact", "mlp")  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_verified_experts_come_back_and_scores_follow_from_them(target, plain_tokens, predictors, name):
    assert set(KINDS) == set(predictors)
    told = Told(predictors[name])
    drafter = ScriptedDrafter([*PROMPT.tolist(), *plain_tokens], hit_rate=0.8)
    result = DecodingLoop(target, drafter, told, make_policy("ecospec")).generate(PROMPT, NEW_TOKENS)
    assert result.tokens == plain_tokens
    assert max(len(experts) for experts in told.experts[1:]) > 1  # paths of several nodes came back
    # The last emitted token has not been processed; a last step may have accepted more than were asked for.
    text = [*PROMPT.tolist(), *plain_tokens]
    shared = min(len(told.tokens), len(text) - 1)
    assert shared > len(PROMPT) + NEW_TOKENS - 4
    assert told.tokens[:shared] == text[:shared]
    used = torch.cat(told.experts).sort(dim=-1).values
    assert used.shape == (len(told.tokens), LAYERS, TOP_K)
    assert torch.equal(used, executed(target.model, told.tokens))
    # Node by node, the scores are those of the whole text up to it, of which only verified experts are known.
    for length, tokens, parents, scores in told.scored:
        known = used[:length]
        for node in (0, len(tokens) - 1):
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            ids = torch.tensor([*told.tokens[:length], *(tokens[at] for at in path)])
            repeated = torch.cat([known, known[-1:].expand(len(path), -1, -1)])
            expected = predictors[name].score_sequence(ids, repeated)[-1]
            torch.testing.assert_close(scores[node], expected)


def test_the_last_token_predictor_repeats_what_was_verified_last(target, plain_tokens, predictors):
    told = Told(predictors["last_token"])
    drafter = ScriptedDrafter([*PROMPT.tolist(), *plain_tokens])
    DecodingLoop(target, drafter, told, make_policy("ecospec")).generate(PROMPT, NEW_TOKENS)
    truth = executed(target.model, told.tokens)
    assert len(told.scored) > 5
    for length, tokens, _, scores in told.scored:
        guess = truth[length - 1].expand(len(tokens), -1, -1)
        assert torch.equal(top_k_experts(scores, TOP_K), guess)
