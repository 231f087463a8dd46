"""Models of another tokenizer: what they read is the same text, and values stand where no later text is known."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from data.chat import decode_response, encode_dialogue, encode_prompt
from rlhf.experience import response_mask_from
from rlhf.micro_batches import Cut
from rlhf.models import new_score_model, score_texts, values
from rlhf.retokenize import Retokenizer, same_tokens
from rlhf.rollout import Models, Rollout, judge
from rlhf.scoring import Scorer
from rlhf.tokenizer_training import train_tokenizer
from tests.rlhf.tiny_models import TEXTS, causal_model, folder, tokenizer

ROWS = [{"prompt": "\n\nHuman: Spell cat.\n\nAssistant:"}, {"prompt": "\n\nHuman: Tell the opposite.\n\nAssistant:"}]
ANSWERS = ["The opposite is cold, très froid \u2603 you are.", "c a t", "I am sure  of it"]


@cache
def other(kind: str):
    if kind == "sentencepiece":
        return train_tokenizer([text.upper() + text for text in TEXTS], 330, 64, seed=1)
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(TEXTS, vocab_size=300, special_tokens=["<pad>", "<s>", "</s>"])
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, **names)


def written(words, text: str, finished: bool = True) -> list[int]:
    """The actor's own tokens of an answer."""
    whole, _ = encode_dialogue(words, ROWS[0], text)
    response = whole[len(encode_prompt(words, ROWS[0])) :]
    return response if finished else response[:-1]


@pytest.mark.parametrize("kind", ["sentencepiece", "bytes"])
@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("text", ANSWERS)
@pytest.mark.parametrize("swap", [False, True])
def test_a_state_is_read_at_the_last_token_wholly_within_it(kind, finished, text, swap):
    actor, critic = (other(kind), tokenizer()) if swap else (tokenizer(), other(kind))
    words, row = Retokenizer(actor, critic), ROWS[0]
    response = written(actor, text, finished)
    text = decode_response(actor, response)
    (whole,) = words.whole([row], [text], [finished])
    prompt = len(encode_prompt(critic, row))
    theirs = whole[prompt:-1] if finished else whole[prompt:]
    assert (whole[-1] == critic.eos_token_id) == finished
    places = words.places(row, response, whole, finished)
    assert len(places) == len(response) and places[0] >= prompt - 1 and places == sorted(places)
    for t, place in enumerate(places):
        state = actor.decode(response[:t], skip_special_tokens=True).lstrip()
        read = critic.decode(theirs[: place - prompt + 1], skip_special_tokens=True).lstrip()
        further = critic.decode(theirs[: place - prompt + 2], skip_special_tokens=True).lstrip()
        if "\ufffd" not in state + read + further:
            assert state.startswith(read), "a value that knows what is still to come"
            assert place - prompt + 1 == len(theirs) or not state.startswith(further), "a token of the state left out"
    if finished:  # before the end token all of the text is known, and not that it ends
        assert places[-1] == len(whole) - 2


def test_of_the_same_tokenizer_every_state_is_its_own():
    words = Retokenizer(tokenizer(), tokenizer())
    for text in ("c a t", "I am sure of it."):
        response = written(words.actor, text)
        (whole,) = words.whole(ROWS[:1], [text], [True])
        start = len(whole) - len(response)
        assert words.places(ROWS[0], response, whole, True) == list(range(start - 1, len(whole) - 1))


def test_which_tokenizers_are_the_same():
    plain = tokenizer()
    padded = tokenizer("none")
    padded.add_special_tokens({"pad_token": "<|pad|>"})  # what a reward model's may have besides
    assert same_tokens(plain, tokenizer()) and same_tokens(tokenizer("none"), padded)
    assert not same_tokens(plain, other("sentencepiece")) and not same_tokens(plain, other("bytes"))
    templated = tokenizer()
    templated.chat_template = "{{ messages[0].content }}"
    assert not same_tokens(plain, templated)


def sampled(words) -> Rollout:
    """Two answers, the second cut off."""
    prompts = [encode_prompt(words, row) for row in ROWS]
    answers = [written(words, "c a t"), written(words, "The opposite of hot", finished=False)]
    width, length = max(map(len, prompts)), max(map(len, answers))
    ids = torch.zeros(2, width + length, dtype=torch.long)
    mask = torch.zeros(2, width, dtype=torch.bool)
    for b, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids[b, width - len(prompt) : width + len(answer)] = torch.tensor(prompt + answer)
        mask[b, width - len(prompt) :] = True
    lengths = torch.tensor([len(answer) for answer in answers])
    response_mask = response_mask_from(lengths, length)
    return Rollout(
        ids, torch.cat([mask, response_mask], 1), response_mask, torch.zeros(2, length), lengths,
        torch.tensor([True, False]), ROWS,
    )  # fmt: skip


def test_scores_and_values_are_those_of_the_text():
    actor, theirs = tokenizer(), other("bytes")
    critic, reward = (new_score_model(folder(seed=seed), tokenizer(), seed=seed).eval() for seed in (2, 3))
    rollout, words = sampled(actor), Retokenizer(actor, theirs)
    models = Models(causal_model(), causal_model(seed=1), critic, Scorer(actor, reward, 1.0, words), theirs, words)
    for cut in (Cut(1), Cut(2), Cut(2, max_tokens=80)):
        experience = judge(rollout, models, cut=cut, temperature=1.0)
        with torch.no_grad():
            expected = score_texts(reward, theirs, [f"{ROWS[0]['prompt']} c a t"])
            torch.testing.assert_close(experience.scores[:1], expected, atol=1e-5, rtol=0)
            (whole,) = words.whole(ROWS[1:], ["The opposite of hot"], [False])
            heads = values(critic, torch.tensor([whole]), torch.ones(1, len(whole), dtype=torch.bool))[0]
        torch.testing.assert_close(experience.scores[1], scores_of(reward, whole), atol=1e-5, rtol=0)
        places = words.places(ROWS[1], rollout.responses()[1], whole, False)
        torch.testing.assert_close(experience.values[1, : len(places)], heads[places], atol=1e-5, rtol=0)
        batch = experience.select([0]).trimmed()
        assert batch.critic_ids.shape[1] == int(batch.critic_mask.sum()) and batch.critic_mask.all()


def scores_of(model, ids):
    with torch.no_grad():
        return values(model, torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool))[0, -1]
