"""Attention: positions, masks, caches, and the weighted sum itself."""
