"""Short clips: one object that moves, and colours that come one after the other.

Training draws the eight frames that the model will see; where the model is tested a clip has more
of them, and choosing among these is the server's part.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from models.demo.recipe.backgrounds import background
from models.demo.recipe.canvas import COLOURS, RGB, SHAPES, Sprite, an, cut, finish, shade
from models.demo.recipe.clip_wordings import (
    FIRST,
    LAST,
    MOVER,
    MOVER_COLOUR,
    ORDER,
    SECOND,
    WAY,
    WHETHER,
)
from models.demo.recipe.sample import Clip, Sample, Split, Turn, Wordings
from models.demo.recipe.scene_questions import (
    NONE,
    Thing,
    absent_shape,
    ask_colour,
    ask_is_there,
    ask_shape,
)
from models.demo.recipe.scenes import some_shapes
from models.demo.recipe.textures import texture

SEEN = 8  # frames that the model is shown of any clip
WAYS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
ANY_WAY = frozenset({*WAYS, "not"})
NAMED_WAY = Wordings(  # that say what moves
    [wording for wording in WAY.learned if "{thing}" in wording],
    [wording for wording in WAY.kept if "{thing}" in wording],
)
STILL = 0.05  # of the clips of motion have none
LEAST = 0.31  # of a clip that a colour lasts
Frames = NDArray[np.uint8]  # [frames, height, width, 3]


def motion(rng: random.Random, split: Split, turns: int) -> Sample:
    """An object moves one way across a background; another may lie still beside its path."""
    clip, things, way = moving(rng, split)
    return Sample((clip,), _motion_turns(rng, split, turns, things, way))


def moving(rng: random.Random, split: Split) -> tuple[Clip, list[Sprite], str]:
    """A clip, what is in it (first what moves), and which way that moves; "" if it does not."""
    width, height = _size(rng, split)
    easy = rng.random() < 0.35
    way = rng.choice(list(WAYS))
    side = min(width, height)
    colour, other_colour = rng.sample(COLOURS, 2)
    shape, other_shape = some_shapes(rng, 2)
    sprite = cut(rng, shape, colour, side * (rng.uniform(0.3, 0.5) if easy else _share(rng)))
    other = cut(rng, other_shape, other_colour, side * rng.uniform(0.14, 0.26))
    ground = background(rng, split, width, height, avoid=[sprite.rgb, other.rgb], plain=easy)
    path = _path(rng, width, height, sprite, way, least=0.42 if easy else 0.3)
    things = [sprite]
    if not easy and rng.random() < 0.4 and _put_beside(rng, ground, other, path, sprite):
        things.append(other)
    if rng.random() < STILL:
        way, path = "", replace(path, end=path.start)
    frames = _moved(rng, ground, sprite, path, _count(rng, split))
    return Clip(frames, _fps(rng, split)), things, way


def panned(rng: random.Random, split: Split) -> Clip:
    """A texture that the camera moves over: nothing in it is known."""
    width, height = _size(rng, split)
    count = _count(rng, split)
    room = rng.randint(0, 48)
    ground = np.asarray(texture(rng, split, width + room, height))
    starts = [round(room * frame / (count - 1)) for frame in range(count)]
    if rng.random() < 0.5:
        starts.reverse()
    frames = np.stack([ground[:, start : start + width] for start in starts])
    return Clip(_grainy(rng, frames), _fps(rng, split))


def order(rng: random.Random, split: Split, turns: int) -> Sample:
    """The whole picture, or one object in it, has two or three colours in turn."""
    width, height = _size(rng, split)
    colours = rng.sample(COLOURS, rng.choice((2, 3)))
    rgbs = [shade(rng, colour) for colour in colours]
    if rng.random() < 0.5:
        images = [_sheet(rng, width, height, rgb) for rgb in rgbs]
        thing = rng.choice(("picture", "image", "clip", "video", "screen"))
    else:
        images, thing = _recoloured(rng, split, width, height, colours, rgbs)
    count = _count(rng, split)
    starts = _starts(rng, len(colours))
    shown = [sum(frame / count >= start for start in starts) - 1 for frame in range(count)]
    frames = _grainy(rng, np.stack(images)[shown])
    return Sample(
        (Clip(frames, _fps(rng, split)),), _order_turns(rng, split, turns, colours, thing)
    )


# Clips


def _size(rng: random.Random, split: Split) -> tuple[int, int]:
    most = 128 if split is Split.TRAIN else 160
    return rng.randint(96, most), rng.randint(96, most)


def _count(rng: random.Random, split: Split) -> int:
    return SEEN if split is Split.TRAIN else rng.randint(16, 32)


def _fps(rng: random.Random, split: Split) -> float:
    """So that clips last from one second to some seven, in training as in tests."""
    if split is Split.TRAIN:
        return round(SEEN / rng.uniform(0.7, 7.5), 2)
    return rng.choice((4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 15.0, 20.0, 24.0))


def _grainy(rng: random.Random, frames: Frames) -> Frames:
    """Seldom with a grain that is another in every frame, as cameras have it."""
    if rng.random() >= 0.12:
        return frames
    count, height, width, _ = frames.shape
    noise = np.random.default_rng(rng.getrandbits(32))
    most = rng.randint(4, 14)
    grain = noise.integers(-most, most + 1, (height + count, width, 3), dtype=np.int16)
    moved = np.stack([grain[step : step + height] for step in range(count)])
    return np.clip(frames + moved, 0, 255).astype(np.uint8)


# Motion


@dataclass(frozen=True)
class _Path:
    start: tuple[float, float]
    end: tuple[float, float]
    begin: float = 0.0  # of the clip's time, when the object sets out
    until: float = 1.0  # when it has arrived

    def at(self, time: float) -> tuple[float, float]:
        done = min(1.0, max(0.0, (time - self.begin) / (self.until - self.begin)))
        (x, y), (to_x, to_y) = self.start, self.end
        return x + (to_x - x) * done, y + (to_y - y) * done


def _share(rng: random.Random) -> float:
    return rng.uniform(0.15, 0.42)


def _path(
    rng: random.Random, width: int, height: int, sprite: Sprite, way: str, least: float
) -> _Path:
    """A way through the picture of at least that share of it, with some drift to a side."""
    step_x, step_y = WAYS[way]
    length, girth = (width, sprite.width) if step_x else (height, sprite.height)
    breadth, cross = (height, sprite.height) if step_x else (width, sprite.width)
    outside = girth * 0.45 if rng.random() < 0.15 else 0.0  # it comes in and leaves, in part
    low, high = girth / 2 - outside, length - girth / 2 + outside
    travel = rng.uniform(min(length * least, high - low), high - low)
    first = rng.uniform(low, high - travel)
    last = first + travel
    if step_x + step_y < 0:
        first, last = last, first
    side = rng.uniform(cross / 2, breadth - cross / 2)
    drift = rng.uniform(-0.2, 0.2) * travel if rng.random() < 0.5 else 0.0
    to_side = min(breadth - cross / 2, max(cross / 2, side + drift))
    begin, until = (0.0, 1.0) if rng.random() < 0.7 else (rng.uniform(0, 0.25), rng.uniform(0.7, 1))
    if step_x:
        return _Path((first, side), (last, to_side), begin, until)
    return _Path((side, first), (to_side, last), begin, until)


def _put_beside(
    rng: random.Random, ground: Image.Image, other: Sprite, path: _Path, sprite: Sprite
) -> bool:
    """Lay an object where the moving one will not come, if such a place is found."""
    (x0, y0), (x1, y1) = path.start, path.end
    gap_x = (other.width + sprite.width) / 2 + 3
    gap_y = (other.height + sprite.height) / 2 + 3
    for _ in range(12):
        x = rng.uniform(other.width / 2, ground.width - other.width / 2)
        y = rng.uniform(other.height / 2, ground.height - other.height / 2)
        clear_x = x < min(x0, x1) - gap_x or x > max(x0, x1) + gap_x
        clear_y = y < min(y0, y1) - gap_y or y > max(y0, y1) + gap_y
        if clear_x or clear_y:
            other.paste(ground, x, y)
            return True
    return False


def _moved(
    rng: random.Random, ground: Image.Image, sprite: Sprite, path: _Path, count: int
) -> Frames:
    ground = Image.fromarray(finish(rng, ground).pixels)
    frames = np.empty((count, ground.height, ground.width, 3), np.uint8)
    for frame in range(count):
        image = ground.copy()
        sprite.paste(image, *path.at(frame / (count - 1)))
        frames[frame] = np.asarray(image)
    return _grainy(rng, frames)


def _motion_turns(
    rng: random.Random, split: Split, turns: int, sprites: list[Sprite], way: str
) -> tuple[Turn, ...]:
    """Questions about the first of the sprites, which moves; ``way`` is empty if it does not."""
    sprite = sprites[0]
    names = [sprite.shape, sprite.shape, f"{sprite.colour} {sprite.shape}"]
    if len(sprites) == 1:
        names += ["object", "thing", "shape"]
    question = WAY.ask(rng, split, thing=rng.choice(names))
    main = Turn("motion", question, f"It {_told_way(way)}.", (way or "not",), ANY_WAY)
    others = [_whether(rng, split, rng.choice(names), way)]
    if way:
        others += [_mover(rng, split, sprite), _mover_colour(rng, split, sprite)]
    things = [Thing(each.shape, each.colour, 0, 0, each.width) for each in sprites]
    if rng.random() < 0.3:
        others.append(absent(rng, split, things))
    still = rng.choice((ask_colour, ask_shape, ask_is_there))(rng, split, things)
    if still is not None:
        others.append(still)
    return _chosen(rng, split, turns, main, others)


def absent(rng: random.Random, split: Split, things: Sequence[Thing]) -> Turn:
    """Which way does the star move, where there is none?"""
    shape = absent_shape(rng, things)
    question = NAMED_WAY.ask(rng, split, thing=shape)
    return Turn("absent", question, f"There is no {shape}.", (NONE,), ANY_WAY | {NONE})


def _whether(rng: random.Random, split: Split, thing: str, way: str) -> Turn:
    asked = rng.choice([way or "left", rng.choice(list(WAYS))])
    right = "yes" if asked == way else "no"
    question = WHETHER.ask(rng, split, thing=thing, way=to(asked))
    answer = f"{right.capitalize()}, it {_told_way(way)}."
    return Turn("motion", question, answer, (right, way or "not"), ANY_WAY | {"yes", "no"})


def _told_way(way: str) -> str:
    return f"moves {to(way)}" if way else "does not move"


def to(way: str) -> str:
    """How a direction is said."""
    return f"to the {way}" if way in ("left", "right") else way


def _mover(rng: random.Random, split: Split, sprite: Sprite) -> Turn:
    words = (sprite.colour, sprite.shape)
    answer = an(" ".join(words))
    choices = frozenset((*COLOURS, *SHAPES))
    return Turn("mover", MOVER.ask(rng, split), f"{answer[0].upper()}{answer[1:]}.", words, choices)


def _mover_colour(rng: random.Random, split: Split, sprite: Sprite) -> Turn:
    answer = f"The {sprite.shape} is {sprite.colour}."
    question = MOVER_COLOUR.ask(rng, split)
    return Turn("mover", question, answer, (sprite.colour,), frozenset(COLOURS))


def _chosen(
    rng: random.Random, split: Split, turns: int, main: Turn, others: list[Turn]
) -> tuple[Turn, ...]:
    """Training asks in any order, and now and then something else alone: what a later turn tells
    must be seen, not read in an earlier answer."""
    rng.shuffle(others)
    if split is not Split.TRAIN:
        return (main, *others)[:turns]
    if turns == 1:
        return (main if rng.random() < 0.8 else others[0],)
    asked = [main, *others[: turns - 1]]
    if rng.random() < 0.4:
        rng.shuffle(asked)
    return tuple(asked)


# Order


def _starts(rng: random.Random, count: int) -> list[float]:
    """When each colour begins. Each lasts long enough for two of the frames that the model sees,
    however these fall."""
    cuts = sorted(rng.uniform(0, 1 - LEAST * count) for _ in range(count - 1))
    return [0.0, *(LEAST * (index + 1) + later for index, later in enumerate(cuts))]


def _sheet(rng: random.Random, width: int, height: int, rgb: RGB) -> Frames:
    """One colour all over, or a little lighter towards one side."""
    sheet = np.empty((height, width, 3), np.uint8)
    sheet[:] = rgb
    if rng.random() < 0.6:
        return sheet
    turn = rng.uniform(0, 2 * math.pi)
    across = np.linspace(-9, 9, width) * math.cos(turn)
    down = np.linspace(-9, 9, height) * math.sin(turn)
    slope = (across[None, :] + down[:, None]).astype(np.int16)[:, :, None]
    return np.clip(sheet + slope, 0, 255).astype(np.uint8)


def _recoloured(
    rng: random.Random,
    split: Split,
    width: int,
    height: int,
    colours: list[str],
    rgbs: list[RGB],
) -> tuple[list[Frames], str]:
    """The same object about the middle in each colour, and what to call it."""
    side = min(width, height)
    sprite = cut(rng, rng.choice(SHAPES), colours[0], side * rng.uniform(0.3, 0.8), rgb=rgbs[0])
    ground = background(rng, split, width, height, avoid=rgbs)
    ground = Image.fromarray(finish(rng, ground).pixels)
    x = width / 2 + rng.uniform(-0.1, 0.1) * width
    y = height / 2 + rng.uniform(-0.1, 0.1) * height
    images = []
    for rgb in rgbs:
        image = ground.copy()
        replace(sprite, rgb=rgb, rim=None).paste(image, x, y)
        images.append(np.asarray(image))
    return images, rng.choice((sprite.shape, sprite.shape, "object", "thing", "shape"))


def _order_turns(
    rng: random.Random, split: Split, turns: int, colours: list[str], thing: str
) -> tuple[Turn, ...]:
    choices = frozenset(COLOURS)
    answer = ", then ".join(colours).capitalize() + "."
    main = Turn("order", ORDER.ask(rng, split, thing=thing), answer, tuple(colours), choices)
    places = {"first": (FIRST, 0), "second": (SECOND, 1), "last": (LAST, -1)}
    others = [
        Turn(
            "order",
            wordings.ask(rng, split, thing=thing),
            f"{colours[index].capitalize()} comes {place}.",
            (colours[index],),
            choices,
        )
        for place, (wordings, index) in places.items()
    ]
    return _chosen(rng, split, turns, main, others)
