"""Short words drawn as text, to be read: one word of two to seven letters in one of many fonts.

Answers spell the word in capitals, whatever case it is drawn in. A quarter of what is drawn for
training are letters that make no word, so that it is letters that are learned. Tests use fonts of
families that training never draws; half of their words are new as well.
"""

from __future__ import annotations

import io
import math
import random
import string
import zipfile
from functools import cache

from PIL import Image, ImageFont

from models.demo.recipe import ink
from models.demo.recipe.sample import DATA, Picture, Sample, Split, Turn, Wordings, gathered
from models.demo.recipe.vocabulary import KEPT, LEARNED, NUMBERS

SOURCE = DATA / "fonts.zip"
SIZES = (24, 40, 64)  # that text is drawn in before it is scaled
CHOSEN = frozenset(string.ascii_lowercase)
PLACES = {"first": 0, "second": 1, "last": -1}

SAYS = Wordings(
    learned=(
        "What does it say?",
        "What does [this|the picture|the image] say?",
        "What is written here?",
        "What is written in the [picture|image]?",
        "[Which|What] word is this?",
        "[Which|What] word do you see?",
        "[Which|What] word is written [here|in the picture|in the image]?",
        "[Which|What] word is [shown|in the picture|in the image]?",
        "What does the text say?",
        "Read the [word|text].",
        "Read this [word|text], please.",
        "Please read the [word|text].",
        "Please read what is written.",
        "Tell me what it says.",
        "Can you read this [word|text]?",
        "[Read|Spell] the word in the [picture|image].",
        "What is the word",
    ),
    kept=(
        "Please tell me what is written in the picture.",
        "What does this word say?",
        "Can you read the text in the image?",
        "Read what it says, please.",
        "Which word can you read here?",
    ),
)

DOES_IT = Wordings(
    learned=(
        "Does it say {word}?",
        "Does this say {word}?",
        "Does the [picture|image|text] say {word}?",
        "Is the word {word}?",
        "Is this the word {word}?",
        "Is {word} written here?",
        "Is {word} written in the [picture|image]?",
        "Do you read {word}?",
        "Can you see the word {word}?",
        "Tell me whether it says {word}.",
        "Is {word} what it says?",
        "Would you read this as {word}?",
    ),
    kept=(
        "Is {word} the word in the picture?",
        "Does the word here say {word}?",
        "Tell me: does it say {word}?",
    ),
)

LETTER = Wordings(
    learned=(
        "What is the {place} letter?",
        "Which letter is the {place} one?",
        "Which letter comes {place}?",
        "[Which|What] is the {place} letter of the word?",
        "[Name|Read] the {place} letter.",
        "Please [name|read] the {place} letter.",
        "What is the {place} letter of this word?",
        "Tell me the {place} letter.",
        "What letter is {place}",
        "What {place} letter does the word have?",
        "Which letter do you see {place}?",
        "The {place} letter, please.",
    ),
    kept=(
        "Tell me which letter comes {place}.",
        "What is the {place} letter that you see?",
        "Read the {place} letter of this word, please.",
    ),
)

LENGTH = Wordings(
    learned=(
        "How many letters does [it|the word|this word] have?",
        "How many letters are there?",
        "How many letters do you see?",
        "How many letters are in [the|this] word?",
        "How many letters are written here?",
        "Count the letters.",
        "Please count the letters.",
        "Count the letters of the word, please.",
        "How long is the word, in letters?",
        "Of how many letters is the word?",
        "Tell me how many letters it has.",
        "What is the number of letters",
    ),
    kept=(
        "Tell me how many letters you see.",
        "How many letters can you count?",
        "Count how many letters the word has.",
    ),
)


CLAIMED = range(2, 6)  # letters of the words that tests show
WIDE = 0.6  # of the picture's width that a tested word fills at least


def _short(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word for word in words if len(word) in CLAIMED)


SHORT_LEARNED, SHORT_KEPT = _short(LEARNED), _short(KEPT)


def word(rng: random.Random, split: Split, turns: int) -> Sample:
    """A drawn word. More turns ask for a letter, for their number, or whether it is some word."""
    if split is Split.TRAIN:
        learned = LEARNED if rng.random() < 0.4 else SHORT_LEARNED
        drawn = _letters(rng) if rng.random() < 0.4 else rng.choice(learned)
    else:
        drawn = rng.choice(SHORT_KEPT if rng.random() < 0.5 else SHORT_LEARNED)
    return _asked(rng, split, turns, drawn)


def new_word(rng: random.Random, split: Split, turns: int) -> Sample:
    """A drawn word that training never draws: not for training."""
    if split is Split.TRAIN:
        raise ValueError("these words are kept for tests: train on `word`")
    return _asked(rng, split, turns, rng.choice(SHORT_KEPT))


def _letters(rng: random.Random) -> str:
    """Letters that make no word of the list: half of them could be pronounced."""
    while True:
        count = rng.choice((2, 3, 3, 4, 4, 5, 5, 6, 7))
        if rng.random() < 0.5:
            drawn = "".join(rng.choices(string.ascii_lowercase, k=count))
        else:
            kinds = ("aeiouy", "bcdfghjklmnpqrstvwxz")
            first = rng.randrange(2)
            drawn = "".join(rng.choice(kinds[(first + i) % 2]) for i in range(count))
        if drawn not in KEPT:
            return drawn


def _asked(rng: random.Random, split: Split, turns: int, drawn: str) -> Sample:
    picture = _written(rng, split, _cased(rng, drawn))
    capitals = drawn.upper()
    says = Turn("word", SAYS.ask(rng, split), f"It says {capitals}.", (capitals,))
    more = rng.sample([_whether, _letter, _length], k=min(turns - 1, 3))
    asked = [says, *(turn(rng, split, capitals) for turn in more)]
    rng.shuffle(asked)
    return Sample((picture,), tuple(asked))


def _whether(rng: random.Random, split: Split, capitals: str) -> Turn:
    guess = capitals
    if rng.random() < 0.5:
        guess = rng.choice(LEARNED if split is Split.TRAIN else KEPT).upper()
    said = "yes" if guess == capitals else "no"
    question = DOES_IT.ask(rng, split, word=guess)
    answer = f"{said.capitalize()}, it says {capitals}."
    return Turn("word check", question, answer, (said,), frozenset({"yes", "no"}))


def _letter(rng: random.Random, split: Split, capitals: str) -> Turn:
    place = rng.choice(list(PLACES))
    letter = capitals[PLACES[place]]
    question = LETTER.ask(rng, split, place=place)
    answer = f"The {place} letter is {letter}."
    return Turn("letter", question, answer, (letter.lower(),), CHOSEN)


def _length(rng: random.Random, split: Split, capitals: str) -> Turn:
    count = NUMBERS[len(capitals)]
    answer = f"It has {count} letters."
    return Turn("letters", LENGTH.ask(rng, split), answer, (count,), frozenset(NUMBERS))


def _cased(rng: random.Random, drawn: str) -> str:
    """In small letters, with a capital, or in capitals. A capital i and a small L look the same
    in many fonts, so that letters that make no word begin with one of them in capitals only."""
    kind = rng.random()
    if kind < 0.35 or (drawn[0] in "il" and drawn not in LEARNED and drawn not in KEPT):
        return drawn.upper()
    return drawn.capitalize() if kind < 0.6 else drawn


@cache
def _faces(split: Split) -> tuple[bytes, ...]:
    folder = "learned/" if split is Split.TRAIN else "kept/"
    with zipfile.ZipFile(gathered(SOURCE)) as archive:
        return tuple(archive.read(n) for n in sorted(archive.namelist()) if n.startswith(folder))


@cache
def _font(split: Split, face: int, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(
        io.BytesIO(_faces(split)[face]), size, layout_engine=ImageFont.Layout.BASIC
    )


def _written(rng: random.Random, split: Split, text: str) -> Picture:
    """The text 45 to 95 % of the picture wide (long words not too small), a little turned."""
    height = rng.randint(100, 160)
    width = round(height * rng.choice((1.0, 1.0, 1.33, 1.6, 2.0, 2.0, 2.5, 3.0)))
    least = max(0.45, 0.1 * len(text) * min(1.0, 150 / width))
    if split is not Split.TRAIN or rng.random() < 0.6:
        least = max(WIDE, least)
    wide = width * rng.uniform(least, 0.95)
    face = rng.randrange(len(_faces(split)))
    mask = _placed(rng, _text(split, face, text, wide), (width, height), wide)
    paper, colour = ink.page(rng, split, (width, height))
    return ink.painted(rng, paper, colour, mask)


def _text(split: Split, face: int, text: str, wide: float) -> Image.Image:
    """Only the text, bright on dark, drawn in the size that is nearest to this width."""
    length = _font(split, face, SIZES[-1]).getlength(text)
    wanted = wide / length * SIZES[-1]
    size = min(SIZES, key=lambda size: abs(math.log(size / wanted)))
    font = _font(split, face, size)
    left, top, right, bottom = (round(edge) for edge in font.getbbox(text))
    room = Image.new("L", (right - left + 4, bottom - top + 4))
    core = font.getmask(text, "L")
    drawn = Image.frombytes("L", core.size, bytes(core))
    room.paste(drawn, (2, 2))
    return room.crop(room.getbbox() or (0, 0, *room.size))


def _placed(
    rng: random.Random, text: Image.Image, size: tuple[int, int], wide: float
) -> Image.Image:
    """A mask of this size with the text in it, so wide (less where it would be too high)."""
    width, height = size
    turn = math.radians(rng.uniform(-8, 8)) if rng.random() < 0.6 else 0.0
    cos, sin = math.cos(turn), math.sin(turn)
    across = text.width * cos + text.height * abs(sin)
    down = text.width * abs(sin) + text.height * cos
    scale = min(wide / text.width, width * 0.97 / across, height * 0.92 / down)
    x = _between(rng, across * scale, width)
    y = _between(rng, down * scale, height)
    a, b, d, e = cos / scale, sin / scale, -sin / scale, cos / scale
    c = text.width / 2 - a * x - b * y
    f = text.height / 2 - d * x - e * y
    return text.transform(
        size, Image.Transform.AFFINE, (a, b, c, d, e, f), Image.Resampling.BICUBIC
    )


def _between(rng: random.Random, extent: float, length: int) -> float:
    """Where the middle of something may be that is to be seen whole."""
    return rng.uniform(extent / 2, length - extent / 2)
