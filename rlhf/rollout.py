"""From prompts to experience: the actor answers, and the four models judge what it said.

Everything here runs without gradients and with dropout off, in micro-batches, and every rank makes the
same number of forward passes, as sharded models need.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from data import collate_prompts
from data.chat import stop_token_ids
from rlhf.experience import Experience, response_logprobs, response_logprobs_and_entropy, response_mask_from
from rlhf.models import end_scores, response_values, values


@dataclass
class Rollout:
    """Sampled answers to left-padded prompts; `T` is the longest answer of this rank.

    input_ids, attention_mask `[B, P + T]`; response_mask, gen_logprobs `[B, T]` (the sampler's own
    log-probabilities); lengths, finished `[B]` (finished: ended by an end token, not cut off).
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    response_mask: torch.Tensor
    gen_logprobs: torch.Tensor
    lengths: torch.Tensor
    finished: torch.Tensor

    @property
    def response_length(self) -> int:
        return self.response_mask.shape[1]

    def responses(self) -> list[list[int]]:
        """Token ids of each answer, its end token included, padding not."""
        answers = self.input_ids[:, -self.response_length :]
        return [row[: int(n)].tolist() for row, n in zip(answers, self.lengths, strict=True)]


@dataclass
class Models:
    """The four models of PPO, each on an engine of its own."""

    actor: object
    reference: object
    critic: object
    reward: object


def generate(actor, items: list[dict], tokenizer, *, batch_size: int, seeds: list[int], **sampling) -> Rollout:
    """Sample one answer for each prompt, `batch_size` prompts at a time.

    `seeds` has one number a prompt, on which its answer's dice depend and on nothing else: not on the batch, not on
    the number of ranks.

    `sampling` are keywords of `HybridEngine.generate` (max_new_tokens, temperature, top_k, top_p, do_sample).
    """
    batch = collate_prompts(items, tokenizer.pad_token_id)
    ids, mask = batch["input_ids"].to(actor.device), batch["attention_mask"].to(actor.device)
    actor.eval()
    parts = []
    for start in range(0, len(items), batch_size):
        rows = slice(start, start + batch_size)
        output = actor.generate(
            ids[rows],
            mask[rows],
            eos_token_id=stop_token_ids(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            seed=seeds[rows],
            return_dict_in_generate=True,
            **sampling,
        )
        parts.append(output)
    lengths = torch.cat([part.lengths for part in parts])
    longest = max(1, int(lengths.max()))
    prompt_length = ids.shape[1]
    answers = torch.cat([_fit(part.sequences[:, prompt_length:], longest, tokenizer.pad_token_id) for part in parts])
    response_mask = response_mask_from(lengths, longest)
    return Rollout(
        input_ids=torch.cat([ids, answers.masked_fill(~response_mask, tokenizer.pad_token_id)], dim=1),
        attention_mask=torch.cat([mask, response_mask], dim=1),
        response_mask=response_mask,
        gen_logprobs=torch.cat([_fit(part.logprobs, longest, 0.0) for part in parts]).masked_fill(~response_mask, 0.0),
        lengths=lengths,
        finished=torch.cat([part.finished for part in parts]),
    )


@torch.no_grad()
def judge(rollout: Rollout, models: Models, *, micro_batch: int, temperature: float) -> Experience:
    """Old and reference log-probabilities, values and raw scores of the sampled answers.

    The old log-probabilities are the training engine's own, so that the first ratio is exactly 1; the
    sampler's stay beside them in `gen_logprobs`.
    """
    for engine in (models.actor, models.reference, models.critic, models.reward):
        engine.eval()
    experience = Experience(
        input_ids=rollout.input_ids,
        attention_mask=rollout.attention_mask,
        response_mask=rollout.response_mask,
        gen_logprobs=rollout.gen_logprobs,
    )
    for name in ("logprobs", "entropy", "ref_logprobs", "values"):
        setattr(experience, name, torch.zeros_like(rollout.gen_logprobs))
    experience.scores = rollout.gen_logprobs.new_zeros(len(experience))
    # sorted by length, so that a micro-batch holds little padding; what is said of a row does not hang on its company
    for rows in experience.lengths.argsort(stable=True).split(micro_batch):
        batch = experience.select(rows).trimmed()
        ids, mask, length = batch.input_ids, batch.attention_mask, batch.response_length
        logprobs, entropy = response_logprobs_and_entropy(models.actor, ids, mask, length, temperature)
        experience.logprobs[rows, :length] = logprobs
        experience.entropy[rows, :length] = entropy
        experience.ref_logprobs[rows, :length] = response_logprobs(models.reference, ids, mask, length, temperature)
        experience.values[rows, :length] = response_values(models.critic, ids, mask, length)
        experience.scores[rows] = end_scores(values(models.reward, ids, mask), mask)
    return experience


def _fit(tensor: torch.Tensor, length: int, fill: float) -> torch.Tensor:
    """Cut or pad `[B, N]` to `[B, length]`."""
    tensor = tensor[:, :length]
    return torch.nn.functional.pad(tensor, (0, length - tensor.shape[1]), value=fill)
