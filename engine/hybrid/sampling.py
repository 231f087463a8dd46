"""From logits to tokens: one uniform number a row and step, and the inverse of the cumulative distribution.

The uniform of a request's n-th token is a hash of the request's key and n. So what a request samples does
not depend on the batch it runs in, the slot it got, the rank, or the tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


# Logits divided by less would leave fp32's range.
LEAST_TEMPERATURE = 1e-30


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens. `top_k` 0 and `top_p` 1 cut nothing; `stop` are the end tokens' ids, which
    `min_new_tokens` forbids before that many tokens."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_new_tokens: int = 0
    stop: tuple[int, ...] = ()

    def check(self) -> None:
        """Raises ValueError, one line naming the value, for settings that mean nothing."""
        if not self.temperature >= LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature={self.temperature} must be above 0 (from {LEAST_TEMPERATURE} on): greedy is "
                "do_sample=False with 1.0"
            )
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be 0 (no cut) or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]")


def mix(*numbers: int) -> int:
    """A 64-bit key from integers, each bit of which depends on every bit of them (splitmix64's finalizer)."""
    state = 0
    for number in numbers:
        state = (state ^ (number & _MASK)) + _GOLDEN & _MASK
        state = (state ^ state >> 30) * _MIX[0] & _MASK
        state = (state ^ state >> 27) * _MIX[1] & _MASK
        state ^= state >> 31
    return state


def uniforms(keys: Sequence[int], steps: int, device: torch.device) -> torch.Tensor:
    """`[len(keys), steps]` numbers in (0, 1), fp32, each a hash of its key and column alone."""
    signed = [key - (1 << 64) if key >> 63 else key for key in keys]
    state = torch.tensor(signed, dtype=torch.int64)[:, None]
    state = state + torch.arange(1, steps + 1) * _to_signed(_GOLDEN)  # wraps, as 64-bit arithmetic should
    state = (state ^ _shift(state, 30)) * _to_signed(_MIX[0])
    state = (state ^ _shift(state, 27)) * _to_signed(_MIX[1])
    state = state ^ _shift(state, 31)
    # 24 bits and a half: never 0, never 1, exact in fp32
    return ((_shift(state, 40).double() + 0.5) / (1 << 24)).float().clamp_(max=1 - 2**-24).to(device)


def choose(
    logits: torch.Tensor, uniform: torch.Tensor | None, sampling: Sampling, too_early: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Next tokens and their log-probabilities.

    Args:
        logits: `[rows, vocabulary]`, fp32; overwritten.
        uniform: `[rows]`, for sampling.
        too_early: `[rows]` True where an end token may not be chosen yet, or None.

    Returns:
        tokens `[rows]` and their log-probabilities `[rows]` under the whole distribution at the sampling
        temperature: before any cut and before end tokens were forbidden, as training computes them.
    """
    if sampling.temperature != 1.0:
        logits.div_(sampling.temperature)
    # an end token outside the vocabulary ends nothing, and there is nothing to forbid
    stop = [token for token in sampling.stop if 0 <= token < logits.shape[-1]] if too_early is not None else []
    if not sampling.do_sample:
        total = logits.logsumexp(dim=-1)
        scores = _forbid(logits.clone(), stop, too_early) if stop else logits
        tokens = scores.argmax(dim=-1)
        return tokens, logits.gather(-1, tokens[:, None]).squeeze(-1) - total
    # forbidden before the softmax: after it, what is left may all have been rounded to 0
    kept = probabilities = torch.softmax(_forbid(logits.clone(), stop, too_early) if stop else logits, dim=-1)
    if sampling.top_k and sampling.top_k < logits.shape[-1]:
        kth = kept.topk(sampling.top_k, dim=-1).values[:, -1:]
        kept = kept.masked_fill(kept < kth, 0.0)
    if sampling.top_p is not None and sampling.top_p < 1.0:
        kept = _nucleus(kept, sampling.top_p)
    cumulative = kept.cumsum(dim=-1)
    total = cumulative[:, -1]
    # strictly below the total, so that the token found always has a probability above zero
    threshold = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, threshold[:, None], right=True).squeeze(-1)
    tokens.clamp_(max=logits.shape[-1] - 1)  # beyond it where logits are NaN, as the log-probability then is too
    if stop:
        return tokens, logits.gather(-1, tokens[:, None]).squeeze(-1) - logits.logsumexp(dim=-1)
    return tokens, probabilities.gather(-1, tokens[:, None]).squeeze(-1).log()


def _nucleus(kept: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest set of most likely tokens whose share of the remaining probability reaches `top_p`."""
    ordered, order = kept.sort(dim=-1, descending=True, stable=True)
    reached = ordered.cumsum(dim=-1)
    before = reached - ordered
    cut = before >= top_p * reached[:, -1:]
    cut[:, 0] = False
    return kept.scatter(-1, order, ordered.masked_fill(cut, 0.0))


def _forbid(scores: torch.Tensor, stop: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
    for token in stop:
        scores[:, token].masked_fill_(rows, -torch.inf)
    return scores


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64 (torch's is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _to_signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
