"""The drafter-attached predictor: the loop reads what training reads; bundle, refusals, losslessness."""

import dataclasses

import numpy as np
import pytest
import torch

from ecospec.decoding import DecodingLoop, DraftTree, LosslessCheck, TargetModel, make_policy
from ecospec.decoding.drafter_states import text_states
from ecospec.decoding.drafters import Eagle3Config, Eagle3Drafter, Eagle3Head, StateDrafter
from ecospec.predictor import DrafterAttachedPredictor, load_predictor
from ecospec.predictor.attached import AttachedHeads
from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.predictor.session import AttachedPredictor, AttachedSession
from tests.decoding_fakes import VOCAB, ScriptedDrafter, tiny_target

SPEC = RoutingSpec(3, (0, 1, 2), 8, 2, VOCAB, "0" * 64, "tiny", "1" * 64)
PROMPT = torch.arange(9)


def make_drafter(target, seed=1, hidden=32):
    torch.manual_seed(seed)
    config = Eagle3Config(
        hidden_size=hidden,
        target_hidden_size=32,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        aux_layers=(0, 1, 2),
    )
    return Eagle3Drafter(Eagle3Head(config, target.model.get_input_embeddings()).double(), capacity=16)


def make_predictor(drafter, activation="silu", **changes):
    torch.manual_seed(3)
    heads = AttachedHeads(SPEC, sum(drafter.state_sizes), rank=5, activation=activation).double()
    options = {"temperature": (0.5, 1.0, 2.0)} | changes
    return DrafterAttachedPredictor.from_heads(heads.eval(), drafter.state_fingerprint, **options)


@pytest.fixture(scope="module")
def target():
    return TargetModel(tiny_target("qwen3_moe"), SPEC)


@pytest.fixture(scope="module")
def drafter(target):
    return make_drafter(target)


class Spy:
    """Hands the states of every tree to a list before the predictor sees them."""

    def __init__(self, predictor):
        self.spec, self.drafter_fingerprint = predictor.spec, predictor.drafter_fingerprint
        self._session, self.seen = predictor.session(), []

    def session(self):
        return self

    def __getattr__(self, name):
        return getattr(self._session, name)

    def prefill(self, ids, experts=None):
        self._session.prefill(ids, experts)

    def score(self, tokens, parents):
        return self._session.score(tokens, parents)

    def score_states(self, tokens, parents, states):
        self.seen.append((tokens, parents, states))
        return self._session.score_states(tokens, parents, states)

    def commit(self, path, experts=None):
        self._session.commit(path, experts)

    def close(self):
        self._session.close()


def test_the_loop_reads_what_training_reads(target, drafter):
    """At every node, leaves included: states are those along the text that leads to it, at the node's level."""
    spy = Spy(make_predictor(drafter))
    result = DecodingLoop(target, drafter, spy, make_policy("ecospec")).generate(PROMPT, 12)
    assert len(spy.seen) == len(result.steps)
    text, checked = [*PROMPT.tolist(), *result.tokens], 0
    position = len(PROMPT)
    for step, (tokens, parents, states) in zip(result.steps, spy.seen, strict=True):
        assert tokens[0] == text[position]
        paths = [[int(tokens[0])]]
        for token, parent in zip(tokens.tolist()[1:], parents.tolist()[1:], strict=True):
            paths.append([*paths[parent], token])
        for node, path in enumerate(paths):
            ids = torch.tensor(text[:position] + path)
            along = text_states(target, drafter, ids, depth=3)[len(path) - 1, -1]
            expected = torch.cat((drafter.token_states(ids[-1:])[0], along))
            torch.testing.assert_close(states[node], expected, rtol=0, atol=1e-10)
            checked += 1
        position += step.emitted
    assert checked == 11 * len(spy.seen) > 50


def test_states_along_a_text_do_not_look_ahead(target, drafter):
    """States before a token are those of the text that ends with it; a level too deep is the deepest there."""
    ids = torch.randint(0, VOCAB, (10,), generator=torch.Generator().manual_seed(2))
    whole = text_states(target, drafter, ids, depth=3)
    assert whole.shape == (4, 10, 32)
    for length in range(1, 10):
        torch.testing.assert_close(
            text_states(target, drafter, ids[:length], depth=3), whole[:, :length], rtol=0, atol=1e-10
        )
    assert not whole[:, 0].any()
    for level in (1, 2, 3):
        assert torch.equal(whole[level, : level + 1], whole[level - 1, : level + 1])
        assert not torch.isclose(whole[level, level + 1 :], whole[level - 1, level + 1 :]).all(dim=-1).any()
    torch.testing.assert_close(text_states(target, drafter, ids, depth=0), whole[:1])


@pytest.mark.parametrize("activation", ["silu", "none"])
@torch.no_grad()
def test_scores_are_two_matrices_and_a_temperature(drafter, activation):
    predictor = make_predictor(drafter, activation)
    states = torch.randn(7, 64, dtype=torch.float64)
    heads = predictor.heads
    inner = states.numpy() @ heads.down.weight.numpy().T
    if activation == "silu":
        inner = inner / (1 + np.exp(-inner))
    expected = (inner @ heads.up.weight.numpy().T + heads.up.bias.numpy()).reshape(7, 3, 8)
    expected = expected / predictor.temperature.numpy()
    np.testing.assert_allclose(predictor.score_states(states).numpy(), expected, rtol=1e-12)


def test_protocols(target, drafter):
    predictor = make_predictor(drafter)
    assert isinstance(drafter, StateDrafter)
    assert not isinstance(ScriptedDrafter([1]), StateDrafter)
    assert isinstance(predictor, AttachedPredictor)
    assert isinstance(predictor.session(), AttachedSession)
    assert predictor.drafter_fingerprint == drafter.state_fingerprint


def test_bundle_round_trip(drafter, tmp_path):
    predictor = make_predictor(drafter, metrics={"val_overlap": 0.5})
    predictor.save_pretrained(tmp_path / "bundle")
    loaded = load_predictor(tmp_path / "bundle", require_spec=SPEC)
    assert isinstance(loaded, DrafterAttachedPredictor)
    assert loaded.config == predictor.config
    states = torch.randn(7, 64, dtype=torch.float64)
    assert torch.equal(loaded.score_states(states), predictor.score_states(states))
    assert (
        load_predictor(tmp_path / "bundle", dtype=torch.float32).state_dict()["heads.up.weight"].dtype
        == torch.float32
    )
    card = (tmp_path / "bundle" / "README.md").read_text()
    assert "low-rank heads on the hidden states that a drafter has" in card
    assert "session.score_states(tokens, parents, states)" in card


@pytest.mark.parametrize("policy", ["ecospec", "ecospec_static"])
def test_decoding_with_it_is_lossless(target, drafter, policy):
    plain = DecodingLoop(target, None, None, make_policy("autoregressive"))
    loop = DecodingLoop(target, drafter, make_predictor(drafter), make_policy(policy))
    check = LosslessCheck(target.model)
    for seed in range(2):
        prompt = torch.randint(0, VOCAB, (9,), generator=torch.Generator().manual_seed(seed))
        check.compare(prompt.tolist(), plain.generate(prompt, 16).tokens, loop.generate(prompt, 16).tokens)
    assert check.summary() == {"runs": 2, "tokens": 32, "mismatches": 0, "ties": 0}


def test_the_loop_refuses_what_cannot_feed_it(target, drafter):
    predictor = make_predictor(drafter)
    ecospec = make_policy("ecospec")
    with pytest.raises(ValueError, match="policy ecospec needs a drafter"):
        DecodingLoop(target, None, predictor, ecospec)
    with pytest.raises(
        ValueError, match="reads a drafter's hidden states, and ScriptedDrafter gives none; use the draft"
    ):
        DecodingLoop(target, ScriptedDrafter([1]), predictor, ecospec)
    with pytest.raises(
        ValueError, match=f"states of another drafter: state fingerprint {drafter.state_fingerprint[:12]}"
    ):
        DecodingLoop(target, make_drafter(target, seed=2), predictor, ecospec)
    # A policy that asks for no predictor does not care whose it is.
    DecodingLoop(target, make_drafter(target, seed=2), predictor, make_policy("probability"))


def test_token_ids_alone_are_refused(drafter):
    predictor = make_predictor(drafter)
    session = predictor.session()
    tokens, parents = torch.tensor([1, 2]), torch.tensor([-1, 0])
    with pytest.raises(ValueError, match="reads a drafter's hidden states, not token ids; decode with a drafter"):
        session.score(tokens, parents)
    with pytest.raises(ValueError, match="not token ids; decode with a drafter, or report with --drafter"):
        predictor.score_sequence(tokens)
    with pytest.raises(ValueError, match=r"takes states \[2, F\], got \[3, 64\]"):
        session.score_states(tokens, parents, torch.zeros(3, 64))
    with pytest.raises(ValueError, match="reads states of width 64, the drafter gives 10"):
        session.score_states(tokens, parents, torch.zeros(2, 10))
    session.close()
    with pytest.raises(ValueError, match="session is closed"):
        session.prefill(tokens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "options.rank of a drafter_attached predictor must be a positive integer, got 0"),
        ({"state_size": None}, "options.state_size of a drafter_attached predictor must be a positive integer"),
        ({"activation": "sillu"}, "unknown options.activation 'sillu'; did you mean 'silu'"),
        ({"drafter_fingerprint": 1}, "options.drafter_fingerprint .* must name the drafter's weights"),
    ],
)
def test_options_are_validated(drafter, changes, message):
    predictor = make_predictor(drafter)
    config = dataclasses.replace(predictor.config, options={**predictor.config.options, **changes})
    with pytest.raises(ValueError, match=message):
        DrafterAttachedPredictor(config, predictor.heads)


def test_fingerprint_is_of_what_makes_the_states(target, tmp_path):
    drafter = make_drafter(target)
    found = drafter.state_fingerprint
    drafter.head.save_pretrained(tmp_path / "head", dtype=torch.float32)
    embedding = target.model.get_input_embeddings()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert Eagle3Head.from_pretrained(tmp_path / "head", embedding, dtype=dtype).state_fingerprint == found
    proposes = make_drafter(target)
    proposes.head.lm_head.weight.data += 1
    assert proposes.state_fingerprint == found
    for name in ("fc.weight", "midlayer.mlp.up_proj.weight"):
        other = make_drafter(target)
        dict(other.head.named_parameters())[name].data[0, 0] += 1
        assert other.state_fingerprint != found


def test_states_of_a_tree_have_a_row_a_node(drafter):
    tree = (torch.tensor([1]), torch.tensor([-1]), torch.zeros(1), torch.tensor([0]))
    with pytest.raises(ValueError, match=r"DraftTree.states must be \[1, H\], got \[2, 4\]"):
        DraftTree(*tree, states=torch.zeros(2, 4))
