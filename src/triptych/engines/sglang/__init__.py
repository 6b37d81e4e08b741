"""The adapter of SGLang: runs SGLang in its own environment, through its Python interface."""
