"""The frames that a model looks at, beside decoding everything; and sound to its spectrum.

Clips are 720p H.264 at 30 frames a second with a key frame every 250, as encoders make them. Both
ways end with the same resized pixels (checked), in one thread; figures are CPU time. The other
sound is the same file decoded by the same means, then Whisper's stock extractor.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from fractions import Fraction
from statistics import median
from typing import Any

from benchmarks import pictures
from benchmarks.record import Figure

RATE = 30
WIDTH, HEIGHT = 1280, 720
SOUND_SECONDS, SOUND_RATE, MODEL_RATE, MELS = 30, 44100, 16000, 128


def run(quick: bool) -> tuple[list[Figure], dict[str, Any]]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rounds = 2 if quick else 5
    figures, found = [], {}
    try:
        for seconds in (10,) if quick else (10, 60):
            clip = video(seconds)
            for name, frames in _ways().items():
                times = _compare(clip, frames, rounds)
                what = f"{name} of {seconds} s"
                found[what] = times | {"bytes": len(clip)}
                everything, sampled = median(times["everything"]), median(times["sampled"])
                detail = f"{sampled:.0f} ms of CPU beside {everything:.0f} ms"
                figures.append(
                    Figure(
                        f"{what}, everything over sampled",
                        everything / sampled,
                        "x",
                        None,
                        True,
                        detail,
                    )
                )
        found["sound"] = _sound(rounds)
    finally:
        torch.set_num_threads(threads)
    stock, ours = (median(found["sound"][name]) for name in ("stock", "ours"))
    detail = f"{ours:.0f} ms of CPU beside {stock:.0f} ms, decoding included"
    figures.append(
        Figure("30 s of MP3 to spectrum, stock over ours", stock / ours, "x", None, True, detail)
    )
    return figures, found


def _ways() -> dict[str, Any]:
    from triptych.recipe import FrameSampling

    return {
        "8 frames": FrameSampling("even", 0.0, 8, 1, 768, 2),
        "2 frames a second": FrameSampling("qwen2", 2.0, 0, 4, 768, 2),
    }


def video(seconds: int) -> bytes:
    """A view that moves over a scene, with grain."""
    import av
    import numpy as np

    scene = pictures.scene(3, 1920, 1080)
    grain = np.random.default_rng(4).integers(0, 4, (8, HEIGHT, WIDTH, 3), np.uint8)
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        options = {"preset": "superfast", "crf": "23"}
        stream: Any = container.add_stream("libx264", rate=RATE, options=options)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.time_base = Fraction(1, RATE)
        for number in range(seconds * RATE):
            left = round(320 * (1 + np.sin(number / 47)))
            top = round(180 * (1 + np.cos(number / 31)))
            view = scene[top : top + HEIGHT, left : left + WIDTH]
            frame = av.VideoFrame.from_ndarray(view // 2 + 40 + grain[number % 8], format="rgb24")
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def _compare(clip: bytes, frames: Any, rounds: int) -> dict[str, list[float]]:
    import numpy as np

    from triptych.config import Limits
    from triptych.media.prepare import prepare
    from triptych.recipe import GridVideo, Normalization, Recipes

    tone = Normalization(1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    recipe = GridVideo(frames, 14, 2, 128 * 28 * 28, 768 * 28 * 28, True, 3, tone)
    recipes, limits = Recipes("benchmark", video=recipe), Limits()

    def sampled() -> Any:
        return prepare("video", "file", memoryview(clip), recipes, limits, False)[1][0]

    def everything() -> Any:
        return _everything(clip, recipe)

    if not np.array_equal(sampled(), everything()):
        raise RuntimeError("the frames are not the same")
    times: dict[str, list[float]] = {"everything": [], "sampled": []}
    for _ in range(rounds):
        times["everything"].append(_cpu_ms(everything))
        times["sampled"].append(_cpu_ms(sampled))
    return times


def _everything(clip: bytes, recipe: Any) -> Any:
    """Decode every frame, keep those that are asked for."""
    import av
    import numpy as np

    from triptych.media import images, video

    with av.open(io.BytesIO(clip)) as container:
        stream = container.streams.video[0]
        stream.thread_count = 1
        decoded = list(container.decode(stream))
        wanted = video.choose_frames(recipe.frames, len(decoded), float(RATE))
        height, width = images.fit_to_grid(
            HEIGHT, WIDTH, recipe.patch * recipe.merge, recipe.min_pixels, recipe.max_pixels
        )
        return np.stack(
            [
                images.resize(
                    decoded[index].to_ndarray(format="rgb24"), height, width, recipe.resample
                )
                for index in wanted
            ]
        )


def _sound(rounds: int) -> dict[str, list[float]]:
    import numpy as np
    from transformers import WhisperFeatureExtractor

    from triptych.config import Limits
    from triptych.media import audio
    from triptych.media.container import AUDIO_CONTAINERS
    from triptych.recipe import MelAudio

    file = _mp3()
    recipe = MelAudio(MODEL_RATE, 400, 160, MELS, 3000)
    extractor: Any = WhisperFeatureExtractor(feature_size=MELS)
    limits = Limits()

    def ours() -> Any:
        return audio.prepare_audio(memoryview(file), recipe, limits)[1][0]

    def stock() -> Any:
        wave = audio.decode_audio(memoryview(file), AUDIO_CONTAINERS, recipe, limits)
        return extractor(wave, sampling_rate=MODEL_RATE, return_tensors="np")["input_features"][0]

    made = ours()
    if not np.allclose(made, stock()[:, : made.shape[1]], atol=1e-4):  # which adds silence
        raise RuntimeError("the spectra are not the same")
    times: dict[str, list[float]] = {"stock": [], "ours": []}
    for _ in range(2 * rounds):
        times["stock"].append(_cpu_ms(stock))
        times["ours"].append(_cpu_ms(ours))
    return times


def _mp3() -> bytes:
    """Gliding tones with noise, in stereo."""
    import av
    import numpy as np

    at = np.arange(int((SOUND_SECONDS - 0.1) * SOUND_RATE)) / SOUND_RATE
    noise = np.random.default_rng(5).normal(0, 0.05, (2, len(at)))
    wave = noise + [[0.3], [0.2]] * np.sin(2 * np.pi * (300 + 40 * at) * at)
    file = io.BytesIO()
    with av.open(file, "w", format="mp3") as container:
        stream: Any = container.add_stream("libmp3lame", rate=SOUND_RATE)
        frame = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(wave, np.float32), format="fltp", layout="stereo"
        )
        frame.sample_rate = SOUND_RATE
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def _cpu_ms(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return round(1e3 * (time.process_time() - start), 2)
