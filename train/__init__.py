"""Training of predictors: data from trace stores, losses, the Lightning module, baselines, export to a bundle."""
