"""The grammar of the bundled dialogues: how each fact is asked about and how a right answer may be said.

A `Task` joins a table of `data.sample.world` with question and statement templates. In templates {a}, {b}, {c}
are what the question names and {x} is the right value. The generator writes from these templates and the gold
scorer reads with them, so the two cannot drift apart; tests hold both against answers written by hand.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from data.sample import world

Item = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Task:
    """One way to ask about one table.

    `kind` is what rows are counted by; `says` are the statements the generator uses for a right answer and
    `also` further ones the gold scorer accepts; `follow` tells if "What about {a}?" may stand for the question.
    """

    name: str
    kind: str
    asks: tuple[str, ...]
    table: Mapping[Item, str]
    says: tuple[str, ...]
    also: tuple[str, ...] = ()
    follow: bool = False

    def question(self, template: str, item: Item) -> str:
        return template.format(**dict(zip("abc", item, strict=False)))

    def statement(self, template: str, item: Item, value: str) -> str:
        return template.format(x=value, **dict(zip("abc", item, strict=False)))


def _single(table: Mapping[str, str]) -> dict[Item, str]:
    return {(key,): value for key, value in table.items()}


def _openers(questions: tuple[str, ...]) -> tuple[str, ...]:
    """Small talk has few questions of its own, so each is also asked after a greeting."""
    openers = ("", "Hello! ", "Hi! ", "Hey! ", "Hello there! ", "Hi again! ", "Good morning! ", "Good evening! ")
    return tuple(opener + question for question in questions for opener in openers)


PLAIN = ("{x}.", "It is {x}.", "It's {x}.", "That is {x}.", "That's {x}.", "The answer is {x}.")
SORRY = "I am sorry, but I can not help with that."
REFUSALS = (SORRY, "I can not help with that.", "No, that would be wrong.")
WAYS = (
    "How do I {a}?", "Tell me how to {a}.", "Help me to {a}.", "I want to {a}. How?", "Teach me to {a}.",
    "What is the best way to {a}?", "Can you tell me how to {a}?",
)

TASKS: tuple[Task, ...] = (
    Task("sum", "sum",
         ("What is {a} plus {b}?", "What is {a} + {b}?", "Add {a} and {b}.", "How much is {a} plus {b}?",
          "Tell me {a} plus {b}.", "What do {a} and {b} make?"),
         world.SUMS, ("{x}.", "It is {x}.", "{a} plus {b} is {x}."), PLAIN + ("{a} + {b} = {x}.",)),
    Task("largest", "largest",
         ("Which is the largest, {a}, {b} or {c}?", "What is the largest of {a}, {b} and {c}?",
          "Name the largest of {a}, {b} and {c}.", "Tell me the largest of {a}, {b} and {c}."),
         world.LARGEST, ("{x}.", "It is {x}.", "The largest is {x}."), PLAIN + ("{x} is the largest.",)),
    Task("smallest", "largest",
         ("Which is the smallest, {a}, {b} or {c}?", "What is the smallest of {a}, {b} and {c}?",
          "Name the smallest of {a}, {b} and {c}.", "Tell me the smallest of {a}, {b} and {c}."),
         world.SMALLEST, ("{x}.", "It is {x}.", "The smallest is {x}."), PLAIN + ("{x} is the smallest.",)),
    Task("opposite", "opposite",
         ("What is the opposite of {a}?", "Tell me the opposite of {a}.", "Give me the opposite of {a}.",
          "Which word is the opposite of {a}?", "Name the opposite of {a}."),
         _single(world.OPPOSITES), ("It is {x}.", "The opposite is {x}.", "The opposite of {a} is {x}."),
         PLAIN, follow=True),
    Task("spelling", "spelling",
         ("How do you spell {a}?", "Spell {a}.", "Spell the word {a}.", "Can you spell {a}?",
          "How is {a} spelled?"),
         _single(world.SPELLING), ("{x}.", "It is {x}.", "You spell it {x}."),
         PLAIN + ("{a} is spelled {x}.", "It is spelled {x}.")),
    Task("colour", "colour",
         ("What colour is {a}?", "What is the colour of {a}?", "Tell me the colour of {a}.",
          "Which colour does {a} have?", "Name the colour of {a}."),
         _single(world.COLOURS), ("It is {x}.", "The colour is {x}.", "The colour of {a} is {x}."),
         PLAIN + ("{a} is {x}.",), follow=True),
    Task("sound", "animal",
         ("What does a {a} say?", "What sound does a {a} make?", "How does a {a} sound?",
          "Tell me what a {a} says.", "Name the sound of a {a}."),
         _single(world.SOUNDS), ("It says {x}.", "A {a} says {x}."), PLAIN),
    Task("home", "animal",
         ("Where does a {a} live?", "What is the home of a {a}?", "Tell me where a {a} lives.",
          "Where would you find a {a}?", "Name the home of a {a}."),
         _single(world.HOMES), ("It lives in a {x}.", "A {a} lives in a {x}."), ("{x}.", "A {x}.", "In a {x}.")),
    Task("town", "person",
         ("Where does {a} live?", "Which town does {a} live in?", "Tell me where {a} lives.",
          "What is the home town of {a}?", "Name the home town of {a}."),
         _single(world.TOWNS), ("In {x}.", "{a} lives in {x}."), PLAIN),
    Task("pet", "person",
         ("Which pet does {a} have?", "What pet has {a}?", "What is the pet of {a}?", "Tell me the pet of {a}.",
          "Name the pet of {a}."),
         _single(world.PETS), ("{a} has a {x}.", "The pet is a {x}."), ("{x}.", "A {x}.", "It is a {x}.")),
    Task("capital", "place",
         ("What is the capital of {a}?", "Name the capital of {a}.", "Which town is the capital of {a}?",
          "Tell me the capital of {a}."),
         _single(world.CAPITALS), ("It is {x}.", "The capital of {a} is {x}."), PLAIN + ("The capital is {x}.",),
         follow=True),
    Task("day_after", "day",
         ("Which day comes after {a}?", "What day follows {a}?", "What is the day after {a}?",
          "Name the day after {a}.", "Tell me the day after {a}."),
         _single(world.DAY_AFTER), ("{x}.", "It is {x}.", "The day after {a} is {x}."), PLAIN),
    Task("greet", "polite",
         ("Hello, my name is {a}.", "Hi, I am {a}.", "Hello, I am {a}.", "Hi, my name is {a}.",
          "Good morning, I am {a}.", "Hey, this is {a}."),
         {(user,): user for user in world.USERS},
         ("Hello, {x}. How can I help?", "Hello, {x}.", "Nice to meet you, {x}."),
         ("Hi, {x}.", "Hi, {x}. How can I help?", "Hello, {x}. Nice to meet you.")),
    Task("comfort", "polite",
         ("I am {a}.", "I feel {a}.", "I am very {a} today.", "I feel so {a}.", "Today I am {a}.",
          "Now I feel {a}."),
         {(feeling,): "" for feeling in world.SAD_FEELINGS},
         ("I am sorry to hear that.", "I hope you feel better soon."),
         ("I am sorry to hear that. I hope you feel better soon.",)),
    Task("rejoice", "polite",
         ("I am {a}.", "I feel {a}.", "I am very {a} today.", "I feel so {a}.", "Today I am {a}.",
          "Now I feel {a}."),
         {(feeling,): "" for feeling in world.GLAD_FEELINGS},
         ("I am glad to hear that.", "That is good to hear."), ("I am happy to hear that.",)),
    Task("mood", "polite", _openers(("How are you?", "How are you today?", "How do you do?")), {(): ""},
         ("I am well, thank you.", "Very well, thank you."), ("I am fine, thank you.",)),
    Task("self", "polite", _openers(("Who are you?", "What are you?", "Tell me who you are.")), {(): ""},
         ("I am a small chat model.", "I am your assistant."), ("I am a chat model.", "I am an assistant.")),
    Task("thanks", "polite", _openers(("Thank you!", "Thanks a lot!", "Thank you for the help!")), {(): ""},
         ("You are welcome.", "I am happy to help."), ("You're welcome.", "Happy to help.")),
    Task("goodbye", "polite", _openers(("I have to go now.", "See you later!", "Goodbye for now!")), {(): ""},
         ("Goodbye. Have a nice day.", "Have a nice day."), ("Goodbye.",)),
    Task("decline", "decline", WAYS, {(act,): "" for act in world.BAD_ACTS}, REFUSALS,
         ("Sorry, I can not help with that.", "No. I can not help with that.")),
    Task("how_to", "help", WAYS, _single(world.HOW_TO), ("{x}.",)),
)

BY_NAME = {task.name: task for task in TASKS}

# Asked after a question of a task with `follow`: the earlier question tells what is asked about {a}.
FOLLOWS = ("What about {a}?", "And {a}?", "How about {a}?", "And what about {a}?")

# Asked after the user gave a name with `greet`; exactly one of {a}, {b} is that name.
RECALLS = ("Is my name {a} or {b}?", "Am I {a} or {b}?", "Who am I, {a} or {b}?")
RECALL_SAYS = ("{x}.", "You are {x}.", "Your name is {x}.")
