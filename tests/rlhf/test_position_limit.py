"""Texts longer than a model's table of positions: refused before a run, and in a stream when they come."""

from __future__ import annotations

import pytest
import torch

from rlhf.models import load_actor, new_score_model
from rlhf.position_limit import position_limit
from tests.rlhf import tiny_models
from tests.stages.kit import PPO_SMALL, run, write_rows


@pytest.mark.parametrize(("family", "limit"), [("opt", 64), ("gpt2", 64), ("gpt_neo", 64), ("llama", None)])
def test_as_many_as_were_learned(family, limit):
    for model in (load_actor(tiny_models.folder(family)), tiny_models.causal_model(family)):
        assert position_limit(model) == limit


def ids(length):
    return {"input_ids": torch.full((2, length), 5), "attention_mask": torch.ones(2, length, dtype=torch.long)}


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_a_forward_pass_beyond_the_table_says_so(family):
    actor = load_actor(tiny_models.folder(family))
    reward = new_score_model(tiny_models.folder(family), tiny_models.tokenizer(), seed=0)
    with torch.no_grad():
        # wider than the table by padding, or by a second text in the row: its positions are all there
        wide = torch.arange(80).clamp(max=63).expand(2, -1)
        assert actor(**ids(80), position_ids=wide).logits.shape[1] == 80
        with pytest.raises(ValueError, match="a text of 65 tokens is longer than the 64 positions"):
            actor(**ids(65), position_ids=torch.arange(65).expand(2, -1))
        with pytest.raises(ValueError, match="a text of 70 tokens"):
            reward(**ids(70))


def test_runs_are_refused_before_they_start(tmp_path):
    data, base = write_rows(tmp_path / "rows.jsonl"), tiny_models.folder("opt")
    long = tmp_path / "long.jsonl"
    long.write_text(data.read_text().replace("Say ", "Say please " * 9))
    for stage in ("sft", "reward", "dpo"):
        with pytest.raises(ValueError, match="tokens is longer than the 64 positions that the model has learned: low"):
            run(stage, tmp_path / stage, long, model_name_or_path=base, per_device_train_batch_size=2)
    (tmp_path / "zero.py").write_text("def zero(prompt, answer): return 0\n")
    flags = {**PPO_SMALL, "actor_model_name_or_path": base, "reward_fn": f"{tmp_path}/zero.py:zero"}
    with pytest.raises(ValueError, match="lower --max_seq_len, in PPO --max_prompt_seq_len or --max_answer_seq_len"):
        run("ppo", tmp_path / "ppo", data, **{**flags, "max_answer_seq_len": 40})
    assert not (tmp_path / "ppo" / "metrics.jsonl").exists()
