"""How a picture and a sound are asked about in one question: learned ways, and kept ones.

``{seen}`` is a question about the picture as a clause ("what colour is the shape"), ``{heard}`` one
about the sound ("which digit is said"); the clauses have wordings of their own.
"""

from __future__ import annotations

from models.demo.recipe.sample import Wordings

BOTH = Wordings(
    learned=(
        "[Tell me|Say]: {seen} and {heard}?",
        "Please [tell me|answer|say]: {seen}, and {heard}?",
        "{Seen} and {heard}?",
        "{seen} and {heard}",
        "{Seen}, and {heard}?",
        "{Seen}? And {heard}?",
        "{Seen} and {heard}, please?",
        "Two things, please: {seen} and {heard}?",
        "Look and listen: {seen} and {heard}?",
        "Look at the [picture|image] and listen to the sound. {Seen} and {heard}?",
        "Here are a [picture|image] and a sound. {Seen} and {heard}?",
        "I [want|would like] to know: {seen} and {heard}?",
    ),
    kept=(
        "Look at the picture: {seen}? Listen to the sound: {heard}?",
        "Two questions: {seen}, and {heard}?",
        "Please look and listen. {Seen} and {heard}?",
        "{Seen}, please, and {heard}?",
    ),
)
SEEN_COLOUR = Wordings(
    learned=(
        "[what|which] [colour|color] is the {thing}",
        "[what|which] [colour|color] is the {thing} in the [picture|image]",
        "[what|which] [colour|color] is the {thing} here",
        "what is the [colour|color] of the {thing}",
        "[what|which] [colour|color] do you see",
        "[what|which] [colour|color] does the {thing} have",
        "what is the [colour|color] of the {thing} in the [picture|image]",
        "in [what|which] [colour|color] is the {thing}",
        "in [what|which] [colour|color] is the {thing} drawn",
        "[what|which] [colour|color] is the {thing} that you see",
        "what [colour|color] is the {thing} on the [picture|image]",
        "[what|which] [colour|color] is shown",
    ),
    kept=(
        "which [colour|color] does the {thing} in the picture have",
        "what [colour|color] is the {thing} that is shown",
        "what [colour|color] of {thing} do you see",
    ),
)
SEEN_SHAPE = Wordings(
    learned=(
        "[what|which] shape is [this|it|that]",
        "[what|which] shape is in the [picture|image]",
        "[what|which] shape do you see",
        "[what|which] shape can you see",
        "[what|which] shape does the [picture|image] show",
        "[what|which] shape is shown in the [picture|image]",
        "[what|which] shape is shown",
        "[what|which] shape is drawn",
        "[what|which] shape is on the [picture|image]",
        "what kind of shape is [this|it]",
        "[what|which] shape is [here|there]",
        "what is the shape in the [picture|image]",
    ),
    kept=(
        "which shape can be seen",
        "what kind of shape do you see",
        "which shape can you see in the picture",
    ),
)
SEEN_DIGIT = Wordings(
    learned=(
        "[what|which] [digit|number] is written",
        "[what|which] [digit|number] is in the [picture|image]",
        "[what|which] [digit|number] do you see",
        "[what|which] [digit|number] can you see",
        "[what|which] [digit|number] does the [picture|image] show",
        "[what|which] [digit|number] is shown in the [picture|image]",
        "[what|which] [digit|number] is shown",
        "[what|which] handwritten digit do you see",
        "[what|which] [digit|number] is on the [picture|image]",
        "[what|which] [digit|number] was written",
        "[what|which] handwritten [digit|number] is this",
        "what is the [digit|number] in the [picture|image]",
    ),
    kept=(
        "which number can be seen",
        "which handwritten number is in the picture",
        "what digit is written in the image",
    ),
)
HEARD_SAID = Wordings(
    learned=(
        "[what|which] {kind} is [said|spoken]",
        "[what|which] {kind} do you hear",
        "[what|which] {kind} can you hear",
        "[what|which] {kind} does the [voice|person|speaker] say",
        "[what|which] {kind} is said by the [voice|person|speaker]",
        "[what|which] {kind} is in the [sound|audio|recording]",
        "[what|which] {kind} do you hear in the [sound|recording]",
        "what does the [voice|person|speaker] say",
        "what is the {kind} that you hear",
        "what is [said|spoken]",
        "what do you hear",
        "what is the {kind} that is [said|spoken]",
    ),
    kept=(
        "which {kind} can be heard",
        "what {kind} does the recording say",
        "which spoken {kind} do you hear",
    ),
)
HEARD_TONE = Wordings(
    learned=(
        "is the [tone|sound] [high or low|low or high]",
        "is it a [high or a low|low or a high] tone",
        "do you hear a [high or a low|low or a high] tone",
        "how high is the tone",
        "is this [tone|sound] [high or low|low or high]",
        "is the pitch [high or low|low or high]",
        "[what|which] [kind|sort] of tone is it, [high or low|low or high]",
        "is the tone that you hear [high or low|low or high]",
        "[what|which] pitch does the tone have, [high or low|low or high]",
        "is the pitch of the tone [high or low|low or high]",
        "is this a [high or a low|low or a high] tone",
        "what is the pitch of the tone",
    ),
    kept=(
        "is the sound that you hear low or high",
        "can you hear a high or a low tone",
        "which kind of tone do you hear, low or high",
    ),
)
SAME = Wordings(
    learned=(
        "Do [the |]picture and [the |]voice give the same [digit|number]?",
        "do [the |]picture and [the |]voice give the same digit",
        "Is it the same [digit|number] in the [picture|image] and in the sound?",
        "Does the voice say the [digit|number] [in|on] the [picture|image]?",
        "Does the voice say what the [picture|image] shows?",
        "Does the [picture|image] show the [digit|number] that is [said|spoken]?",
        "Does the [picture|image] show what the voice says?",
        "Are the written and the spoken [digit|number] the same?",
        "Are the two [digits|numbers] the same?",
        "Is the spoken [digit|number] the one in the [picture|image]?",
        "Tell me whether [the |]picture and [the |]voice give the same [digit|number].",
        "Please tell me if both give the same [digit|number].",
        "Look and listen: is it the same [digit|number]?",
        "Do you see and hear the same [digit|number]?",
    ),
    kept=(
        "Is the digit that you see the one that you hear?",
        "Do the voice and the picture give the same number?",
        "Tell me if the voice says the digit that is written.",
        "Is the same number shown and spoken?",
    ),
)
PICTURE_DIGIT = Wordings(
    learned=(
        "[Which|What] [digit|number] is written?",
        "[Which|What] [digit|number] is in the [picture|image]?",
        "[Which|What] [digit|number] do you see?",
        "what digit do you see",
        "[Which|What] [digit|number] does the [picture|image] show?",
        "[Which|What] handwritten digit is in the [picture|image]?",
        "Read the [digit|number] in the [picture|image].",
        "Please read the [handwritten|written] [digit|number].",
        "Name the [digit|number] that is written.",
        "Look at the [picture|image]. [Which|What] [digit|number] is it?",
        "Tell me [which|what] [digit|number] the [picture|image] shows.",
        "[Can|Could] you read the [digit|number] in the [picture|image]?",
    ),
    kept=(
        "Which number can you see in the picture?",
        "Tell me the digit that is written in the image, please.",
        "Read what is written in the picture.",
    ),
)
SOUND_SAID = Wordings(
    learned=(
        "[Which|What] {kind} is [said|spoken]?",
        "[Which|What] {kind} do you hear?",
        "what {kind} do you hear",
        "[Which|What] {kind} does the [voice|person|speaker] say?",
        "What does the [voice|person|speaker] say?",
        "What is [said|spoken] in the [sound|audio|recording]?",
        "What do you hear?",
        "Name the {kind} that is [said|spoken].",
        "Please name the {kind} that you hear.",
        "Tell me [which|what] {kind} the voice says.",
        "Listen to the [voice|sound]. [Which|What] {kind} is it?",
        "[Can|Could] you tell me [which|what] {kind} is spoken?",
    ),
    kept=(
        "Listen: what {kind} does the voice say?",
        "Tell me the {kind} that the person says.",
        "Please say which {kind} can be heard.",
    ),
)
