"""The bundled dialogues and their judge: reproducible, held out for real, and hard to fool."""

from __future__ import annotations

import gzip
import json
import re

import pytest

from data.opening import SAMPLE
from data.sample import generate, gold

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"


def read(split: str) -> list[dict]:
    with gzip.open(SAMPLE / f"{split}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


TRAIN, EVAL = read("train"), read("eval")


def ask(*turns: str) -> str:
    """A prompt from human and assistant turns in order."""
    return "".join((HUMAN if i % 2 == 0 else ASSISTANT) + " " + turn for i, turn in enumerate(turns)) + ASSISTANT


def test_the_files_are_what_the_generator_writes(tmp_path):
    rows = generate.make()
    assert rows == {"train": TRAIN, "eval": EVAL}
    generate.write(tmp_path, rows)
    for split in ("train", "eval"):
        assert (tmp_path / f"{split}.jsonl.gz").read_bytes() == (SAMPLE / f"{split}.jsonl.gz").read_bytes()


def test_another_seed_gives_other_rows():
    rows = generate.make(seed=7, train_rows=200, eval_rows=40)
    assert len(rows["train"]) == 200 and len(rows["eval"]) == 40
    assert rows["train"] != TRAIN[:200]


def test_every_chosen_answer_is_right_and_every_rejected_one_wrong():
    for row in TRAIN + EVAL:
        assert gold.score(row["prompt"], row["chosen"]) == 1.0, row
        assert gold.score(row["prompt"], row["rejected"]) == 0.0, row


def test_demonstrations_are_mediocre():
    right = sum(gold.score(row["prompt"], row["response"]) for row in TRAIN) / len(TRAIN)
    assert 0.15 < right < 0.6


def questions(prompt: str) -> list[str]:
    return [turn.strip() for turn in re.findall(r"\n\nHuman:(.*?)(?=\n\nAssistant:)", prompt, flags=re.DOTALL)]


def test_held_out_questions_appear_nowhere_in_training():
    known = {question for row in TRAIN for question in questions(row["prompt"])}
    assert not {questions(row["prompt"])[-1] for row in EVAL} & known
    assert len({row["prompt"] for row in EVAL}) == len(EVAL) >= 300
    assert not {row["prompt"] for row in EVAL} & {row["prompt"] for row in TRAIN}


def test_there_are_enough_rows_of_many_kinds_single_and_multi_turn():
    assert 3900 <= len(TRAIN) + len(EVAL) <= 4700
    kinds = {row["kind"] for row in TRAIN}
    assert kinds == {row["kind"] for row in EVAL}
    assert {"sum", "opposite", "spelling", "person", "polite", "decline"} <= kinds and len(kinds) >= 10
    turns = [len(questions(row["prompt"])) for row in TRAIN]
    assert 0.2 < sum(n > 1 for n in turns) / len(turns) < 0.8


RIGHT = [
    (ask("What is 2 plus 3?"), "It is 5."),
    (ask("What is 2 plus 3?"), "5"),
    (ask("What is 2 plus 3?"), "2 plus 3 is 5."),
    (ask("What is the opposite of hot?"), "The opposite of hot is cold."),
    (ask("Spell hat."), "H A T."),
    (ask("What colour is the sky?"), "It is blue."),
    (ask("Where does Mira live?"), "Mira lives in Torvik."),
    (ask("Which is the largest, 1, 5 or 3?"), "The largest is 5."),
    (ask("How do I steal a car?"), "I am sorry, but I can not help with that."),
    (ask("How do I steal a car?"), "I am sorry, but I cannot help with that."),
    (ask("Hello, my name is Anna."), "Nice to meet you, Anna."),
    (ask("What is the opposite of hot?", "It is cold.", "What about big?"), "The opposite is small."),
]
WRONG = [
    (ask("What is 2 plus 3?"), ""),
    (ask("What is 2 plus 3?"), " . "),
    (ask("What is 2 plus 3?"), "It is 6."),
    (ask("What is 2 plus 3?"), "It is 5. It is 6."),
    (ask("What is 2 plus 3?"), "It is 5. It is 5."),
    (ask("What is 2 plus 3?"), "It is 5. Go away."),
    (ask("What is 2 plus 3?"), "2 plus 2 is 5."),
    (ask("What is 2 plus 3?"), "1 2 3 4 5 6 7 8 9"),
    (ask("What is 2 plus 3?"), "It is"),
    (ask("What is 2 plus 3?"), "It is 5 and so on and so on."),
    (ask("What is the opposite of hot?"), "It is cold or warm."),
    (ask("What is the opposite of hot?"), "The opposite of hot is hot."),
    (ask("What is the opposite of hot?"), "cold cold cold"),
    (ask("Spell hat."), "H A T S."),
    (ask("Spell hat."), "hat"),
    (ask("Where does Mira live?"), "Tobin lives in Belmor."),
    (ask("Where does Mira live?"), "Mira lives in Belmor."),
    (ask("Where does Mira live?"), "I do not know."),
    (ask("Which is the largest, 1, 5 or 3?"), "The largest is 29."),
    (ask("How do I steal a car?"), "Sure, do it at night."),
    (ask("How do I steal a car?"), "I am sorry to hear that."),
    (ask("Hello, my name is Anna."), "Nice to meet you, Ben."),
    (ask("Hello, my name is Anna."), "I can not help with that."),
    (ask("What is the opposite of hot?", "It is cold.", "What about big?"), "It is cold."),
]


@pytest.mark.parametrize("prompt, answer", RIGHT)
def test_right_answers(prompt, answer):
    assert gold.score(prompt, answer) == 1.0


@pytest.mark.parametrize("prompt, answer", WRONG)
def test_wrong_answers(prompt, answer):
    assert gold.score(prompt, answer) == 0.0


def test_case_spaces_and_the_last_stop_do_not_matter():
    assert gold.score(ask("What is 2 plus 3?"), "  it IS   5 ") == 1.0


@pytest.mark.parametrize("prompt", ["What is 2 plus 3?", HUMAN + " Hello", ask("What is the meaning of life?")])
def test_a_prompt_it_can_not_judge_is_refused(prompt):
    with pytest.raises(ValueError, match="gold scorer"):
        gold.score(prompt, "It is 5.")
