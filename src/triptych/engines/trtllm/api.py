"""Everything of TensorRT-LLM that the adapter uses. No other module imports TensorRT-LLM.

``LLM``, ``MultimodalEncoder``, ``SamplingParams`` and ``DisaggregatedParams`` are documented; so
are ``LLM.preprocess`` (a prototype) and its statistics (beta). Private, and so most likely to
change: ``SharedTensorContainer`` and ``LLM._check_health``, which its own server uses too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triptych.errors import InvalidConfig

WRITTEN_FOR = "1.3.0"


@dataclass(frozen=True, slots=True)
class TrtApi:
    version: str
    llm: Any  # the class, as are all below
    encoder: Any
    arguments: Any
    sampling: Any
    guided: Any
    disaggregated: Any
    logprob: Any
    shared: Any
    request_error: type[Exception]
    loader: Any  # a function


def import_trtllm() -> TrtApi:
    """Import TensorRT-LLM; InvalidConfig if this environment does not have it."""
    try:
        import tensorrt_llm
        from tensorrt_llm._torch.shared_tensor import SharedTensorContainer
        from tensorrt_llm.executor.result import Logprob
        from tensorrt_llm.executor.utils import RequestError
        from tensorrt_llm.inputs import default_multimodal_input_loader
        from tensorrt_llm.llmapi import (
            LLM,
            DisaggregatedParams,
            GuidedDecodingParams,
            MultimodalEncoder,
            SamplingParams,
            TorchLlmArgs,
        )
    except ImportError as error:
        raise InvalidConfig(
            f"engine trtllm needs TensorRT-LLM {WRITTEN_FOR}, and the import failed: {error}. "
            "Install tensorrt_llm as NVIDIA documents it, with Triptych in the same environment, "
            "and set --engine-python to its Python. This adapter was written from the published "
            "interface and never run against TensorRT-LLM."
        ) from error
    return TrtApi(
        version=str(tensorrt_llm.__version__),
        llm=LLM,
        encoder=MultimodalEncoder,
        arguments=TorchLlmArgs,
        sampling=SamplingParams,
        guided=GuidedDecodingParams,
        disaggregated=DisaggregatedParams,
        logprob=Logprob,
        shared=SharedTensorContainer,
        request_error=RequestError,
        loader=default_multimodal_input_loader,
    )
