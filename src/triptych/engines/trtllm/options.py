"""``--engine-args`` as users of ``trtllm-serve`` write them, to arguments of ``LLM``.

``--config FILE`` (or ``--extra_llm_api_options FILE``) names their YAML file, whose keys are fields
of LlmArgs. Besides, every field is an option by its own name, those of nested settings with dots:
``--kv_cache_config.enable_block_reuse false``. An option goes before the file. Dashes may stand
for underscores.
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

# What trtllm-serve calls otherwise than LlmArgs does.
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

# What the adapter sets, and how it is told.
LLM_ARGS_SET_BY_TRIPTYCH = {
    "model": "name the folder as MODEL",
    "tokenizer": "it is the checkpoint's own",
    "skip_tokenizer_init": "the pictures' processor needs the tokenizer",
    "dtype": "say --dtype",
    "max_seq_len": "say --max-model-len",
    "backend": "only PyTorch's is served",
    "mm_encoder_only": "say --pattern and --encoder native",
    "stream_interval": "every token is sent at once",
    "num_postprocess_workers": "Triptych's frontend writes the text",
}


def llm_arguments(api: TrtApi, config: Config, role: Role, model: Model) -> dict[str, Any]:
    """All arguments of ``LLM`` or ``MultimodalEncoder`` for this role, checked."""
    chosen: dict[str, Any] = {"model": str(model.folder), "dtype": config.dtype}
    if role.span:
        chosen |= {"max_seq_len": model.context, "enable_iter_perf_stats": True}
    if role.span in ("P", "D"):
        # A prompt that does not fit in the buffer fails when it is transferred.
        chosen["cache_transceiver_config"] = {
            "backend": "DEFAULT",
            "max_tokens_in_buffer": model.context,
        }
    if role.span == "P":
        chosen["disable_overlap_scheduler"] = True  # it demands that where only context is computed
    _merge(chosen, parse_llm_args(config.engine_args, tuple(api.arguments.model_fields)))
    try:
        api.arguments(**chosen)
    except (TypeError, ValueError) as error:  # pydantic's is one of the latter
        raise InvalidConfig(f"--engine-args: TensorRT-LLM refuses them: {error}") from None
    return chosen


def parse_llm_args(text: str, fields: tuple[str, ...]) -> dict[str, Any]:
    """The text as nested arguments. ``fields``: those that LlmArgs has."""
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
    """Names, underscored, and values; an option without one is a flag."""
    words = split_arguments(text)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or len(word) == 2:
            raise InvalidConfig(f"--engine-args: '{word}' is no option; write --name value")
        name, equals, value = word[2:].partition("=")
        if not equals:
            value = words.pop(0) if words and not words[0].startswith("--") else "true"
        yield name.replace("-", "_"), value


def _check(name: str, fields: tuple[str, ...]) -> None:
    if name in LLM_ARGS_SET_BY_TRIPTYCH:
        raise InvalidConfig(
            f"--engine-args: {name} is not to be given here: {LLM_ARGS_SET_BY_TRIPTYCH[name]}"
        )
    if name not in fields:
        near = difflib.get_close_matches(name, [*fields, *SERVE_NAMES], 1)
        hint = f". Is {near[0]} meant?" if near else ""
        raise InvalidConfig(f"--engine-args: TensorRT-LLM has no option {name}{hint}")


def _file(path: str) -> dict[str, Any]:
    try:
        content = _yaml(Path(path).expanduser().read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"--engine-args: {path} can't be read: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise InvalidConfig(f"--engine-args: {path} holds no settings by their names")
    return content


def _yaml(text: str) -> Any:
    import yaml  # which TensorRT-LLM's environment has

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidConfig(f"--engine-args: '{text}' is no YAML: {error}") from None


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    """Settings within settings are added to what is there."""
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value
