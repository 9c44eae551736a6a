"""Differentially private pre-training of vision foundation models, on Ray (map: README.md)."""
