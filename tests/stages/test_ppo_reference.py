"""PPO's step against a slow, plain one: rewards, advantages, losses and their gradients' norms."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

import engine
from data.chat import encode_prompt
from rlhf.arguments import parse, ppo_parser
from rlhf.micro_batches import Cut, update_parts
from rlhf.models import load_tokenizer, new_score_model
from rlhf.ppo_metrics import StepMetrics
from rlhf.ppo_models import load_models
from rlhf.ppo_options import resolve_options
from rlhf.ppo_update import update
from rlhf.ptx import PTX, text_blocks
from rlhf.rollout import generate, judge
from rlhf.score_scale import ScoreScale
from rlhf.training import sampler_for
from stages.ppo import add_advantages, shaped_scores
from tests.helpers import run_ranks
from tests.rlhf.tiny_models import causal_model, folder
from tests.stages.slow_ppo import Answer, slow_step

QUESTIONS = ["Say red.", "Say blue please, and green too.", "Hello", "What is six and ten?"]
LONGEST = 6
BLOCK = 12  # tokens of a text block for the PTX loss
WHOLE = slice(None)


@cache
def score_folder(family: str, seed: int) -> Path:
    path, tokenizer = Path(mkdtemp()), load_tokenizer(folder(family))
    model = new_score_model(folder(family, seed=seed), tokenizer, seed=seed)
    with torch.no_grad():
        model.head.weight.mul_(20)  # scores and values of the size of one
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@cache
def texts() -> Path:
    path = Path(mkdtemp()) / "texts.jsonl"
    rows = [{"text": f"The sun is hot. It is {i}, or cold. " * 3} for i in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def paths(family: str) -> dict:
    return {
        "actor_model_name_or_path": folder(family),
        "critic_model_name_or_path": score_folder(family, 2),
        "reward_model_name_or_path": score_folder(family, 3),
    }


def arguments(family: str | None, **flags):
    """Of a run with that family's models; None: with those that the flags name."""
    settings = {
        **(paths(family) if family else {}),
        "output_dir": "unused",
        "max_prompt_seq_len": 40,
        "max_answer_seq_len": LONGEST,
        "per_device_generation_batch_size": 4,
        "per_device_training_batch_size": 4,
        **flags,
    }
    argv: list[str] = []
    for name, value in settings.items():
        argv += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    args = parse(ppo_parser(), argv)
    resolve_options(args)
    return args


class Prepared:
    """Models with a reference of other weights, and one judged rollout; `noise` as if weights had moved since."""

    def __init__(self, family: str, args, noise_size: float = 0.0, seed: int = 0, share: slice = WHOLE):
        tokenizer = load_tokenizer(args.actor_model_name_or_path)
        self.args, self.models = args, load_models(args, 10, tokenizer)
        self.models.reference = causal_model(family, seed=1)
        self.ptx = None
        if args.unsupervised_dataset_name:
            self.ptx = PTX(args.unsupervised_dataset_name, tokenizer, BLOCK, args.seed)
        rows = [{"prompt": f"\n\nHuman: {text}\n\nAssistant:"} for text in QUESTIONS]
        items = [{"prompt_ids": torch.tensor(encode_prompt(tokenizer, row)), "row": row} for row in rows][share]
        seeds = [seed * 100 + i for i in range(len(rows))][share]
        options = {"batch_size": 4, "seeds": seeds, "max_new_tokens": LONGEST, "temperature": args.temperature}
        samples = args.num_samples_per_prompt
        self.rollout = generate(
            self.models.actor, items, tokenizer, do_sample=True, num_return_sequences=samples, **options
        )
        if share == WHOLE:
            end_some(self.rollout)
        cut, scale = Cut(args.per_device_training_batch_size), ScoreScale()
        self.experience = judge(self.rollout, self.models, cut=cut, temperature=args.temperature)
        self.noise = torch.zeros(self.rollout.response_mask.shape)
        if noise_size:
            self.noise.normal_(0, noise_size, generator=torch.Generator().manual_seed(seed))
            self.experience.logprobs = self.experience.logprobs + self.noise
            if self.experience.values is not None:
                self.experience.values = self.experience.values + self.noise
        self.greedy = None
        if args.advantage_estimator == "remax":
            self.greedy = generate(self.models.actor, items, tokenizer, do_sample=False, **options)
            scores = shaped_scores(self.models.scorer(self.greedy, cut), self.greedy, scale, args)
            self.experience.greedy_scores = scores.repeat_interleave(samples)
        add_advantages(self.experience, self.rollout, scale, args.kl_ctl, args)

    def answers(self) -> list[Answer]:
        width = self.rollout.input_ids.shape[1] - self.rollout.response_length
        answers = []
        for b, tokens in enumerate(self.rollout.responses()):
            prompt = self.rollout.input_ids[b, :width][self.rollout.attention_mask[b, :width]].tolist()
            gen = self.rollout.gen_logprobs[b, : len(tokens)].tolist()
            greedy = self.greedy.responses()[b // self.args.num_samples_per_prompt] if self.greedy else None
            answers.append(Answer(prompt, tokens, bool(self.rollout.finished[b]), gen, greedy))
        return answers

    def step(self) -> dict:
        """One update; the line of metrics."""
        metrics, args = StepMetrics(), self.args
        cut = Cut(args.per_device_training_batch_size, args.max_tokens_per_micro_batch)
        order = torch.Generator().manual_seed(1)
        for part in update_parts(
            self.experience, cut, epochs=1, window=args.gradient_accumulation_steps, generator=order
        ):
            figures = update(self.models, part, args, kl_ctl=args.kl_ctl, ptx=self.ptx)
            metrics.add(*figures.sums())
        return metrics.flush(self.models.actor, self.models.critic, 0, 0.0)


def end_some(rollout) -> None:
    """Every other answer ends early: random models hardly ever say the end token themselves."""
    for b in range(0, len(rollout), 2):
        length = 1 + b % (LONGEST - 1)
        rollout.lengths[b], rollout.finished[b] = length, True
        rollout.response_mask[b] = torch.arange(rollout.response_length) < length
        rollout.input_ids[b, -rollout.response_length + length - 1] = 2
    rollout.attention_mask[:, -rollout.response_length :] = rollout.response_mask
    rollout.gen_logprobs.mul_(rollout.response_mask)


GROUP = {"num_samples_per_prompt": 3, "per_device_training_batch_size": 12}
CASES = {
    "defaults": ({}, 0.0),
    "weights moved": ({"no_whiten_advantages": True, "temperature": 0.7, "gamma": 0.9, "kl_ctl": 0.3}, 0.3),
    "shaping": (
        {"kl_estimator": "k3", "missing_eos_penalty": 0.7, "overlong_buffer": 4, "clip_reward_value": 0.5,
         "mask_truncated": True},
        0.0,
    ),
    "clips": ({"cliprange": 0.1, "cliprange_high": 0.3, "dual_clip": 1.2, "kl_estimator": "k2", "tis_cap": 0.9}, 0.5),
    "grpo": ({"advantage_estimator": "grpo", "kl_in": "loss", "loss_aggregation": "seq-mean-token-mean", **GROUP}, 0.2),
    "rloo": (
        {"advantage_estimator": "rloo", "entropy_coef": 0.1, "loss_aggregation": "seq-mean-token-sum",
         "mask_truncated": True, **GROUP},
        0.2,
    ),
    "reinforce++": ({"advantage_estimator": "reinforce++", "kl_in": "loss", "kl_estimator": "k2", "gamma": 0.95}, 0.1),
    "remax": ({"advantage_estimator": "remax", **GROUP}, 0.1),
    "ptx": ({"unsupervised_dataset_name": texts(), "unsup_coef": 2.0}, 0.1),
}  # fmt: skip


def blocks(args, count: int) -> list[list[int]]:
    """The first text blocks of a run; none without the PTX loss."""
    if not args.unsupervised_dataset_name:
        return []
    every = text_blocks(args.unsupervised_dataset_name, load_tokenizer(args.actor_model_name_or_path), BLOCK)
    return every[sampler_for(every, 1, args.seed).order(0)[:count]].tolist()


@pytest.mark.parametrize(("family", "seed"), [("llama", 0), ("gpt2", 1)])
@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_slow_one(case, family, seed):
    flags, noise = CASES[case]
    args = arguments(family, **flags)
    ours = Prepared(family, args, noise, seed)
    models, answers = ours.models, ours.answers()
    slow = slow_step(
        models.actor.module, models.reference, models.critic.module if models.critic else None,
        models.scorer.model.module, answers, ours.noise.tolist(), args, blocks(args, len(answers)),
    )  # fmt: skip
    got = ours.experience
    for b, answer in enumerate(answers):
        n = len(answer.tokens)
        assert got.rewards[b, :n].tolist() == pytest.approx(slow.rewards[b], abs=1e-5)
        if answer.finished or not args.mask_truncated:
            assert got.advantages[b, :n].tolist() == pytest.approx(slow.advantages[b], abs=1e-5)
        assert got.loss_mask[b, :n].all() == (answer.finished or not args.mask_truncated)
        assert not got.advantages[b, n:].any() and not got.rewards[b, n:].any()
        if slow.returns is not None:
            assert got.returns[b, :n].tolist() == pytest.approx(slow.returns[b], abs=1e-5)
    line = ours.step()
    assert line["actor_loss"] == pytest.approx(slow.actor_loss, abs=1e-5)
    assert line["grad_norm"] == pytest.approx(slow.actor_norm, rel=1e-5, abs=1e-5)
    if slow.critic_loss is None:
        assert line["critic_loss"] is None and line["critic_grad_norm"] is None
    else:
        assert line["critic_loss"] == pytest.approx(slow.critic_loss, abs=1e-5)
        assert line["critic_grad_norm"] == pytest.approx(slow.critic_norm, rel=1e-5, abs=1e-5)
    if not noise:
        assert line["ratio_max"] == pytest.approx(1.0, abs=1e-5) and line["clip_fraction"] == 0
    elif case == "clips":
        assert line["clip_fraction_high"] > 0 and line["clip_fraction_low"] > 0


CUTS = {
    "micro-batches of 2": {"per_device_training_batch_size": 2, "gradient_accumulation_steps": 4},
    "micro-batches of 3": {"per_device_training_batch_size": 3, "gradient_accumulation_steps": 3},
    "a budget of tokens": {"max_tokens_per_micro_batch": 60},
    "a budget for two rows": {"max_tokens_per_micro_batch": 100, "gradient_accumulation_steps": 1},
}


def updated(share: slice = WHOLE, noise: float = 0.3, family: str | None = "llama", **flags):
    """Losses and norms of one update of 8 answers to 4 prompts, and the weights of actor and critic after it.

    By plain gradient descent at rate 1 (clipped to norm 1): Adam's first step would blow rounding up to its rate.
    """
    flags = {"num_samples_per_prompt": 2, "per_device_training_batch_size": 8, **flags}
    ours = Prepared("llama", arguments(family, **flags), noise, share=share)
    engines = [eng for eng in (ours.models.actor, ours.models.critic) if eng is not None]
    for eng in engines:
        eng.optimizer = torch.optim.SGD([p for group in eng.optimizer.param_groups for p in group["params"]], lr=1.0)
    line = ours.step()
    weights = {f"{i}.{name}": p.clone() for i, eng in enumerate(engines) for name, p in eng.gather_full_parameters()}
    names = ("actor_loss", "critic_loss", "grad_norm", "critic_grad_norm", "ratio_mean", "ptx_loss")
    return {name: line[name] for name in names if line[name] is not None}, weights


def same_update(one, other):
    for name, value in one[0].items():
        assert other[0][name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    for name, weight in one[1].items():
        torch.testing.assert_close(other[1][name], weight, atol=1e-5, rtol=0, msg=lambda text, name=name: name + text)


PTX_FLAGS = {"unsupervised_dataset_name": texts(), "unsup_coef": 2.0}
ESTIMATORS = {
    "gae": PTX_FLAGS,
    "grpo": {"advantage_estimator": "grpo", "kl_in": "loss", "loss_aggregation": "seq-mean-token-mean"},
    "rloo, truncated masked": {"advantage_estimator": "rloo", "mask_truncated": True, **PTX_FLAGS},
    "reinforce++": {"advantage_estimator": "reinforce++", "loss_aggregation": "seq-mean-token-sum"},
    "remax": {"advantage_estimator": "remax"},
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_update_is_the_same_however_it_is_cut(estimator):
    whole = updated(**ESTIMATORS[estimator])
    assert whole[0]["ratio_mean"] != pytest.approx(1.0, abs=1e-3)
    for cut in CUTS.values():
        same_update(whole, updated(**ESTIMATORS[estimator], **cut))


def rank_update(rank, world, flags):
    engine.init_distributed()
    share = slice(0, 2) if rank == 0 else slice(2, 4)
    return updated(share, noise=0.0, family=None, per_device_training_batch_size=4, **flags)


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_two_ranks_make_the_update_of_one(estimator):
    """The prompts of one process dealt to two, whose answers have unequal lengths: whitening and means are global."""
    flags = {**paths("llama"), **ESTIMATORS[estimator], "max_tokens_per_micro_batch": 60}
    flags |= {"actor_zero_stage": 2, "critic_zero_stage": 3}
    first, second = run_ranks(rank_update, 2, flags)
    assert first[0] == second[0]
    same_update(updated(slice(0, 4), noise=0.0, **ESTIMATORS[estimator]), first)


@pytest.mark.parametrize("poisoned", ["actor", "critic", None])
def test_aligned_overflows_skip_both_steps(poisoned):
    """One engine's loss is not finite: with --align_overflow neither model moves, without it the other one does."""
    for align in (True, False):
        flags = {"align_overflow": True} if align else {}
        ours = Prepared("llama", arguments("llama", num_warmup_steps=0, **flags))
        if poisoned == "actor":
            ours.experience.advantages = ours.experience.advantages * float("nan")
        elif poisoned == "critic":
            ours.experience.returns = ours.experience.returns * float("nan")
        ours.step()
        applied = [eng.was_step_applied() for eng in (ours.models.actor, ours.models.critic)]
        expected = [poisoned != "actor", poisoned != "critic"]
        assert applied == ([all(expected)] * 2 if align else expected)


@pytest.mark.parametrize(("critic", "head"), [(None, "keep"), ("gpt2", "zero")])
def test_where_a_reward_model_scores_a_critic_keeps_the_head_it_has(critic, head):
    flags = {"critic_model_name_or_path": folder(critic)} if critic else {}
    args = arguments("llama", **flags)
    models = load_models(args, 10, load_tokenizer(args.actor_model_name_or_path))
    assert args.critic_head == head and bool(models.critic.module.head.weight.any()) == (head == "keep")
