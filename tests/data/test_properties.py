"""For any dialogue, tokenizer, length and way of cutting: what is trained is the assistant's own and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data import chat, collate_packs, collate_sft
from data.items import Refused, make_items, make_rules
from data.markers import turns_to_text
from data.report import SourceReport
from data.store import item_tensors
from tests.data.kit import ALL, build
from tests.data.test_chat import contents, trained_groups

texts = contents.map(str.strip)
answers = texts.filter(bool)
exchanges = st.lists(st.tuples(texts, texts), max_size=3)


@st.composite
def rows(draw):
    """A row with a system turn or none, earlier exchanges, a question, and two different answers."""
    turns = [{"role": "system", "content": draw(answers)}] if draw(st.booleans()) else []
    for question, answer in draw(exchanges):
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    turns.append({"role": "user", "content": draw(answers)})
    chosen = draw(answers)
    return {
        "prompt": turns_to_text(turns),
        "messages": turns,
        "chosen": chosen,
        "rejected": draw(answers.filter(lambda text: text != chosen)),
    }


def as_decoded(tokenizer, text):
    """The text as the tokenizer gives it back: WordPiece loses spaces and unknown letters."""
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return tokenizer.decode(ids).strip()


def made(stage, name, row, limit, truncation):
    rules = make_rules(stage, limit, limit, truncation, False, "pair")
    (item,) = make_items([row], build(name), rules, SourceReport("rows"))
    return item


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=40, deadline=None)
@given(row=rows(), limit=st.integers(8, 120), truncation=st.sampled_from(["drop", "left", "right"]))
def test_sft_trains_whole_answers_or_the_beginning_of_the_last(name, row, limit, truncation):
    tokenizer = build(name)
    end = chat.end_token_id(tokenizer)
    item = made("sft", name, row, limit, truncation)
    own = [turn["content"] for turn in row["messages"] if turn["role"] == "assistant"] + [row["chosen"]]
    own = [as_decoded(tokenizer, text) for text in own]
    if isinstance(item, Refused):
        (whole,) = chat.format_of(tokenizer).encode(
            [[*row["messages"], {"role": "assistant", "content": row["chosen"]}]], False
        )
        assert len(whole.ids) > limit
        return
    (ids,) = item.sequences
    assert len(ids) <= limit
    labels = [token if trained else chat.IGNORE for token, trained in zip(ids, item.trained, strict=True)]
    if labels[-1] == end:
        answers = [tokenizer.decode(group[:-1]).strip() for group in trained_groups(labels, end)]
        # right keeps the first answers, left the last ones, drop all of them
        assert answers == (own[: len(answers)] if truncation == "right" else own[len(own) - len(answers) :])
        assert truncation != "drop" or len(answers) == len(own)
    else:
        assert truncation == "right" and labels[-1] != chat.IGNORE, "an answer cut off has no end token"


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=25, deadline=None)
@given(row=rows(), limit=st.integers(12, 120))
def test_both_sides_of_a_pair_stand_over_the_prompt_that_ppo_gets(name, row, limit):
    tokenizer = build(name)
    pair = made("reward", name, row, None, None)
    prompt = made("ppo", name, row, None, None)
    if not isinstance(pair, Refused):
        for ids, side in zip(pair.sequences, ("chosen", "rejected"), strict=True):
            (start,) = prompt.sequences
            assert ids[: len(start)] == start
            assert tokenizer.decode(ids[len(start) : -1]).strip() == as_decoded(tokenizer, row[side])
            assert ids[-1] == chat.end_token_id(tokenizer)
    cut = made("reward", name, row, limit, "left")
    if not isinstance(cut, Refused):
        chosen, rejected = cut.sequences
        _, _, starts, _ = cut.facts
        assert max(map(len, cut.sequences)) <= limit
        assert starts[0] == starts[1] and chosen[: starts[0]] == rejected[: starts[1]], "one prompt for both"
        assert chosen != rejected


@pytest.mark.parametrize("name", ["byte-level, pad = eos", "byte-level, no pad", "SentencePiece", "WordPiece"])
@settings(max_examples=25, deadline=None)
@given(several=st.lists(rows(), min_size=1, max_size=4), multiple=st.integers(1, 8))
def test_labels_never_cover_padding_whatever_pads(name, several, multiple):
    tokenizer = build(name)
    items = [made("sft", name, row, None, None) for row in several]
    items = [item_tensors("sft", item.sequences, item.trained) for item in items]
    trained = sum(int((item["labels"] != chat.IGNORE).sum()) for item in items)
    for batch in (
        collate_sft(items, tokenizer.pad_token_id, multiple),
        collate_packs([items[:2], items[2:]][: 1 + (len(items) > 2)], tokenizer.pad_token_id, multiple),
    ):
        assert batch["input_ids"].shape[1] % multiple == 0
        assert (batch["labels"][~batch["attention_mask"]] == chat.IGNORE).all()
        assert int(batch["attention_mask"].sum()) == sum(len(item["input_ids"]) for item in items)
        assert int((batch["labels"] != chat.IGNORE).sum()) == trained
        own = batch["labels"] != chat.IGNORE
        assert torch.equal(batch["labels"][own], batch["input_ids"][own])
