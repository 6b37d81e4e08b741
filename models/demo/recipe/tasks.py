"""All makers by name, what is aimed at, and how often each is drawn in training."""

from __future__ import annotations

from models.demo.recipe import (
    chat,
    clips,
    digits,
    emoji,
    mixed,
    scenes,
    several,
    sounds,
    unknown,
    words,
)
from models.demo.recipe.sample import Maker

MAKERS: dict[str, Maker] = {
    "colour": scenes.colour,
    "shape": scenes.shape,
    "count": scenes.count,
    "position": scenes.position,
    "place": scenes.place,
    "absent": scenes.absent,
    "pictures": several.pictures,
    "digit": digits.digit,
    "emoji": emoji.emoji,
    "word": words.word,
    "motion": clips.motion,
    "order": clips.order,
    "spoken_digit": sounds.spoken_digit,
    "spoken_word": sounds.spoken_word,
    "tone": sounds.tone,
    "together": sounds.together,
    "mixed": mixed.mixed,
    "later": mixed.later,
    "unknown_picture": unknown.unknown_picture,
    "unknown_sound": unknown.unknown_sound,
    "talk": chat.talk,
    "refuse": chat.refuse,
    "nothing": chat.nothing,
}

# Tasks whose pictures may be on any background.
ON_GROUNDS = (
    *("colour", "shape", "count", "position", "place", "absent", "pictures", "emoji", "motion"),
)

# What a turn may be about; the first turn that a maker draws is of its own task.
TASKS = (
    *("colour", "shape", "count", "position", "pictures", "digit", "emoji", "word"),
    *("motion", "order", "spoken digit", "spoken word", "tone", "beeps", "glide", "together"),
    *("talk", "refuse", "nothing"),
    *("place", "absent", "mixed", "later", "unknown picture", "unknown sound"),
    "other",
)

AIMS: dict[str, float] = {  # share of held-out questions that are answered rightly
    **dict.fromkeys(("colour", "shape"), 0.98),
    **dict.fromkeys(("position", "digit", "motion"), 0.97),
    **dict.fromkeys(("count", "place", "absent", "pictures", "emoji", "word", "order"), 0.95),
    **dict.fromkeys(("spoken digit", "spoken word", "tone", "beeps", "glide"), 0.95),
    **dict.fromkeys(("together", "mixed", "later", "unknown picture", "unknown sound"), 0.95),
    **dict.fromkeys(("talk", "refuse", "nothing"), 0.95),
}

SHARES: dict[str, tuple[float, str]] = {  # of a batch, and the task whose errors make it grow
    "colour": (0.04, "colour"),
    "shape": (0.04, "shape"),
    "count": (0.13, "count"),
    "position": (0.08, "position"),
    "place": (0.035, "place"),
    "absent": (0.06, "absent"),
    "pictures": (0.06, "pictures"),
    "digit": (0.045, "digit"),
    "emoji": (0.07, "emoji"),
    "word": (0.18, "word"),
    "motion": (0.065, "motion"),
    "order": (0.035, "order"),
    "spoken_digit": (0.06, "spoken digit"),
    "spoken_word": (0.055, "spoken word"),
    "tone": (0.03, "beeps"),
    "together": (0.05, "together"),
    "mixed": (0.04, "mixed"),
    "later": (0.06, "later"),
    "unknown_picture": (0.07, "unknown picture"),
    "unknown_sound": (0.045, "unknown sound"),
    "talk": (0.015, "talk"),
    "refuse": (0.02, "refuse"),
    "nothing": (0.015, "nothing"),
}
