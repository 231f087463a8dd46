"""Log-probabilities (and entropies) of given tokens out of logits, without an fp32 copy of the logits.

The logits of a batch are its largest tensor by far: positions x vocabulary. Here they are walked in chunks
of rows, in fp32 whatever their own type, in the forward and in the backward pass; what is kept between the
two is the logits as they came and one number a row.
"""

from __future__ import annotations

import torch

# 4 Mi fp32 entries are 16 MiB: small beside any model, large enough that the loop costs nothing.
CHUNK_ELEMENTS = 4 * 1024 * 1024


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """`log softmax(logits / temperature)[token]` where `mask` is True, and 0 elsewhere.

    Args:
        logits: `[..., V]`, any floating type.
        tokens: `[...]` ids; anything may stand where the mask is False.
        mask: `[...]` bool. Masked rows cost nothing and get no gradient.
        temperature: positive.

    Returns:
        `[...]` in fp32, differentiable with respect to the logits.
    """
    return _TokenLogprobs.apply(logits, tokens, mask, temperature, False)[0]


def token_logprobs_and_entropy(
    logits: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_logprobs`, and the entropy in nats of each unmasked row's distribution, in the same pass.

    Both `[...]` in fp32, 0 where masked, and both differentiable.
    """
    return _TokenLogprobs.apply(logits, tokens, mask, temperature, True)


class _TokenLogprobs(torch.autograd.Function):
    """With p = softmax(z / t): d logp_k / dz_j = (1[j=k] - p_j) / t and d H / dz_j = -p_j (log p_j + H) / t."""

    @staticmethod
    def forward(ctx, logits, tokens, mask, temperature, with_entropy):
        if temperature <= 0:
            raise ValueError(f"temperature must be positive, not {temperature}")
        flat, rows = logits.reshape(-1, logits.shape[-1]), mask.reshape(-1).nonzero().squeeze(1)
        targets = tokens.reshape(-1)[rows].unsqueeze(1)
        logprobs = torch.zeros(flat.shape[0], dtype=torch.float32, device=flat.device)
        normalizers = torch.empty(len(rows), dtype=torch.float32, device=flat.device)
        entropies = torch.zeros_like(logprobs)
        for part in _chunks(len(rows), flat.shape[1]):
            scaled = flat[rows[part]].float() / temperature
            logp = torch.log_softmax(scaled, dim=-1)
            chosen = logp.gather(1, targets[part]).squeeze(1)
            logprobs[rows[part]] = chosen
            normalizers[part] = scaled.gather(1, targets[part]).squeeze(1) - chosen
            if with_entropy:
                # xlogy-like: a token of probability 0 adds 0, also where its log is -inf (a masked logit)
                entropies[rows[part]] = torch.special.entr(logp.exp()).sum(-1)
        ctx.save_for_backward(logits, rows, targets, normalizers, entropies)
        ctx.temperature, ctx.with_entropy = temperature, with_entropy
        if not with_entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs.view(mask.shape), entropies.view(mask.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logprobs, grad_entropies):
        logits, rows, targets, normalizers, entropies = ctx.saved_tensors
        flat = logits.reshape(-1, logits.shape[-1])
        grad = torch.zeros_like(flat)
        for part in _chunks(len(rows), flat.shape[1]):
            index = rows[part]
            logp = flat[index].float() / ctx.temperature - normalizers[part].unsqueeze(1)
            probabilities = logp.exp()
            outer = grad_logprobs.reshape(-1)[index].unsqueeze(1)
            piece = -probabilities * outer
            piece.scatter_add_(1, targets[part], outer)
            if ctx.with_entropy:
                surprise = torch.where(probabilities > 0, logp, 0.0) + entropies[index].unsqueeze(1)
                piece -= probabilities * surprise * grad_entropies.reshape(-1)[index].unsqueeze(1)
            grad[index] = (piece / ctx.temperature).to(grad.dtype)
        return grad.view(logits.shape), None, None, None, None


def _chunks(rows: int, width: int) -> list[slice]:
    step = max(1, CHUNK_ELEMENTS // width)
    return [slice(start, start + step) for start in range(0, rows, step)]
