"""The gold scorer of the bundled dialogues: 1.0 for a right answer, 0.0 for anything else.

`score(prompt, answer)` reads the last question of the prompt (and the turn before it for "What about …?"),
looks the right value up in the small world, and accepts the answer only if all of it is one of the ways to say
just that. A right word inside a rude, rambling or unfinished answer earns nothing. Use it as
`--gold_fn data.sample.gold:score`.
"""

import re
from functools import cache

from data.sample import world
from data.sample.tasks import BY_NAME, FOLLOWS, RECALL_SAYS, RECALLS, TASKS, Item, Task

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
_TURN = re.compile(r"\n\n(Human|Assistant):")
RECALL = Task("recall", "recall", RECALLS, {}, RECALL_SAYS, ("It is {x}.", "Your name's {x}.", "You're {x}."))


def normalise(text: str) -> str:
    """Lower case, single spaces, straight apostrophes, "can not" in one spelling, one closing . or ! dropped."""
    text = " ".join(text.replace("\u2019", "'").split()).lower()
    text = text.replace("cannot", "can not").replace("can't", "can not")
    return text[:-1].rstrip() if text.endswith((".", "!")) and not text.endswith(("..", "!!", ".!", "!.")) else text


@cache
def _questions() -> dict[str, tuple[Task, Item]]:
    """Every question that can stand on its own, normalised -> what it asks."""
    found: dict[str, tuple[Task, Item]] = {}
    for task in TASKS:
        for template in task.asks:
            for item in task.table:
                found[normalise(task.question(template, item))] = (task, item)
    return found


@cache
def _referring() -> dict[str, tuple[str, Item]]:
    """Every question that needs an earlier turn, normalised -> ("follow" or "recall", what it names)."""
    found: dict[str, tuple[str, Item]] = {}
    for task in TASKS:
        for item in task.table if task.follow else ():
            for template in FOLLOWS:
                found[normalise(template.format(a=item[0]))] = ("follow", item)
    for template in RECALLS:
        for a in world.USERS:
            for b in world.USERS:
                if a != b:
                    found[normalise(template.format(a=a, b=b))] = ("recall", (a, b))
    return found


def human_turns(prompt: str) -> list[str]:
    """What the human said, turn by turn, in a prompt in marker form that ends with the assistant marker.

    Raises ValueError if the prompt has no human turn or does not end where the assistant is to speak.
    """
    parts = _TURN.split(prompt)
    turns = list(zip(parts[1::2], (part.strip() for part in parts[2::2]), strict=True))
    if len(turns) < 2 or turns[-1] != ("Assistant", "") or turns[-2][0] != "Human":
        raise ValueError(f"gold scorer: the prompt must run through its last '\\n\\nAssistant:', got {prompt!r}")
    return [text for who, text in turns if who == "Human"]


def understand(turns: list[str]) -> tuple[Task, Item, str]:
    """The task, what the last of these human turns names, and the right value.

    Raises ValueError if the last turn is no question of the sample's grammar.
    """
    question = normalise(turns[-1])
    if question in _questions():
        task, item = _questions()[question]
        return task, item, task.table[item]
    how, item = _referring().get(question, ("", ()))
    if how == "follow" and len(turns) > 1:
        task, _, _ = understand(turns[:-1])
        if task.follow and item in task.table:
            return task, item, task.table[item]
    if how == "recall":
        for turn in reversed(turns[:-1]):
            task, named = _questions().get(normalise(turn), (RECALL, ()))
            if task is BY_NAME["greet"] and named[0] in item:
                return RECALL, item, named[0]
    raise ValueError(f"gold scorer: not a question of the bundled sample: {turns[-1]!r}; score its own prompts only")


def accepted(prompt: str) -> frozenset[str]:
    """Every right answer to the prompt, normalised."""
    task, item, value = understand(human_turns(prompt))
    return frozenset(normalise(task.statement(template, item, value)) for template in task.says + task.also)


def score(prompt: str, answer: str) -> float:
    """1.0 if `answer`, all of it, is a right answer to `prompt` (marker form), else 0.0.

    Raises ValueError if the prompt is not one of the sample's grammar.
    """
    return float(normalise(answer) in accepted(prompt))
