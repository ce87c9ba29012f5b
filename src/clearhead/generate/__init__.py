"""Generation: from logits to tokens, and what models do with texts and sounds."""
