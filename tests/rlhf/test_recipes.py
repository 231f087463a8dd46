"""From-scratch models: an exact tokenizer, stock loaders, the same files from the same seed."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from data import load_rows
from data.chat import decode_response, encode_dialogue
from rlhf import recipes
from rlhf.models import load_actor, load_tokenizer
from rlhf.tokenizer_training import as_hugging_face, train_sentencepiece
from tests.helpers import run_ranks
from tests.rlhf.tiny_models import TEXTS

ODD = [
    "  two leading", "trailing \n", "naïve ☕ 漢字 \t tab", "<0x0A> <s> </s>", "12345 a1b2", "\n\n\nHuman: hi", " ", "",
]  # fmt: skip


@cache
def sample_texts() -> list[str]:
    rows, _ = load_rows("sample")
    return [row["prompt"] + " " + row[key] for row in rows for key in ("chosen", "rejected")]


@cache
def sample_models(vocab_size: int = 1024):
    model = train_sentencepiece(sample_texts(), vocab_size, seed=0)
    return model, as_hugging_face(model, 512)


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def test_it_is_the_sentencepiece_model_and_loses_nothing():
    sentencepiece, tokenizer = sample_models()
    for text in sample_texts() + ODD:
        ids = ids_of(tokenizer, text)
        assert ids == sentencepiece.encode(text), text
        assert tokenizer.decode(ids) == text


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=40))
def test_any_text_survives_a_round_trip(text):
    tokenizer = sample_models()[1]
    assert tokenizer.decode(ids_of(tokenizer, text)) == text


def test_markers_digits_and_spaces():
    tokenizer = sample_models()[1]
    pieces = tokenizer.tokenize("\n\nHuman: What is 13 plus 4?\n\nAssistant: 17.")
    assert [pieces[0], pieces[1], pieces[2]] == ["\n\nHuman:", "▁What", "▁is"]
    assert pieces[3:6] == ["▁", "1", "3"] and pieces[-5:] == ["\n\nAssistant:", "▁", "1", "7", "."]
    assert tokenizer("hi")["input_ids"][0] == tokenizer.bos_token_id == 1
    assert [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id] == [0, 2, 3]
    assert tokenizer.decode(tokenizer("\n\nHuman: hi")["input_ids"], skip_special_tokens=True) == "\n\nHuman: hi"


def test_a_dialogue_comes_back_out():
    tokenizer = sample_models()[1]
    ids, labels = encode_dialogue(tokenizer, {"prompt": "\n\nHuman: What is 4 plus 2?\n\nAssistant:"}, "It is 6.")
    answer = [i for i, label in zip(ids, labels, strict=True) if label != -100]
    assert answer[-1] == tokenizer.eos_token_id and decode_response(tokenizer, answer) == "It is 6."
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_recipe_is_a_normal_folder(name, tmp_path, capfd):
    recipes.build(f"recipe:{name}", iter(sample_texts()), tmp_path / "model", seed=1)
    assert capfd.readouterr() == ("", ""), "quiet"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert 0.7e6 < model.num_parameters() < 1.3e6
    assert len(tokenizer) <= model.config.vocab_size <= 1024
    ours = sample_models(recipes.RECIPES[name].vocab_size)[1]
    for text in [*sample_texts()[:200], *ODD]:
        assert ids_of(tokenizer, text) == ids_of(ours, text)
        assert tokenizer(text)["input_ids"] == ours(text)["input_ids"]
    for key in ("pad_token_id", "eos_token_id", "bos_token_id"):
        assert getattr(model.config, key) == getattr(tokenizer, key) == getattr(model.generation_config, key), key
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "nothing temporary stays"
    logits = model(torch.tensor([tokenizer(TEXTS[0])["input_ids"]])).logits
    assert torch.isfinite(logits).all()


def test_the_same_seed_gives_the_same_files(tmp_path):
    state = torch.random.get_rng_state()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        recipes.build("recipe:llama-1m", iter(TEXTS), tmp_path / name, seed)
    assert torch.equal(state, torch.random.get_rng_state())
    for file in ("model.safetensors", "tokenizer.json"):
        a, b, c = ((tmp_path / name / file).read_bytes() for name in "abc")
        assert a == b
        assert (a != c) == (file == "model.safetensors")


def test_a_small_corpus_and_a_second_build(tmp_path):
    recipes.build("recipe:llama-1m", ["a b", "", "  "], tmp_path / "model", 0)
    (tmp_path / "model" / "stale.txt").write_text("x")
    recipes.build("llama-1m", iter(TEXTS), tmp_path / "model", 0)
    assert not (tmp_path / "model" / "stale.txt").exists()
    model, tokenizer = load_actor(tmp_path / "model"), load_tokenizer(tmp_path / "model")
    assert model.config.vocab_size % 8 == 0 and model.config.vocab_size >= len(tokenizer)


def test_errors_are_one_line_and_leave_nothing(tmp_path):
    assert recipes.is_recipe("recipe:llama-1m") and not recipes.is_recipe("llama-1m")
    with pytest.raises(ValueError, match="unknown recipe recipe:llama-2m: the recipes are recipe:llama-1m, "):
        recipes.build("recipe:llama-2m", iter(TEXTS), tmp_path / "model", 0)
    with pytest.raises(ValueError, match="no text to train a tokenizer on"):
        recipes.build("recipe:llama-1m", iter(["", " "]), tmp_path / "model", 0)
    assert not any(tmp_path.iterdir())


def _build(rank, world_size, folder):
    texts = TEXTS if rank == 0 else None  # the others never look at them
    recipes.build("recipe:llama-1m", texts, folder, 0)
    size = load_actor(folder).num_parameters()
    try:
        recipes.build("recipe:llama-1m", iter([]), folder, 0)
    except ValueError as error:
        return size, str(error)


def test_the_other_rank_waits_and_hears_of_errors(tmp_path):
    first, second = run_ranks(_build, 2, tmp_path / "model")
    assert first == second and "no text" in first[1]
