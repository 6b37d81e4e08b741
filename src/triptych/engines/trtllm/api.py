"""Everything of TensorRT-LLM that the adapter touches, in one place, and imported nowhere else.

``LLM``, ``MultimodalEncoder``, ``SamplingParams`` and ``DisaggregatedParams`` are documented; so
are ``LLM.preprocess`` (a prototype) and its statistics (beta). Underscored, and so the first that
may move: ``SharedTensorContainer`` and ``LLM._check_health``, which its own server asks too.
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
    disaggregated: Any
    logprob: Any
    shared: Any
    request_error: type[Exception]
    loader: Any  # a function


def import_trtllm() -> TrtApi:
    """TensorRT-LLM, if this environment has it."""
    try:
        import tensorrt_llm
        from tensorrt_llm._torch.shared_tensor import SharedTensorContainer
        from tensorrt_llm.executor.result import Logprob
        from tensorrt_llm.executor.utils import RequestError
        from tensorrt_llm.inputs import default_multimodal_input_loader
        from tensorrt_llm.llmapi import (
            LLM,
            DisaggregatedParams,
            MultimodalEncoder,
            SamplingParams,
            TorchLlmArgs,
        )
    except ImportError as error:
        raise InvalidConfig(
            f"engine trtllm needs TensorRT-LLM {WRITTEN_FOR}, and it can't be imported: {error}. "
            "Install tensorrt_llm as NVIDIA tells, with Triptych beside it, and name that Python "
            "by --engine-python. This adapter was never run against TensorRT-LLM: it is written "
            "from the published interface."
        ) from error
    return TrtApi(
        version=str(tensorrt_llm.__version__),
        llm=LLM,
        encoder=MultimodalEncoder,
        arguments=TorchLlmArgs,
        sampling=SamplingParams,
        disaggregated=DisaggregatedParams,
        logprob=Logprob,
        shared=SharedTensorContainer,
        request_error=RequestError,
        loader=default_multimodal_input_loader,
    )
