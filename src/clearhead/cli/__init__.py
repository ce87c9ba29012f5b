"""The `clearhead` command: one file a verb, nothing but arguments and printing."""
