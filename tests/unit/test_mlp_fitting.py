"""Fitting the perceptron: on routing that a table of tokens cannot know."""

import itertools

import numpy as np
import pytest
import torch

from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.train.arrays import TraceArrays
from ecospec.train.baselines import baseline_overlaps, mean_overlap, training_facts
from ecospec.train.mlp import fit_mlp
from ecospec.train.mlp_config import MlpTraining

VOCAB, LAYERS, EXPERTS, TOP_K, WIDTH = 12, 2, 8, 2, 16
SPEC = RoutingSpec(LAYERS, (0, 1), EXPERTS, TOP_K, VOCAB, "a" * 64, "test", "b" * 64)
EMBEDDING = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(0)) * 0.02
OPTIONS = MlpTraining(window_tokens=3, hidden_size=48, epochs=12, batch_tokens=256, learning_rate=1e-2)


def traces(lengths, seed):
    """Layer 0 uses experts named by the token and the one two before it, layer 1 by the token and the last."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, sum(lengths), dtype=np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    experts = np.zeros((len(tokens), LAYERS, TOP_K), np.uint8)
    for first, last in itertools.pairwise(offsets):
        for place in range(first, last):
            for layer, back in enumerate((2, 1)):
                other = tokens[place - back] if place - back >= first else 0
                experts[place, layer] = sorted((tokens[place] % 4, 4 + other % 4))
    names = tuple(f"g{seed}-{number}" for number in range(len(lengths)))
    return TraceArrays(SPEC, tokens, experts, offsets, names, names)


@pytest.fixture(scope="module")
def training():
    return traces([300] * 10 + [1, 0, 40], 0)


def test_it_learns_what_the_tables_cannot_know(training):
    held_out = traces([200, 100], 1)
    losses = []
    mlp = fit_mlp(
        training,
        EMBEDDING,
        OPTIONS,
        calibration=traces([200], 2),
        training_data=training_facts(training),
        on_epoch=lambda epoch, loss: losses.append((epoch, loss)),
    )
    tables = baseline_overlaps(training, held_out)
    found = mean_overlap(mlp, held_out)
    # Tables of tokens know one of two experts, of pairs in layer 1 both: the rest is chance.
    assert tables["token_table"] < 0.7 < tables["bigram_table"] < 0.9 < found
    assert [epoch for epoch, _ in losses] == list(range(1, 13))
    assert losses[-1][1] < losses[0][1]
    assert losses[-1][1] == pytest.approx(np.log(TOP_K), abs=0.2)  # the least that the loss can be
    config = mlp.config
    assert config.options["window_tokens"] == 3
    assert config.options["epochs"] == 12
    assert config.training_data["fingerprint"] == training.fingerprint()
    assert config.temperature != (1.0, 1.0)
    assert mlp.model.target_embedding is EMBEDDING
    assert not any(parameter.requires_grad for parameter in mlp.parameters())


def test_temperatures_minimise_the_loss_on_the_calibration_split(training):
    """Against a search over a grid, layer by layer."""
    calibration = traces([300], 3)
    few = MlpTraining(window_tokens=1, hidden_size=16, epochs=2, batch_tokens=256, learning_rate=3e-2)
    mlp = fit_mlp(training, EMBEDDING, few, calibration=calibration)
    raw = mlp.model(mlp.model.windows(torch.from_numpy(calibration.tokens.astype(np.int64))))
    used = torch.from_numpy(calibration.experts.astype(np.int64))
    grid = np.geomspace(0.3, 3, 400)
    for layer in range(LAYERS):
        losses = [-(raw[:, layer] / t).log_softmax(-1).gather(-1, used[:, layer]).mean().item() for t in grid]
        assert mlp.config.temperature[layer] == pytest.approx(grid[int(np.argmin(losses))], rel=0.02)


def test_the_seed_decides(training):
    few = MlpTraining(hidden_size=8, epochs=1, batch_tokens=512)
    rows = [
        fit_mlp(training, EMBEDDING, options).score_sequence(torch.arange(VOCAB))
        for options in (few, few, MlpTraining(hidden_size=8, epochs=1, batch_tokens=512, seed=1))
    ]
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_tokens": 0}, "window_tokens must be at least 1, got 0"),
        ({"hidden_layers": 3}, "hidden_layers must be 1 or 2, got 3; train-predictor trains deep networks"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0 and finite"),
        ({"weight_decay": 1.0}, "weight_decay must be at least 0 and below 1"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        MlpTraining(**options)


def test_a_loss_that_is_not_finite(training):
    with pytest.raises(
        ValueError, match="the loss is not finite in epoch 1; fit again with a lower --learning-rate"
    ):
        fit_mlp(training, EMBEDDING * float("nan"), MlpTraining(hidden_size=4, epochs=1))


def test_no_token():
    with pytest.raises(ValueError, match="cannot be fitted on traces without a token"):
        fit_mlp(traces([0], 0), EMBEDDING, OPTIONS)
