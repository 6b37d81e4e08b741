"""The adapter of TensorRT-LLM's PyTorch backend, through its Python interface. It was written from
the published interface of 1.3.0 and tested against a fake of it, never against TensorRT-LLM."""
