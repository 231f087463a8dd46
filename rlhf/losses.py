"""The losses of all stages, in fp32: means over real tokens or pairs, whatever stands in masked slots.

Every loss is finite and differentiable over no token at all: it is then 0 with zero gradients, because a rank
whose share is empty must still run its backward pass with the others.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rlhf.kl import kl_k3
from rlhf.logprobs import token_logprobs

IGNORED = -100  # the label of a token that is not supervised, as transformers has it
MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: far beyond any clip range, far below fp32's largest number

Diagnostics = dict[str, torch.Tensor]


def causal_lm_loss(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Next-token cross-entropy.

    Args:
        logits: `[B, T, V]`; those at position i predict the token at i + 1.
        labels: `[B, T]`: the token ids, `-100` where not supervised.

    Returns:
        The mean over the supervised tokens, and their number (the `weight` of `Engine.backward`).
    """
    following = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    supervised = following != IGNORED
    logprobs = token_logprobs(logits, following, supervised)
    return -masked_mean(logprobs, supervised), int(supervised.sum())


def pair_loss(
    chosen_scores: torch.Tensor, rejected_scores: torch.Tensor, margins: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """`-log sigmoid(chosen - rejected - margin)`, the mean over pairs: `[B], [B], [B] -> scalar`.

    With a margin the chosen answer must be better by that much for the same loss (Llama 2's reward loss). Linear for
    a large negative gap (100 at -100), so neither the loss nor its gradient overflows.
    """
    gaps = chosen_scores.float() - rejected_scores.float() - margins
    return -F.logsigmoid(gaps).sum() / max(1, gaps.numel())


def single_loss(scores: torch.Tensor, targets: torch.Tensor, is_label: torch.Tensor) -> torch.Tensor:
    """The loss of answers that were judged one by one, the mean over them: `[B], [B], [B] -> scalar`.

    Where `is_label` the target is the probability that the answer is good, and the loss the cross-entropy of
    sigmoid(score); elsewhere the target is a score, and the loss the squared error.
    """
    scores = scores.float()
    cross_entropy = F.binary_cross_entropy_with_logits(scores, targets.clamp(0, 1), reduction="none")
    losses = torch.where(is_label, cross_entropy, (scores - targets).square())
    return losses.sum() / max(1, losses.numel())


def pair_token_loss(
    chosen_values: torch.Tensor,
    rejected_values: torch.Tensor,
    chosen_ids: torch.Tensor,
    rejected_ids: torch.Tensor,
    chosen_mask: torch.Tensor,
    rejected_mask: torch.Tensor,
    margins: torch.Tensor | None = None,
) -> torch.Tensor:
    """The pair loss at every token from the first difference on: mean over tokens, then over pairs.

    DeepSpeed-Chat's reward loss. It runs to the end of the longer side; where the shorter one has ended,
    its score at its last real token stands in (never a value on padding). Two equal texts are compared at
    their last token.

    Args:
        chosen_values, rejected_values: `[B, T]`, the score head at every position.
        chosen_ids, rejected_ids: `[B, T]` token ids.
        chosen_mask, rejected_mask: `[B, T]` bool, real tokens; padded on either side.
        margins: `[B]`, taken off the gap at every token.
    """
    values_c, ids_c, real_c, length_c = _aligned(chosen_values, chosen_ids, chosen_mask)
    values_r, ids_r, real_r, length_r = _aligned(rejected_values, rejected_ids, rejected_mask)
    either = real_c | real_r
    differs = ((ids_c != ids_r) | ~(real_c & real_r)) & either
    longest = torch.maximum(length_c, length_r).unsqueeze(1)
    steps = torch.arange(ids_c.shape[1], device=ids_c.device)
    last = steps == longest - 1
    # a pair without any difference starts at its last token
    started = (differs | last).cumsum(1) > 0
    counted = started & either
    gaps = values_c - values_r if margins is None else values_c - values_r - margins.unsqueeze(1)
    losses = torch.where(counted, -F.logsigmoid(gaps), 0.0)
    per_pair = losses.sum(1) / counted.sum(1).clamp(min=1)
    return per_pair.sum() / max(1, per_pair.numel())


def _aligned(values: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor):
    """Values, ids, realness `[B, T]` and lengths `[B]` with real tokens moved to the left, the last one repeated."""
    lengths = mask.sum(1)
    first = mask.int().argmax(1, keepdim=True)
    steps = torch.arange(mask.shape[1], device=mask.device)
    index = first + torch.minimum(steps, (lengths - 1).clamp(min=0).unsqueeze(1))
    return values.float().gather(1, index), ids.gather(1, index), steps < lengths.unsqueeze(1), lengths


def dpo_loss(
    chosen_logprobs: torch.Tensor,
    rejected_logprobs: torch.Tensor,
    ref_chosen_logprobs: torch.Tensor,
    ref_rejected_logprobs: torch.Tensor,
    beta: float,
    label_smoothing: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Direct preference optimization (Rafailov et al. 2023), of whole answers' log-probabilities, `[B]` each.

    With the implicit reward `r = beta (log pi - log pi_ref)` of an answer and `d = r_chosen - r_rejected`:
    `-(1 - s) log sigmoid(d) - s log sigmoid(-d)`, s the label smoothing, the share of pairs taken to be the wrong
    way round.

    Returns:
        losses (not yet averaged, so that they can be weighed), chosen rewards, rejected rewards, `[B]` each.
    """
    chosen = beta * (chosen_logprobs.float() - ref_chosen_logprobs.float())
    rejected = beta * (rejected_logprobs.float() - ref_rejected_logprobs.float())
    gaps = chosen - rejected
    losses = -(1 - label_smoothing) * F.logsigmoid(gaps) - label_smoothing * F.logsigmoid(-gaps)
    return losses, chosen, rejected


def aggregate(terms: torch.Tensor, mask: torch.Tensor, how: str = "token-mean") -> torch.Tensor:
    """One number out of a loss's terms for every token, `[B, T], [B, T] bool -> scalar` fp32.

    token-mean: the mean over all tokens; seq-mean-token-mean: over answers, of an answer's mean (GRPO's paper);
    seq-mean-token-sum: over answers, of an answer's sum (Dr. GRPO, up to a constant). Answers without any token in
    the mask count nowhere. `units` is what the result is a mean over.
    """
    if how == "token-mean":
        return masked_mean(terms, mask)
    rows = torch.where(mask, terms.float(), 0.0).sum(1)
    if how == "seq-mean-token-mean":
        rows = rows / mask.sum(1).clamp(min=1)
    return rows.sum() / mask.any(1).sum().clamp(min=1)


def units(mask: torch.Tensor, how: str = "token-mean") -> int:
    """How many units `aggregate` takes the mean over: what weighs a micro-batch in its update."""
    return int(mask.sum() if how == "token-mean" else mask.any(1).sum())


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    cliprange: float,
    *,
    cliprange_high: float | None = None,
    dual_clip: float | None = None,
    weights: torch.Tensor | None = None,
    aggregation: str = "token-mean",
) -> tuple[torch.Tensor, Diagnostics]:
    """PPO's clipped loss, `max(-A r, -A clip(r, 1 - c, 1 + c))` with `r = exp(logprobs - old_logprobs)`.

    Args:
        logprobs, old_logprobs, advantages: `[B, T]`.
        mask: `[B, T]` bool, response tokens.
        cliprange: c.
        cliprange_high: another c above 1 (clip-higher, DAPO); c on both sides without.
        dual_clip: bounds a token's loss by `-dual_clip A` where A < 0, however large its ratio (Ye et al. 2020).
        weights: `[B, T]` factors of the tokens' losses (importance weights); denominators do not change.
        aggregation: see `aggregate`.

    Returns:
        The loss, and detached scalars, means over the masked tokens: ratio_mean, ratio_max, ratio_min;
        clip_fraction (tokens whose gradient a clip removed), clip_fraction_high, clip_fraction_low (those
        above 1 + c and below 1 - c); approx_kl (`mean(r - 1 - log r)`, never negative) and approx_kl_k1
        (`mean(-log r)`); tokens.
    """
    logprobs, advantages = logprobs.float(), torch.where(mask, advantages.float(), 0.0)
    log_ratio = torch.where(mask, logprobs - old_logprobs.float(), 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    high = cliprange if cliprange_high is None else cliprange_high
    clipped = -advantages * ratio.clamp(1.0 - cliprange, 1.0 + high)
    terms = torch.maximum(plain, clipped)
    active = clipped > plain
    if dual_clip is not None:
        bound = -dual_clip * advantages
        is_bounded = (advantages < 0) & (terms > bound)
        terms, active = torch.where(is_bounded, bound, terms), active | is_bounded
    if weights is not None:
        terms = terms * torch.where(mask, weights, 0.0)
    loss = aggregate(terms, mask, aggregation)
    with torch.no_grad():
        diagnostics = {
            "ratio_mean": masked_mean(ratio, mask),
            "ratio_max": _masked_extreme(ratio, mask, largest=True),
            "ratio_min": _masked_extreme(ratio, mask, largest=False),
            "clip_fraction": masked_mean(active, mask),
            "clip_fraction_high": masked_mean(active & (ratio > 1.0), mask),
            "clip_fraction_low": masked_mean(active & (ratio < 1.0), mask),
            "approx_kl": masked_mean(kl_k3(-log_ratio), mask),
            "approx_kl_k1": masked_mean(-log_ratio, mask),
            "tokens": mask.sum().float(),
        }
    return loss, diagnostics


def sampler_weights(old_logprobs: torch.Tensor, gen_logprobs: torch.Tensor, cap: float) -> torch.Tensor:
    """Truncated importance weights `min(exp(old - gen), cap)` of what the sampler drew, `[B, T]`, without gradient.

    The sampler's numbers differ a little from the training engine's (another order of sums, another type); the
    weights make the loss an estimate under the policy that trains (Yao et al. 2025).
    """
    difference = (old_logprobs.detach().float() - gen_logprobs.detach().float()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.exp().clamp(max=cap)


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    cliprange_value: float | None,
) -> tuple[torch.Tensor, Diagnostics]:
    """The critic's clipped loss, `1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)`.

    Args:
        values, old_values, returns: `[B, T]`.
        mask: `[B, T]` bool, response tokens.
        cliprange_value: c; None for the plain squared error.

    Returns:
        The mean over the masked tokens, and detached scalars: value_clip_fraction (tokens whose clipped
        error is the larger), value_mean, return_mean, value_error (root of the mean squared error), tokens.
    """
    values = torch.where(mask, values.float(), 0.0)
    old_values, returns = (torch.where(mask, x.float(), 0.0) for x in (old_values, returns))
    plain = clipped = (values - returns).square()
    if cliprange_value is not None:
        near = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
        clipped = (near - returns).square()
    loss = 0.5 * masked_mean(torch.maximum(plain, clipped), mask)
    with torch.no_grad():
        diagnostics = {
            "value_clip_fraction": masked_mean(clipped > plain, mask),
            "value_mean": masked_mean(values, mask),
            "return_mean": masked_mean(returns, mask),
            "value_error": masked_mean(plain, mask).sqrt(),
            "tokens": mask.sum().float(),
        }
    return loss, diagnostics


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of `x` over the True slots of `mask`, in fp32; 0, with its graph, over none."""
    return torch.where(mask, x.float(), 0.0).sum() / mask.sum().clamp(min=1)


def _masked_extreme(x: torch.Tensor, mask: torch.Tensor, largest: bool) -> torch.Tensor:
    if not mask.any():
        return x.new_zeros(())
    return x.masked_fill(~mask, float("-inf")).max() if largest else x.masked_fill(~mask, float("inf")).min()
