"""Questions about pictures, clips and sounds, as they are asked when none was sent."""

from __future__ import annotations

import random

from models.demo.recipe.canvas import COLOURS, SHAPES, plural
from models.demo.recipe.sample import Split, Wordings

ALONE = Wordings(
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
        "Is the {shape} [above|below|left of|right of] the {other}?",
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
        "Please name the colour of the {shape}.",
        "What number of {shapes} can you see?",
        "Tell me what is in this picture.",
        "Which way does the {colour} {shape} go?",
        "What is said in the sound?",
        "Which word do you read here?",
    ),
)


def question(rng: random.Random, split: Split) -> str:
    """A question that could be answered if what it is about had been sent."""
    shape, other = rng.sample(SHAPES, 2)
    return ALONE.ask(
        rng,
        split,
        shape=shape,
        shapes=plural(shape),
        other=other,
        colour=rng.choice(COLOURS),
    )
