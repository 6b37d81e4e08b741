"""Speech for the recipe: single words by free synthesisers, packed into ``data/speech.npz``.

    python -m models.demo.gather_speech [--only espeak,flite,festival,pico,recorded]

It needs the Debian packages espeak-ng, flite, festival, festlex-cmu, festlex-poslex,
festvox-kallpc16k, festvox-kdlpc16k, festvox-us-slt-hts, asterisk-core-sounds-en-g722 and the
Python packages ttspico and av. A voice is a speaker: every rendering of a speaker, by whatever
program and at whatever pitch, is either learned from or kept for the tests.

Licences: espeak-ng is GPL-3+ (the program; what it says is not), flite and its CMU voices and
festival with kal, ked and slt have BSD-like licences, SVOX Pico is Apache-2.0. The recorded
prompts are CC-BY-SA-3.0; they are kept for the tests, so no weight is made from them.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import subprocess
import tempfile
import wave
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.demo.recipe.sample import RATE
from models.demo.recipe.voices import DIGITS, SPEECH, UNKNOWN, UNKNOWN_KEPT, WORDS, mu_law

Wave = NDArray[np.float32]

# The accents and variants of espeak-ng whose words a recogniser tells apart; those that it mostly
# takes for others (whispers, robots, the strongest accents) are left out.
ACCENTS = ("en-us",) * 4 + ("en-gb", "en-gb-x-rp") * 2 + ("en-gb-scotland", "en-us-nyc")
_LEARNED = """
    adam Alex Andy antonio aunty belinda benjamin caleb Denis ed edward edward2 f1 f2 f3 f5 Gene
    Gene2 grandpa Henrique Hugo iven iven4 Jacky john klatt klatt2 klatt4 m1 m2 m3 m4 m6 m7 m8
    Mario max michel miguel Nguyen pablo paul rob robert sandro steph steph2 steph3
"""
_KEPT = "Andrea anika Diogo f4 grandma linda m5 Mike pedro quincy victor"
VARIANTS, VARIANTS_KEPT = _LEARNED.split(), _KEPT.split()
SPEAKERS_KEPT = ("rms", "ked", "recorded")
RECORDED = Path("/usr/share/asterisk/sounds/en_US_f_Allison")
RECORDED_WORDS = ("hello", "goodbye")
LICENCES = {
    "espeak-ng": "GPL-3+ (the program; not what it says)",
    "flite": "BSD-like (CMU)",
    "festival": "BSD-like (Edinburgh, CMU)",
    "festvox-kallpc16k": "BSD-like (CMU)",
    "festvox-kdlpc16k": "BSD-like (CMU)",
    "festvox-us-slt-hts": "BSD-3-Clause",
    "ttspico": "Apache 2.0 (SVOX)",
    "asterisk-core-sounds-en-g722": "CC BY-SA 3.0 (for the tests only)",
}
LONGEST = 1.1  # seconds; what is longer was spelled or stretched


@dataclass(frozen=True)
class Job:
    """One word by one speaker, and the call that renders it."""

    word: str
    speaker: str
    render: Callable[[], Wave]


@dataclass(frozen=True)
class Spoken:
    word: str
    speaker: str
    wave: Wave  # [samples] at RATE, trimmed, loudest sample 0.95


def resampled(sound: Wave, rate: int) -> Wave:
    """The same sound at RATE, exactly band limited."""
    if rate == RATE:
        return sound
    count = round(len(sound) * RATE / rate)
    spectrum = np.fft.rfft(sound)
    bins = count // 2 + 1
    kept = np.zeros(bins, dtype=np.complex128)
    kept[: min(bins, len(spectrum))] = spectrum[:bins]
    return (np.fft.irfft(kept, count) * (count / len(sound))).astype(np.float32)


def read_wave(data: bytes) -> Wave:
    with wave.open(io.BytesIO(data)) as file:
        rate, frames = file.getframerate(), file.readframes(1 << 30)
    count = len(frames) // 2 * 2  # espeak-ng writes its header before it knows the length
    return resampled(_scaled(np.frombuffer(frames[:count], dtype="<i2")), rate)


def _scaled(samples: NDArray[Any]) -> Wave:
    """16-bit samples as numbers within -1 and 1."""
    return samples.astype(np.float32) / np.float32(32768)


def trimmed(sound: Wave) -> Wave:
    """Without the silence around it: 10 ms frames under 1.5 % of the loudest go, bar a margin."""
    frame = RATE // 100
    count = len(sound) // frame
    loud = np.sqrt(np.mean(sound[: count * frame].reshape(count, frame) ** 2, axis=1))
    heard = np.flatnonzero(loud > 0.015 * loud.max())
    first, last = max(heard[0] - 2, 0), min(heard[-1] + 3, count)
    cut = sound[first * frame : last * frame]
    return (cut * (0.95 / np.abs(cut).max())).astype(np.float32)


def espeak(word: str, variant: str, rng: random.Random) -> Job:
    voice = f"{rng.choice(ACCENTS)}+{variant}"
    speed, pitch = str(rng.randint(135, 200)), str(rng.randint(30, 70))
    command = ["espeak-ng", "-v", voice, "-s", speed, "-p", pitch, "--stdout", word]

    def render() -> Wave:
        return read_wave(subprocess.run(command, check=True, capture_output=True).stdout)

    return Job(word, f"espeak {variant}", render)


def flite(word: str, voice: str, rng: random.Random) -> Job:
    stretch = f"duration_stretch={rng.uniform(0.85, 1.3):.2f}"
    command = ["flite", "-voice", voice, "--setf", stretch, "-t", word]
    if voice.startswith("kal"):
        command += ["--setf", f"int_f0_target_mean={rng.randint(80, 135)}"]

    def render() -> Wave:
        with tempfile.NamedTemporaryFile(suffix=".wav") as file:
            subprocess.run([*command, "-o", file.name], check=True, capture_output=True)
            return read_wave(Path(file.name).read_bytes())

    return Job(word, "kal" if voice == "kal16" else voice, render)


def festival(voice: str, speaker: str, words: list[str], rng: random.Random) -> list[Spoken]:
    """One run for all words: the program takes long to start."""
    with tempfile.TemporaryDirectory() as folder:
        script = [f"({voice})"]
        for index, word in enumerate(words):
            script.append(f"(Parameter.set 'Duration_Stretch {rng.uniform(0.85, 1.3):.2f})")
            said = f'(utt.synth (Utterance Text "{word}"))'
            script.append(f'(utt.save.wave {said} "{folder}/{index}.wav" \'riff)')
        batch = Path(folder) / "batch.scm"
        batch.write_text("\n".join(script))
        subprocess.run(["festival", "-b", str(batch)], check=True, capture_output=True)
        return [
            Spoken(word, speaker, trimmed(read_wave((Path(folder) / f"{index}.wav").read_bytes())))
            for index, word in enumerate(words)
        ]


def pico(language: str, times: int, rng: random.Random) -> Iterator[Spoken]:
    from ttspico import TtsEngine

    engine = TtsEngine(language)
    for _ in range(times):
        for word in (*DIGITS, *WORDS):
            engine.rate, engine.pitch = rng.randint(80, 125), rng.randint(80, 125)
            sound = _scaled(np.frombuffer(engine.speak(word), dtype="<i2"))
            yield Spoken(word, f"pico {language}", trimmed(sound))


def recorded() -> Iterator[Spoken]:
    """A person's telephone prompts: the digits and two of the words."""
    import av

    files = {word: RECORDED / "digits" / f"{digit}.g722" for digit, word in enumerate(DIGITS)}
    files |= {word: RECORDED / f"{word}.g722" for word in RECORDED_WORDS}
    for word, path in files.items():
        with av.open(str(path), format="g722") as container:
            frames = [frame.to_ndarray().reshape(-1) for frame in container.decode(audio=0)]
        yield Spoken(word, "recorded", trimmed(_scaled(np.concatenate(frames))))


def jobs(only: set[str], rng: random.Random) -> Iterator[Job]:
    for word in (*DIGITS, *WORDS):
        times = 1.5 if word in DIGITS else 0.9  # the digits are what is asked for most
        if "espeak" in only:
            for variant in rng.sample(VARIANTS * 2, round(len(VARIANTS) * times)):
                yield espeak(word, variant, rng)
            for variant in VARIANTS_KEPT:
                yield espeak(word, variant, rng)
        if "flite" in only:
            for voice, count in (("kal", 2), ("kal16", 4), ("awb", 7), ("slt", 6), ("rms", 4)):
                for _ in range(round(count * times)):
                    yield flite(word, voice, rng)


def unknown_jobs(only: set[str], rng: random.Random) -> Iterator[Job]:
    """Words that the model is to say it does not know: some for training, others for tests."""
    for word in UNKNOWN:
        if "espeak" in only:
            for variant in rng.sample(VARIANTS, 12):
                yield espeak(word, variant, rng)
        if "flite" in only:
            for voice in ("kal16", "awb", "slt"):
                yield flite(word, voice, rng)
    for word in UNKNOWN_KEPT:
        if "espeak" in only:
            for variant in rng.sample(VARIANTS_KEPT, 6):
                yield espeak(word, variant, rng)
        if "flite" in only:
            yield flite(word, "rms", rng)


def said(job: Job) -> Spoken:
    return Spoken(job.word, job.speaker, trimmed(job.render()))


def gather(only: set[str], rng: random.Random) -> list[Spoken]:
    with ThreadPoolExecutor(2) as pool:
        spoken = list(pool.map(said, jobs(only, rng)))
        spoken += pool.map(said, unknown_jobs(only, random.Random(5)))
    if "festival" in only:
        words = [*DIGITS, *WORDS] * 3
        for voice, speaker in (
            ("voice_kal_diphone", "kal"),
            ("voice_cmu_us_slt_arctic_hts", "slt"),
            ("voice_ked_diphone", "ked"),
        ):
            spoken += festival(voice, speaker, words, rng)
    if "pico" in only:
        spoken += [*pico("en-US", 9, rng), *pico("en-GB", 9, rng)]
    if "recorded" in only:
        spoken += recorded()
    return [one for one in spoken if len(one.wave) <= LONGEST * RATE]


def is_kept(speaker: str) -> bool:
    name = speaker.removeprefix("espeak ")
    return speaker in SPEAKERS_KEPT or (name != speaker and name in VARIANTS_KEPT)


def pack(spoken: list[Spoken], path: Path) -> None:
    """One flat array of mu-law bytes, where each clip starts, and who says what."""
    words = [*DIGITS, *WORDS, *UNKNOWN, *UNKNOWN_KEPT]
    speakers = sorted({one.speaker for one in spoken})
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path,
        waves=np.concatenate([mu_law(one.wave) for one in spoken]),
        starts=np.cumsum([0, *(len(one.wave) for one in spoken)]),
        word=np.array([words.index(one.word) for one in spoken], dtype=np.uint8),
        voice=np.array([speakers.index(one.speaker) for one in spoken], dtype=np.uint8),
        words=np.array(words),
        voices=np.array(speakers),
        kept=np.array([is_kept(speaker) for speaker in speakers]),
    )


def record(path: Path) -> None:
    """Add to the list of sources beside the file; what other scripts wrote there stays."""
    listed = path.parent / "SOURCES.json"
    sources = json.loads(listed.read_text()) if listed.exists() else {}
    ask = ["dpkg-query", "-W", "-f", "${Version}"]
    sources[path.name] = [
        {
            "package": package,
            "version": version(package)
            if package == "ttspico"
            else subprocess.run([*ask, package], check=True, capture_output=True).stdout.decode(),
            "licence": licence,
        }
        for package, licence in LICENCES.items()
    ]
    listed.write_text(json.dumps(sources, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Render the words into data/speech.npz.")
    parser.add_argument("--only", default="espeak,flite,festival,pico,recorded")
    parser.add_argument("--out", type=Path, default=SPEECH)
    parser.add_argument("--seed", type=int, default=4)
    chosen = parser.parse_args()
    spoken = gather(set(chosen.only.split(",")), random.Random(chosen.seed))
    pack(spoken, chosen.out)
    record(chosen.out)
    seconds = sum(len(one.wave) for one in spoken) / RATE
    size = chosen.out.stat().st_size / 1e6
    print(f"{len(spoken)} clips, {seconds:.0f} s, {size:.1f} MB in {chosen.out}")


if __name__ == "__main__":
    main()
