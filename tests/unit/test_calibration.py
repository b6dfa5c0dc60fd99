"""Temperatures against a known factor and scipy's minimum; calibration error against its definition."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

from ecospec.eval.metrics import membership
from ecospec.predictor.calibration import calibration_counts, expected_calibration_error, marginal_probabilities
from ecospec.train.calibration import CalibrationError, TemperatureFit

B, T, L, E, K = 8, 500, 3, 16, 2
FACTORS = torch.tensor([0.5, 1.0, 3.0])


@pytest.fixture(scope="module")
def sample():
    """Logits, and experts of which the first is drawn from their softmax; K = 1, so that softmax is the truth."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(B, T, L, E, generator=generator) * 2
    drawn = torch.multinomial(logits.softmax(-1).view(-1, E), 1, generator=generator).view(B, T, L, 1)
    mask = torch.arange(T) < torch.tensor([[T]] * (B - 1) + [[100]])
    return logits, drawn, mask


def fitted(scores, experts, mask):
    fit = TemperatureFit(L)
    for row in range(len(scores)):  # several batches
        fit.update(scores[row : row + 1], experts[row : row + 1], mask[row : row + 1])
    return fit.compute()


def test_a_known_temperature_is_recovered(sample):
    logits, experts, mask = sample
    scaled = logits * FACTORS.view(L, 1)
    temperature = fitted(scaled, experts, mask)
    assert temperature.dtype == torch.float32
    torch.testing.assert_close(temperature, FACTORS, rtol=0.05, atol=0)
    # Scores divided by it are the unscaled ones up to sampling noise: fitting them again gives 1.
    again = fitted(scaled / temperature.view(L, 1), experts, mask)
    torch.testing.assert_close(again, torch.ones(L), rtol=2e-3, atol=0)


def test_it_is_the_minimum_that_scipy_finds(sample):
    logits, _, mask = sample
    generator = torch.Generator().manual_seed(1)
    experts = (logits + torch.randn(logits.shape, generator=generator)).topk(K).indices
    scores = logits * FACTORS.view(L, 1)
    found = fitted(scores, experts, mask)
    for layer in range(L):
        rows = scores[:, :, layer][mask].double().numpy()
        chosen = experts[:, :, layer][mask].numpy()

        def loss(log_t, rows=rows, chosen=chosen):
            return -np.take_along_axis(log_softmax(rows / np.exp(log_t), axis=-1), chosen, axis=-1).mean()

        expected = np.exp(minimize_scalar(loss, bounds=(-2, 2), method="bounded", options={"xatol": 1e-8}).x)
        assert float(found[layer]) == pytest.approx(expected, rel=2e-3)


def test_padding_counts_for_nothing_and_no_tokens_leave_one(sample):
    logits, experts, mask = sample
    changed = logits.clone()
    changed[~mask] = 50.0
    torch.testing.assert_close(fitted(changed, experts, mask), fitted(logits, experts, mask))
    assert torch.equal(fitted(logits, experts, torch.zeros_like(mask)), torch.ones(L))
    assert torch.equal(TemperatureFit(L).compute(), torch.ones(L))


def test_minimum_outside_the_grid_becomes_its_end(sample):
    logits, experts, mask = sample
    worse = logits.flip(-1)  # scores that say nothing: the hotter, the better
    low = torch.zeros(B, T, L, E).scatter_(-1, experts, 1.0)  # scores that are always right: the colder, the better
    assert fitted(low, experts, mask).tolist() == pytest.approx([1 / 8] * L)
    assert all(value > 2 for value in fitted(worse, experts, mask).tolist())
    assert fitted(-low, experts, mask).tolist() == pytest.approx([8.0] * L)


def test_processes_add_up(sample):
    logits, experts, mask = sample
    parts = []
    for half in (slice(0, 3), slice(3, B)):
        fit = TemperatureFit(L)
        fit.update(logits[half], experts[half], mask[half])
        parts.append(fit.slopes)
    whole = TemperatureFit(L)
    whole.slopes = parts[0] + parts[1]  # what the sum over processes makes
    torch.testing.assert_close(whole.compute(), fitted(logits, experts, mask))


def test_calibration_error_is_that_of_the_counted_tokens(sample):
    logits, experts, mask = sample
    error = CalibrationError(1)
    for row in range(B):
        error.update(logits[row : row + 1], experts[row : row + 1], mask[row : row + 1])
    used = membership(experts[mask], E)
    expected = expected_calibration_error(calibration_counts(marginal_probabilities(logits[mask], 1), used))
    assert float(error.compute()) == pytest.approx(expected)
    hot = CalibrationError(1)
    hot.update(logits * 3, experts, mask)
    assert float(hot.compute()) > 4 * float(error.compute())
    assert float(CalibrationError(1).compute()) == 0
