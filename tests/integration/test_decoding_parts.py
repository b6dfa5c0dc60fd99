"""The loop with the real parts: EAGLE-3 drafter, neural and trivial predictors, all random and tiny."""

import dataclasses

import pytest
import torch

from ecospec.decoding import POLICIES, DecodingLoop, LosslessCheck, TargetModel, make_policy
from ecospec.decoding.drafters import Eagle3Config, Eagle3Drafter, Eagle3Head
from ecospec.predictor import ExpertPredictor, LastTokenPredictor, RoutingPredictorModel
from ecospec.predictor.routing_spec import RoutingSpec
from tests.decoding_fakes import VOCAB, tiny_target

SPEC = RoutingSpec(3, (0, 1, 2), 8, 2, VOCAB, "0" * 64, "tiny", "1" * 64)
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def target():
    return TargetModel(tiny_target("qwen3_moe"), SPEC)


@pytest.fixture(scope="module")
def drafter(target):
    torch.manual_seed(1)
    config = Eagle3Config(
        hidden_size=32,
        target_hidden_size=32,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        draft_vocab_size=48,
        aux_layers=(0, 1, 2),
    )
    head = Eagle3Head(config, target.model.get_input_embeddings()).double()
    head.set_draft_vocabulary(torch.randperm(VOCAB)[:48].sort().values)
    return Eagle3Drafter(head, capacity=16)


@pytest.fixture(scope="module")
def predictor(target):
    torch.manual_seed(2)
    backbone = {
        "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": VOCAB,
    }  # fmt: skip
    model = RoutingPredictorModel(SPEC, backbone=backbone, embedding_size=32).double()
    model.set_target_embedding(target.model.get_input_embeddings())
    return ExpertPredictor.from_model(model.eval())


@pytest.mark.parametrize("name", POLICIES)
def test_real_parts_are_lossless(target, drafter, predictor, name):
    policy = make_policy(name, **({"mean_curve": (1.0, 1.01, 1.02, 1.03)} if name == "evict" else {}))
    plain = DecodingLoop(target, None, None, make_policy("autoregressive"))
    loop = DecodingLoop(target, drafter, predictor, policy)
    check = LosslessCheck(target.model)
    for seed in range(3):
        prompt = torch.randint(0, VOCAB, (9,), generator=torch.Generator().manual_seed(seed))
        result = loop.generate(prompt, NEW_TOKENS)
        check.compare(prompt.tolist(), plain.generate(prompt, NEW_TOKENS).tokens, result.tokens)
    assert check.summary() == {"runs": 3, "tokens": 3 * NEW_TOKENS, "mismatches": 0, "ties": 0}


def test_a_predictor_that_learns_from_executed_experts(target, drafter):
    """The last-token predictor repeats what the target executed last: it must be told at prefill and commit."""
    predictor = LastTokenPredictor.from_counts(SPEC, torch.ones(3, 8, dtype=torch.int64))
    prompt = torch.arange(9)
    told: list[torch.Tensor] = []
    scored: list[torch.Tensor] = []
    session = predictor.session()

    class Spy:
        spec = SPEC

        def session(self):
            return self

        def prefill(self, ids, experts=None):
            told.append(experts)
            session.prefill(ids, experts)

        def score(self, tokens, parents):
            scores = session.score(tokens, parents)
            scored.append(scores.topk(2).indices.sort().values[0])
            return scores

        def commit(self, path, experts=None):
            told.append(experts)
            session.commit(path, experts)

        def close(self):
            session.close()

    loop = DecodingLoop(target, drafter, Spy(), make_policy("ecospec"))
    loop.generate(prompt, NEW_TOKENS)
    assert len(scored) > 5
    for experts, guess in zip(told, scored, strict=False):
        assert torch.equal(experts[-1], guess)


def test_predictor_of_another_target_is_refused(target, drafter, predictor):
    other = TargetModel(target.model, dataclasses.replace(SPEC, target_fingerprint="2" * 64))
    with pytest.raises(
        ValueError, match="the predictor was made for another target than target tiny: target_fingerprint"
    ):
        DecodingLoop(other, drafter, predictor, make_policy("ecospec"))
