"""From a recipe to a trained model: optimiser, schedule, loop, checkpoints, diagnosis."""
