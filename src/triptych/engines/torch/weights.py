"""Loads one part of a checkpoint, encoder or language model, and reads no weights of the other.

Builds modules whose parameters hold no memory, then reads the tensors of the part from the
safetensors files one by one. Refuses pickled checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from triptych.checkpoint import Model
from triptych.engines.base import ReportProgress
from triptych.errors import UnsupportedModel
from triptych.models.family import Family

ModelPart = Literal["encoder", "language"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SHOWN = 8  # names in an error message


class EmptyWeights(TorchFunctionMode):
    """A mode in which ``torch.empty`` gives meta tensors; everything else is real.

    Layers make their large weights with ``torch.empty``, so these take neither memory nor time,
    while computed buffers (rotary frequencies, position ids) come out right, which they do not
    under ``torch.device("meta")``.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def load_part(
    family: Family,
    model: Model,
    part: ModelPart,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: ReportProgress = lambda what, fraction: None,
    *,
    attention: str = "sdpa",
) -> nn.Module:
    """One part of the model on its device, in evaluation mode, without gradients.

    ``attention`` names an implementation in transformers' attention interface; it need only be
    registered when the module runs.
    """
    if "quantization_config" in model.config:
        raise UnsupportedModel(f"{model.name} is quantized; only plain weights are supported")
    what = f"loading {part} weights"
    progress(what, 0.0)
    with EmptyWeights():
        module = family.build_encoder() if part == "encoder" else family.build_language()
    sources = _sources(family, model, part)
    _compare(module, sources, model, part)
    parameters = _read(module, sources, model, device, dtype, lambda done: progress(what, done))
    module.load_state_dict(parameters, strict=True, assign=True)
    for name, buffer in module.named_buffers():
        assert not buffer.is_meta, f"buffer {name} has no value"
    module = module.to(device).eval().requires_grad_(False)
    set_attention(module, attention)
    progress(what, 1.0)
    return module


def count_parameters(module: nn.Module) -> int:
    """Parameters of a module; tied ones count once."""
    return sum(parameter.numel() for parameter in module.parameters())


def set_attention(module: nn.Module, name: str) -> None:
    """Choose the attention implementation by name; layers look it up in the shared config."""
    for inner in module.modules():
        config = getattr(inner, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = name


def _sources(family: Family, model: Model, part: ModelPart) -> dict[str, tuple[Path, str]]:
    """Parameter name to the file and tensor that hold it, for one part."""
    sources = {}
    for stored, file in _tensors(model.folder).items():
        target = family.weight_name(stored)
        if target is not None and target[0] == part:
            sources[target[1]] = (file, stored)
    return sources


def _tensors(folder: Path) -> dict[str, Path]:
    """Every tensor of a checkpoint with its file; reads headers only."""
    if (folder / _INDEX).is_file():
        index = msgspec.json.decode((folder / _INDEX).read_bytes(), type=dict[str, Any])
        named = {name: folder / file for name, file in index["weight_map"].items()}
        if absent := sorted({file.name for file in named.values() if not file.is_file()}):
            raise UnsupportedModel(f"{folder.name} lacks {_list(absent)}, which its index names")
        return named
    if (folder / _SINGLE).is_file():
        files = [folder / _SINGLE]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        raise UnsupportedModel(
            f"{folder.name} has no *.safetensors files."
            + (" Pickled weights are never loaded: convert them first." if pickled else "")
        )
    return {name: file for file in files for name in _names(file)}


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return list(tensors.keys())
    except SafetensorError as error:
        raise UnsupportedModel(f"{file.name} cannot be read: {error}") from None


def _compare(
    module: nn.Module, sources: Mapping[str, tuple[Path, str]], model: Model, part: ModelPart
) -> None:
    own = {name for name, _ in module.named_parameters()}  # without the second name of a tied one
    if missing := sorted(own - sources.keys()):
        raise UnsupportedModel(f"{model.name} lacks weights of its {part}: {_list(missing)}")
    if unexpected := sorted(sources.keys() - module.state_dict().keys()):
        stored = [sources[name][1] for name in unexpected]
        raise UnsupportedModel(f"{model.name} has unknown weights in its {part}: {_list(stored)}")


def _read(
    module: nn.Module,
    sources: Mapping[str, tuple[Path, str]],
    model: Model,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Callable[[float], None],
) -> dict[str, Tensor]:
    """Every name of the module's state to its loaded tensor, file by file."""
    own = dict(module.named_parameters())
    by_file: dict[Path, list[str]] = {}
    for name in own:
        by_file.setdefault(sources[name][0], []).append(name)
    loaded: dict[str, Tensor] = {}
    for file, names in by_file.items():
        with safe_open(file, framework="pt") as tensors:
            for name in names:
                tensor = tensors.get_tensor(sources[name][1])
                if tensor.shape != own[name].shape:
                    raise UnsupportedModel(
                        f"{model.name}: {sources[name][1]} is {list(tensor.shape)}, "
                        f"but config.json asks for {list(own[name].shape)}"
                    )
                loaded[name] = nn.Parameter(tensor.to(device, dtype), requires_grad=False)
                progress(len(loaded) / len(own))
    by_identity = {id(parameter): name for name, parameter in own.items()}
    for name, value in module.state_dict(keep_vars=True).items():
        if name not in loaded:  # the second name of a tied weight, or a stored buffer
            loaded[name] = loaded[by_identity[id(value)]] if id(value) in by_identity else value
    return loaded


def _list(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
