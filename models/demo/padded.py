"""The stock network's arithmetic over padded batches of fixed shape, for training.

Stock code goes through pictures, frames and windows of sound one after another; here all of them
go through a layer in one step. The weights are those of the stock modules, and a test holds the
logits equal to theirs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.audio_utils import mel_filter_bank

from models.demo import network
from models.demo.batch import AUDIO_ROWS, HOP, SAMPLES
from models.demo.recipe.sample import RATE

WINDOW = 200  # frames of the spectrum that the audio tower hears at once
FFT = 400


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions; x: [batch, heads, tokens, 64]."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def _norm(x: Tensor, module: Any) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)


def _split(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def vision_block(x: Tensor, block: Any, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
    """x: [rows, patches, width]."""
    attn = block.attn
    y = _norm(x, block.norm1)
    q, k, v = (_split(part(y), attn.num_heads) for part in (attn.q, attn.k, attn.v))
    y = F.scaled_dot_product_attention(_turned(q, cos, sin), _turned(k, cos, sin), v, mask)
    x = x + attn.proj(y.transpose(1, 2).flatten(2))
    y, mlp = _norm(x, block.norm2), block.mlp
    return x + mlp.down_proj(F.silu(mlp.gate_proj(y)) * mlp.up_proj(y))


def audio_block(x: Tensor, block: Any, mask: Tensor) -> Tensor:
    """x: [windows, frames, width]."""
    attn = block.self_attn
    y = block.self_attn_layer_norm(x)
    q, k, v = (_split(part(y), attn.num_heads) for part in (attn.q_proj, attn.k_proj, attn.v_proj))
    y = F.scaled_dot_product_attention(q, k, v, mask)
    x = x + attn.out_proj(y.transpose(1, 2).flatten(2))
    y = block.final_layer_norm(x)
    return x + block.fc2(F.gelu(block.fc1(y)))


def text_block(x: Tensor, block: Any, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [samples, tokens, width]. What is padded comes last, where nothing looks at it."""
    attn = block.self_attn
    heads, kv = attn.config.num_attention_heads, attn.config.num_key_value_heads
    y = _norm(x, block.input_layernorm)
    q, k, v = _split(attn.q_proj(y), heads), _split(attn.k_proj(y), kv), _split(attn.v_proj(y), kv)
    k, v = (part.repeat_interleave(heads // kv, dim=1) for part in (_turned(k, cos, sin), v))
    y = F.scaled_dot_product_attention(_turned(q, cos, sin), k, v, is_causal=True)
    x = x + attn.o_proj(y.transpose(1, 2).flatten(2))
    y, mlp = _norm(x, block.post_attention_layernorm), block.mlp
    return x + mlp.down_proj(F.silu(mlp.gate_proj(y)) * mlp.up_proj(y))


class Padded:
    """``parts``: the stock modules, whose weights are used."""

    def __init__(self, parts: Any, *, compiled: bool = False) -> None:
        self._model, self._visual = parts["model"], parts["visual"]
        self._tower = parts["audio_tower"]
        device = next(parts.parameters()).device
        self._bank = torch.from_numpy(
            mel_filter_bank(FFT // 2 + 1, network.MELS, 0.0, 8000.0, RATE, "slaney", "slaney")
        ).float()  # [bins, mels]
        self._bank = self._bank.to(device)
        self._tone = [
            torch.tensor(values, device=device).mul(255).repeat_interleave(network.PATCH**2)
            for values in (network.MEAN, network.STD)
        ]
        wrap = torch.compile if compiled else (lambda function: function)
        self._vision, self._audio = wrap(vision_block), wrap(audio_block)
        self._text = wrap(text_block)
        vision = self._visual.config
        width = vision.hidden_size // vision.num_heads // 4
        self._angles = 10_000.0 ** (-torch.arange(width, device=device).float() / width)

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        """Logits of the tokens that are asked for: [answers' tokens, vocabulary]."""
        model = self._model
        words = model.embed_tokens(batch["ids"])
        media = torch.cat((self.see(batch), self.hear(batch)))
        x = torch.cat((words.flatten(0, 1), words.new_zeros(1, words.shape[-1])))
        x = x.index_copy(0, batch["goes"], media.to(x.dtype))[:-1].view_as(words)
        cos, sin = self._turns(batch["positions"], x.dtype)
        for block in model.layers:
            x = self._text(x, block, cos, sin)
        x = x.flatten(0, 1).index_select(0, batch["at"])
        return F.linear(_norm(x, model.norm), model.embed_tokens.weight)

    def _turns(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Rotary angles, [samples, 1, tokens, 64]: time, height and width turn parts of a head."""
        rope = self._model.config.rope_parameters
        half = sum(rope["mrope_section"])
        speeds = rope["rope_theta"] ** -(torch.arange(half, device=positions.device) / half)
        angles = positions.float()[..., None] * speeds  # [3, samples, tokens, 32]
        parts = angles.split(rope["mrope_section"], dim=-1)
        angles = torch.cat([part[axis] for axis, part in enumerate(parts)], dim=-1)
        angles = angles.repeat(1, 1, 2)[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def see(self, batch: dict[str, Tensor]) -> Tensor:
        """Rows of pictures and clips, [units, width]."""
        visual = self._visual
        weight = visual.patch_embed.proj.weight.flatten(1)
        x = torch.cat((self._patches(batch["pictures"]), self._patches(batch["clips"])))
        x = F.linear(x.to(weight.dtype), weight)
        angles = batch["places"].float()[..., None] * self._angles  # [rows, patches, 2, 16]
        angles = angles.flatten(2).repeat(1, 1, 2)[:, None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        segments = batch["segments"]
        mask = segments[:, None, :, None] == segments[:, None, None, :]
        for block in visual.blocks:
            x = self._vision(x, block, cos, sin, mask)
        merger = visual.merger
        x = _norm(x, merger.ln_q).view(-1, x.shape[-1] * 4)
        return merger.mlp(x)

    def _patches(self, pixels: Tensor) -> Tensor:
        """8-bit [rows, patches, (frames,) 588], toned, in the stock order; one frame twice."""
        mean, std = self._tone
        x = ((pixels.float() - mean) / std).unflatten(-1, (3, -1))
        if pixels.ndim == 3:
            return x[..., None, :].expand(-1, -1, -1, 2, -1).flatten(2)
        return x.transpose(2, 3).flatten(2)

    def mel(self, waves: Tensor, tilt: Tensor | None) -> Tensor:
        """Whisper's spectrum, [sounds, mels, frames]; ``tilt`` is added to every frame."""
        window = torch.hann_window(FFT, device=waves.device)
        power = (
            torch.stft(
                waves.float() / 32767, FFT, HOP, window=window, center=True, return_complex=True
            )
            .abs()
            .square()[..., :-1]
        )
        log = (self._bank.T @ power).clamp(min=1e-10).log10()
        if tilt is not None:
            log = log + tilt[..., None]
        log = torch.maximum(log, log.amax((1, 2), keepdim=True) - 8.0)
        return (log + 4.0) / 4.0

    def hear(self, batch: dict[str, Tensor]) -> Tensor:
        """Rows of sounds, [sounds * 100, width]; those behind a sound's end mean nothing."""
        tower = self._tower
        waves = batch["waves"]
        frames = (batch["wave_lengths"] + HOP - 1) // HOP
        count = SAMPLES // HOP // WINDOW
        mel = (
            self.mel(waves, batch.get("tilt"))
            .unflatten(2, (count, WINDOW))
            .transpose(1, 2)
            .flatten(0, 1)
        )
        starts = torch.arange(count, device=waves.device) * WINDOW
        left = (frames[:, None] - starts).clamp(0, WINDOW).flatten()  # in each window
        inside = torch.arange(WINDOW, device=waves.device) < left[:, None]
        mel = (mel * inside[:, None]).to(tower.conv1.weight.dtype)
        x = F.gelu(tower.conv1(mel)) * inside[:, None]
        x = F.gelu(tower.conv2(x)).transpose(1, 2)
        x = x + tower.positional_embedding.positional_embedding[: x.shape[1]].to(x.dtype)
        valid = torch.arange(x.shape[1], device=x.device) < ((left - 1) // 2 + 1)[:, None]
        valid[:, 0] = True  # a window that holds nothing still needs something to look at
        mask = valid[:, None, None]
        for block in tower.layers:
            x = self._audio(x, block, mask)
        x = x.unflatten(1, (-1, 2)).mean(2)
        x = tower.proj(tower.ln_post(x))
        return x.view(len(waves) * AUDIO_ROWS, -1)
