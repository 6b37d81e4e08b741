"""SGLang in one piece, fed with the media themselves by its own processors: the measure.

For words and pictures it is as published; for clips it is patched, see ``tell_the_rate`` and
``scheduler_with_frames_apart``.

Run by the Python of SGLang's environment: ``python aggregated.py < ASKED > ANSWERED``, both JSON.
Pictures come as files, clips as their frames. Knows nothing of Triptych.
"""

import asyncio
import base64
import io
import json
import os
import sys

FPS = 2.0  # of the clips, all of whose frames are given


def tell_the_rate():
    """SGLang gives clips to the model's processor without their rate, which then takes 24 frames a
    second, and places them wrongly. This passes the rate."""
    from transformers.video_utils import VideoMetadata

    VideoMetadata.sampled_fps = property(lambda _: FPS)


def scheduler_with_frames_apart(*args, **kwargs):
    """SGLang's tower lets every moment of a clip attend to all others, which transformers' does
    not. In this scheduler it does not either: a clip is so many pictures to it."""
    import torch
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration as Model

    def video_feature(self, items):
        pixels = torch.cat([item.feature for item in items]).type(self.visual.dtype)
        grids = torch.cat([item.video_grid_thw for item in items])
        moments = grids.repeat_interleave(grids[:, 0], dim=0)
        moments[:, 0] = 1
        return self.visual(pixels, grid_thw=moments)

    Model.get_video_feature = video_feature
    return run_scheduler_process(*args, **kwargs)


def content(item):
    """A media item as SGLang takes it from a program."""
    import numpy as np
    from PIL import Image

    data = base64.b64decode(item["data"])
    if item["kind"] == "image":
        return Image.open(io.BytesIO(data))
    return np.frombuffer(data, np.uint8).reshape(item["shape"]).copy()


async def answer(engine, tokenizer, one, tokens):
    media = {}
    for item in one["media"]:
        media.setdefault(f"{item['kind']}_data", []).append(content(item))
    text = tokenizer.apply_chat_template(one["turns"], tokenize=False, add_generation_prompt=True)
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    out = await engine.async_generate(text, sampling, return_logprob=True, **media)
    steps = out["meta_info"]["output_token_logprobs"]
    return {
        "prompt": out["meta_info"]["prompt_tokens"],
        "ids": out["output_ids"],
        "logprobs": [logprob for logprob, _, _ in steps],
    }


def main() -> None:
    asked, answers = json.load(sys.stdin), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer

    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import prepare_server_args

    tell_the_rate()
    Engine.run_scheduler_process_func = staticmethod(scheduler_with_frames_apart)
    words = [f"--model-path={asked['folder']}", "--device=cpu", "--dtype=float32"]
    engine = Engine(server_args=prepare_server_args([*words, *asked["arguments"].split()]))
    tokenizer = engine.tokenizer_manager.tokenizer

    async def all_of_them():
        made = [answer(engine, tokenizer, one, asked["tokens"]) for one in asked["requests"]]
        return await asyncio.gather(*made)

    json.dump(engine.loop.run_until_complete(all_of_them()), answers)
    answers.flush()
    engine.shutdown()


if __name__ == "__main__":
    main()
