"""Generation through a module's own forward pass, for families that have no description here.

transformers' loop runs the module; the tokens are chosen by our sampling, so that seeds, log-probabilities
and limits mean the same as in the decoder.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from engine.adapters import adapted_ties, plain_name
from engine.hybrid.sampling import Sampling, choose, uniforms
from engine.hybrid.scheduler import Answers, OnToken, check_finite
from engine.hybrid.sources import Sources
from engine.modes import evaluation_mode


class _Chooser(LogitsProcessor):
    """Chooses and records every row's token, and hides all others from the loop's argmax."""

    def __init__(self, keys: list[int], limit: int, sampling: Sampling, device, on_token: OnToken | None):
        self.uniforms = uniforms(keys, limit, device) if sampling.do_sample else None
        self.sampling, self.on_token, self.step = sampling, on_token, 0
        rows = len(keys)
        self.tokens = torch.zeros(rows, limit, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(rows, limit, dtype=torch.float32, device=device)
        self.lengths = torch.full((rows,), limit, dtype=torch.int64, device=device)
        self.done = torch.zeros(rows, dtype=torch.bool, device=device)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        early = self.step < self.sampling.min_new_tokens
        uniform = self.uniforms[:, self.step] if self.uniforms is not None else None
        logits = scores.float().clone()
        tokens, logprobs = choose(logits, uniform, self.sampling, ~self.done if early else None)
        self.tokens[:, self.step], self.logprobs[:, self.step] = tokens, logprobs
        if self.on_token is not None:
            for row, (token, done) in enumerate(zip(tokens.tolist(), self.done.tolist(), strict=True)):
                if not done:
                    self.on_token(row, token)
        self.step += 1
        stop = torch.zeros_like(self.done)
        for token in self.sampling.stop:
            stop |= tokens == token
        self.lengths[stop & ~self.done] = self.step
        self.done |= stop
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)


@torch.no_grad()
def generate(
    module: nn.Module,
    prompts: list[torch.Tensor],
    prompt_of: list[int],
    keys: list[int],
    limits: list[int],
    sampling: Sampling,
    *,
    on_token: OnToken | None = None,
) -> Answers:
    """As `scheduler.generate`, requests of one limit as one left-padded batch.

    Not all as one: a row would run on to the longest limit, beyond the positions that a model may have learned.
    """
    device, longest = prompts[0].device, max(limits)
    answers = Answers(
        torch.zeros(len(keys), longest, dtype=torch.int64, device=device),
        torch.zeros(len(keys), longest, dtype=torch.float32, device=device),
        torch.tensor(limits, device=device),
    )
    for limit in sorted(set(limits)):
        rows = [row for row, own in enumerate(limits) if own == limit]
        hear = None if on_token is None else lambda row, token, rows=rows: on_token(rows[row], token)
        part = _generate(
            module, [prompts[prompt_of[row]] for row in rows], [keys[row] for row in rows], limit, sampling, hear
        )
        answers.tokens[rows, :limit], answers.logprobs[rows, :limit] = part.tokens, part.logprobs
        answers.lengths[rows] = part.lengths
    check_finite(answers)
    return answers


def _generate(
    module: nn.Module,
    prompts: list[torch.Tensor],
    keys: list[int],
    limit: int,
    sampling: Sampling,
    on_token: OnToken | None,
) -> Answers:
    device = prompts[0].device
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(keys), longest, dtype=torch.int64, device=device)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    chooser = _Chooser(keys, limit, sampling, device, on_token)
    config = GenerationConfig(
        max_new_tokens=limit,
        do_sample=False,
        num_beams=1,
        eos_token_id=list(sampling.stop) or None,
        pad_token_id=0,
        bos_token_id=None,
    )
    kept, module.generation_config = getattr(module, "generation_config", None), config
    try:
        with evaluation_mode(module):
            module.generate(ids, attention_mask=mask, logits_processor=LogitsProcessorList([chooser]), use_cache=True)
    finally:
        module.generation_config = kept
    return Answers(chooser.tokens, chooser.logprobs, chooser.lengths)


def gathered_copy(module: nn.Module, sources: Sources, dtype: torch.dtype) -> nn.Module:
    """A plain module of the same class with whole weights in `dtype`. Collective."""
    plain = module.get_base_model() if hasattr(module, "get_base_model") else module
    # FSDP2 puts a class of its own in front of the module's
    kind = next(c for c in type(plain).__mro__ if not c.__name__.startswith("FSDP"))
    config = copy.deepcopy(plain.config)
    if adapted_ties(module):
        config.tie_word_embeddings = False
    with torch.device("meta"):
        replica = kind(config)
    state = {}
    for name in sources.names:
        state[name] = sources.whole(name).to(dtype)
    for name, buffer in module.named_buffers():
        state[plain_name(name)] = buffer
    for name, _ in [*replica.named_parameters(), *replica.named_buffers()]:
        owner, _, leaf = name.rpartition(".")
        child = replica.get_submodule(owner)
        if leaf in child._parameters:
            child._parameters[leaf] = nn.Parameter(state[name], requires_grad=False)
        else:
            child._buffers[leaf] = state[name]
    replica.tie_weights()
    return replica.eval()
