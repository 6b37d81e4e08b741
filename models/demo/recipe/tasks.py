"""All makers by name, what is aimed at, and how often each is drawn in training."""

from __future__ import annotations

from models.demo.recipe import chat, clips, digits, emoji, scenes, several, sounds, words
from models.demo.recipe.sample import Maker

MAKERS: dict[str, Maker] = {
    "colour": scenes.colour,
    "shape": scenes.shape,
    "count": scenes.count,
    "position": scenes.position,
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
    "talk": chat.talk,
    "refuse": chat.refuse,
    "nothing": chat.nothing,
}

# What a turn may be about; the first turn that a maker draws is of its own task.
TASKS = (
    *("colour", "shape", "count", "position", "pictures", "digit", "emoji", "word"),
    *("motion", "order", "spoken digit", "spoken word", "tone", "beeps", "glide", "together"),
    *("talk", "refuse", "nothing"),
    "other",
)

AIMS: dict[str, float] = {  # share of held-out questions that are answered rightly
    "colour": 0.98,
    "shape": 0.98,
    "count": 0.95,
    "position": 0.97,
    "pictures": 0.95,
    "digit": 0.97,
    "emoji": 0.90,
    "word": 0.90,
    "motion": 0.97,
    "order": 0.95,
    "spoken digit": 0.95,
}

SHARES: dict[str, tuple[float, str]] = {  # of a batch, and the task whose errors make it grow
    "colour": (0.06, "colour"),
    "shape": (0.05, "shape"),
    "count": (0.1, "count"),
    "position": (0.09, "position"),
    "pictures": (0.08, "pictures"),
    "digit": (0.06, "digit"),
    "emoji": (0.09, "emoji"),
    "word": (0.2, "word"),
    "motion": (0.08, "motion"),
    "order": (0.05, "order"),
    "spoken_digit": (0.06, "spoken digit"),
    "spoken_word": (0.05, "spoken word"),
    "tone": (0.04, "beeps"),
    "together": (0.06, "together"),
    "talk": (0.015, "talk"),
    "refuse": (0.02, "refuse"),
    "nothing": (0.015, "nothing"),
}
