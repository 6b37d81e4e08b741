"""TensorRT-LLM's PyTorch backend, by its Python API. Written from the published interface of 1.3.0:
it was never run against TensorRT-LLM itself, only against a fake of that interface."""
