"""The recipe's sounds: their answers agree with what can be measured in them."""

from __future__ import annotations

import random
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from models.demo import gather_speech
from models.demo.recipe import digits, sound_wordings, sounds, together_wordings, tones, voices
from models.demo.recipe.sample import RATE, Maker, Picture, Sample, Sound, Split, Wordings

SPOKEN = pytest.mark.skipif(
    not voices.SPEECH.exists(), reason="needs data/speech.npz, which gather_speech makes"
)
WRITTEN = pytest.mark.skipif(
    not digits.SOURCE.exists(), reason="needs data/mnist.npz, which another gatherer makes"
)
MAKERS = [
    pytest.param(sounds.spoken_digit, marks=SPOKEN),
    pytest.param(sounds.spoken_word, marks=SPOKEN),
    sounds.steady_tone,
    sounds.beeps,
    sounds.glide,
    pytest.param(sounds.together, marks=[SPOKEN, WRITTEN]),
]
TASKS = {
    sounds.spoken_digit: "spoken digit",
    sounds.spoken_word: "spoken word",
    sounds.steady_tone: "tone",
    sounds.beeps: "beeps",
    sounds.glide: "glide",
    sounds.together: "together",
}
EVERY_WORDING = {
    name: wordings
    for module in (sound_wordings, together_wordings)
    for name, wordings in vars(module).items()
    if isinstance(wordings, Wordings)
}


def drawn(maker: Maker, split: Split, count: int, turns: int = 1) -> list[Sample]:
    return [maker(random.Random(seed), split, turns) for seed in range(count)]


def the_sound(sample: Sample) -> np.ndarray:
    (wave,) = (medium.wave for medium in sample.media if isinstance(medium, Sound))
    return wave


def pitch(wave: np.ndarray) -> float:
    """The lowest strong frequency of a sound, in Hz."""
    strength = np.abs(np.fft.rfft(wave * np.hanning(len(wave))))
    strong = np.flatnonzero(strength > 0.6 * strength.max())
    return float(strong[0] * RATE / len(wave))


def expanded(wording: str) -> set[str]:
    parts = [part.split("|") for part in re.split(r"\[([^\[\]]*)\]", wording)[1::2]]
    plain = re.split(r"\[[^\[\]]*\]", wording)
    return {
        "".join(text + choice for text, choice in zip(plain, [*chosen, ""], strict=True))
        for chosen in product(*parts)
    }


@pytest.mark.parametrize("maker", MAKERS)
def test_the_same_generator_gives_the_same_sample(maker: Maker) -> None:
    for seed in range(20):
        one, other = (maker(random.Random(seed), Split.TRAIN, 3) for _ in range(2))
        assert one.turns == other.turns
        for medium, again in zip(one.media, other.media, strict=True):
            if isinstance(medium, Sound) and isinstance(again, Sound):
                assert np.array_equal(medium.wave, again.wave)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("split", Split)
def test_an_answer_is_right_and_another_is_not(maker: Maker, split: Split) -> None:
    for sample in drawn(maker, split, 60, turns=3):
        assert 1 <= len(sample.turns) <= 3
        for turn in sample.turns:
            assert turn.right(turn.answer)
            wrong = next(iter(turn.choices - set(turn.truth)), "nothing")
            assert not turn.right(f"It is {wrong}.")


@pytest.mark.parametrize("maker", MAKERS)
def test_a_single_question_is_of_the_makers_own_task(maker: Maker) -> None:
    for sample in drawn(maker, Split.TEST, 40):
        (turn,) = sample.turns
        assert turn.task == TASKS[maker]


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("split", Split)
def test_a_sound_has_a_third_of_a_second_to_three_and_stays_within_bounds(
    maker: Maker, split: Split
) -> None:
    for sample in drawn(maker, split, 60):
        wave = the_sound(sample)
        assert wave.dtype == np.float32
        assert 0.3 * RATE <= len(wave) <= 3 * RATE
        assert 0.05 < np.abs(wave).max() <= 1


@pytest.mark.parametrize("split", Split)
def test_a_tone_is_as_high_as_the_answer_says(split: Split) -> None:
    heard = {"high": 0, "low": 0}
    for sample in drawn(sounds.steady_tone, split, 80):
        (level,) = sample.turns[0].truth
        low, high = tones.HIGH if level == "high" else tones.LOW
        assert low * 0.95 < pitch(the_sound(sample)) < high * 1.05
        heard[level] += 1
    assert min(heard.values()) > 20


@pytest.mark.parametrize("split", Split)
def test_there_are_as_many_beeps_as_the_answer_says(split: Split) -> None:
    for sample in drawn(sounds.beeps, split, 80):
        wave = the_sound(sample)
        count = len(wave) // 320
        loud = np.abs(wave[: count * 320]).reshape(count, 320).max(axis=1) > np.abs(wave).max() / 2
        starts = np.flatnonzero(np.diff(np.concatenate([[False], loud]).astype(int)) == 1)
        assert sample.turns[0].truth == (voices.DIGITS[len(starts)],)


@pytest.mark.parametrize("rises", [True, False])
@pytest.mark.parametrize("split", Split)
def test_a_glide_ends_higher_or_lower_than_it_began(split: Split, rises: bool) -> None:
    for seed in range(40):
        wave = tones.glide(random.Random(seed), split, rises)
        part = len(wave) // 6
        began, ended = pitch(wave[:part]), pitch(wave[-part:])
        assert (ended > 1.2 * began) if rises else (ended < began / 1.2)


def test_the_answer_describes_the_glide_that_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def noted(rng: random.Random, split: Split, rises: bool) -> tones.Wave:
        asked.append(rises)
        return np.ones(RATE, dtype=np.float32)

    monkeypatch.setattr(tones, "glide", noted)
    told = [sample.turns[0].truth[0] for sample in drawn(sounds.glide, Split.TRAIN, 20)]
    assert told == ["rises" if rises else "falls" for rises in asked]
    assert len(set(told)) == 2


def test_tone_asks_about_every_sound_without_words() -> None:
    tasks = {sample.turns[0].task for sample in drawn(sounds.tone, Split.TEST, 40)}
    assert tasks == {"tone", "beeps", "glide"}


def test_tests_hear_timbres_that_training_does_not() -> None:
    assert not set(tones.LEARNED) & set(tones.KEPT)


@pytest.mark.parametrize("name", EVERY_WORDING)
def test_held_out_wordings_are_never_trained_on(name: str) -> None:
    wordings = EVERY_WORDING[name]
    learned = {text.lower() for wording in wordings.learned for text in expanded(wording)}
    kept = {text.lower() for wording in wordings.kept for text in expanded(wording)}
    assert len(wordings.learned) >= 12
    assert len(wordings.kept) >= 3
    assert not learned & kept


def test_a_speaker_is_held_out_whole() -> None:
    """Whichever program speaks with a voice, at whatever pitch, it is one speaker."""
    rng = random.Random(0)
    assert {gather_speech.flite("one", voice, rng).speaker for voice in ("kal", "kal16")} == {"kal"}


def test_every_speaker_is_trained_on_or_held_out_and_never_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they would be gathered, each saying every word as silence."""
    every = [*voices.DIGITS, *voices.WORDS]

    def silent(word: str, speaker: str) -> gather_speech.Spoken:
        return gather_speech.Spoken(word, speaker, np.zeros(2, np.float32))

    def said(job: gather_speech.Job) -> gather_speech.Spoken:
        return silent(job.word, job.speaker)

    def festival(
        voice: str, speaker: str, words: list[str], rng: random.Random
    ) -> list[gather_speech.Spoken]:
        return [silent(word, speaker) for word in words]

    def pico(language: str, times: int, rng: random.Random) -> list[gather_speech.Spoken]:
        return [silent(word, f"pico {language}") for word in every]

    def recorded() -> list[gather_speech.Spoken]:
        return [silent(word, "recorded") for word in every]

    for fake in (said, festival, pico, recorded):
        monkeypatch.setattr(gather_speech, fake.__name__, fake)
    programs = {"espeak", "flite", "festival", "pico", "recorded"}
    gather_speech.pack(gather_speech.gather(programs, random.Random(4)), tmp_path / "all.npz")
    store = voices.speech(tmp_path / "all.npz")
    learned, kept = (
        {store.speakers[clip] for clips in words.values() for clip in clips}
        for words in (store.learned, store.kept)
    )
    variants = {f"espeak {variant}" for variant in gather_speech.VARIANTS}
    variants_kept = {f"espeak {variant}" for variant in gather_speech.VARIANTS_KEPT}
    assert not learned & kept
    assert learned == {"kal", "slt", "awb", "pico en-US", "pico en-GB"} | variants
    assert kept == {"rms", "ked", "recorded"} | variants_kept
    assert set(store.learned) == {*every, *voices.UNKNOWN}
    assert set(store.kept) == {*every, *voices.UNKNOWN_KEPT}


def test_no_variant_of_a_voice_is_in_both_lists() -> None:
    learned, kept = (
        [name.lower() for name in names]
        for names in (gather_speech.VARIANTS, gather_speech.VARIANTS_KEPT)
    )
    assert len(set(learned + kept)) == len(learned) + len(kept)
    for variant in gather_speech.VARIANTS:
        assert not gather_speech.is_kept(f"espeak {variant}")
    for variant in gather_speech.VARIANTS_KEPT:
        assert gather_speech.is_kept(f"espeak {variant}")
        assert not gather_speech.is_kept(variant)  # another program's voice of that name


def test_packing_restores_who_said_what(tmp_path: Path) -> None:
    wave = np.sin(np.arange(4000) / 9).astype(np.float32) * 0.9
    spoken = [
        gather_speech.Spoken("one", "slt", wave),
        gather_speech.Spoken("one", "rms", wave[:3000]),
        gather_speech.Spoken("cat", "slt", wave[:2000]),
    ]
    gather_speech.pack(spoken, tmp_path / "speech.npz")
    store = voices.speech(tmp_path / "speech.npz")
    assert store.learned == {"one": [0], "cat": [2]}
    assert store.kept == {"one": [1]}
    assert store.speakers == ["slt", "rms", "slt"]
    assert list(store.starts) == [0, 4000, 7000, 9000]
    assert np.abs(voices._levels()[store.waves[4000:7000]] - wave[:3000]).max() < 0.02


@SPOKEN
def test_held_out_voices_are_never_trained_on() -> None:
    with np.load(voices.SPEECH) as data:
        speaker = [str(data["voices"][voice]) for voice in data["voice"]]
    store = voices.speech()
    learned = {speaker[clip] for clips in store.learned.values() for clip in clips}
    kept = {speaker[clip] for clips in store.kept.values() for clip in clips}
    assert not learned & kept
    assert {"rms", "ked", "recorded"} <= kept
    for word in (*voices.DIGITS, *voices.WORDS):
        assert len(store.learned[word]) >= 40
        assert len(store.kept[word]) >= 10


def test_say_draws_only_clips_that_the_split_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    clips = np.full(8000, 200, dtype=np.uint8)
    starts = np.array([0, 4000, 8000])
    store = voices.Speech(clips, starts, ["slt", "rms"], {"learned": [0]}, {"kept": [1]})
    monkeypatch.setattr(voices, "speech", lambda: store)
    for split in Split:
        allowed, other = ("learned", "kept") if split is Split.TRAIN else ("kept", "learned")
        voices.say(random.Random(0), split, allowed)
        with pytest.raises(KeyError):
            voices.say(random.Random(0), split, other)


@SPOKEN
@WRITTEN
def test_together_has_one_picture_and_one_sound_and_says_yes_only_of_the_same() -> None:
    answers = set()
    for sample in drawn(sounds.together, Split.TRAIN, 300):
        kinds = {type(medium) for medium in sample.media}
        assert len(sample.media) == 2
        assert kinds == {Picture, Sound}
        truth = sample.turns[0].truth
        answers.add(truth[0])
        if truth[0] == "no":
            assert len(truth) == 3
            assert truth[1] != truth[2]
        if truth[0] == "yes":
            assert sample.turns[0].answer == f"Yes, both are {truth[1]}."
    assert {"yes", "no"} <= answers
