"""Parameters, errors and shared memory of the fake of TensorRT-LLM's interface.

Written from the published interface; TensorRT-LLM itself was never run. See fake_tensorrt_llm.
"""

from __future__ import annotations

import asyncio
import itertools
import weakref
from dataclasses import dataclass, fields
from typing import Any

import torch

TYPES = ("context_only", "generation_only", "context_and_generation")


class RequestError(RuntimeError):
    """executor/utils.py: one request failed."""


class CppExecutorError(RuntimeError):
    """executor/executor.py: the executor did."""


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class Kept:
    """A context request's KV cache, until a generation request has fetched it."""

    llm: Any
    request: int
    state: bytes
    digest: bytes
    length: int
    first: list[int]


class World:
    """What all engines of a test share, and what a test may ask of them."""

    def __init__(self) -> None:
        self.llms: list[Any] = []
        self.kept: dict[int, Kept] = {}
        self.calls: list[dict[str, Any]] = []
        self.memory: dict[str, Any] = {}  # handles that were not opened yet
        self.lent: list[Any] = []  # all that were ever made
        self.numbers = itertools.count(1)
        self.end_after: int | None = None  # tokens after which a stream's next one is an end token
        self.gate: asyncio.Event | None = None  # held: no request gets on
        self.unfaithful: dict[int, int] = {}  # ids that come back from text as others
        self.takes_embeddings = True
        self.row_id = 0  # that stands for a row in an expanded prompt; 0: the placeholder itself

    def kill(self) -> None:
        for llm in self.llms:
            llm._alive = False


WORLD = World()


def strict(cls: type) -> type:
    """As pydantic's with ``extra="forbid"``: an unknown name is a ValueError."""
    made = dataclass(kw_only=True)(cls)
    made.model_fields = {one.name: one for one in fields(made)}

    def forbid(self: Any, **given: Any) -> None:
        for name in given:
            if name not in made.model_fields:
                raise ValueError(f"{name}: Extra inputs are not permitted")
        init(self, **given)

    init, made.__init__ = made.__init__, forbid
    return made


@strict
class KvCacheConfig:
    enable_block_reuse: bool = True
    free_gpu_memory_fraction: float = 0.9
    max_tokens: int | None = None
    dtype: str = "auto"


@strict
class CacheTransceiverConfig:
    backend: str | None = None
    max_tokens_in_buffer: int | None = None
    kv_transfer_timeout_ms: int | None = None

    def __post_init__(self) -> None:
        if self.backend not in (None, "DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"):
            raise ValueError(f"backend: {self.backend} is none")


@strict
class TorchLlmArgs:
    model: str
    tokenizer: Any = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    dtype: str = "auto"
    backend: str = "pytorch"
    max_batch_size: int = 2048
    max_num_tokens: int = 8192
    max_seq_len: int | None = None
    enable_chunked_prefill: bool = False
    enable_iter_perf_stats: bool = False
    disable_overlap_scheduler: bool = False
    kv_cache_config: Any = None
    cache_transceiver_config: Any = None
    mm_encoder_only: bool = False
    stream_interval: int = 1
    guided_decoding_backend: str | None = None

    def __post_init__(self) -> None:
        for name, kind in (
            ("kv_cache_config", KvCacheConfig),
            ("cache_transceiver_config", CacheTransceiverConfig),
        ):
            if isinstance(value := getattr(self, name), dict):
                setattr(self, name, kind(**value))
        for name in ("max_num_tokens", "tensor_parallel_size", "max_batch_size"):
            if not isinstance(getattr(self, name), int):
                raise ValueError(f"{name}: Input should be a valid integer")


@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    json: str | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    stop: Any = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: torch.Tensor | None = None
    n: int = 1
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_p: float | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    guided_decoding: GuidedDecodingParams | None = None

    def __post_init__(self) -> None:
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"require 0 < top_p <= 1, got {self.top_p}")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"require temperature >= 0, got {self.temperature}")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise ValueError("seed is an unsigned number of 64 bits")

    @property
    def greedy(self) -> bool:
        given = self.temperature, self.top_p, self.top_k
        return given == (None, None, None) or self.top_k == 1 or self.temperature == 0


@dataclass(slots=True, kw_only=True)
class DisaggregatedParams:
    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    first_gen_log_probs: list[Any] | None = None
    first_gen_logits: list[Any] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None
    schedule_style: Any = None
    ctx_usage: dict[str, Any] | None = None
    multimodal_embedding_handles: list[dict[str, Any]] | None = None
    multimodal_hashes: list[list[int]] | None = None
    mrope_position_ids_handle: dict[str, Any] | None = None
    mrope_position_deltas_handle: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.request_type is not None and self.request_type not in TYPES:
            raise ValueError(f"Unknown request type: {self.request_type}")
        if self.opaque_state is not None and not isinstance(self.opaque_state, bytes):
            raise TypeError("opaque_state is bytes")
        if self.multimodal_embedding_handles is not None:
            assert self.multimodal_hashes is not None, "without hashes nothing is re-used"
            assert len(self.multimodal_embedding_handles) == len(self.multimodal_hashes)
            for digest in self.multimodal_hashes:
                assert isinstance(digest, list)
                assert len(digest) == 8
                assert all(-(2**31) <= number < 2**31 for number in digest)


class SharedTensorContainer:
    """The memory belongs to the maker of the handle, and is gone when that releases it."""

    def __init__(self, name: str, size: list[int]) -> None:
        self._name = name
        self._size = size

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> SharedTensorContainer:
        name = f"shm-{next(WORLD.numbers)}"
        WORLD.memory[name] = weakref.ref(tensor)
        WORLD.lent.append(WORLD.memory[name])
        return cls(name, list(tensor.shape))

    @classmethod
    def from_dict(cls, info: dict[str, Any]) -> SharedTensorContainer:
        assert info["method_key"] in (1, 2)
        return cls(info["storage_handle"], info["tensor_size"])

    def dump_to_dict(self) -> dict[str, Any]:
        return {"method_key": 2, "tensor_size": self._size, "storage_handle": self._name}

    def get_local_view(self) -> torch.Tensor:
        tensor = WORLD.memory.pop(self._name)()
        if tensor is None:
            raise RuntimeError(f"{self._name}: No such file or directory")
        assert list(tensor.shape) == self._size
        return tensor
