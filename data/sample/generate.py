"""Writes the bundled dialogues: `python -m data.sample.generate [--seed N] [--out FOLDER]`.

Each row has `prompt` (marker form), `response` (the SFT demonstration, often a bad one, so that SFT alone gives
a mediocre model), `chosen` (right), `rejected` (wrong) and `kind`. `train.jsonl.gz` and `eval.jsonl.gz` share no
question: a part of the questions of every kind is set aside before any row is written and never appears in a
training row, neither as its last question nor in an earlier turn. The same seed gives the same bytes.
"""

import argparse
import gzip
import json
import random
from pathlib import Path

from data.sample import world
from data.sample.gold import ASSISTANT, HUMAN, RECALL, score, understand
from data.sample.tasks import BY_NAME, FOLLOWS, RECALLS, TASKS, Task
from data.sample.wrong import DEMONSTRATED, wrong_answer

SEED = 20240
TRAIN_ROWS, EVAL_ROWS = 4200, 400
# How often each task is asked, relative to one another; its questions are dealt like a shuffled deck.
WEIGHTS = {
    "sum": 36, "largest": 20, "smallest": 20, "opposite": 30, "spelling": 16, "colour": 24, "sound": 12, "home": 12,
    "town": 14, "pet": 14, "capital": 12, "day_after": 14, "greet": 10, "comfort": 8, "rejoice": 8, "mood": 5,
    "self": 5, "thanks": 5, "goodbye": 5, "decline": 16, "how_to": 14, "follow": 18, "recall": 20,
}
HELD_OUT = 0.2  # of each task's questions
RIGHT_DEMONSTRATIONS = 0.2
MULTI_TURN = 0.6
LONGEST_PROMPT_WORDS = 36

Turns = list[tuple[str, str]]  # (question, answer)


def task_questions(task: Task) -> list[str]:
    return [task.question(template, item) for template in task.asks for item in task.table]


def all_questions() -> dict[str, list[str]]:
    """Task name -> every question of it, in a fixed order; "follow" and "recall" need earlier turns."""
    questions = {task.name: task_questions(task) for task in TASKS}
    names = dict.fromkeys(item[0] for task in TASKS if task.follow for item in task.table)
    questions["follow"] = [template.format(a=name) for template in FOLLOWS for name in names]
    questions["recall"] = [
        template.format(a=a, b=b) for template in RECALLS for a in world.USERS for b in world.USERS if a != b
    ]
    return questions


class Deck:
    """Deals its cards in shuffled order, again and again, so that all come up equally often."""

    def __init__(self, rng: random.Random, cards: list[str]):
        self.rng, self.cards, self.left = rng, cards, []

    def deal(self) -> str:
        if not self.left:
            self.left = self.rng.sample(self.cards, len(self.cards))
        return self.left.pop()


def right_answer(rng: random.Random, turns: list[str]) -> str:
    """One of the ways the sample gives a right answer to the last of these human turns."""
    task, item, value = understand(turns)
    return task.statement(rng.choice(task.says), item, value)


class Writer:
    """Writes rows whose last question comes from one pool and whose earlier questions come from another."""

    def __init__(self, rng: random.Random, last: dict[str, list[str]], earlier: dict[str, list[str]], distinct: bool):
        self.rng, self.distinct, self.written = rng, distinct, set()
        self.last = {name: Deck(rng, cards) for name, cards in last.items()}
        self.earlier = earlier

    def before(self, name: str, question: str) -> Turns:
        """The exchanges before `question`; those that it refers to come right before it."""
        rng, turns = self.rng, []
        while len(turns) < 2 and rng.random() < MULTI_TURN:
            other = rng.choice([task.name for task in TASKS])
            turns.append(self.exchange([], rng.choice(self.earlier[other])))
        if name == "recall":
            word = question.rstrip("?").replace(",", " ").split()
            user = rng.choice([w for w in word if w in world.USERS])
            greeting = rng.choice([q for q in self.earlier["greet"] if user in q])
            turns.append(self.exchange([], greeting))
            if rng.random() < 0.3:
                turns.append(self.exchange([], rng.choice(self.earlier[rng.choice(("sum", "colour", "mood"))])))
        if name == "follow":
            tasks = [task for task in TASKS if task.follow and any(
                question == template.format(a=item[0]) for template in FOLLOWS for item in task.table)]
            turns.append(self.exchange([], rng.choice(self.earlier[rng.choice(tasks).name])))
        return turns

    def exchange(self, turns: Turns, question: str) -> tuple[str, str]:
        return question, right_answer(self.rng, [q for q, _ in turns] + [question])

    def row(self, name: str) -> dict[str, str]:
        rng = self.rng
        question = self.last[name].deal()
        while True:
            turns = self.before(name, question)
            prompt = "".join(f"{HUMAN} {q}{ASSISTANT} {a}" for q, a in turns) + f"{HUMAN} {question}{ASSISTANT}"
            # a held-out prompt is written once: a question that comes up again gets other turns before it
            if len(prompt.split()) <= LONGEST_PROMPT_WORDS and not (self.distinct and prompt in self.written):
                self.written.add(prompt)
                break
        asked = [q for q, _ in turns] + [question]
        answers = [a for _, a in turns]
        chosen, rejected = right_answer(rng, asked), wrong_answer(rng, asked, answers)
        good = rng.random() < RIGHT_DEMONSTRATIONS
        response = right_answer(rng, asked) if good else wrong_answer(rng, asked, answers, DEMONSTRATED)
        task, _, _ = understand(asked)
        kind = "recall" if task is RECALL else "follow" if name == "follow" else BY_NAME[name].kind
        return {"prompt": prompt, "response": response, "chosen": chosen, "rejected": rejected, "kind": kind}


def make(seed: int = SEED, train_rows: int = TRAIN_ROWS, eval_rows: int = EVAL_ROWS) -> dict[str, list[dict[str, str]]]:
    """The rows of both files, {"train": [...], "eval": [...]}; the same seed gives the same rows."""
    rng = random.Random(seed)
    train, held_out = {}, {}
    for name, questions in all_questions().items():
        shuffled = rng.sample(questions, len(questions))
        cut = round(len(shuffled) * HELD_OUT)
        held_out[name], train[name] = shuffled[:cut], shuffled[cut:]
    rows = {}
    for split, last, count in (("train", train, train_rows), ("eval", held_out, eval_rows)):
        writer = Writer(rng, last, train, distinct=split == "eval")
        share = count / sum(WEIGHTS.values())
        names, dealt = [], 0.0
        for name, weight in WEIGHTS.items():  # cumulative rounding: the counts add up to `count`
            dealt += weight * share
            names += [name] * (round(dealt) - len(names))
        rng.shuffle(names)
        rows[split] = [writer.row(name) for name in names]
        for row in rows[split]:
            if score(row["prompt"], row["chosen"]) != 1.0 or score(row["prompt"], row["rejected"]) != 0.0:
                raise AssertionError(f"the generator and the gold scorer disagree on {row}")
    return rows


def write(folder: Path, rows: dict[str, list[dict[str, str]]]) -> None:
    """One gzipped JSON-lines file a split; no time stamp and no file name inside, so the bytes are fixed."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, content in rows.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content)
        (folder / f"{split}.jsonl.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write the bundled sample's train and eval files.")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args(argv)
    write(arguments.out, make(arguments.seed))


if __name__ == "__main__":
    main()
