"""Packed rows through a causal model: each dialogue as if it were alone in its row."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from data import collate_packs, own_dialogue_mask

PROBE_LENGTHS = (5, 9, 3)
PROBE_TOLERANCE = 1e-3


def packed_logits(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits `[B, T, V]` of a batch of `data.collate_packs`; `model` is a causal model or an engine around one."""
    mask = own_dialogue_mask(batch["dialogue_ids"])
    config = getattr(model, "module", model).config
    if config._attn_implementation != "sdpa":  # which takes the truth; others add a bias to their scores
        bias = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
        mask = bias.masked_fill(~mask, torch.finfo(torch.float32).min)
    return model(
        input_ids=batch["input_ids"], attention_mask=mask, position_ids=batch["position_ids"], use_cache=False
    ).logits


@torch.no_grad()
def check_packing(model: PreTrainedModel, longest: int) -> None:
    """Tries a packed row of random tokens against its parts by themselves.

    Args:
        model: as it was loaded, before an engine takes it.
        longest: most tokens of a packed row.

    Raises:
        ValueError: the model's attention or positions do not keep dialogues apart. In one line.
    """
    kind = model.config.model_type
    window = getattr(model.config, "sliding_window", None)
    if window is not None and window < longest and getattr(model.config, "use_sliding_window", True):
        raise ValueError(
            f"--packing: {kind} looks back {window} tokens, less than --max_seq_len {longest}, and a packed row cannot "
            "keep both limits: lower --max_seq_len or leave out --packing"
        )
    generator = torch.Generator().manual_seed(0)
    items = []
    for length in PROBE_LENGTHS:
        ids = torch.randint(model.config.vocab_size, (length,), generator=generator)
        items.append({"input_ids": ids, "labels": ids})
    training = model.training
    model.eval()
    try:
        packed = packed_logits(model, collate_packs([items], 0))[0]
    except (ValueError, RuntimeError, TypeError) as error:
        raise ValueError(f"--packing: {kind} does not take packed rows ({error}): leave it out") from error
    alone = torch.cat([model(input_ids=item["input_ids"][None], use_cache=False).logits[0] for item in items])
    model.train(training)
    gap = float((packed.float() - alone.float()).abs().max() / alone.float().abs().max().clamp(min=1e-6))
    if not gap < PROBE_TOLERANCE:
        raise ValueError(
            f"--packing: {kind} mixes the dialogues of a packed row (logits differ by {gap:.1g} of their size): leave "
            "it out, --group_by_length saves padding too"
        )
