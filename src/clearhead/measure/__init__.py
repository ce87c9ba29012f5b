"""Measuring: what a model costs, and what a machine can give."""
