"""Questions and requests that the model can't answer: facts, sums, texts to write, advice, orders.

Words in them are kept apart by split as wordings are. No question here asks for anything that
another maker answers; what these are answered with is not decided here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from models.demo.recipe.sample import Split, Wordings


def _list(text: str) -> tuple[str, ...]:
    return tuple(entry.strip() for entry in text.split(","))


@dataclass(frozen=True)
class Words:
    learned: Sequence[str]
    kept: Sequence[str]  # for TEST and NEW

    def choose(self, rng: random.Random, split: Split) -> str:
        return rng.choice(self.learned if split is Split.TRAIN else self.kept)


WORDS = {
    "country": Words(
        _list(
            "France, Germany, Italy, Spain, Japan, China, India, Brazil, Canada, Mexico, Egypt, "
            "Kenya, Norway, Sweden, Poland, Greece, Turkey, Russia, Australia, Argentina, Chile, "
            "Peru, Ireland, Iceland, Denmark, Austria, Hungary, Nigeria, Morocco, Thailand, Korea"
        ),
        _list("Portugal, Finland, Belgium, Vietnam, Cuba, Scotland"),
    ),
    "city": Words(
        _list(
            "Paris, London, Berlin, Rome, Madrid, Tokyo, New York, Moscow, Cairo, Sydney, Vienna, "
            "Prague, Athens, Dublin, Oslo, Boston, Chicago, Munich, Milan, Lima, Delhi, Istanbul"
        ),
        _list("Lisbon, Hamburg, Toronto, Seattle, Warsaw, Kyoto"),
    ),
    "person": Words(
        _list(
            "Albert Einstein, Isaac Newton, Mozart, Beethoven, Shakespeare, Napoleon, Cleopatra, "
            "Marie Curie, Charles Darwin, Picasso, Goethe, Plato, Gandhi, Columbus, Galileo, "
            "Julius Caesar, Ada Lovelace, Alan Turing, Homer, Rembrandt, Bach, the king, the queen"
        ),
        _list("Leonardo da Vinci, Aristotle, Kepler, Chopin, Jane Austen, the pope"),
    ),
    "friend": Words(
        _list(
            "my mother, my father, my brother, my sister, my boss, my friend, my teacher, my dog, "
            "my son, my daughter, my wife, my husband, my neighbour, Anna, Peter, Maria, Tom, Sam"
        ),
        _list("my uncle, my cousin, my doctor, Laura, Daniel"),
    ),
    "thing": Words(
        _list(
            "the sea, love, winter, summer, spring, a dragon, a princess, my garden, the forest, "
            "friendship, a robot, a pirate, the desert, a long journey, the city, a lost key, "
            "an old house, war, peace, freedom, time, money, a wizard, a mountain, a river, school"
        ),
        _list("autumn, a ghost, a knight, the harbour, loneliness, a secret door"),
    ),
    "matter": Words(
        _list(
            "gravity, photosynthesis, inflation, democracy, philosophy, electricity, evolution, "
            "the French Revolution, quantum physics, chemistry, algebra, climate change, religion, "
            "black holes, atoms, DNA, the stock market, artificial intelligence, economics, "
            "the Roman Empire, the Second World War, grammar, music theory, the internet, taxes"
        ),
        _list("relativity, magnetism, sociology, the Middle Ages, cell biology, logic"),
    ),
    "animal": Words(
        _list(
            "spider, lion, whale, horse, bee, giraffe, kangaroo, snake, tiger, penguin, crow, "
            "shark, cow, crocodile, camel, dolphin, butterfly, dinosaur, wolf, hamster"
        ),
        _list("zebra, goat, rabbit, falcon, beetle"),
    ),
    "food": Words(
        _list(
            "bread, soup, pasta, rice, a cake, pancakes, an omelette, pizza, a salad, curry, "
            "fried potatoes, apple pie, fish, chicken, beans, chocolate cake, coffee, jam"
        ),
        _list("risotto, lasagne, biscuits, a stew, dumplings"),
    ),
    "item": Words(
        _list(
            "a car, a phone, a computer, a bicycle, shoes, a camera, a house, a ticket, a laptop, "
            "a watch, insurance, a train ticket, a sofa, a book, headphones, a present, a printer"
        ),
        _list("a guitar, a washing machine, a tent, a desk, gloves"),
    ),
    "language": Words(
        _list(
            "French, German, Spanish, Italian, Chinese, Japanese, Latin, Russian, Arabic, Dutch, "
            "Polish, Greek, Turkish, Hindi, Korean, Swedish"
        ),
        _list("Portuguese, Danish, Hebrew, Finnish, Welsh"),
    ),
    "program": Words(
        _list(
            "sorts a list, reads a file, reverses a string, finds prime numbers, sends an email, "
            "adds two numbers, downloads a page, parses JSON, counts words, draws a chart, "
            "plays chess, opens a window, searches a tree, computes an average"
        ),
        _list("merges two lists, renames files, checks a password, prints a calendar"),
    ),
    "code": Words(
        _list("Python, Java, C, Rust, JavaScript, SQL, HTML, Go, Ruby, a shell, C++"),
        _list("Haskell, Kotlin, Perl, Swift"),
    ),
    "trouble": Words(
        _list(
            "a headache, a cold, a fever, back pain, no money, no time, a broken phone, a flat "
            "tyre, an exam, too much work, a bad dream, a job interview, a noisy neighbour"
        ),
        _list("a cough, a toothache, no friends, a broken window, stage fright"),
    ),
    "sport": Words(
        _list("football, tennis, chess, basketball, golf, hockey, cricket, rugby, the lottery"),
        _list("handball, volleyball, snooker"),
    ),
    "body": Words(
        _list("moon, sun, planet Mars, planet Venus, Milky Way, North Pole, Earth, ocean"),
        _list("planet Saturn, planet Jupiter, South Pole"),
    ),
    "day": Words(
        _list("today, tomorrow, this week, on Monday, on Friday, next week, tonight, this year"),
        _list("on Sunday, this evening, next month"),
    ),
    "year": Words(
        _list("1066, 1492, 1789, 1815, 1914, 1945, 1969, 1989, 2001, 2010, 1850, 1600, 2020"),
        _list("1776, 1848, 1917, 1999"),
    ),
    "a": Words(
        _list("two, three, 7, 12, 15, 4, 23, 100, six, nine, 31, 8, 64, eleven, twenty, 250"),
        _list("five, 9, 17, 42, 81"),
    ),
    "b": Words(
        _list("two, four, 3, 11, 6, 48, 19, 10, seven, eight, 72, 5, 20, thirteen, fifty, 99"),
        _list("three, 8, 14, 37, 60"),
    ),
    "phrase": Words(
        _list(
            "good morning, how are you, I love you, the weather is nice, where is the station, "
            "thank you very much, the book is on the table, I am hungry, one moment, see you soon, "
            "my name is Anna, the train is late"
        ),
        _list("good night, where do you live, I am tired, the door is open"),
    ),
}

# Asked without media: one kind a line group, so that none outweighs the others by its wordings.
ALONE = (
    Wordings(
        (
            "What is the capital of {country}?",
            "[Which|What] city is the capital of {country}?",
            "Name the capital of {country}.",
            "capital of {country}",
            "Who [is|was] the [president|king|prime minister] of {country}?",
            "How many people live in {country}?",
            "Where is {country}?",
            "What language [is spoken|do people speak] in {country}?",
        ),
        ("Do you know the capital of {country}?", "Which language do they speak in {country}?"),
    ),
    Wordings(
        (
            "Who was {person}?",
            "Who is {person}?",
            "When was {person} born?",
            "Where did {person} live?",
            "How old [is|was] {person}?",
            "What did {person} do?",
            "Tell me about {person}.",
            "Tell me [something|more] about the life of {person}.",
        ),
        ("What do you know about {person}?", "When did {person} die?"),
    ),
    Wordings(
        (
            "What is {a} plus {b}?",
            "What is {a} times {b}?",
            "What is {a} minus {b}?",
            "How much is {a} [plus|times|minus|divided by] {b}?",
            "Calculate {a} [plus|times|+|*|-] {b}.",
            "{a} [+|-|*|/] {b}",
            "{a} [+|-|*] {b} = ?",
            "What is the square root of {a}?",
            "Solve the equation x + {a} = {b}.",
        ),
        ("Add {a} and {b}.", "Can you tell me what {a} times {b} is?"),
    ),
    Wordings(
        (
            "Write a poem about {thing}.",
            "Write [a story|a short story|an essay|a song|a novel|a text|a letter] about {thing}.",
            "Please write [a poem|a story|an essay] about {thing}.",
            "Tell me a [story|tale|fairy tale] about {thing}.",
            "Can you write a [poem|story|song] about {thing}?",
            "Make up a [story|poem|rhyme] about {thing}.",
            "I need [a poem|an essay|a speech] about {thing}.",
        ),
        ("Could you write some lines about {thing}?", "Please tell a long story about {thing}."),
    ),
    Wordings(
        (
            "Write a [program|function|script] that {program}.",
            "Write {code} code that {program}.",
            "How do I write a {code} program?",
            "Write a {code} [function|program] that {program}.",
            "Can you [write|fix|explain] my {code} code?",
            "What is wrong with my {code} [program|script]?",
            "Teach me {code}.",
            "Is {code} better than [Fortran|Pascal|BASIC]?",
        ),
        ("Please write me some {code} that {program}.", "Help me with my {code} script."),
    ),
    Wordings(
        (
            "Translate {phrase} into {language}.",
            "How do you say {phrase} in {language}?",
            'What does "{phrase}" mean in {language}?',
            'Translate "{phrase}" to {language}.',
            "What is {phrase} in {language}?",
            "Say {phrase} in {language}.",
            "Do you speak {language}?",
            "Can you translate [this|a text] into {language}?",
            "Teach me {language}.",
        ),
        ("Please say {phrase} in {language}.", "Can you teach me some {language}?"),
    ),
    Wordings(
        (
            "What is the weather like in {city} {day}?",
            "What is the weather {day}?",
            "Will it rain {day}?",
            "Is it [cold|warm|sunny|raining] in {city}?",
            "How is the weather in {city}?",
            "Do I need an umbrella {day}?",
            "Will it [snow|rain] in {city} {day}?",
            "weather {city}",
        ),
        ("How warm will it be in {city} {day}?", "Will the sun shine {day}?"),
    ),
    Wordings(
        (
            "What is the news {day}?",
            "What happened in {city} {day}?",
            "What happened in {year}?",
            "Who won the [election|war|race] in {year}?",
            "Who won the {sport} game {day}?",
            "Tell me the [news|latest news].",
            "What is new in {city}?",
            "Who will win the {sport} game {day}?",
            "Who invented {sport}?",
        ),
        ("What is in the news from {city}?", "Who was the best at {sport} in {year}?"),
    ),
    Wordings(
        (
            "What time is it?",
            "What time is it in {city}?",
            "What day is it [today|tomorrow]?",
            "What is the date {day}?",
            "What year is it?",
            "Set [an alarm|a timer] for {a} [minutes|hours].",
            "Remind me {day}.",
            "How many days are left {day}?",
        ),
        ("Do you know what time it is in {city}?", "Please wake me {day}."),
    ),
    Wordings(
        (
            "What is {matter}?",
            "Explain {matter}.",
            "Explain {matter} [to me|to a child|in simple words].",
            "How does {matter} work?",
            "What does {matter} mean?",
            "Why is {matter} important?",
            "Define {matter}.",
            "Tell me about {matter}.",
            "What do you think about {matter}?",
            "Give me a [summary|history|definition] of {matter}.",
        ),
        ("Can you explain {matter}?", "What should I know about {matter}?"),
    ),
    Wordings(
        (
            "How do I [cook|make] {food}?",
            "Give me a recipe for {food}.",
            "What do I need for {food}?",
            "How long do I cook {food}?",
            "Is {food} healthy?",
            "What can I eat {day}?",
            "I want to eat {food}.",
            "Where can I get good {food} in {city}?",
        ),
        ("Please tell me how to make {food}.", "Should I eat {food} {day}?"),
    ),
    Wordings(
        (
            "What should I do? I have {trouble}.",
            "I have {trouble}. What can I do?",
            "What helps against {trouble}?",
            "Give me [some advice|advice|a tip]. I have {trouble}.",
            "Help, I have {trouble}!",
            "Should I see a doctor? I have {trouble}.",
            "How do I deal with {trouble}?",
            "I feel [sad|bad|ill|lonely] because I have {trouble}.",
        ),
        ("My problem is {trouble}. Please help.", "Can you help me? I have {trouble}."),
    ),
    Wordings(
        (
            "Should I buy {item}?",
            "Where can I buy {item}?",
            "How much does {item} cost?",
            "What is the best way to get {item}?",
            "How do I repair {item}?",
            "Recommend {item}.",
            "Order {item} for me.",
            "Can you find me {item} in {city}?",
            "How do I sell {item}?",
        ),
        ("What does {item} cost in {city}?", "Please buy {item} for me."),
    ),
    Wordings(
        (
            "Write [an email|a letter|a message] to {friend}.",
            "Call {friend}.",
            "What is the name of {friend}?",
            "Where is {friend}?",
            "Does {friend} like me?",
            "What should I give {friend} for a birthday?",
            "Tell {friend} that I am late.",
            "Is {friend} at home {day}?",
            "{friend} and I went to {city}.",
        ),
        ("What does {friend} think of me?", "Please send a message to {friend}."),
    ),
    Wordings(
        (
            "How many legs does a {animal} have?",
            "What does a {animal} eat?",
            "How old can a {animal} get?",
            "Where does the {animal} live?",
            "How fast is a {animal}?",
            "Is a {animal} dangerous?",
            "Can a {animal} swim?",
            "Why does a {animal} sleep?",
            "How far is it to the {body}?",
            "How [big|old|hot] is the {body}?",
            "Is there life on the {body}?",
            "Who was first on the {body}?",
        ),
        ("How heavy is a {animal}?", "Do people live on the {body}?"),
    ),
    Wordings(
        (
            "Tell me a joke.",
            "Tell me a joke about {friend}.",
            "Sing a song.",
            "Sing [me|us] a song about {thing}.",
            "Play [some music|a song|a game|{sport} with me].",
            "Draw {thing}.",
            "Draw me a picture of {thing}.",
            "Make a [picture|video|film] of {thing}.",
            "Make me laugh.",
            "Open the [door|window|browser].",
            "Turn on the [light|radio|heating].",
            "Search the [web|internet] for {item}.",
            "Book a [flight|hotel|train] to {city}.",
        ),
        ("Can you tell a good joke?", "Please draw {thing} for me.", "Find a hotel in {city}."),
    ),
    Wordings(
        (
            "What is the meaning of life?",
            "Why is the sky blue?",
            "Why do we [sleep|dream|cry|laugh]?",
            "What is your favourite [film|book|song|food]?",
            "Do you [like|love|hate] {food}?",
            "Do you like {thing}?",
            "Are you [alive|happy|in love|afraid of {thing}]?",
            "Who is the [richest|tallest|oldest] person in {country}?",
            "What do you think of {city}?",
            "How do I get from {city} to [the airport|the station|the sea]?",
            "How far is it to {city}?",
            "Summarise [the book|the text|the article] about {thing}.",
            "What is the [longest|highest|deepest] [river|mountain|lake] in {country}?",
        ),
        ("Have you been to {city}?", "What is the biggest city in {country}?"),
    ),
    Wordings(
        (
            "I like {food}.",
            "I live in {city}.",
            "I was in {country} in {year}.",
            "My favourite animal is the {animal}.",
            "{food} and {item}",
            "{matter}",
            "{thing}?",
            "I think that {matter} is [easy|hard|great|boring].",
            "Yesterday I bought {item}.",
            "We play {sport} {day}.",
        ),
        ("I know a lot about {matter}.", "We live in {city} and like {food}."),
    ),
)

WITH_PICTURE = Wordings(
    (
        "Who [painted|drew|made|took] this [picture|image|photo]?",
        "Who [painted|drew|made] this?",
        "Write [a story|a poem|an essay|a song|a letter] about [this picture|this image|it|this].",
        "Tell me a story about this [picture|image].",
        "Where was this [picture|photo|image] taken?",
        "When was this [picture|photo|image] [taken|made|painted]?",
        "How much is this [picture|image] worth?",
        "What does this [picture|image] cost?",
        "Is this [a good|a beautiful|an old|a famous] picture?",
        "Do you like this [picture|image]?",
        "What does the artist want to say?",
        "Who is the person in the [picture|image|photo]?",
        "What is the name of the person in this [picture|photo]?",
        "Which camera was used for this [picture|photo]?",
        "Make this [picture|image] [brighter|bigger|nicer].",
        "Please [edit|crop|rotate|print|send] this [picture|image].",
        "Draw [another|a better|a second] picture like this.",
        "How does this [picture|image] make you feel?",
        "What happened before this [picture|photo] was taken?",
        "Write code that draws this [picture|image].",
        "Translate this [picture|image] into {language}.",
        "What would {person} say about this [picture|image]?",
        "Is this [picture|image] from {country}?",
        "Why did {person} paint this?",
        "Should I give this picture to {friend}?",
    ),
    (
        "Who was the painter of this picture?",
        "Please write a long story about this image.",
        "Do you think this picture is beautiful?",
        "In which year was this image made?",
        "What does {friend} think about this picture?",
    ),
)

WITH_CLIP = Wordings(
    (
        "Who [made|filmed|directed] this [clip|video|film]?",
        "Write [a story|a poem|a review] about this [clip|video].",
        "Where was this [clip|video] [filmed|made]?",
        "When was this [clip|video] [filmed|made]?",
        "Do you like this [clip|video]?",
        "Is this a good [clip|video|film]?",
        "What happens after this [clip|video]?",
        "Who is the person in the [clip|video]?",
        "Why does it do that?",
        "Make this [clip|video] [longer|shorter|nicer].",
        "How much did this [clip|video] cost?",
        "What would {person} say about this [clip|video]?",
        "Is this [clip|video] from {country}?",
    ),
    (
        "Who was the director of this clip?",
        "Please write a long review of this video.",
        "In which year was this video made?",
    ),
)

WITH_SOUND = Wordings(
    (
        "Who is [speaking|talking|the speaker]?",
        "Who made this [sound|recording]?",
        "How old is the [speaker|person who speaks]?",
        "Write [a story|a poem|a song] about this [sound|recording].",
        "Where was this [sound|recording] [recorded|made]?",
        "When was this [sound|recording] [recorded|made]?",
        "Do you like this [sound|recording|music]?",
        "Which [instrument|microphone] was used?",
        "Is the speaker [happy|sad|angry|tired]?",
        "Why does the person say that?",
        "Translate this [sound|recording] into {language}.",
        "Make this [sound|recording] [louder|longer|nicer].",
        "What would {person} say about this [sound|recording]?",
        "Is this [sound|recording] from {country}?",
        "Does this sound like {person}?",
    ),
    (
        "What is the name of the speaker?",
        "Please write a poem about this recording.",
        "In which year was this sound made?",
    ),
)


def alone(rng: random.Random, split: Split) -> str:
    """A question beyond the model, without media; one in ten is a mere heap of words."""
    if rng.random() < 0.1:
        return _heap(rng, split)
    return asked(rng.choice(ALONE), rng, split)


def asked(wordings: Wordings, rng: random.Random, split: Split) -> str:
    names = {name: words.choose(rng, split) for name, words in WORDS.items()}
    question = wordings.ask(rng, split, **names)
    if rng.random() < 0.15:
        question = question.rstrip("?.!")
    if rng.random() < 0.1:
        question = question.lower()
    return question if question[0].islower() and rng.random() < 0.3 else _raised(question)


def _raised(question: str) -> str:
    return question[0].upper() + question[1:]


def _heap(rng: random.Random, split: Split) -> str:
    # a phrase alone may be a greeting, which has an answer
    lists = [words for name, words in WORDS.items() if name != "phrase"]
    words = [rng.choice(lists).choose(rng, split) for _ in range(rng.randint(1, 5))]
    return " ".join(words) + rng.choice(("", ".", "?", "!"))
