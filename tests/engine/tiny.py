"""Tiny models and batches for the engine's tests, and plain single-process torch training to compare with."""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(tied: bool = False, seed: int = 0, **overrides) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    settings = dict(
        vocab_size=67,  # odd on purpose: rows of dimension 0 do not divide by 2 or 4
        hidden_size=32,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )
    return LlamaForCausalLM(LlamaConfig(**{**settings, **overrides})).float()


def token_batch(rows: int, length: int = 12, seed: int = 0, vocab: int = 67) -> dict[str, torch.Tensor]:
    """Right-padded rows of unequal length: `input_ids`, `attention_mask`, `labels` (-100 on padding), `[B, T]`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, vocab, (rows, length), generator=generator)
    lengths = torch.randint(3, length + 1, (rows,), generator=generator)
    mask = torch.arange(length)[None, :] < lengths[:, None]
    return {
        "input_ids": ids.masked_fill(~mask, 0),
        "attention_mask": mask,
        "labels": ids.masked_fill(~mask, -100),
    }


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Mean next-token cross-entropy over supervised tokens, and their number."""
    targets = labels[:, 1:].reshape(-1)
    loss = nn.functional.cross_entropy(logits[:, :-1].float().reshape(-1, logits.shape[-1]), targets, ignore_index=-100)
    return loss, int((targets != -100).sum())


def plain_training(model: nn.Module, batches: list[dict], lr: float, clip: float, weight_decay: float = 0.0):
    """AdamW on whole batches in one process: the parameters afterwards and each step's gradient norm."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    decay = [p for n, p in model.named_parameters() if p.requires_grad and p.ndim > 1]
    plain = [p for n, p in model.named_parameters() if p.requires_grad and p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=lr,
        betas=(0.9, 0.95),
    )
    norms = []
    for batch in batches:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss, _ = token_loss(logits, batch["labels"])
        loss.backward()
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in parameters if p.grad is not None]))
        norms.append(float(norm))
        if clip:
            torch.nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, norms
