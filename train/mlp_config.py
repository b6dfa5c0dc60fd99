"""Options of the perceptron baseline; imports nothing heavy, so that command lines can show their help quickly."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class MlpTraining:
    """The perceptron and its training."""

    window_tokens: int = 4
    """Tokens that the perceptron reads: the token itself and those before it."""
    hidden_size: int = 512
    """Width of the perceptron's hidden layers."""
    hidden_layers: int = 1
    """Hidden layers of the perceptron: 1 or 2."""
    epochs: int = 4
    """Passes of the perceptron over the training tokens."""
    batch_tokens: int = 4096
    """Tokens of a batch of the perceptron, padding included."""
    learning_rate: float = 2e-3
    """Peak learning rate of the perceptron's AdamW."""
    weight_decay: float = 0.05
    """Decoupled weight decay of the perceptron's matrices."""
    seed: int = 0
    """Seed of the perceptron's initial weights and of the order."""

    def __post_init__(self) -> None:
        """Validate.

        Raises:
            ValueError: An option is out of range; the message names it.
        """
        for name, low in (
            ("window_tokens", 1),
            ("hidden_size", 1),
            ("epochs", 1),
            ("batch_tokens", 1),
            ("seed", 0),
        ):
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if self.hidden_layers not in {1, 2}:
            raise ValueError(
                f"hidden_layers must be 1 or 2, got {self.hidden_layers}; train-predictor trains deep networks"
            )
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be above 0 and finite, got {self.learning_rate}")
        if not 0 <= self.weight_decay < 1:
            raise ValueError(f"weight_decay must be at least 0 and below 1, got {self.weight_decay}")
