"""An end token of the user's choice: one token, a row for it in the model, and the stages train and save it."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from data.chat import encode_dialogue, stop_token_ids
from rlhf.end_token import fit_end_token, use_eot_token
from tests.rlhf import tiny_models
from tests.stages.kit import PPO_SMALL, ppo_models, run, trained, write_rows

EOT = "<|over|>"
ROW = {"prompt": "\n\nHuman: Say red.\n\nAssistant:"}


def test_answers_end_with_it_as_one_token():
    tokenizer = tiny_models.tokenizer(pad="eos")
    before, pad = len(tokenizer), tokenizer.pad_token_id
    use_eot_token(tokenizer, EOT)
    ids, labels = encode_dialogue(tokenizer, ROW, "It is red.")
    assert ids[-1] == labels[-1] == before == tokenizer.eos_token_id and ids.count(before) == 1
    assert stop_token_ids(tokenizer) == [before] and tokenizer.pad_token_id == pad


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_its_row_is_the_mean_of_all(family):
    tokenizer, model = tiny_models.tokenizer(), tiny_models.causal_model(family)
    old = [model.get_input_embeddings().weight.detach().clone(), model.get_output_embeddings().weight.detach().clone()]
    use_eot_token(tokenizer, EOT)
    fit_end_token(model, tokenizer)
    end = tokenizer.eos_token_id
    for module, before in zip((model.get_input_embeddings(), model.get_output_embeddings()), old, strict=True):
        assert module.weight.shape[0] % 8 == 0 and module.weight.shape[0] > end
        assert torch.equal(module.weight[: len(before)], before)
        torch.testing.assert_close(module.weight[end], before.mean(0))
    assert model.config.eos_token_id == model.generation_config.eos_token_id == end
    again = model.get_input_embeddings().weight.detach().clone()
    fit_end_token(model, tokenizer)
    assert torch.equal(model.get_input_embeddings().weight, again)


def test_a_chat_template_ends_turns_by_itself():
    tokenizer = tiny_models.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    with pytest.raises(ValueError, match="--add_eot_token: the tokenizer has a chat template"):
        use_eot_token(tokenizer, EOT)


def test_the_stages_train_and_save_it(tmp_path):
    data = write_rows(tmp_path / "rows.jsonl")
    small = {"per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 1e-3, "add_eot_token": True}
    sft, reward, dpo = tmp_path / "sft", tmp_path / "reward", tmp_path / "dpo"
    run("sft", sft, data, **small)
    tokenizer = AutoTokenizer.from_pretrained(sft)
    model = AutoModelForCausalLM.from_pretrained(sft)
    assert tokenizer.eos_token == "<|endoftext|>" and model.generation_config.eos_token_id == tokenizer.eos_token_id
    run("reward", reward, data, **{**small, "model_name_or_path": sft})
    assert AutoTokenizer.from_pretrained(reward).eos_token == "<|endoftext|>"
    AutoModelForSequenceClassification.from_pretrained(reward)
    run("dpo", dpo, data, **{**small, "model_name_or_path": sft})
    flags = {**PPO_SMALL, **ppo_models(sft, reward), "max_steps": 1, "add_eot_token": True}
    assert trained(run("ppo", tmp_path / "ppo", data, **flags))[0]["kl_ref"] == 0
    with pytest.raises(ValueError, match="is no token of --actor_model_name_or_path: give its SFT the flag too"):
        run("ppo", tmp_path / "other", data, **{**flags, "actor_model_name_or_path": tiny_models.folder()})
