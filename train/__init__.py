"""Placeholder docstring, replaced by its owner."""
