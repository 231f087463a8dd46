"""PPO's flags together: what is filled in, and what is refused in one line."""

from __future__ import annotations

import pytest

from rlhf.arguments import parse, ppo_parser
from rlhf.ppo_options import answers_per_iteration, resolve_options, uses_reward_model


def resolved(*words: str):
    args = parse(ppo_parser(), ["--actor_model_name_or_path", "a", "--output_dir", "o", *words])
    resolve_options(args)
    return args


CRITIC = ("--critic_model_name_or_path", "c")


def test_deepspeed_chats_flags_mean_gae_with_one_answer():
    args = resolved(*CRITIC)
    assert args.advantage_estimator == "gae" and args.num_samples_per_prompt == 1
    assert args.reward_model_name_or_path == "c" and args.critic_head is None and args.kl_estimator == "k1"
    assert answers_per_iteration(args) == 16


def test_what_is_left_open_is_filled_in():
    assert resolved("--reward_model_name_or_path", "r").critic_model_name_or_path == "r"
    assert resolved(*CRITIC, "--kl_in", "loss").kl_estimator == "k3"
    grpo = resolved("--reward_model_name_or_path", "r", "--advantage_estimator", "grpo", "--generation_batches", "2")
    assert grpo.num_samples_per_prompt == 8 and grpo.critic_model_name_or_path is None
    assert answers_per_iteration(grpo) == 16 * 2 * 8


def test_a_function_scores_alone_unless_a_reward_model_is_named():
    alone = resolved("--reward_fn", "f.py:f")
    assert not uses_reward_model(alone)
    # nothing is known of a value: the actor's backbone with a head of zeros, or the critic's likewise
    assert alone.critic_model_name_or_path == "a" and alone.critic_head == "zero"
    assert resolved("--reward_fn", "f.py:f", *CRITIC).critic_head == "zero"
    assert resolved("--reward_fn", "f.py:f", *CRITIC, "--critic_head", "keep").critic_head == "keep"
    both = resolved("--reward_url", "http://x", "--reward_model_name_or_path", "r")
    assert uses_reward_model(both) and both.critic_head is None  # hangs on the model


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing scores the answers: give --reward_model_name_or_path, --reward_fn or --reward_url"),
        ([*CRITIC, "--advantage_estimator", "rloo", "--num_samples_per_prompt", "1"], "of at least 2, not 1"),
        ([*CRITIC, "--kl_estimator", "k3\\+"], "a reward has none: use k3"),
        ([*CRITIC, "--dual_clip", "0.9"], "--dual_clip 0.9 must be above 1"),
        ([*CRITIC, "--overlong_buffer", "256"], "--overlong_buffer 256 must be shorter than --max_answer_seq_len 256"),
        ([*CRITIC, "--max_tokens_per_micro_batch", "511"], "give at least 512"),
        ([*CRITIC, "--max_tokens_per_micro_batch", "512", "--gradient_accumulation_steps", "2"],
         "16 answers .* are no multiple of 32"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(words, message):
    words = [word.replace("\\", "") for word in words]
    with pytest.raises(ValueError, match=message) as error:
        resolved(*words)
    assert "\n" not in str(error.value)
