"""The run-time form of a model on a CPU: few bytes a weight, and products that read each once."""
