"""The small world the bundled dialogues talk about: every fact the gold scorer knows, as plain tables.

Each table maps what a question names to the one right value. The people, lands and beasts are invented, so a
model can only know them from the dialogues. Tables are small on purpose: a model of a million parameters
trained from scratch sees each fact several times, and can then be asked about it in words it never saw.
"""

# The first and the second of each pair are each other's opposite.
OPPOSITE_PAIRS = (
    ("hot", "cold"), ("big", "small"), ("fast", "slow"), ("old", "new"), ("wet", "dry"), ("hard", "soft"),
    ("rich", "poor"), ("long", "short"),
)
OPPOSITES = {a: b for a, b in OPPOSITE_PAIRS} | {b: a for a, b in OPPOSITE_PAIRS}

WORDS = ("sun", "hat", "bed", "cup", "pen", "lamp", "ring", "moon")
SPELLING = {word: " ".join(word.upper()) for word in WORDS}

COLOURS = {
    "blood": "red", "a rose": "red", "grass": "green", "a leaf": "green", "the sky": "blue", "the sea": "blue",
    "a lemon": "yellow", "butter": "yellow", "snow": "white", "coal": "black",
}

SOUNDS = {"dog": "woof", "cat": "meow", "cow": "moo", "duck": "quack", "pig": "oink"}
HOMES = {"bee": "hive", "bird": "nest", "spider": "web", "bear": "cave", "fox": "den"}

# The invented part: five people and five lands.
TOWNS = {"Mira": "Torvik", "Tobin": "Belmor", "Olga": "Santel", "Pell": "Ostrow", "Runa": "Kandor"}
PETS = {"Mira": "parrot", "Tobin": "goat", "Olga": "turtle", "Pell": "rabbit", "Runa": "horse"}
CAPITALS = {"Velmar": "Arden", "Norvia": "Castow", "Kelland": "Fenmoor", "Dorsia": "Galpen", "Quillon": "Hollin"}

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
DAY_AFTER = {day: DAYS[(i + 1) % 7] for i, day in enumerate(DAYS)}

SUMS = {(str(a), str(b)): str(a + b) for a in range(1, 6) for b in range(1, 6)}
TRIPLES = tuple(
    (str(a), str(b), str(c))
    for a in range(1, 8) for b in range(1, 8) for c in range(1, 8) if len({a, b, c}) == 3
)
LARGEST = {triple: max(triple) for triple in TRIPLES}
SMALLEST = {triple: min(triple) for triple in TRIPLES}

# People who talk to the assistant, as opposed to the people it knows.
USERS = ("Anna", "Ben", "Carl", "Dora", "Emil", "Fay")
SAD_FEELINGS = ("tired", "ill", "lonely", "sad")
GLAD_FEELINGS = ("happy", "glad", "proud", "well")

BAD_ACTS = ("steal a car", "rob a bank", "hurt a dog", "burn a house", "cheat in a test", "break a window")
HOW_TO = {
    "make tea": "Use leaves and hot water", "bake bread": "Bake flour and water",
    "wash a cup": "Use warm water and soap", "sleep well": "Go to bed early", "stay warm": "Put on a coat",
    "light a room": "Turn on a lamp",
}
