"""A fake of the part of TensorRT-LLM that Triptych's adapter touches.

Written from the published interface; TensorRT-LLM itself was never run.

The interface is that of the 1.3.0 line (API reference of 1.3.0rc26), as read in the repository
NVIDIA/TensorRT-LLM:

- ``tensorrt_llm/llmapi/llm.py``: LLM, PreprocessedInputs, RequestOutput, which inputs go which way
- ``tensorrt_llm/llmapi/mm_encoder.py``: MultimodalEncoder
- ``tensorrt_llm/llmapi/llm_args.py``: TorchLlmArgs, KvCacheConfig, CacheTransceiverConfig
- ``tensorrt_llm/disaggregated_params.py``: DisaggregatedParams
- ``tensorrt_llm/sampling_params.py``: SamplingParams
- ``tensorrt_llm/executor/result.py``: CompletionOutput, GenerationResult, Logprob, IterationResult
- ``tensorrt_llm/executor/utils.py`` and ``executor.py``: RequestError, CppExecutorError
- ``tensorrt_llm/inputs/utils.py``: default_multimodal_input_loader
- ``tensorrt_llm/_torch/shared_tensor``: SharedTensorContainer
- ``tensorrt_llm/_torch/models/modeling_qwen2vl.py``, ``modeling_qwen3vl.py``: how a prompt expands

It is stricter than the original: what that would overlook, or fail on in another process, raises
here. Its tokens are digests of everything that a model would have seen: the prompt's ids, the rows
of its media and, for sampling, the seed. Blocks are counted, and memory behind a handle is gone
when its maker released it.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from unit.engines.trtllm.fake_llm import LLM, MultimodalEncoder, default_multimodal_input_loader
from unit.engines.trtllm.fake_parameters import (
    WORLD,
    DisaggregatedParams,
    GuidedDecodingParams,
    Logprob,
    RequestError,
    SamplingParams,
    SharedTensorContainer,
    TorchLlmArgs,
    World,
)

NAMES: dict[str, tuple[Any, ...]] = {
    "tensorrt_llm": (),
    "tensorrt_llm._torch": (),
    "tensorrt_llm._torch.shared_tensor": (SharedTensorContainer,),
    "tensorrt_llm.executor": (),
    "tensorrt_llm.executor.result": (Logprob,),
    "tensorrt_llm.executor.utils": (RequestError,),
    "tensorrt_llm.inputs": (default_multimodal_input_loader,),
    "tensorrt_llm.llmapi": (
        LLM,
        DisaggregatedParams,
        GuidedDecodingParams,
        MultimodalEncoder,
        SamplingParams,
        TorchLlmArgs,
    ),
}


def install(monkeypatch: Any) -> World:
    """Make it importable for the time of a test. Nothing else than these names is there."""
    WORLD.__init__()
    for module, members in NAMES.items():
        made = types.ModuleType(module)
        for member in members:
            setattr(made, member.__name__, member)
        monkeypatch.setitem(sys.modules, module, made)
    sys.modules["tensorrt_llm"].__version__ = "1.3.0"
    return WORLD
