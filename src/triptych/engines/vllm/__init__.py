"""The adapter of vLLM: runs vLLM in its own environment, through its Python interface."""
