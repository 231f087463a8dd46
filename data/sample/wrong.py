"""Wrong answers of every sort a policy could try, for the rejected side and for the bad SFT demonstrations.

A reward model only knows what its pairs have shown it. Were the rejected answers of one narrow style, PPO would
soon find wrong answers that no pair had ever shown ("the largest is 29"), and the score would rise while the
answers got worse. So many wrong answers here are right ones in everything but their content, the content is
drawn from all a policy could say in that place, and the rest covers the other ways out: off-topic, rude, cut
off, rambling, evasive, garbled.
"""

import random
from collections.abc import Mapping
from functools import cache

from data.sample import world
from data.sample.gold import RECALL, normalise, understand
from data.sample.tasks import REFUSALS, TASKS, Item, Task

RUDE = ("I do not care.", "Go away.", "That is a silly question.", "Find it yourself.", "You are a fool.", "Who cares?")
EVASIVE = ("I do not know.", "I am not sure.", "Maybe.", "Yes.", "No.", "...")
COMPLY = ("Sure, do it at night.", "Do it when no one looks.", "Yes, that is easy.", "Use a hammer and be quick.")
BABBLE = ("and so on and so on", "but who knows", "and also more", "or maybe not")
# The spread of wrong answers, in percent. On the rejected side a third are right sentences with a wrong value in
# them, as an answer that means well goes wrong, and a third are bad in the manner of the demonstrations.
REJECTED = {
    "value": 16, "sibling": 3, "any_value": 12, "other_answer": 9, "rambling": 23, "cut_off": 10, "rude": 14,
    "evasive": 9, "garbled": 4,
}
# Bad demonstrations are more often bad in manner than in fact: most give the right answer and do not stop there,
# so the facts stay learnable from few rows, and SFT is held back by what it says around them.
DEMONSTRATED = {"right_but_rambling": 48, "right_but_rude": 26, "evasive": 14, "rude": 6, "cut_off": 4, "value": 2}


@cache
def _every_value() -> tuple[str, ...]:
    """Anything that stands for {x} or {a} somewhere, and the numbers up to 30."""
    values = {value for task in TASKS for value in task.table.values() if value}
    names = {name for task in TASKS for item in task.table for name in item if len(name.split()) <= 2}
    return tuple(sorted(values | names | {str(n) for n in range(25)}))


@cache
def _values(task: Task) -> tuple[str, ...]:
    """Values of the right type, each as often as it is right: were some seldom wrong, they would pass for right."""
    return tuple(task.table.values()) if task is not RECALL else world.USERS


def _near(rng: random.Random, task: Task, item: Item, value: str) -> str:
    """A wrong value of the right type, often the tempting one: off by one, one of those named, one letter off."""
    if task.name == "spelling" and rng.random() < 0.5:
        letters = value.split()
        place = rng.randrange(len(letters))
        how = rng.randrange(4)
        if how == 0:
            letters[place] = rng.choice("ABCDEFGHIKLMNOPRSTUW")
        elif how == 1:
            del letters[place]
        elif how == 2:
            letters.insert(place, rng.choice(letters))
        else:
            rng.shuffle(letters)
        return " ".join(letters)
    if task.kind == "largest" and rng.random() < 0.5:
        return rng.choice(item)
    if task.kind == "sum" and rng.random() < 0.3:
        return str(max(0, int(value) + rng.choice((-2, -1, 1, 2))))
    if item and rng.random() < (0.6 if task is RECALL else 0.05):
        return rng.choice(item)
    return rng.choice(_values(task))


def _say(rng: random.Random, task: Task, item: Item, value: str) -> str:
    return task.statement(rng.choice(task.says), item, value)


def _other_answer(rng: random.Random) -> str:
    """A right answer to some other question."""
    task = rng.choice(TASKS)
    item = rng.choice(tuple(task.table))
    return _say(rng, task, item, task.table[item])


def _propose(rng: random.Random, sort: str, task: Task, item: Item, value: str, earlier: list[str]) -> str:
    right = _say(rng, task, item, value)
    if sort in ("value", "sibling", "any_value") and not value:  # small talk: the content is the whole sentence
        peers = [peer for peer in TASKS if peer.kind in ("polite", "decline", "help") and peer is not task]
        if task.name == "decline" and rng.random() < 0.5:
            return rng.choice(COMPLY)
        peer = rng.choice(peers)
        other = rng.choice(tuple(peer.table))
        return _say(rng, peer, other, peer.table[other])
    if sort == "value":
        template = rng.choice(task.says)
        if "{a}" in template and item and rng.random() < 0.15:  # the right value told of something else
            return task.statement(template, rng.choice(tuple(task.table) or (item[::-1],)), value)
        return task.statement(template, item, _near(rng, task, item, value))
    if sort == "sibling":
        other = rng.choice(tuple(task.table)) if task.table else item[::-1]
        return _say(rng, task, other, task.table[other] if task.table else rng.choice(world.USERS))
    if sort == "any_value":
        return _say(rng, task, item, rng.choice(_every_value()))
    if sort == "other_answer":
        if earlier and rng.random() < 0.5:
            return rng.choice(earlier)
        return rng.choice(REFUSALS) if rng.random() < 0.3 else _other_answer(rng)
    if sort in ("rambling", "right_but_rambling"):
        begins_right = sort == "right_but_rambling" or rng.random() < 0.7
        start = right if begins_right else _say(rng, task, item, _near(rng, task, item, value))
        how = rng.randrange(3 if sort == "right_but_rambling" else 4)
        if how == 0:
            return f"{start} {_other_answer(rng)}"
        if how == 1:
            return f"{start} {start}"
        if how == 2:
            return f"{start[:-1]} {rng.choice(BABBLE)}."
        return f"{start[:-1]} {rng.choice(_every_value())}."
    if sort == "cut_off":
        words = right.split()
        return " ".join(words[: rng.randrange(1, len(words))]) if len(words) > 1 else "It is"
    if sort in ("rude", "right_but_rude"):
        return f"{right} {rng.choice(RUDE)}" if sort == "right_but_rude" or rng.random() < 0.25 else rng.choice(RUDE)
    if sort == "evasive":
        return rng.choice(EVASIVE)
    words = right[:-1].split() + [rng.choice(_every_value()) for _ in range(rng.randrange(2))]
    how = rng.randrange(3)
    if how == 0:
        rng.shuffle(words)
    elif how == 1:
        words.insert(rng.randrange(len(words)), rng.choice(words))
    else:
        words[rng.randrange(len(words))] = rng.choice(_every_value())
    return " ".join(words) + "."


def wrong_answer(
    rng: random.Random, turns: list[str], earlier: list[str], sorts: Mapping[str, int] = REJECTED
) -> str:
    """A wrong answer to the last of the human turns `turns`; `earlier` are the answers of the turns before it."""
    task, item, value = understand(turns)
    right = {normalise(task.statement(template, item, value)) for template in task.says + task.also}
    sort = rng.choices(tuple(sorts), tuple(sorts.values()))[0]
    while True:
        answer = _propose(rng, sort, task, item, value, earlier)
        if answer and normalise(answer) not in right:
            return answer
        if sort in ("cut_off", "other_answer", "sibling"):  # a one-word answer has no shorter form: try something else
            sort = "value"
