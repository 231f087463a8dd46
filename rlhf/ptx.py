"""The PTX loss of PPO: next-token cross-entropy on plain text, so that the actor keeps what pretraining taught it.

The texts (column `text`) are joined, each with its end token, and cut into blocks of one length, so that no
batch holds padding (InstructGPT, Ouyang et al. 2022, appendix C.4).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from data import Source, open_source, parse_source
from rlhf.experience import positions
from rlhf.losses import causal_lm_loss
from rlhf.training import batch_stream, sampler_for


class PTX:
    """Batches of text blocks `[B, block_length]`, the next one at every call; every rank reads its own.

    Args:
        source: a file, folder or hub name whose rows have a `text` column.

    Raises:
        FileNotFoundError: no such source. ValueError: no `text` column, or too little text for one batch.
    """

    def __init__(self, source: str | Source, tokenizer: Any, block_length: int, batch_size: int, seed: int):
        self._blocks = text_blocks(source, tokenizer, block_length)
        self._sampler = sampler_for(self._blocks, batch_size, seed)
        self.load_state_dict({"used": 0})

    def loss(self, model: Any) -> torch.Tensor:
        """Mean cross-entropy of the next batch under `model` (an engine), with its graph."""
        _, indices = next(self._stream)
        self._used += 1
        ids = self._blocks[torch.as_tensor(indices)].to(model.device)
        mask = torch.ones_like(ids)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions(mask), use_cache=False).logits
        return causal_lm_loss(logits, ids)[0]

    def state_dict(self) -> dict[str, int]:
        return {"used": self._used}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after the batches that a run has used."""
        self._used = state["used"]
        self._stream = batch_stream(self._sampler, self._used)


def text_source(name: str, subset: str | None) -> Source:
    """The source of `--unsupervised_dataset_name`, with the set that `--unsupervised_dataset_config_name` picks."""
    source = parse_source(name)
    return replace(source, subset=subset) if subset else source


def text_blocks(source: str | Source, tokenizer: Any, block_length: int) -> torch.Tensor:
    """All texts of a source as token blocks `[blocks, block_length]`; the rest that fills no block is left out."""
    stream: list[int] = []
    name = source.name if isinstance(source, Source) else source
    for place, record in open_source(source).train:
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise ValueError(f"--unsupervised_dataset_name {name}: {place} has no `text` column of text")
        ids = tokenizer(record["text"])["input_ids"]
        stream += ids if ids and ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]
    count = len(stream) // block_length
    if count == 0:
        raise ValueError(
            f"--unsupervised_dataset_name {name} has {len(stream)} tokens, less than one block of {block_length}"
        )
    return torch.tensor(stream[: count * block_length]).view(count, block_length)
