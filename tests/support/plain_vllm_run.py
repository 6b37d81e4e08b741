"""Plain vLLM in one process, fed with the media themselves by its own processors: the measure.

Run by the Python of vLLM's environment: ``python plain_vllm_run.py < ASKED > ANSWERED``, both JSON.
Pictures and sounds come as files, clips as their frames. Knows nothing of Triptych.
"""

import base64
import io
import json
import os
import sys
import wave

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
FPS = 2.0


def content(item):
    """A media item as vLLM takes it from a program."""
    import numpy as np
    from PIL import Image

    data = base64.b64decode(item["data"])
    if item["kind"] == "image":
        return Image.open(io.BytesIO(data))
    if item["kind"] == "audio":
        with wave.open(io.BytesIO(data)) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
            return samples.astype(np.float32) / 32768, file.getframerate()
    frames = np.frombuffer(data, np.uint8).reshape(item["shape"])
    count = len(frames)
    about = {
        "fps": FPS,
        "duration": count / FPS,
        "total_num_frames": count,
        "frames_indices": list(range(count)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }
    return frames, about


def prompt(tokenizer, one):
    media = {}
    for item in one["media"]:
        media.setdefault(item["kind"], []).append(content(item))
    text = tokenizer.apply_chat_template(one["turns"], tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return {"prompt_token_ids": ids, "multi_modal_data": media}


def main() -> None:
    asked, answers = json.load(sys.stdin), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer

    from vllm import LLM, SamplingParams

    llm = LLM(
        asked["folder"],
        dtype="float32",
        enforce_eager=True,
        skip_mm_profiling=True,
        max_model_len=4096,
        block_size=32,
        limit_mm_per_prompt=dict.fromkeys(asked["kinds"], 8),
        enable_prefix_caching=False,
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=asked["tokens"], ignore_eos=True, logprobs=0, detokenize=False
    )
    prompts = [prompt(llm.get_tokenizer(), one) for one in asked["requests"]]
    told = []
    for out in llm.generate(prompts, sampling, use_tqdm=False):
        [made] = out.outputs
        steps = zip(made.logprobs, made.token_ids, strict=True)
        logprobs = [step[id].logprob for step, id in steps]
        told.append(
            {
                "prompt": list(out.prompt_token_ids),
                "ids": list(made.token_ids),
                "logprobs": logprobs,
            }
        )
    json.dump(told, answers)
    answers.flush()


if __name__ == "__main__":
    main()
