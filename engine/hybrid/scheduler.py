"""Continuous batching: prompts wait, enter free slots together, and leave with their last token.

Sequences being generated fill the first slots without holes: when some finish, the last ones move into
their places, so a step costs what the sequences still alive cost. Order of entry never changes a result,
since each request samples by a key of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.hybrid.decoder import Model
from engine.hybrid.sampling import Sampling, choose, uniforms

# Enough sequences for the matrix products to be efficient; more only lengthens the cache's way through memory.
MAX_SLOTS = 128
# Prompt tokens (padding included) read in one pass: bounds the memory of activations.
PREFILL_TOKENS = 4096

# (request, token) as soon as it is chosen
OnToken = Callable[[int, int], None]


@dataclass
class Answers:
    """`tokens`, `logprobs` `[requests, N]`, filled up to `lengths` `[requests]`; as wide as the longest limit."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    lengths: torch.Tensor


@dataclass
class _Rows:
    """The sequences alive, one a slot: request, tokens chosen so far, newest token and its position."""

    request: torch.Tensor
    step: torch.Tensor
    token: torch.Tensor
    position: torch.Tensor

    def select(self, index: torch.Tensor) -> _Rows:
        return _Rows(*(value.index_select(0, index) for value in vars(self).values()))

    def joined(self, other: _Rows) -> _Rows:
        return _Rows(*(torch.cat(pair) for pair in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __len__(self) -> int:
        return self.request.shape[0]


@torch.inference_mode()
def generate(
    model: Model,
    prompts: list[torch.Tensor],
    prompt_of: list[int],
    keys: list[int],
    limits: list[int],
    sampling: Sampling,
    *,
    reserve: int = 0,
    on_token: OnToken | None = None,
) -> Answers:
    """Answer every request.

    Args:
        prompts: token ids `[length]` each, none empty, on the model's device.
        prompt_of, keys, limits: for each request the prompt it continues, its sampling key and its longest answer.
        reserve: positions of one sequence that the workspace is sized for at least.
        on_token: called for each token of each request in order.

    Raises:
        FloatingPointError: logits were not finite.
    """
    run = _Run(model, prompts, prompt_of, keys, limits, sampling, on_token)
    width = max(len(prompts[p]) + limit for p, limit in zip(prompt_of, limits, strict=True))
    slots = min(len(keys), MAX_SLOTS, max(1, model.tp.smallest(model.workspace.room(width))))
    model.workspace.open(slots, width, reserve)
    while run.waiting or len(run.rows):
        free = slots - len(run.rows)
        if run.waiting and (free >= max(1, slots // 8) or not len(run.rows)):
            run.admit(free)
        else:
            run.advance()
    check_finite(run.answers, model)
    return run.answers


def check_finite(answers: Answers, model: Model | None = None) -> None:
    """Refuse answers that were chosen from logits with NaN or infinite numbers in them.

    Raises:
        FloatingPointError: there are such; the workspace, which may hold them too, is given back.
    """
    if not answers.logprobs.isnan().any():
        return
    if model is not None:
        model.workspace.release()  # masked or not, a NaN in it would reach whoever comes into its slot
    raise FloatingPointError("generate: logits are not finite, since weights are not or activations overflowed")


class _Run:
    def __init__(self, model, prompts, prompt_of, keys, limits, sampling, on_token):
        device = model.device
        self.model, self.prompts, self.prompt_of = model, prompts, prompt_of
        self.sampling, self.on_token = sampling, on_token
        self.limits = torch.tensor(limits, device=device)
        requests, longest = len(keys), max(limits)
        self.uniforms = uniforms(keys, longest, device) if sampling.do_sample else None
        self.answers = Answers(
            torch.zeros(requests, longest, dtype=torch.int64, device=device),
            torch.zeros(requests, longest, dtype=torch.float32, device=device),
            torch.zeros(requests, dtype=torch.int64, device=device),
        )
        # prompts of like length enter together, which saves padding
        self.waiting = sorted(range(requests), key=lambda r: (len(prompts[prompt_of[r]]), prompt_of[r]))
        none = torch.zeros(0, dtype=torch.int64, device=device)
        self.rows = _Rows(none, none, none, none)
        self.width = 0
        self.until_limit = 0

    # -- entering --------------------------------------------------------------------------------------

    def admit(self, free: int) -> None:
        """Read the next prompts into the slots behind the rows; samples of one prompt share its reading."""
        first, entering = len(self.rows), [self.waiting.pop() for _ in range(min(free, len(self.waiting)))]
        distinct = list(dict.fromkeys(self.prompt_of[r] for r in entering))
        slot_of = {prompt: i for i, prompt in enumerate(distinct)}
        self.model.workspace.widen(max(len(self.prompts[p]) for p in distinct), first)
        logits = self._read([self.prompts[p] for p in distinct], first)
        leaders, copies, seen = [None] * len(distinct), [], set()
        for request in entering:
            prompt = self.prompt_of[request]
            if prompt in seen:
                copies.append(request)
            else:
                seen.add(prompt)
                leaders[slot_of[prompt]] = request
        order = leaders + copies
        device = self.model.device
        source = torch.tensor([slot_of[self.prompt_of[r]] for r in order], device=device)
        lengths = [len(self.prompts[self.prompt_of[r]]) for r in order]
        if copies:
            targets = torch.arange(first + len(leaders), first + len(order), device=device)
            self.model.workspace.move(source[len(leaders) :] + first, targets, max(lengths))
            logits = logits.index_select(0, source)
        request = torch.tensor(order, device=device)
        rows = _Rows(
            request,
            torch.zeros_like(request),
            torch.zeros_like(request),
            torch.tensor(lengths, device=device) - 1,
        )
        self._take(rows, logits)
        self.rows = self.rows.joined(rows)
        self.width = max(self.width, max(lengths) + 1)
        self._leave()
        self.until_limit = self._until_limit()

    def _read(self, prompts: list[torch.Tensor], first: int) -> torch.Tensor:
        """Logits after each prompt, read in passes of at most `PREFILL_TOKENS`."""
        logits, start = [], 0
        while start < len(prompts):
            stop, longest = start, 0
            while stop < len(prompts):
                longest = max(longest, len(prompts[stop]))
                if stop > start and (stop + 1 - start) * longest > PREFILL_TOKENS:
                    break
                stop += 1
            if longest > PREFILL_TOKENS:
                logits.append(self._read_long(prompts[start], first + start))
                start += 1
                continue
            part = prompts[start:stop]
            logits.append(self.model.prompts(torch.cat(part), [len(p) for p in part], first + start))
            start = stop
        return torch.cat(logits)

    def _read_long(self, prompt: torch.Tensor, slot: int) -> torch.Tensor:
        for offset in range(0, len(prompt), PREFILL_TOKENS):
            part = prompt[offset : offset + PREFILL_TOKENS]
            logits = self.model.prompts(part, [len(part)], slot, offset, len(prompt))
        return logits

    # -- going on --------------------------------------------------------------------------------------

    def advance(self) -> None:
        """One token for every row."""
        rows = self.rows
        self.model.workspace.widen(self.width, len(rows))
        logits = self.model.step(rows.token, rows.position, self.width)
        self._take(rows, logits)
        self.width += 1
        self.until_limit -= 1
        if self.sampling.stop or self.until_limit <= 0:
            self._leave()

    def _take(self, rows: _Rows, logits: torch.Tensor) -> None:
        """Choose each row's next token and note it. The rows' positions become the new tokens'."""
        sampling = self.sampling
        uniform = self.uniforms[rows.request, rows.step] if self.uniforms is not None else None
        too_early = rows.step < sampling.min_new_tokens if sampling.min_new_tokens else None
        tokens, logprobs = choose(logits, uniform, sampling, too_early)
        self.answers.tokens[rows.request, rows.step] = tokens
        self.answers.logprobs[rows.request, rows.step] = logprobs
        rows.token = tokens
        rows.step = rows.step + 1
        rows.position = rows.position + 1
        if self.on_token is not None:
            for request, token in zip(rows.request.tolist(), tokens.tolist(), strict=True):
                self.on_token(request, token)

    def _leave(self) -> None:
        """Let finished rows go, and close the gaps."""
        rows = self.rows
        finished = rows.step >= self.limits[rows.request]
        for token in self.sampling.stop:
            finished |= rows.token == token
        if not finished.any():
            return
        self.answers.lengths[rows.request[finished]] = rows.step[finished]
        alive = int(len(rows) - finished.sum())
        gaps = finished[:alive].nonzero().squeeze(1)
        movers = (~finished[alive:]).nonzero().squeeze(1) + alive
        if len(gaps):
            self.model.workspace.move(movers, gaps, self.width)
        index = torch.arange(alive, device=finished.device)
        index[gaps] = movers
        self.rows = rows.select(index)
        self.width = int(self.rows.position.max()) + 1 if alive else 0
        self.until_limit = self._until_limit()

    def _until_limit(self) -> int:
        return int((self.limits[self.rows.request] - self.rows.step).min()) if len(self.rows) else 0
