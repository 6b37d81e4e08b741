"""Samples to arrays of fixed shape, as the network takes them in training.

What the server does to a file is done here to what the recipe draws: resize, cut into patches,
one placeholder for every row that the towers give, positions in time, height and width. Tone and
mel spectra are left to the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer

from models.demo import network
from models.demo.network import FRAME_UNITS, FRAMES, PATCH, PICTURE_UNITS, UNIT
from models.demo.recipe.sample import RATE, Clip, Media, Picture, Sample, Sound

LENGTH = 208  # tokens of a sample
ROW = 144  # patches of a picture, or of two moments of a clip
SAMPLES = 4 * RATE  # of the longest sound that is trained on
PIXELS = 3 * PATCH * PATCH  # values of a patch of one frame
AUDIO_ROWS = SAMPLES // RATE * 25
HOP = 160
NOTHING = -100  # where an array of answers or turns is not filled


@dataclass(frozen=True)
class Room:
    """How much of each a batch holds."""

    samples: int
    pictures: int
    clips: int
    sounds: int
    turns: int
    tokens: int  # of answers

    @classmethod
    def scaled(cls, numbers: Sequence[int], scale: float) -> Room:
        return cls(*(max(1, int(number * scale)) for number in numbers))


def fit(height: int, width: int, units: tuple[int, int]) -> tuple[int, int]:
    """The size in pixels that a picture is resized to, as the stock processor reckons it."""
    least, most = units[0] * UNIT**2, units[1] * UNIT**2
    rows, columns = round(height / UNIT) * UNIT, round(width / UNIT) * UNIT
    if rows * columns > most:
        scale = math.sqrt(height * width / most)
        rows = max(UNIT, math.floor(height / scale / UNIT) * UNIT)
        columns = max(UNIT, math.floor(width / scale / UNIT) * UNIT)
    elif rows * columns < least:
        scale = math.sqrt(least / (height * width))
        rows = math.ceil(height * scale / UNIT) * UNIT
        columns = math.ceil(width * scale / UNIT) * UNIT
    return rows, columns


def resized(pixels: NDArray[np.uint8], units: tuple[int, int]) -> NDArray[np.uint8]:
    height, width = pixels.shape[:2]
    rows, columns = fit(height, width, units)
    if (rows, columns) == (height, width):
        return pixels
    image = Image.fromarray(pixels).resize((columns, rows), Image.Resampling.BICUBIC)
    return np.asarray(image)


def patches(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[height, width, 3] to [patches, 3 * 14 * 14], the four of a unit side by side."""
    rows, columns = pixels.shape[0] // UNIT, pixels.shape[1] // UNIT
    split = pixels.reshape(rows, 2, PATCH, columns, 2, PATCH, 3)
    return split.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, PIXELS)


def places(rows: int, columns: int) -> NDArray[np.int16]:
    """Row and column of every patch, in the order of ``patches``: [patches, 2]."""
    grid = np.indices((rows * 2, columns * 2), dtype=np.int16)
    return grid.reshape(2, rows, 2, columns, 2).transpose(1, 3, 2, 4, 0).reshape(-1, 2)


def sound_rows(samples: int) -> int:
    """Rows that the audio tower makes of a sound."""
    frames = -(-samples // HOP)
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


@dataclass(frozen=True, eq=False)
class Seen:
    """One medium, cut: what the batch keeps of it, and its rows in the prompt."""

    media: Media
    cells: tuple[int, int, int]  # moments, rows, columns; of a sound (0, 0, rows)
    parts: tuple[NDArray[np.uint8], ...] = ()  # patches of each frame

    @property
    def rows(self) -> int:
        moments, height, width = self.cells
        return max(moments, 1) * max(height, 1) * width


def cut(media: Media) -> Seen:
    if isinstance(media, Picture):
        pixels = resized(media.pixels, PICTURE_UNITS)
        return Seen(
            media, (1, pixels.shape[0] // UNIT, pixels.shape[1] // UNIT), (patches(pixels),)
        )
    if isinstance(media, Clip):
        total = len(media.frames)
        count = min(FRAMES, total) // 2 * 2
        frames = [
            resized(media.frames[number * total // count], FRAME_UNITS) for number in range(count)
        ]
        cells = (count // 2, frames[0].shape[0] // UNIT, frames[0].shape[1] // UNIT)
        return Seen(media, cells, tuple(patches(frame) for frame in frames))
    return Seen(media, (0, 0, sound_rows(len(media.wave))))


class Prompt:
    """A sample's tokens, their positions, and which of them are answers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}
        self._ids = network.special_ids(tokenizer)

    def _encode(self, text: str) -> list[int]:
        ids = self._known.get(text)
        if ids is None:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            if len(self._known) < 100_000:
                self._known[text] = ids
        return ids

    def of(self, sample: Sample, seen: Sequence[Seen], text_first: bool) -> Written:
        ids = self._ids
        written = Written()
        if sample.system:
            written.text([ids[network.START], *self._encode(f"system\n{sample.system}")])
            written.text([ids[network.STOP], *self._encode("\n")])
        for number, turn in enumerate(sample.turns):
            written.text([ids[network.START], *self._encode("user\n")])
            sent = sample.sent_with(number)
            if sent and text_first:
                written.text(self._encode(turn.question))
            for at in sent:
                self._media(written, at, seen[at])
            if not (sent and text_first):
                written.text(self._encode(turn.question))
            written.text([ids[network.STOP], *self._encode("\n")])
            written.text([ids[network.START], *self._encode("assistant\n")])
            written.answer(number, [*self._encode(turn.answer), ids[network.STOP]])
            written.text(self._encode("\n"))
        return written

    def _media(self, written: Written, number: int, item: Seen) -> None:
        ids = self._ids
        if isinstance(item.media, Sound):
            written.text([ids[network.AUDIO_BOS]])
            written.rows(number, ids[network.AUDIO], item)
            written.text([ids[network.AUDIO_EOS]])
            return
        name = network.IMAGE if isinstance(item.media, Picture) else network.VIDEO
        written.text([ids[network.VISION_BOS]])
        written.rows(number, ids[name], item)
        written.text([ids[network.VISION_EOS]])


@dataclass
class Written:
    ids: list[int] = field(default_factory=list)
    positions: list[NDArray[np.int32]] = field(default_factory=list)  # [3, run]
    runs: list[tuple[int, int, int]] = field(default_factory=list)  # medium, first token, rows
    answers: list[tuple[int, int, int]] = field(default_factory=list)  # turn, first token, tokens
    next: int = 0

    def text(self, ids: Sequence[int]) -> None:
        run = np.arange(self.next, self.next + len(ids), dtype=np.int32)
        self.positions.append(np.broadcast_to(run, (3, len(ids))))
        self.ids.extend(ids)
        self.next += len(ids)

    def rows(self, number: int, id: int, item: Seen) -> None:
        self.runs.append((number, len(self.ids), item.rows))
        if isinstance(item.media, Sound):
            self.text([id] * item.rows)
            return
        where = np.indices(item.cells, dtype=np.int32).reshape(3, -1)
        where[0] *= int(2 / network.FPS * 25)  # two frames a moment, 25 positions a second
        self.positions.append(where + self.next)
        self.ids.extend([id] * item.rows)
        self.next += int(where.max()) + 1

    def answer(self, turn: int, ids: Sequence[int]) -> None:
        self.answers.append((turn, len(self.ids), len(ids)))
        self.text(ids)


class Batch:
    """Arrays that are filled sample by sample, until there is no more room.

    Turns of a task that is not among ``tasks`` count to the last of them.
    """

    def __init__(self, room: Room, tasks: Sequence[str]) -> None:
        self._room, self._tasks = room, {task: number for number, task in enumerate(tasks)}
        rows = room.pictures + 2 * room.clips
        self._vision_rows = rows
        self.pictures = np.zeros((room.pictures, ROW, PIXELS), np.uint8)
        self.clips = np.zeros((room.clips * 2, ROW, 2, PIXELS), np.uint8)
        self.places = np.zeros((rows, ROW, 2), np.int16)
        self.segments = np.zeros((rows, ROW), np.int16)  # patches see those of their own segment
        self.waves = np.zeros((room.sounds, SAMPLES), np.int16)
        self.wave_lengths = np.full(room.sounds, RATE, np.int32)
        self.ids = np.zeros((room.samples, LENGTH), np.int32)
        self.positions = np.zeros((3, room.samples, LENGTH), np.int32)
        # Which token each row of the towers goes to; behind the last are those that nobody wants.
        units = rows * (ROW // 4) + room.sounds * AUDIO_ROWS
        self.goes = np.full(units, room.samples * LENGTH, np.int64)
        self._at: list[int] = []
        self._want: list[int] = []
        self._turn: list[int] = []
        self._turn_tasks: list[int] = []
        self._used = [0, 0, 0, 0]  # samples, pictures, clips, sounds

    @property
    def full(self) -> bool:
        return self._used[0] == self._room.samples

    def add(self, sample: Sample, seen: Sequence[Seen], written: Written) -> bool:
        """Whether there was room."""
        number, pictures, clips, sounds = self._used
        count = [
            sum(isinstance(item.media, kind) for item in seen) for kind in (Picture, Clip, Sound)
        ]
        if (
            number == self._room.samples
            or pictures + count[0] > self._room.pictures
            or clips + count[1] > self._room.clips
            or sounds + count[2] > self._room.sounds
            or len(written.ids) > LENGTH
            or len(self._turn_tasks) + len(written.answers) > self._room.turns
            or len(self._at) + sum(tokens for _, _, tokens in written.answers) > self._room.tokens
        ):
            return False
        starts = [self._keep(item) for item in seen]
        self.ids[number, : len(written.ids)] = written.ids
        self.positions[:, number, : len(written.ids)] = np.concatenate(written.positions, axis=1)
        for medium, first, rows in written.runs:
            begin = number * LENGTH + first
            self.goes[starts[medium]] = np.arange(begin, begin + rows)
        for turn, first, tokens in written.answers:
            before = number * LENGTH + first - 1
            self._at.extend(range(before, before + tokens))
            self._want.extend(written.ids[first : first + tokens])
            self._turn.extend([len(self._turn_tasks)] * tokens)
            self._turn_tasks.append(self._tasks.get(sample.turns[turn].task, len(self._tasks) - 1))
        self._used[0] += 1
        return True

    def _keep(self, item: Seen) -> NDArray[np.int32]:
        """Puts one medium into the arrays; gives where its rows come out."""
        if isinstance(item.media, Sound):
            at = self._used[3]
            self._used[3] += 1
            wave = item.media.wave
            self.waves[at, : len(wave)] = np.clip(wave * 32767, -32768, 32767)
            self.wave_lengths[at] = len(wave)
            start = self._vision_rows * (ROW // 4) + at * AUDIO_ROWS
            return np.arange(start, start + item.rows, dtype=np.int32)
        _, height, width = item.cells
        where, count = places(height, width), height * width * 4
        if isinstance(item.media, Picture):
            at = self._used[1]
            self._used[1] += 1
            self.pictures[at, :count] = item.parts[0]
            self.places[at, :count] = where
            self.segments[at, :count] = 1
            return np.arange(at * (ROW // 4), at * (ROW // 4) + count // 4, dtype=np.int32)
        first = self._used[2] * 2
        self._used[2] += 1
        result = []
        for moment in range(item.cells[0]):
            row, start = first + moment // 2, moment % 2 * count
            for frame in (0, 1):
                self.clips[row, start : start + count, frame] = item.parts[moment * 2 + frame]
            at = self._room.pictures + row
            self.places[at, start : start + count] = where
            self.segments[at, start : start + count] = 1 + moment % 2
            begin = at * (ROW // 4) + start // 4
            result.append(np.arange(begin, begin + count // 4, dtype=np.int32))
        return np.concatenate(result)

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {
            "pictures": self.pictures,
            "clips": self.clips,
            "places": self.places,
            "segments": self.segments,
            "waves": self.waves,
            "wave_lengths": self.wave_lengths,
            "ids": self.ids,
            "positions": self.positions,
            "goes": self.goes,
            # Unused places must differ: gradients of one place are added one after another.
            "at": _filled(self._at, np.arange(self._room.tokens) % self.ids.size),
            "want": _filled(self._want, np.full(self._room.tokens, NOTHING)),
            "turn": _filled(self._turn, np.arange(self._room.tokens) % self._room.turns),
            "turn_tasks": _filled(self._turn_tasks, np.full(self._room.turns, NOTHING)),
        }


def _filled(values: Sequence[int], array: NDArray[np.int64]) -> NDArray[np.int64]:
    array[: len(values)] = values
    return array
