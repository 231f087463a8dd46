"""The PTX loss of PPO: next-token cross-entropy on plain text, so that the actor keeps what pretraining taught it.

The texts (column `text`) are joined, each with its end token, and cut into blocks of one length, so that no
batch holds padding (InstructGPT, Ouyang et al. 2022, appendix C.4).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from data import Source, open_source, parse_source
from data.cache import tokenizer_hash
from data.identity import refuse_other, source_identity
from rlhf.experience import positions
from rlhf.losses import causal_lm_loss
from rlhf.training import batch_stream, sampler_for


class PTX:
    """Text blocks of `block_length` tokens, the next ones at every call. Ranks deal the blocks out one by one, so that
    an update reads the same ones however many ranks and micro-batches share it.

    Args:
        source: a file, folder or hub name whose rows have a `text` column.

    Raises:
        FileNotFoundError: no such source. ValueError: no `text` column, or too little text for one block a rank.
    """

    def __init__(self, source: str | Source, tokenizer: Any, block_length: int, seed: int):
        self._blocks = text_blocks(source, tokenizer, block_length)
        self._sampler = sampler_for(self._blocks, 1, seed)
        opened = open_source(source)
        self._identity = {
            "all": {"tokenizer": tokenizer_hash(tokenizer), "tokens of a text block": block_length, "seed": seed},
            "sources": [source_identity(opened.source, opened.content_hash())],
        }
        self.load_state_dict({"epoch": 0, "blocks": 0, "identity": self._identity})

    def loss(self, model: Any, count: int) -> torch.Tensor:
        """Mean cross-entropy of the next `count` blocks of this rank under `model` (an engine), with its graph."""
        indices = [next(self._stream)[1][0] for _ in range(count)]
        self._used += count
        ids = self._blocks[torch.as_tensor(indices)].to(model.device)
        mask = torch.ones_like(ids)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions(mask), use_cache=False).logits
        return causal_lm_loss(logits, ids)[0]

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how many of its blocks all ranks together have read."""
        epoch, steps = divmod(self._used, len(self._sampler))
        return {"epoch": epoch, "blocks": steps * self._sampler.global_size, "identity": self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the blocks that a run has read. Raises ValueError when they were others than these."""
        refuse_other(state.get("identity"), self._identity)
        self._used = state["epoch"] * len(self._sampler) + state["blocks"] // self._sampler.global_size
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
        ids = tokenizer(record["text"], verbose=False)["input_ids"]  # a text may be longer than the model
        stream += ids if ids and ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]
    count = len(stream) // block_length
    if count == 0:
        raise ValueError(
            f"--unsupervised_dataset_name {name} has {len(stream)} tokens, less than one block of {block_length}"
        )
    return torch.tensor(stream[: count * block_length]).view(count, block_length)
