"""Ways to ask about clips: which way something moves, what moves, in which order colours come."""

from __future__ import annotations

from models.demo.recipe.sample import Wordings

WAY = Wordings(
    (
        "Which way does the {thing} move?",
        "Which way is the {thing} [moving|going]?",
        "[Which|What] way does it [move|go]?",
        "In which direction does the {thing} [move|go]?",
        "In what direction is the {thing} [moving|going]?",
        "What direction does the {thing} [move|go] in",
        "Where does the {thing} [move|go] to?",
        "Where does the {thing} [move|go]?",
        "Where is the {thing} [moving|going]?",
        "[Name|Tell me] the direction of the {thing}.",
        "Tell me [which way|where] the {thing} [moves|goes].",
        "Please say which way the {thing} [moves|is moving].",
        "How does the {thing} move?",
        "How does the {thing} move in the [clip|video]",
        "Does the {thing} move left, right, up or down?",
        "Does it [go|move] to the left, to the right, up or down?",
        "Is the {thing} moving left, right, up or down?",
        "Look at the [clip|video]. Which way does the {thing} move?",
        "In the [clip|video], where does the {thing} [go|move]?",
        "What does the {thing} do?",
        "What is the direction of the [motion|movement]?",
        "Direction of the {thing}, please.",
        "Describe the [motion|movement] of the {thing}.",
        "Say where the {thing} [goes|moves].",
    ),
    (
        "Please tell me the direction in which the {thing} moves.",
        "Which direction is the {thing} going in?",
        "Where is the {thing} moving to in this clip?",
        "Say in which direction it goes.",
        "Watch the {thing}: which way does it go?",
    ),
)

WHETHER = Wordings(
    (
        "Does the {thing} move {way}?",
        "Does the {thing} go {way}?",
        "Is the {thing} [moving|going] {way}?",
        "Does it [move|go] {way}?",
        "Is it [moving|going] {way}?",
        "Does the {thing} move {way} in the [clip|video]?",
        "Tell me [if|whether] the {thing} [moves|goes] {way}.",
        "Can you see the {thing} [move|go] {way}",
        "Is the [motion|movement] {way}?",
        "In the [clip|video], does the {thing} [move|go] {way}?",
        "Please say whether it [moves|goes] {way}.",
        "The {thing} moves {way}, [right|doesn't it]?",
        "Is it true that the {thing} moves {way}?",
    ),
    (
        "Do you see the {thing} moving {way}?",
        "Is it right that the {thing} goes {way}?",
        "Please tell me if it moves {way}.",
    ),
)

MOVER = Wordings(
    (
        "What moves?",
        "What is moving?",
        "What moves in the [clip|video]?",
        "[Which|What] object [moves|is moving]?",
        "[Which|What] thing [moves|is moving]?",
        "Which object do you see moving",
        "What do you see moving?",
        "Name the [moving object|object that moves|thing that moves].",
        "Tell me what moves.",
        "Please say what is moving.",
        "What is the moving object?",
        "What is it that moves?",
        "What kind of object moves?",
        "Describe the [moving object|object that moves].",
        "In the [clip|video], what moves?",
    ),
    (
        "Which object is it that moves?",
        "Please name what is moving.",
        "Tell me which thing you see moving.",
        "What can you see moving in this video?",
    ),
)

MOVER_COLOUR = Wordings(
    (
        "What [colour|color] is the moving object?",
        "What [colour|color] is the [object|thing] that moves?",
        "[Which|What] [colour|color] does the moving [object|thing|shape] have?",
        "Which [colour|color] has the moving [object|shape]",
        "Which [colour|color] moves?",
        "Name the [colour|color] of the moving [object|shape].",
        "Tell me the [colour|color] of [what moves|the thing that moves].",
        "Please say which [colour|color] the moving object [has|is].",
        "What is the [colour|color] of the moving [object|thing]?",
        "In the [clip|video], what [colour|color] is the moving object?",
        "The moving object has which [colour|color]?",
        "Of what [colour|color] is the [object|thing] that moves?",
    ),
    (
        "Please name the [colour|color] of what is moving.",
        "Which [colour|color] is the shape that moves?",
        "Tell me what [colour|color] the moving thing has.",
    ),
)

ORDER = Wordings(
    (
        "In which order do the [colours|colors] come?",
        "In what order do the [colours|colors] [come|appear|change]?",
        "Which [colours|colors] come, and in which order?",
        "What is the order of the [colours|colors]?",
        "[Name|List] the [colours|colors] in [order|their order].",
        "Name the [colours|colors] one after the other.",
        "Tell me the [colours|colors] in [order|the order they come].",
        "Please [list|say|name] the [colours|colors] in order.",
        "Which [colours|colors] does the {thing} have, one after the other",
        "How does the [colour|color] of the {thing} change?",
        "How do the [colours|colors] change?",
        "Which [colours|colors] do you see, from first to last?",
        "In the [clip|video], which [colours|colors] come one after the other?",
        "What [colours|colors] does the {thing} show, in order?",
        "Order of the [colours|colors], please.",
        "Look at the [clip|video]. In which order do the [colours|colors] come?",
        "The [colours|colors] change. In which order?",
        "Describe how the [colour|color] changes.",
    ),
    (
        "Please tell me in which order the [colours|colors] appear.",
        "List the [colours|colors] of the {thing} from first to last.",
        "Which [colours|colors] do you see one after the other?",
        "What is the order in which the [colours|colors] change?",
        "Name all [colours|colors] in the order they come.",
    ),
)

FIRST = Wordings(
    (
        "Which [colour|color] comes first?",
        "What [colour|color] comes first?",
        "What is the first [colour|color]?",
        "[Which|What] [colour|color] do you see first?",
        "Name the first [colour|color].",
        "Tell me the [colour|color] that comes first.",
        "What [colour|color] is the {thing} [first|at first|at the beginning|at the start]?",
        "Which [colour|color] does the {thing} have first?",
        "Please say which [colour|color] is first.",
        "[Which|What] [colour|color] does the [clip|video] [start|begin] with?",
        "With which [colour|color] does it [start|begin]",
        "In the [clip|video], which [colour|color] is first?",
        "The first [colour|color], please.",
    ),
    (
        "Please name the [colour|color] that you see first.",
        "Which [colour|color] is there at the beginning?",
        "What [colour|color] does it begin with?",
    ),
)

SECOND = Wordings(
    (
        "Which [colour|color] comes second?",
        "What [colour|color] comes second?",
        "What is the second [colour|color]?",
        "[Which|What] [colour|color] do you see second?",
        "Name the second [colour|color].",
        "Tell me the [colour|color] that comes second.",
        "Which [colour|color] is [second|number two]?",
        "Which [colour|color] comes after the first[?| one?]",
        "Please say which [colour|color] is second.",
        "What [colour|color] [follows|comes after] the first one?",
        "In the [clip|video], which [colour|color] is second?",
        "The second [colour|color], please.",
        "After the first [colour|color], which one comes",
    ),
    (
        "Please name the [colour|color] that you see second.",
        "Which [colour|color] follows the first [colour|color]?",
        "Tell me which [colour|color] is the second.",
    ),
)

LAST = Wordings(
    (
        "Which [colour|color] comes last?",
        "What [colour|color] comes last?",
        "What is the last [colour|color]?",
        "[Which|What] [colour|color] do you see last?",
        "Name the last [colour|color].",
        "Tell me the [colour|color] that comes last.",
        "What [colour|color] is the {thing} [in the end|at the end|at last]?",
        "Which [colour|color] does the {thing} have last?",
        "Please say which [colour|color] is last.",
        "[Which|What] [colour|color] does the [clip|video] end with?",
        "With which [colour|color] does it end",
        "In the [clip|video], which [colour|color] is last?",
        "The last [colour|color], please.",
    ),
    (
        "Please name the [colour|color] that you see last.",
        "Which [colour|color] is there at the end?",
        "What [colour|color] does it end with?",
    ),
)
