"""PPO's step from its formulas: one answer at a time without padding, one token at a time, in float64.

Nothing of the product is called here but the models' own forward passes.
"""

from __future__ import annotations

import copy
import math
from argparse import Namespace
from dataclasses import dataclass

import torch


@dataclass
class Answer:
    """Token ids of a prompt and its answer, whether it ended, and the sampler's log-probabilities of it."""

    prompt: list[int]
    tokens: list[int]
    finished: bool
    gen_logprobs: list[float]
    greedy: list[int] | None = None


@dataclass
class Step:
    """Of every answer, token by token; losses, and the 2-norms of their gradients."""

    logprobs: list[list[float]]
    rewards: list[list[float]]
    advantages: list[list[float]]
    returns: list[list[float]] | None
    actor_loss: float
    actor_norm: float
    critic_loss: float | None = None
    critic_norm: float | None = None


def slow_step(actor, reference, critic, reward, answers: list[Answer], noise, args: Namespace, texts=()) -> Step:
    """The step of `args` on `answers`, and on `texts`, lists of tokens of one length.

    `noise[b][t]` is added to old log-probabilities and values.
    """
    actor, reference, reward = (double(model) for model in (actor, reference, reward))
    critic = double(critic) if critic is not None else None
    new = [token_logprobs(actor, a.prompt, a.tokens, args.temperature) for a in answers]
    entropies = [token_entropies(actor, a.prompt, a.tokens, args.temperature) for a in answers]
    ref = [[x.item() for x in token_logprobs(reference, a.prompt, a.tokens, args.temperature)] for a in answers]
    old = [[x.item() + noise[b][t] for t, x in enumerate(row)] for b, row in enumerate(new)]

    rewards = []
    for b, a in enumerate(answers):
        row = [-kl_weight(args) * kl(old[b][t] - ref[b][t], args.kl_estimator) for t in range(len(a.tokens))]
        row[-1] += shaped(score(reward, a.prompt + a.tokens), len(a.tokens), a.finished, args)
        rewards.append(row)

    values = returns = None
    if args.advantage_estimator == "gae":
        new_values = [state_values(critic, a.prompt, a.tokens) for a in answers]
        values = [[x.item() + noise[b][t] for t, x in enumerate(row)] for b, row in enumerate(new_values)]
        advantages = [gae(rewards[b], values[b], args.gamma, args.lam) for b in range(len(answers))]
        returns = [[a + v for a, v in zip(*rows, strict=True)] for rows in zip(advantages, values, strict=True)]
    elif args.advantage_estimator in ("grpo", "rloo"):
        advantages = grouped([sum(row) for row in rewards], [len(row) for row in rewards], args)
    else:
        advantages = []
        for b, a in enumerate(answers):
            later = [sum(args.gamma ** (k - t) * r for k, r in enumerate(rewards[b]) if k >= t)
                     for t in range(len(rewards[b]))]  # fmt: skip
            base = 0.0
            if args.advantage_estimator == "remax":
                base = shaped(score(reward, a.prompt + a.greedy), len(a.greedy), a.greedy[-1] == 2, args)
            advantages.append([g - base for g in later])
    trains = [a.finished or not args.mask_truncated for a in answers]
    if args.advantage_estimator in ("gae", "reinforce++") and not args.no_whiten_advantages:
        flat = [x for row, counts in zip(advantages, trains, strict=True) if counts for x in row]
        mean = sum(flat) / len(flat)
        std = math.sqrt(sum((x - mean) ** 2 for x in flat) / len(flat) + 1e-8)
        advantages = [[(x - mean) / std for x in row] for row in advantages]

    terms = [
        [
            policy_term(new[b][t], old[b][t], ref[b][t], entropies[b][t], advantages[b][t], a.gen_logprobs[t], args)
            for t in range(len(a.tokens))
        ]
        for b, a in enumerate(answers)
    ]
    actor_loss = averaged([row for row, counts in zip(terms, trains, strict=True) if counts], args.loss_aggregation)
    objective = actor_loss
    if texts:
        likelihoods = [x for ids in texts for x in token_logprobs(actor, ids[:1], ids[1:], 1.0)]
        objective = objective - args.unsup_coef * sum(likelihoods) / len(likelihoods)
    step = Step(
        [[x.item() for x in row] for row in new], rewards, advantages, returns, actor_loss.item(),
        norm(objective, actor),
    )  # fmt: skip
    if values is not None:
        errors = []
        for b in range(len(answers)):
            if trains[b]:
                for v, v_old, goal in zip(new_values[b], values[b], returns[b], strict=True):
                    near = v_old + torch.clamp(v - v_old, -args.cliprange_value, args.cliprange_value)
                    errors.append(0.5 * torch.maximum((v - goal) ** 2, (near - goal) ** 2))
        critic_loss = sum(errors) / len(errors)
        step.critic_loss, step.critic_norm = critic_loss.item(), norm(critic_loss, critic)
    return step


def policy_term(new, old, ref, entropy, advantage, gen, args):
    ratio = torch.exp(new - old)
    high = args.cliprange if args.cliprange_high is None else args.cliprange_high
    clipped = torch.clamp(ratio, 1 - args.cliprange, 1 + high)
    term = -torch.minimum(ratio * advantage, clipped * advantage)
    if args.dual_clip and advantage < 0:
        term = torch.clamp(term, max=-args.dual_clip * advantage)
    if args.tis_cap:
        term = term * min(math.exp(old - gen), args.tis_cap)
    if args.kl_in == "loss":
        d = new - ref
        term = term + args.kl_ctl * (torch.exp(-d) - 1 + d if args.kl_estimator == "k3" else d * d / 2)
    return term - args.entropy_coef * entropy


def averaged(rows, how):
    if how == "token-mean":
        return sum(sum(row) for row in rows) / sum(len(row) for row in rows)
    per_answer = [sum(row) / (len(row) if how == "seq-mean-token-mean" else 1) for row in rows]
    return sum(per_answer) / len(per_answer)


def kl_weight(args):
    return args.kl_ctl if args.kl_in == "reward" else 0.0


def kl(d, kind):
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kind]


def shaped(raw, length, finished, args):
    result = min(max(raw, -args.clip_reward_value), args.clip_reward_value)
    if not finished:
        result -= args.missing_eos_penalty
    if args.overlong_buffer:
        over = length - (args.max_answer_seq_len - args.overlong_buffer)
        result -= max(over, 0) / args.overlong_buffer * args.overlong_penalty
    return result


def gae(rewards, values, gamma, lam):
    advantages, following = [0.0] * len(rewards), 0.0
    for t in reversed(range(len(rewards))):
        next_value = values[t + 1] if t + 1 < len(values) else 0.0
        following = rewards[t] + gamma * next_value - values[t] + gamma * lam * following
        advantages[t] = following
    return advantages


def grouped(totals, lengths, args):
    size, worth = args.num_samples_per_prompt, []
    for start in range(0, len(totals), size):
        group = totals[start : start + size]
        for i, total in enumerate(group):
            if args.advantage_estimator == "rloo":
                worth.append(total - (sum(group) - total) / (size - 1))
            else:
                mean = sum(group) / size
                std = math.sqrt(sum((x - mean) ** 2 for x in group) / (size - 1))
                worth.append((group[i] - mean) / (std + 1e-6))
    return [[w] * n for w, n in zip(worth, lengths, strict=True)]


def token_logprobs(model, prompt, tokens, temperature):
    logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0] / temperature
    rows = logits[len(prompt) - 1 : -1]
    return [row[token] - torch.log(torch.exp(row).sum()) for row, token in zip(rows, tokens, strict=True)]


def token_entropies(model, prompt, tokens, temperature):
    logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0] / temperature
    entropies = []
    for row in logits[len(prompt) - 1 : -1]:
        p = torch.exp(row) / torch.exp(row).sum()
        entropies.append(-(p * torch.log(p)).sum())
    return entropies


def state_values(critic, prompt, tokens):
    return list(heads(critic, prompt + tokens)[len(prompt) - 1 : -1])


def score(reward, ids):
    return heads(reward, ids)[-1].item()


def heads(model, ids):
    """The score head at every position of one unpadded text, `[L]`."""
    hidden = model.model.base_model(input_ids=torch.tensor([ids])).last_hidden_state
    return model.head(hidden)[0, :, 0]


def double(model):
    return copy.deepcopy(model).double().requires_grad_(True).eval()


def norm(loss, model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return math.sqrt(sum(float((g**2).sum()) for g in gradients if g is not None))
