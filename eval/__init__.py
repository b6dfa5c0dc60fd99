"""How good a predictor is and what it buys: metrics, bootstrap intervals, reports, and the decoding benchmark."""
