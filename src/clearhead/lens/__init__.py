"""Looking inside: what a model computes, shown step by step and number by number."""
