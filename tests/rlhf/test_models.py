"""Loading, score heads, and scores that depend on the text alone (not on padding, side or company)."""

from __future__ import annotations

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import engine
from data.chat import encode_dialogue
from rlhf.model_files import quiet, resolve
from rlhf.models import (
    ScoreModel,
    end_scores,
    load_actor,
    load_score_model,
    load_tokenizer,
    new_score_model,
    response_values,
    score_texts,
    scores,
    text_ids,
    values,
)
from tests.helpers import run_ranks
from tests.rlhf.tiny_models import FAMILIES, TEXTS, VOCABULARY, causal_model, folder, padded

PLAIN = [text + " And so on." for text in TEXTS]


def score_model(family: str = "llama", pad: str = "own") -> tuple[ScoreModel, object]:
    tokenizer = load_tokenizer(folder(family, pad))
    model = new_score_model(folder(family, pad), tokenizer, seed=5)
    with torch.no_grad():
        model.head.weight.mul_(30)  # a fresh head is so small that differences would hide
    return model.eval(), tokenizer


# -- scores --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pad", ["own", "eos"])
@torch.no_grad()
def test_a_score_does_not_depend_on_company(family, pad):
    model, tokenizer = score_model(family, pad)
    rows = [text_ids(tokenizer, text) for text in TEXTS]
    alone = torch.stack([scores(model, *padded([row], 0, "right"))[0] for row in rows])
    assert alone.std() > 1e-3
    for side in ("left", "right"):
        for extra in (0, 9):
            for filler in (tokenizer.pad_token_id, tokenizer.eos_token_id, 77):
                together = scores(model, *padded(rows, filler, side, extra))
                torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    for i, row in enumerate(rows):  # beside a short and a long partner
        for partner in (rows[1][:3], rows[1] * 2):
            pair = scores(model, *padded([row, partner], tokenizer.pad_token_id, "right"))
            torch.testing.assert_close(pair[0], alone[i], atol=1e-5, rtol=0)
    torch.testing.assert_close(score_texts(model, tokenizer, TEXTS, batch_size=2), alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pad", ["own", "eos", "none"])
@torch.no_grad()
def test_the_saved_folder_scores_the_same_with_the_stock_class(family, pad, tmp_path):
    model, tokenizer = score_model(family, pad)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ours = score_texts(model, tokenizer, TEXTS)

    stock = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    stock_tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert stock.config.num_labels == 1 and stock.config.pad_token_id == stock_tokenizer.pad_token_id
    assert stock_tokenizer.pad_token_id != stock_tokenizer.eos_token_id
    rows = [text_ids(tokenizer, text) for text in TEXTS]
    for row, score in zip(rows, ours, strict=True):
        torch.testing.assert_close(stock(torch.tensor([row])).logits[0, 0], score, atol=1e-5, rtol=0)
    batch = stock_tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    assert batch["input_ids"][0, -1] == stock_tokenizer.pad_token_id, "pads on the right"
    torch.testing.assert_close(stock(**batch).logits[:, 0], ours, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        score_texts(load_score_model(tmp_path), load_tokenizer(tmp_path), TEXTS), ours, atol=1e-5, rtol=0
    )


def test_a_pad_of_its_own_grows_the_embedding_only_where_needed(tmp_path):
    model = causal_model()
    tokenizer = load_tokenizer(folder("llama", "none"))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    with quiet():
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        model.save_pretrained(tmp_path)
    # <pad> is in the vocabulary, only not announced: it is taken
    grown = new_score_model(tmp_path, tokenizer, seed=0)
    assert tokenizer.pad_token == "<pad>" and grown.config.vocab_size == len(tokenizer)
    # without one, a new token and row
    tokenizer = load_tokenizer(folder("llama", "none"))
    known = len(tokenizer)
    import rlhf.models

    names, rlhf.models.KNOWN_PADS = rlhf.models.KNOWN_PADS, ()
    try:
        grown = new_score_model(tmp_path, tokenizer, seed=0)
    finally:
        rlhf.models.KNOWN_PADS = names
    assert tokenizer.pad_token_id == known and known < grown.config.vocab_size < known + 9
    assert grown.model.get_input_embeddings().weight.shape[0] == grown.config.vocab_size


@torch.no_grad()
def test_the_score_is_the_head_at_the_last_hidden_state():
    model, tokenizer = score_model()
    row = torch.tensor([text_ids(tokenizer, TEXTS[0])])
    hidden = model.model.base_model(row).last_hidden_state[0].double()
    expected = hidden @ model.head.weight[0].double()
    torch.testing.assert_close(values(model, row, torch.ones_like(row).bool())[0].double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        response_values(model, row, torch.ones_like(row).bool(), 3)[0].double(), expected[-4:-1], atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        values(model.model, row, torch.ones_like(row).bool())[0].double(), expected, atol=1e-5, rtol=0
    )


def test_end_scores():
    heads = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).repeat(3, 1)
    mask = torch.tensor([[True, True, False, False], [False, False, True, True], [True, False, True, False]])
    assert end_scores(heads, mask).tolist() == [2.0, 4.0, 3.0]
    with pytest.raises(ValueError, match="a text without any token has no score"):
        end_scores(heads[:1], torch.zeros(1, 4, dtype=torch.bool))


def test_texts_are_tokenized_as_in_training():
    tokenizer = load_tokenizer(folder())
    prompt, _, answer = TEXTS[2].rpartition("\n\nAssistant:")
    expected, _ = encode_dialogue(tokenizer, {"prompt": prompt + "\n\nAssistant:"}, answer)
    assert text_ids(tokenizer, TEXTS[2]) == expected
    assert expected[-1] == tokenizer.eos_token_id and expected.count(tokenizer.eos_token_id) == 2
    plain = text_ids(tokenizer, "no marker")
    assert plain == [*tokenizer("no marker")["input_ids"], tokenizer.eos_token_id]


# -- heads and precision ----------------------------------------------------------------------------------------


def test_a_fresh_head_is_seeded_and_of_the_right_size():
    tokenizer = load_tokenizer(folder())
    first, again, other = (new_score_model(folder(), tokenizer, seed=seed).head.weight for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert new_score_model(folder(), tokenizer, seed=1).head.bias is None
    heads = torch.cat([new_score_model(folder(), tokenizer, seed=seed).head.weight for seed in range(20)])
    assert heads.std().item() == pytest.approx(1 / 33, rel=0.1)  # hidden size 32


def test_the_head_stays_fp32_in_a_bf16_model(tmp_path):
    tokenizer = load_tokenizer(folder())
    model = new_score_model(folder(), tokenizer, seed=0, dtype=torch.bfloat16)
    assert model.head.weight.dtype == torch.float32
    assert model.model.get_input_embeddings().weight.dtype == torch.bfloat16
    assert model._keep_in_fp32_modules == ["score"]
    ids = torch.tensor([text_ids(tokenizer, TEXTS[0])])
    assert values(model, ids, torch.ones_like(ids).bool()).dtype == torch.float32


def test_a_reward_model_starts_the_critic_and_another_reward_model(tmp_path):
    model, tokenizer = score_model()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert torch.equal(load_score_model(tmp_path).head.weight, model.head.weight)
    again = new_score_model(tmp_path, load_tokenizer(tmp_path), seed=99)
    assert torch.equal(again.head.weight, model.head.weight)


def test_activation_checkpointing_keeps_the_values():
    model, tokenizer = score_model()
    ids, mask = padded([text_ids(tokenizer, text) for text in TEXTS], 0, "right")
    model.train()
    plain = values(model, ids, mask)
    plain.sum().backward()
    grad = model.head.weight.grad.clone()
    model.zero_grad()
    model.activation_checkpointing_enable()
    again = values(model, ids, mask)
    again.sum().backward()
    torch.testing.assert_close(again, plain)
    torch.testing.assert_close(model.head.weight.grad, grad)


# -- loading and its errors ---------------------------------------------------------------------------------------


def test_load_actor_gives_the_stock_model_in_fp32():
    actor = load_actor(folder("gpt2"))
    assert actor.dtype == torch.float32 and not actor.training
    stock = AutoModelForCausalLM.from_pretrained(folder("gpt2"))
    for (name, ours), theirs in zip(actor.named_parameters(), stock.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert load_actor(folder("gpt2"), dtype="bfloat16").dtype == torch.bfloat16


def test_dropout_is_set_in_every_place_of_the_family():
    config = load_actor(folder("gpt2"), dropout=0.25).config
    assert config.resid_pdrop == config.embd_pdrop == config.attn_pdrop == 0.25
    assert load_actor(folder("opt"), dropout=0.0).config.dropout == 0.0
    assert load_score_model_dropout() == 0.5
    with pytest.raises(ValueError, match="dropout must be at least 0 and below 1, not 1.5"):
        load_actor(folder("gpt2"), dropout=1.5)


def load_score_model_dropout() -> float:
    tokenizer = load_tokenizer(folder("opt"))
    return new_score_model(folder("opt"), tokenizer, seed=0, dropout=0.5).config.dropout


def test_a_missing_pad_token_is_the_end_token_for_language_models():
    assert load_tokenizer(folder("llama", "own")).pad_token == "<pad>"
    tokenizer = load_tokenizer(folder("llama", "none"))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2


def test_a_local_folder_wins_over_a_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder(), tmp_path / "gpt2")
    assert resolve("gpt2") == "gpt2" and load_actor("gpt2").config.model_type == "llama"
    assert resolve("some-org/some-model") == "some-org/some-model"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{here}/none/deep", "no model folder .*none/deep: .*none does not exist"),
        ("./none", "no model folder none: none does not exist"),
        ("outputs/sft", "no model folder outputs/sft: outputs/sft does not exist"),  # outputs/ is there
        ("outputs", r"outputs is not a model folder: it has no config.json \(did you mean its actor\?\)"),
        ("file.txt", "file.txt is a file: give the Hugging Face folder"),
        ("~/nowhere/at all", "no model folder"),
    ],
)
@pytest.mark.parametrize("load", [load_actor, load_tokenizer, load_score_model])
def test_a_wrong_path_is_one_line_and_never_asks_the_network(path, message, load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "actor").mkdir(parents=True)
    (tmp_path / "outputs" / "actor" / "config.json").write_text("{}")
    (tmp_path / "file.txt").write_text("x")
    monkeypatch.setattr("socket.getaddrinfo", lambda *a, **k: pytest.fail("asked the network"))
    with pytest.raises(FileNotFoundError, match=message) as caught:
        load(path.format(here=tmp_path))
    assert "\n" not in str(caught.value)


def test_a_name_the_hub_cannot_give_is_one_line():
    with pytest.raises(FileNotFoundError, match="no folder no-such-org/no-such-model here, and the hub") as caught:
        load_actor("no-such-org/no-such-model")
    assert "\n" not in str(caught.value)


def test_the_wrong_kind_of_model_is_told(tmp_path):
    with pytest.raises(ValueError, match="is no reward model: it lacks score.weight.*train one with the reward stage"):
        load_score_model(folder())
    for family in ("llama", "qwen2"):  # with an lm_head of its own, and tied to the embedding
        model, _ = score_model(family)
        model.save_pretrained(tmp_path / family)
        with pytest.raises(ValueError, match="is no causal language model but a reward model .*ForSequenceClass"):
            load_actor(tmp_path / family)


def test_a_folder_without_all_weights_is_told(tmp_path):
    model = causal_model()
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    with quiet():
        model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ValueError, match="is no whole causal language model: it lacks lm_head.weight"):
        load_actor(tmp_path)


def test_broken_files_are_one_line(tmp_path):
    shutil.copytree(folder(), tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="cannot load the weights of .*model") as caught:
        load_actor(tmp_path / "model")
    assert "\n" not in str(caught.value)
    (tmp_path / "model" / "config.json").write_text('{"model_type": "nothing_known"}')
    with pytest.raises(ValueError, match="cannot load the configuration of .*model") as caught:
        load_actor(tmp_path / "model")
    assert "\n" not in str(caught.value)


def test_loading_is_quiet(capfd):
    load_tokenizer(folder())
    tokenizer = load_tokenizer(folder())
    new_score_model(folder(), tokenizer, seed=0)
    load_actor(folder())
    out, err = capfd.readouterr()
    assert out == err == ""
    assert VOCABULARY == load_actor(folder()).config.vocab_size


# -- in an engine ---------------------------------------------------------------------------------------------------


def _sharded_scores(rank, world_size, path, out):
    tokenizer = load_tokenizer(path)
    results = {}
    for name, bf16 in (("fp32", False), ("bf16", True)):
        model = load_score_model(path)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": bf16},
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        }
        eng = engine.initialize(model, config)
        eng.eval()
        ids, mask = padded([text_ids(tokenizer, TEXTS[rank])], tokenizer.pad_token_id, "left", extra=3)
        with torch.no_grad():
            results[name] = scores(eng, ids, mask).item()
        results[name + " texts"] = score_texts(eng, tokenizer, TEXTS[:2]).tolist()
    eng.save_pretrained(out)
    return results


def test_scores_in_a_sharded_engine(tmp_path):
    model, tokenizer = score_model()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    expected = score_texts(model, tokenizer, TEXTS[:2])
    for rank, results in enumerate(run_ranks(_sharded_scores, 2, tmp_path / "model", tmp_path / "out")):
        assert results["fp32"] == pytest.approx(expected[rank].item(), abs=1e-5)
        assert results["fp32 texts"] == pytest.approx(expected.tolist(), abs=1e-5)
        assert results["bf16"] == pytest.approx(expected[rank].item(), rel=0.1, abs=0.1)
    saved = load_score_model(tmp_path / "out")
    assert saved.head.weight.shape == model.head.weight.shape
    torch.testing.assert_close(score_texts(saved, tokenizer, TEXTS[:2]), expected, atol=0.1, rtol=0.1)
