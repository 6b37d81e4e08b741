"""Questions about pictures, clips and sounds, as they are asked when none was sent: the other
makers' own, and some plain ones. They are clear without media; their answers are not."""

from __future__ import annotations

import random
import string
from collections.abc import Mapping, Sequence
from functools import cache

from models.demo.recipe import (
    clip_wordings,
    digits,
    emoji,
    scene_wordings,
    several,
    sound_wordings,
    together_wordings,
    words,
)
from models.demo.recipe.canvas import COLOURS, SHAPES, an, plural
from models.demo.recipe.clips import WAYS, to
from models.demo.recipe.emoji_names import ONE
from models.demo.recipe.sample import Split, Wordings
from models.demo.recipe.scene_questions import ENDS, SIDES
from models.demo.recipe.vocabulary import NUMBERS
from models.demo.recipe.voices import WORDS

PLAIN = Wordings(
    (
        "What [colour|color] is the {shape}?",
        "What [colour|color] does the {shape} have?",
        "Which [colour|color] is the {shape}?",
        "Name the [colour|color] of the {shape}.",
        "Which shape is {colour}?",
        "What shape is the {colour} [object|thing|shape]?",
        "How many {shapes} [are there|do you see|can you see]?",
        "How many {colour} {shapes} are [there|in the picture|in the image]?",
        "Count the {shapes}.",
        "Is the {shape} [above|below|left of|right of] {other}?",
        "Where is the {shape}?",
        "Is there a {colour} {shape}?",
        "What is [in|on] [the|this] [picture|image|photo]?",
        "What do you see[?| in the picture?| here?]",
        "What does the [picture|image] show?",
        "Describe the [picture|image|video|clip|sound].",
        "Which digit is [this|shown|written here]?",
        "What [digit|number] is this?",
        "Read the [word|digit|text|sign].",
        "What does the [word|sign|text] say?",
        "Which word is [written|shown] here?",
        "What is this?",
        "Which emoji is [this|shown]?",
        "Name the emoji.",
        "Which way does the {shape} move?",
        "Where does the {shape} go?",
        "What moves[?| in the clip?| in the video?]",
        "In which order do the [colours|colors] come?",
        "Which [colour|color] comes [first|last]?",
        "What happens in the [clip|video]?",
        "What do you hear?",
        "Which word [is spoken|is said|do you hear]?",
        "What does the [voice|person|speaker] say?",
        "Which digit [is spoken|do you hear]?",
        "Is the [tone|sound] high or low?",
        "Which tone is higher?",
        "What can be heard [here|in the sound]?",
        "Which picture has the {shape}?",
        "Which of the [pictures|images] shows a {colour} {shape}?",
        "Are the two [pictures|images|sounds] the same?",
        "Does the [picture|image] show what the voice says?",
    ),
    (
        "Please say which colour the {shape} has.",
        "What number of {shapes} can you see?",
        "Tell me what is in this picture.",
        "Which way does the {colour} {shape} go?",
        "What does somebody say in the sound?",
        "Which word do you read here?",
    ),
)

# For media of the other sense alone: no picture answers the first, no sound the second.
TO_HEAR = Wordings(
    (
        "What does the [voice|person|speaker] say?",
        "[Which|What] word is spoken?",
        "[Which|What] [digit|number] is spoken?",
        "Which word do you hear?",
        "What do you hear?",
        "Is the [tone|sound] high or low?",
        "How many beeps do you hear?",
        "Does the tone rise or fall?",
        "Listen to the [sound|recording]. What is said?",
        "What can be heard?",
        "Is it a voice or a tone?",
        "Repeat the spoken word.",
    ),
    (
        "Listen: which word is said?",
        "Tell me what you hear.",
        "Does the sound that you hear rise or fall?",
    ),
)
TO_SEE = Wordings(
    (
        "What [colour|color] is {what}?",
        "What is the [colour|color] of {what}?",
        "How many {things} [are there|do you see]?",
        "Count the {things}.",
        "What is in the [picture|image]?",
        "What do you see?",
        "Describe the [picture|image].",
        "Is there {a_what} in the [picture|image]?",
        "Which word is written in the [picture|image]?",
        "Which way does {what} move?",
        "Where is {what}, seen from {other}?",
        "What moves in the [clip|video]?",
        "In which order do the [colours|colors] come?",
        "Which emoji do you see?",
        "Which digit is in the [picture|image]?",
    ),
    (
        "Say what [colour|color] {what} has, please.",
        "Tell me what is drawn in the picture.",
        "How many {things} can be seen in the image?",
    ),
)


def question(rng: random.Random, split: Split) -> str:
    """A question that could be answered if what it is about had been sent."""
    wordings = PLAIN if rng.random() < 0.3 else rng.choice(_others())
    return ask(wordings, rng, split)


def ask(wordings: Wordings, rng: random.Random, split: Split) -> str:
    return wordings.ask(rng, split, **_names(rng))


@cache
def _others() -> Sequence[Wordings]:
    """What other makers ask, as far as its gaps can be filled here."""
    modules = (scene_wordings, several, words, sound_wordings, clip_wordings)
    every = [value for module in modules for value in vars(module).values()]
    every += [digits.WHICH, emoji.WHAT, emoji.IS_IT]
    every += [together_wordings.SAME, together_wordings.PICTURE_DIGIT, together_wordings.SOUND_SAID]
    known = _names(random.Random(0))
    cut = [_filled(value, known) for value in every if isinstance(value, Wordings)]
    return [wordings for wordings in cut if wordings.learned and wordings.kept]


def _filled(wordings: Wordings, known: Mapping[str, str]) -> Wordings:
    def able(wording: str) -> bool:
        gaps = {name for _, name, _, _ in string.Formatter().parse(wording) if name is not None}
        return gaps <= known.keys()

    return Wordings(
        [wording for wording in wordings.learned if able(wording)],
        [wording for wording in wordings.kept if able(wording)],
    )


def _names(rng: random.Random) -> dict[str, str]:
    """Something for every gap that a wording may have."""
    shape, second = rng.sample(SHAPES, 2)
    colour = rng.choice(COLOURS)
    what = rng.choice([shape, f"{colour} {shape}"])
    number = rng.choice(NUMBERS)
    up, rise, rising = rng.choice((("up", "rise", "rising"), ("down", "fall", "falling")))
    return {
        "shape": shape,
        "shapes": plural(shape),
        "second": second,
        "colour": colour,
        "what": f"the {shape}",
        "What": f"The {shape}",
        "a_what": an(what),
        "thing": what,
        "things": plural(what),
        "one": f"the {what}",
        "One": f"The {what}",
        "other": f"the {second}",
        "side": rng.choice(list(SIDES.values())),
        "end": rng.choice(list(ENDS.values())),
        "which": f"the {rng.choice(several.ORDER)} {rng.choice(('picture', 'image'))}",
        "part": rng.choice(("shape", "colour", "color")),
        "way": to(rng.choice(list(WAYS))),
        "number": number,
        "name": rng.choice(list(ONE.values())),
        "word": rng.choice(WORDS),
        "kind": rng.choice(("word", "digit", "number")),
        "place": rng.choice(list(words.PLACES)),
        "level": rng.choice(("high", "low")),
        "up": up,
        "rise": rise,
        "rising": rising,
    }
