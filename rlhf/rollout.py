"""From prompts to experience: the actor answers, and the other models judge what it said.

Everything here runs without gradients and with dropout off, in micro-batches, and every rank makes the
same number of forward passes, as sharded models need.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from data import collate_prompts
from data.chat import decode_response, stop_token_ids
from rlhf.experience import Experience, response_logprobs, response_logprobs_and_entropy, response_mask_from
from rlhf.micro_batches import Cut
from rlhf.models import critic_values
from rlhf.retokenize import Retokenizer


@dataclass
class Rollout:
    """Answers to left-padded prompts; `T` is the longest answer of this rank. Those to one prompt lie side by side.

    input_ids, attention_mask `[B, P + T]`; response_mask, gen_logprobs `[B, T]` (the sampler's own
    log-probabilities); lengths, finished `[B]` (finished: ended by an end token, not cut off); rows: the `B` data
    rows that the prompts come from.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    response_mask: torch.Tensor
    gen_logprobs: torch.Tensor
    lengths: torch.Tensor
    finished: torch.Tensor
    rows: list[dict] = field(default_factory=list)

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def response_length(self) -> int:
        return self.response_mask.shape[1]

    def experience(self) -> Experience:
        """What is known of it before anyone has judged it."""
        return Experience(
            input_ids=self.input_ids,
            attention_mask=self.attention_mask,
            response_mask=self.response_mask,
            gen_logprobs=self.gen_logprobs,
        )

    def texts(self, tokenizer: Any) -> list[str]:
        """The answers as text, without end token."""
        return [decode_response(tokenizer, ids) for ids in self.responses()]

    def responses(self) -> list[list[int]]:
        """Token ids of each answer, its end token included, padding not."""
        answers = self.input_ids[:, -self.response_length :]
        return [row[: int(n)].tolist() for row, n in zip(answers, self.lengths, strict=True)]


@dataclass
class Models:
    """Who takes part in PPO, each model on an engine of its own.

    critic: None where the advantage estimator needs none; critic_tokenizer is its own, critic_words translates to
    it where its tokens are others than the actor's. scorer: see `rlhf.scoring`.
    """

    actor: Any
    reference: Any
    critic: Any
    scorer: Any
    critic_tokenizer: Any = None
    critic_words: Retokenizer | None = None


def generate(actor, items: list[dict], tokenizer, *, batch_size: int, seeds: list[int], **sampling) -> Rollout:
    """Sample answers to each prompt, `batch_size` prompts at a time.

    `seeds` has one number a prompt, on which its answers' dice depend and on nothing else: not on the batch, not on
    the number of ranks.

    `sampling` are keywords of `HybridEngine.generate` (max_new_tokens, temperature, top_k, top_p, do_sample,
    num_return_sequences).
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
    samples = sampling.get("num_return_sequences", 1)
    ids, mask = ids.repeat_interleave(samples, dim=0), mask.repeat_interleave(samples, dim=0)
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
        rows=[item["row"] for item in items for _ in range(samples)],
    )


@torch.no_grad()
def judge(rollout: Rollout, models: Models, *, cut: Cut, temperature: float) -> Experience:
    """Old and reference log-probabilities, values and raw scores of the sampled answers. Collective.

    The old log-probabilities are the training engine's own, so that the first ratio is exactly 1; the
    sampler's stay beside them in `gen_logprobs`.
    """
    for engine in (models.actor, models.reference, models.critic):
        if engine is not None:
            engine.eval()
    experience = rollout.experience()
    names = ("logprobs", "entropy", "ref_logprobs") + (("values",) if models.critic is not None else ())
    for name in names:
        setattr(experience, name, torch.zeros_like(rollout.gen_logprobs))
    if models.critic is not None and models.critic_words is not None:
        _translate_for_critic(experience, rollout, models.critic_words)
    for rows in cut.sorted_parts(experience):
        rows = rows.to(experience.input_ids.device)
        batch = experience.select(rows).trimmed()
        ids, mask, length = batch.input_ids, batch.attention_mask, batch.response_length
        logprobs, entropy = response_logprobs_and_entropy(models.actor, ids, mask, length, temperature)
        experience.logprobs[rows, :length] = logprobs
        experience.entropy[rows, :length] = entropy
        experience.ref_logprobs[rows, :length] = response_logprobs(models.reference, ids, mask, length, temperature)
        if models.critic is not None:
            experience.values[rows, :length] = critic_values(models.critic, batch)
    experience.scores = models.scorer(rollout, cut)
    return experience


def _translate_for_critic(experience: Experience, rollout: Rollout, words: Retokenizer) -> None:
    device, responses = rollout.input_ids.device, rollout.responses()
    finished = rollout.finished.tolist()
    whole = words.whole(rollout.rows, rollout.texts(words.actor), finished)
    ids, mask = words.padded(whole)
    places = torch.zeros(rollout.response_mask.shape, dtype=torch.long)
    for b, (row, response) in enumerate(zip(rollout.rows, responses, strict=True)):
        places[b, : len(response)] = torch.tensor(words.places(row, response, whole[b], finished[b]))
    experience.critic_ids, experience.critic_mask = ids.to(device), mask.to(device)
    experience.critic_places = places.to(device)


def _fit(tensor: torch.Tensor, length: int, fill: float) -> torch.Tensor:
    """Cut or pad `[B, N]` to `[B, length]`."""
    tensor = tensor[:, :length]
    return torch.nn.functional.pad(tensor, (0, length - tensor.shape[1]), value=fill)
