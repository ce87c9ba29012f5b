"""Weights: reading and writing them, whole or not at all, in our own layout and in others'."""
