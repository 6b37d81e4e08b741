"""``--engine-args`` in the syntax of ``trtllm-serve``, as arguments of ``LLM``.

``--config FILE`` (or ``--extra_llm_api_options FILE``) names a YAML file, whose keys are fields of
LlmArgs. Every field is also an option, nested fields with dots:
``--kv_cache_config.enable_block_reuse false``. An option overrides the file. Dashes may replace
underscores.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from triptych.checkpoint import Model
from triptych.config import Config
from triptych.engines.adapter.arguments import split_arguments
from triptych.engines.trtllm.api import TrtApi
from triptych.errors import InvalidConfig
from triptych.topology import Role

CONFIG_FILE_OPTIONS = ("config", "extra_llm_api_options")

# Options of trtllm-serve that have other names in LlmArgs.
SERVE_NAMES = {
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "cp_size": "context_parallel_size",
    "ep_size": "moe_expert_parallel_size",
    "cluster_size": "moe_cluster_parallel_size",
    "free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "kv_cache_free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "kv_cache_dtype": "kv_cache_config.dtype",
}

# Options that Triptych sets, and what to do instead.
LLM_ARGS_SET_BY_TRIPTYCH = {
    "model": "give the folder as MODEL",
    "tokenizer": "the tokenizer is the checkpoint's",
    "skip_tokenizer_init": "the image processor needs the tokenizer",
    "dtype": "give --dtype",
    "max_seq_len": "give --max-model-len",
    "backend": "only the PyTorch backend is supported",
    "mm_encoder_only": "give --pattern and --encoder native",
    "stream_interval": "every token is streamed at once",
    "num_postprocess_workers": "Triptych's frontend detokenizes",
}


def llm_arguments(api: TrtApi, config: Config, role: Role, model: Model) -> dict[str, Any]:
    """The checked arguments of ``LLM`` or ``MultimodalEncoder`` for this role."""
    chosen: dict[str, Any] = {"model": str(model.folder), "dtype": config.dtype}
    if role.phases:
        chosen |= {
            "max_seq_len": model.context,
            "enable_iter_perf_stats": True,
            "guided_decoding_backend": "xgrammar",  # without it a grammar is refused
        }
    if role.phases in ("P", "D"):
        # The transfer of a prompt that does not fit in the buffer fails.
        chosen["cache_transceiver_config"] = {
            "backend": "DEFAULT",
            "max_tokens_in_buffer": model.context,
        }
    if role.phases == "P":
        chosen["disable_overlap_scheduler"] = True  # TensorRT-LLM requires it for prefill
    _merge(chosen, parse_llm_args(config.engine_args, tuple(api.arguments.model_fields)))
    try:
        api.arguments(**chosen)
    except (TypeError, ValueError) as error:  # pydantic's is one of the latter
        raise InvalidConfig(f"--engine-args: TensorRT-LLM refuses them: {error}") from None
    return chosen


def parse_llm_args(text: str, fields: tuple[str, ...]) -> dict[str, Any]:
    """The nested arguments of a text. ``fields``: of LlmArgs."""
    given: dict[str, Any] = {}
    options = list(_options(text))
    for name, value in options:
        if name in CONFIG_FILE_OPTIONS:
            for key, setting in _file(value).items():
                _check(key, fields)
                _merge(given, {key: setting})
    for name, value in options:
        if name not in CONFIG_FILE_OPTIONS:
            first, *rest = SERVE_NAMES.get(name, name).split(".")
            _check(first, fields)
            setting = _yaml(value)
            for part in reversed(rest):
                setting = {part: setting}
            _merge(given, {first: setting})
    return given


def _options(text: str) -> Iterator[tuple[str, str]]:
    """Names with underscores, and values; an option without a value is a flag."""
    words = split_arguments(text)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or len(word) == 2:
            raise InvalidConfig(f"--engine-args: '{word}' is not an option; write --name value")
        name, equals, value = word[2:].partition("=")
        if not equals:
            value = words.pop(0) if words and not words[0].startswith("--") else "true"
        yield name.replace("-", "_"), value


def _check(name: str, fields: tuple[str, ...]) -> None:
    if name in LLM_ARGS_SET_BY_TRIPTYCH:
        raise InvalidConfig(
            f"--engine-args {name} is set by Triptych: {LLM_ARGS_SET_BY_TRIPTYCH[name]}"
        )
    if name not in fields:
        near = difflib.get_close_matches(name, [*fields, *SERVE_NAMES], 1)
        hint = f". Did you mean {near[0]}?" if near else ""
        raise InvalidConfig(f"--engine-args: TensorRT-LLM has no option {name}{hint}")


def _file(path: str) -> dict[str, Any]:
    try:
        content = _yaml(Path(path).expanduser().read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"--engine-args: {path} can't be read: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise InvalidConfig(f"--engine-args: {path} is not a mapping of settings")
    return content


def _yaml(text: str) -> Any:
    import yaml  # which TensorRT-LLM's environment has

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidConfig(f"--engine-args: '{text}' is not YAML: {error}") from None


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    """Merge nested settings recursively."""
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value
