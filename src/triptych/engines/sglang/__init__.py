"""SGLang as an engine: the real one, in its own environment, driven by its Python interface."""
