"""Attention: where things stand, who may look at whom, what a decode remembers, and the weighted
sum itself.
"""
