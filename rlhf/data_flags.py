"""The flags that say what data a stage takes and how; `rlhf.stage_data` reads them.

Imports nothing heavy, so that a misspelt flag is answered at once.
"""

from __future__ import annotations

import argparse
import os
import tempfile

from rlhf.flags import Parser, eval_fraction, fraction, non_negative_int, positive_int

TRUNCATION = {
    "sft": "what is done with longer dialogues; right when not given: the end is cut off",
    "reward": "what is done with longer dialogues; left when not given: the oldest turns are cut off",
    "ppo": "what is done with longer prompts; drop when not given",
}


def data_group(parser: Parser, stage: str) -> argparse._ArgumentGroup:
    """Adds the flags of `stage` ("sft", "reward" or "ppo"), with the length limits it has."""
    group = rows_group(parser, stage)
    add = group.add_argument
    add("--streaming", action="store_true", help="read rows on the way, without a cache; needs --max_steps")
    add("--shuffle_buffer", type=positive_int, default=10_000, help="rows of a source that --streaming mixes")
    add("--stream_eval_rows", type=non_negative_int, default=500, help="most rows held out with --streaming")
    add("--group_by_length", action="store_true", help="batches of rows of like length, with less padding")
    if stage != "ppo":
        add("--pad_to_multiple_of", type=positive_int, default=1, help="a batch's length is rounded up to a multiple")
    return group


def rows_group(parser: Parser, stage: str) -> argparse._ArgumentGroup:
    """Those of them that say which rows a stage has and how they become items; evaluation has no others."""
    parser.add_argument("--config", metavar="FILE", help="YAML file of values; flags on the command line win")
    group = parser.add_argument_group("data")
    add = group.add_argument
    add(
        "--data_path",
        nargs="*",
        default=["sample"],
        metavar="SOURCE",
        help="files, folders or hub names, each with an optional :weight; sample is the bundled data",
    )
    add("--data_split", default="2,4,4", help="shares of the rows for SFT, reward and PPO")
    default = os.path.join(tempfile.gettempdir(), "data_files")
    add("--data_output_path", default=default, help="folder of the tokenized caches")
    if stage == "ppo":
        add("--max_prompt_seq_len", type=positive_int, default=256, help="longest prompt, tokens")
        add("--max_answer_seq_len", type=positive_int, default=256, help="longest answer, tokens")
    else:
        add("--max_seq_len", type=positive_int, default=512, help="longest prompt and answer, tokens")
    lengths = ("drop", "left") if stage == "ppo" else ("drop", "left", "right")
    add("--truncation", choices=lengths, help=TRUNCATION[stage])
    add(
        "--eval_fraction",
        type=eval_fraction,
        default=0.1,
        help="share of the stage's rows held out where a source has no evaluation part; 0: none",
    )
    add("--data_format", metavar="SHAPE", help="shape of all sources' rows; recognised by columns when not given")
    add("--chat_template", metavar="FILE", help="Jinja file in place of the tokenizer's own chat template")
    add("--on_bad_row", choices=("drop", "error"), default="drop", help="count rows that cannot be read, or stop")
    add("--max_bad_rows", type=fraction, default=0.5, help="share of rows that cannot be read, above which to stop")
    return group
