"""Models: encoders, decoders, encoder-decoders, their heads, and one file for each family."""
