"""Layers: norm, feed-forward, positions that are added, embeddings, blocks and stacks of them."""
