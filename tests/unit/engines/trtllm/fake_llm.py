"""LLM and MultimodalEncoder of the fake of TensorRT-LLM's interface.

Written from the published interface; TensorRT-LLM itself was never run. See fake_tensorrt_llm.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from unit.engines.trtllm.fake_parameters import (
    WORLD,
    CppExecutorError,
    DisaggregatedParams,
    Kept,
    Logprob,
    RequestError,
    SamplingParams,
    SharedTensorContainer,
    TorchLlmArgs,
)

BLOCK = 32
BLOCKS = 4096
SUPPORT_MM_DISAGG = ("qwen2_5_vl", "qwen3_vl")


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    disaggregated_params: DisaggregatedParams | None = None


@dataclass
class MultimodalParams:
    """What the executor's processes get: rows, or handles to them."""

    rows: list[torch.Tensor] = field(default_factory=list)
    handles: list[dict[str, Any]] = field(default_factory=list)
    identity: tuple[Any, ...] = ()
    mrope: tuple[dict[str, Any], dict[str, Any]] | None = None


@dataclass
class PreprocessedInputs:
    prompt_token_ids: list[int]
    query_token_ids: list[int] | None = None
    multimodal_params: MultimodalParams | None = None
    encoder_input_token_ids: list[int] | None = None


class Tokenizer:
    """Its text is ids with blanks between."""

    def decode(self, token_ids: list[int], *args: Any, **kwargs: Any) -> str:
        assert isinstance(token_ids, list)
        return " ".join(str(id) for id in token_ids)

    def encode(self, text: str) -> list[int]:
        ids = [int(word) for word in text.split()]
        return [WORLD.unfaithful.get(id, id) for id in ids]


class InputProcessor:
    """Qwen2VLInputProcessorBase and those that extend it."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.tokenizer = Tokenizer()
        known = config["model_type"] in SUPPORT_MM_DISAGG
        self.support_mm_disagg = known and WORLD.takes_embeddings
        vision = config["vision_config"]
        self.unit = vision["patch_size"] * vision["spatial_merge_size"]
        deep = len(vision.get("deepstack_visual_indexes") or ())
        self.width = config["text_config"]["hidden_size"] * (1 + deep)
        self.placeholders = (config["image_token_id"], config["video_token_id"])

    def ids(self, inputs: dict[str, Any]) -> list[int]:
        """Of a model that can't expand ids: those that are given are decoded and read again."""
        text = inputs.get("prompt") or self.tokenizer.decode(inputs["prompt_token_ids"])
        return self.tokenizer.encode(text)

    def rows(self, picture: Any) -> torch.Tensor:
        """The tower, in 16 bits."""
        assert isinstance(picture, Image.Image)
        assert picture.mode == "RGB"
        assert picture.width % self.unit == 0 == picture.height % self.unit, "it would be resized"
        count = (picture.width // self.unit) * (picture.height // self.unit)
        seed = int.from_bytes(hashlib.sha256(picture.tobytes()).digest()[:6], "big")
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(count, self.width, generator=generator).to(torch.bfloat16)

    def expand(self, ids: list[int], lengths: list[int]) -> list[int]:
        found = [id for id in ids if id in self.placeholders]
        if len(found) != len(lengths):
            raise ValueError(f"{len(found)} placeholders for {len(lengths)} media items")
        left = iter(lengths)
        expanded: list[int] = []
        for id in ids:
            inside = id in self.placeholders
            expanded += [WORLD.row_id or id] * next(left) if inside else [id]
        return expanded


class RequestOutput:
    """llm.py and executor/result.py: awaited as a whole, or iterated step by step."""

    def __init__(self, llm: Any, ids: list[int], sampling: SamplingParams, streaming: bool) -> None:
        self.request_id = next(WORLD.numbers)
        self.prompt_token_ids = ids
        self.outputs = [CompletionOutput(0)]
        self.cached_tokens = 0
        self.disaggregated_params: DisaggregatedParams | None = None
        self._llm = llm
        self._sampling = sampling
        self._streaming = streaming
        self._done = False
        self._aborted = False
        self._digest: bytes | None = None
        asyncio.get_running_loop()  # without one there would be no queue to wait on

    @property
    def finished(self) -> bool:
        return self._done

    def abort(self) -> None:
        self._aborted = True
        self._llm._release(self.request_id)
        WORLD.kept = {
            number: kept for number, kept in WORLD.kept.items() if kept.request != self.request_id
        }

    def aborted(self) -> bool:
        return self._aborted

    def __aiter__(self) -> RequestOutput:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._done:
            raise StopAsyncIteration
        await asyncio.sleep(0)
        if WORLD.gate is not None:
            await WORLD.gate.wait()
        if not self._llm._alive:
            raise CppExecutorError("the executor's process is gone")
        if self._aborted:
            self._end("cancelled")
            return self
        self._llm._step(self)
        return self

    async def aresult(self) -> RequestOutput:
        while not self._done:
            await self.__anext__()
        return self

    def __await__(self) -> Any:
        return self.aresult().__await__()

    def _end(self, reason: str) -> None:
        self.outputs[0].finish_reason = reason
        self._done = True


class BaseLLM:
    def __init__(
        self,
        model: str,
        tokenizer: Any = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.args = TorchLlmArgs(
            model=model, dtype=dtype, tensor_parallel_size=tensor_parallel_size, **kwargs
        )
        self.input_processor = InputProcessor(json.loads((Path(model) / "config.json").read_text()))
        self._alive = True
        self._held: dict[int, int] = {}  # blocks by request
        self._told: list[dict[str, Any]] = []
        self._seen: set[Any] = set()
        self._media: dict[int, Any] = {}
        WORLD.llms.append(self)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.input_processor.tokenizer

    @property
    def free(self) -> int:
        return BLOCKS - sum(self._held.values())

    def shutdown(self) -> None:
        self._alive = False

    def _check_health(self) -> bool:
        return self._alive

    def preprocess(
        self,
        inputs: Any,
        sampling_params: SamplingParams | None = None,
        disaggregated_params: DisaggregatedParams | None = None,
    ) -> PreprocessedInputs:
        self._params(sampling_params)
        return self._preprocess(inputs, disaggregated_params)

    def _params(self, given: SamplingParams | None) -> SamplingParams:
        if given is not None and not isinstance(given, SamplingParams):
            raise TypeError(f"The sampling_params must be type SamplingParams, not {type(given)}")
        return given or SamplingParams(end_id=0)

    def _preprocess(
        self, inputs: dict[str, Any], told: DisaggregatedParams | None
    ) -> PreprocessedInputs:
        known = {"prompt", "prompt_token_ids", "multi_modal_data", "multi_modal_uuids"}
        if unknown := set(inputs) - known:
            raise TypeError(f"unknown inputs {unknown}")
        handles = told.multimodal_embedding_handles if told else None
        if handles is not None:
            return self._handed(inputs, told, handles)
        if not inputs.get("multi_modal_data"):
            mrope = None
            if told and told.mrope_position_ids_handle is not None:
                if told.mrope_position_deltas_handle is None:
                    raise RuntimeError("both or none of the positions are given")
                mrope = (told.mrope_position_ids_handle, told.mrope_position_deltas_handle)
            params = MultimodalParams(mrope=mrope) if mrope else None
            return PreprocessedInputs(list(inputs["prompt_token_ids"]), multimodal_params=params)
        data, uuids = inputs["multi_modal_data"], inputs.get("multi_modal_uuids")
        if set(data) != {"image"}:
            raise ValueError(f"only pictures are read here, not {set(data)}")
        rows = [self.input_processor.rows(picture) for picture in data["image"]]
        ids = self.input_processor.expand(self.input_processor.ids(inputs), [len(r) for r in rows])
        identity = tuple(uuids["image"]) if uuids else tuple(p.tobytes() for p in data["image"])
        assert len(identity) == len(rows)
        return PreprocessedInputs(ids, multimodal_params=MultimodalParams(rows, [], identity))

    def _handed(
        self, inputs: dict[str, Any], told: DisaggregatedParams, handles: list[dict[str, Any]]
    ) -> PreprocessedInputs:
        if not self.input_processor.support_mm_disagg:
            raise ValueError("Multimodal disaggregated inference is not supported for this model")
        if told.request_type == "generation_only":
            raise ValueError("Generation-only mode should not need multimodal parameters")
        if not inputs.get("prompt"):
            raise ValueError("Text prompt is required but not provided")
        for handle in handles:
            if handle["tensor_size"][1] != self.input_processor.width:
                raise RuntimeError(f"Expected hidden size {self.input_processor.width}")
        lengths = [handle["tensor_size"][0] for handle in handles]
        ids = self.input_processor.expand(self.input_processor.ids(inputs), lengths)
        assert told.mrope_position_ids_handle is not None, "positions would be guessed"
        assert told.mrope_position_deltas_handle is not None
        mrope = (told.mrope_position_ids_handle, told.mrope_position_deltas_handle)
        assert told.multimodal_hashes is not None
        identity = tuple(tuple(digest) for digest in told.multimodal_hashes)
        params = MultimodalParams([], handles, identity, mrope)
        return PreprocessedInputs(ids, multimodal_params=params)

    def _release(self, request: int) -> None:
        if self._held.pop(request, None) is not None:
            self._tell()

    def _tell(self) -> None:
        if self.args.enable_iter_perf_stats:
            used = BLOCKS - self.free
            self._told.append(
                {
                    "numActiveRequests": len(self._held),
                    "kvCacheStats": {
                        "maxNumBlocks": BLOCKS,
                        "freeNumBlocks": self.free,
                        "usedNumBlocks": used,
                    },
                }
            )

    async def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        told, self._told = self._told, []
        for one in told:
            yield one


class LLM(BaseLLM):
    def generate_async(
        self,
        inputs: Any,
        sampling_params: SamplingParams | None = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: DisaggregatedParams | None = None,
        trace_headers: Any = None,
        _postproc_params: Any = None,
        scheduling_params: Any = None,
        conversation_params: Any = None,
        cache_salt: str | None = None,
        priority: float = 0.5,
    ) -> RequestOutput:
        if not self._alive:
            raise RuntimeError("LLM is shutting down")
        sampling = self._params(sampling_params)
        assert sampling.end_id is not None, "the tokenizer would be asked for it"
        kind = disaggregated_params.request_type if disaggregated_params else None
        if disaggregated_params is not None and kind is None:
            raise ValueError("Unknown request type: None")
        self._check_kind(kind)
        if not isinstance(inputs, PreprocessedInputs):
            assert not inputs.get("multi_modal_data"), "it would be prepared on the event loop"
            inputs = self._preprocess(inputs, disaggregated_params)
        ids = inputs.prompt_token_ids
        if kind == "context_only":
            sampling.max_tokens = 1
        if kind != "generation_only" and len(ids) > self.args.max_num_tokens:
            raise RequestError("the prompt should not exceed max_num_tokens")
        if len(ids) + sampling.max_tokens > (self.args.max_seq_len or 2**31):
            raise RequestError("the request should not exceed max_seq_len")
        assert cache_salt is None or isinstance(cache_salt, str)
        assert cache_salt != ""
        result = RequestOutput(self, ids, sampling, streaming)
        result.disaggregated_params = disaggregated_params
        self._media[result.request_id] = (inputs.multimodal_params, cache_salt)
        self._held[result.request_id] = -(-(len(ids) + sampling.max_tokens) // BLOCK)
        WORLD.calls.append(
            {
                "inputs": inputs,
                "sampling": sampling,
                "told": disaggregated_params,
                "salt": cache_salt,
            }
        )
        return result

    def _check_kind(self, kind: str | None) -> None:
        if kind in ("context_only", "generation_only"):
            if self.args.cache_transceiver_config is None:
                raise ValueError(f"{kind} needs a cache_transceiver_config")
            if kind == "context_only" and not self.args.disable_overlap_scheduler:
                raise ValueError("the overlap scheduler must be off where only context is computed")

    def _step(self, result: RequestOutput) -> None:
        """What one iteration of the executor does for one request."""
        told = result.disaggregated_params
        kind = told.request_type if told else "context_and_generation"
        if result._digest is None:
            if kind == "generation_only":
                self._fetch(result, told)
            else:
                self._compute(result)
        output, sampling = result.outputs[0], result._sampling
        while not result._done:
            if output.token_ids or kind != "generation_only":
                self._append(result)
            else:
                self._first(result, told)
            if kind == "context_only":
                self._keep(result)
            if result._streaming:
                break
        assert sampling.logprobs is None or len(output.logprobs) == len(output.token_ids)
        if result._done and (kind != "context_only" or output.finish_reason == "stop"):
            self._release(result.request_id)
        self._tell()

    def _compute(self, result: RequestOutput) -> None:
        media, salt = self._media[result.request_id]
        digest = hashlib.sha256(json.dumps(result.prompt_token_ids).encode())
        rows = []
        if media is not None:
            opened = [SharedTensorContainer.from_dict(h).get_local_view() for h in media.handles]
            rows = [*media.rows, *opened]
            self._positions(result, media)
        for one in rows:
            digest.update(one.float().numpy().tobytes())
        result._digest = digest.digest()
        identity = (salt, tuple(result.prompt_token_ids), media.identity if media else ())
        if identity in self._seen:
            result.cached_tokens = len(result.prompt_token_ids) - 1
        self._seen.add(identity)

    def _positions(self, result: RequestOutput, media: MultimodalParams) -> None:
        if media.mrope is None:
            return
        where, shift = (SharedTensorContainer.from_dict(h).get_local_view() for h in media.mrope)
        assert tuple(where.shape) == (3, 1, len(result.prompt_token_ids))
        assert tuple(shift.shape) == (1, 1)
        WORLD.calls[-1]["positions"] = where.squeeze(1).clone(), int(shift)

    def _fetch(self, result: RequestOutput, told: DisaggregatedParams) -> None:
        kept = WORLD.kept.pop(told.ctx_request_id, None)
        if kept is None or kept.state != told.opaque_state or not kept.llm._alive:
            self._release(result.request_id)
            raise RequestError("Error in kv cache transfer for generation requests")
        assert told.first_gen_tokens == kept.first
        assert len(result.prompt_token_ids) == kept.length
        kept.llm._release(kept.request)
        result._digest = kept.digest
        media, _ = self._media[result.request_id]
        if media is not None:
            self._positions(result, media)

    def _first(self, result: RequestOutput, told: DisaggregatedParams) -> None:
        """The stream of a generation request begins with what the context request made."""
        output = result.outputs[0]
        output.token_ids += told.first_gen_tokens
        output.logprobs += told.first_gen_log_probs or []
        if len(output.token_ids) >= result._sampling.max_tokens:
            result._end("length")

    def _append(self, result: RequestOutput) -> None:
        output, sampling = result.outputs[0], result._sampling
        at, stops = len(output.token_ids), sampling.stop_token_ids or []
        token = self._token(result, at)
        if WORLD.end_after is not None and at >= WORLD.end_after and stops:
            token = stops[0]
        output.token_ids.append(token)
        if sampling.logprobs is not None:
            best = {token + n: Logprob(-0.5 - n, n + 1) for n in range(sampling.logprobs)}
            output.logprobs.append(best)
        if token == sampling.end_id and not sampling.ignore_eos:
            result._end("stop")
        elif token in stops:
            output.stop_reason = token
            if not sampling.include_stop_str_in_output:
                output.token_ids.pop()
            result._end("stop")
        elif len(output.token_ids) >= sampling.max_tokens:
            result._end("length")

    def _token(self, result: RequestOutput, at: int) -> int:
        sampling = result._sampling
        seen = b"" if sampling.greedy else struct.pack(">Q", sampling.seed or 0)
        assert result._digest is not None
        digest = hashlib.sha256(result._digest + seen + bytes([at % 256])).digest()
        token = 10 + int.from_bytes(digest[:4], "big") % 900
        if sampling.embedding_bias is not None:
            token = int(sampling.embedding_bias.argmax())
        return token

    def _keep(self, result: RequestOutput) -> None:
        output = result.outputs[0]
        told = result.disaggregated_params
        number, state = next(WORLD.numbers) + 2**40, hashlib.sha256(result._digest or b"").digest()
        if output.finish_reason == "length":
            result._end("not_finished")
        output.disaggregated_params = DisaggregatedParams(
            request_type="context_only",
            first_gen_tokens=list(output.token_ids),
            first_gen_log_probs=output.logprobs or None,
            ctx_request_id=number,
            opaque_state=state,
            multimodal_embedding_handles=told.multimodal_embedding_handles if told else None,
            multimodal_hashes=told.multimodal_hashes if told else None,
        )
        if output.finish_reason == "not_finished":
            WORLD.kept[number] = Kept(
                self,
                result.request_id,
                state,
                result._digest or b"",
                len(result.prompt_token_ids),
                list(output.token_ids),
            )


class MultimodalEncoder(BaseLLM):
    def generate_async(
        self, inputs: Any, sampling_params: SamplingParams | None = None
    ) -> RequestOutput:
        if not self._alive:
            raise RuntimeError("LLM is shutting down")
        assert isinstance(inputs, PreprocessedInputs), "it would be prepared on the event loop"
        result = RequestOutput(self, inputs.prompt_token_ids, SamplingParams(end_id=0), False)
        self._media[result.request_id] = inputs.multimodal_params
        return result

    def _step(self, result: RequestOutput) -> None:
        made = self._media[result.request_id].rows
        handles = []
        for rows in made:
            handle = SharedTensorContainer.from_tensor(rows).dump_to_dict()
            # This side keeps the memory until it was opened, and for ever if it never is.
            WORLD.memory[handle["storage_handle"]] = lambda rows=rows: rows
            handles.append(handle)
        result.disaggregated_params = DisaggregatedParams(
            multimodal_embedding_handles=handles, multimodal_hashes=[[0] * 8 for _ in handles]
        )
        result._end("length")


def default_multimodal_input_loader(
    *,
    tokenizer: Any,
    model_dir: str,
    model_type: str,
    modality: str,
    prompts: list[str],
    media: list[Any] | None = None,
    image_data_format: str = "pt",
    num_frames: int = 8,
    mm_embeddings: Any = None,
    device: str = "cpu",
    extract_audio: bool = False,
) -> list[dict[str, Any]]:
    assert modality == "image"
    assert image_data_format in ("pt", "pil")
    assert media is not None
    assert mm_embeddings is None
    assert len(media) == len(prompts)
    config = json.loads((Path(model_dir) / "config.json").read_text())
    assert config["model_type"] == model_type
    around = (
        config["vision_start_token_id"],
        config["image_token_id"],
        config["vision_end_token_id"],
    )
    inputs = []
    for shown in media:
        assert isinstance(shown, list), "a single picture would be iterated over"
        text = tokenizer.decode([id for _ in shown for id in around])
        inputs.append({"prompt": text, "multi_modal_data": {"image": shown}})
    return inputs
