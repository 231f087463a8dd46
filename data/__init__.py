"""What goes in: sources, dialogue formats, splits, blends, tokenization, batches. Imports nothing else of this project.

    rows, report = data.load_rows("sample")                        # text, every row accounted for
    parts = data.load_stage_data("sft", tokenizer, data_path=["sample"], seed=1)
    sampler = data.BatchSampler(len(parts.train), 8, seed=1)
    for indices in sampler.iter(epoch=0):
        batch = data.collate_sft([parts.train[i] for i in indices], tokenizer.pad_token_id)

`data.chat` turns dialogues into tokens, the same way for training, prompts, evaluation and chat.
"""

from data import chat
from data.batches import BatchSampler, collate_answers, collate_pairs, collate_prompts, collate_sft
from data.loading import load_rows
from data.opening import open_source
from data.packing import collate_packs, own_dialogue_mask, plan_packs
from data.sources import Source, parse_source
from data.splits import split_rows
from data.stage import StageData, load_stage_data
from data.streaming import ItemStream, stream_stage_data

__all__ = [
    "BatchSampler",
    "ItemStream",
    "Source",
    "StageData",
    "chat",
    "collate_answers",
    "collate_packs",
    "collate_pairs",
    "collate_prompts",
    "collate_sft",
    "load_rows",
    "load_stage_data",
    "open_source",
    "own_dialogue_mask",
    "parse_source",
    "plan_packs",
    "split_rows",
    "stream_stage_data",
]
