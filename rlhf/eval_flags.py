"""The flags of `rlhf eval reward` and `rlhf eval prompts`: those of DeepSpeed-Chat's rw_eval and prompt_eval, and ours.

Imports nothing heavy, so that a misspelt flag is answered at once.
"""

from __future__ import annotations

from rlhf.data_flags import rows_group
from rlhf.flag_groups import add_inference_dtype
from rlhf.flags import Parser, fraction, positive_float, positive_fraction, positive_int

DECODINGS = ("greedy", "sample", "contrastive")
EOT = "accepted and not needed: an end token that was added in training is in the model's folder"


def reward_eval_parser() -> Parser:
    """Flags of ``rlhf eval reward``."""
    parser = Parser("rlhf eval reward", "How well a reward model tells good answers from bad ones.")
    add = parser.add_argument_group("model").add_argument
    add("--model_name_or_path", required=True, help="the reward model: folder or hub name")
    data = rows_group(parser, "reward")
    data.add_argument(
        "--single_answers",
        choices=("auto", "pair", "label", "score"),
        default="auto",
        help="what an answer with a number of its own is: of a pair, a label, a score; auto: see the README",
    )
    data.add_argument("--seed", type=int, default=1234, help="seed of the split, as in the training run")
    data.add_argument(
        "--part",
        choices=("held_out", "all"),
        default="held_out",
        help="what the reward stage holds out of its share with the same flags, or its whole share",
    )
    add = parser.add_argument_group("one comparison in place of data").add_argument
    add("--prompt", metavar="TEXT", help="a question, or a dialogue in marker form")
    add("--chosen", metavar="TEXT", help="an answer to it")
    add("--rejected", metavar="TEXT", help="another answer to it; without it the first one's score alone is told")
    _output(parser)
    parser.add_argument_group("compatibility").add_argument(
        "--num_padding_at_beginning", type=int, default=1, help="accepted and not needed: padding is known from masks"
    )
    return parser


def prompt_eval_parser() -> Parser:
    """Flags of ``rlhf eval prompts``."""
    parser = Parser("rlhf eval prompts", "Two or more models answer the same prompts, side by side.")
    add = parser.add_argument_group("models").add_argument
    add("--model_name_or_path_baseline", required=True, help="the model to compare with: folder or hub name")
    add("--model_name_or_path_finetune", required=True, nargs="+", metavar="MODEL", help="the models to compare")
    add("--reward_model_name_or_path", help="a reward model that scores all answers")
    add("--gold_fn", help="judge for evaluation, given and called as PPO's --reward_fn")

    add = parser.add_argument_group("prompts").add_argument
    add(
        "--language",
        choices=("English", "Chinese", "Japanese"),
        default="English",
        help="of the built-in prompts, used when no others are given",
    )
    add("--prompt", nargs="+", default=[], metavar="TEXT", help="questions, or dialogues in marker form")
    add("--data_path", nargs="+", default=[], metavar="SOURCE", help="sources, their evaluation part if they have one")
    add("--num_prompts", type=positive_int, default=6, help="most prompts of the sources, drawn by --seed")

    add = parser.add_argument_group("answers").add_argument
    add("--decoding", nargs="+", choices=DECODINGS, default=["greedy", "sample"], help="how to answer, one or more")
    add("--max_new_tokens", type=positive_int, default=100, help="longest answer, tokens")
    add("--num_beams", type=positive_int, default=1, help="beams of greedy answers")
    add("--num_beam_groups", type=positive_int, default=1, help="1; diverse beams are not in transformers any more")
    add("--num_return_sequences", type=positive_int, default=1, help="answers a prompt, sampled or of the beams")
    add("--top_k", type=positive_int, default=4, help="candidates of contrastive search")
    add("--penalty_alpha", type=fraction, default=0.6, help="penalty of contrastive search")
    add("--temperature", type=positive_float, default=1.0, help="of sampled answers")
    add("--top_p", type=positive_fraction, default=1.0, help="sample among the likeliest tokens of this probability")
    add("--seed", type=int, default=1234, help="of the sampling and of the choice of prompts")
    _output(parser)
    return parser


def _output(parser: Parser) -> None:
    add_inference_dtype(parser.add_argument_group("scale").add_argument)
    add = parser.add_argument_group("output").add_argument
    add("--per_device_eval_batch_size", type=positive_int, default=16, help="rows scored at once")
    add("--output", metavar="FILE", help="write everything as JSON, too")
    add("--add_eot_token", action="store_true", help=EOT)
