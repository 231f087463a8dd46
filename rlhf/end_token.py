"""`--add_eot_token`: an end token of the user's choice behind every answer, as one token of the vocabulary.

Without it an answer ends with the end token that the tokenizer has, in every stage alike. (DeepSpeed-Chat ends the
answers of its second and third step with the text `<|endoftext|>`, whatever its tokenizer makes of that.)
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.flag_groups import EOT_TOKEN


def use_eot_token(tokenizer: PreTrainedTokenizerBase, text: str = EOT_TOKEN, *, trained: str = "") -> None:
    """Make `text` the tokenizer's end token, a new one if its vocabulary lacks it. Padding stays what it was.

    Args:
        trained: the model that must know the token already, by the name of its flag; none when empty.

    Raises:
        ValueError: the tokenizer has a chat template, whose own end token ends its turns; or `trained` lacks the token.
    """
    if trained and text not in tokenizer.get_vocab():
        raise ValueError(f"--add_eot_token: {text!r} is no token of {trained}: give its SFT the flag too")
    if tokenizer.chat_template:
        raise ValueError(
            "--add_eot_token: the tokenizer has a chat template, whose turns end as it says: leave the flag out"
        )
    tokenizer.add_special_tokens({"eos_token": text})


@torch.no_grad()
def fit_end_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make the model stop at the tokenizer's end token, and give it a row for it where it has none: the mean of all."""
    end = tokenizer.eos_token_id
    rows = model.get_input_embeddings().weight.shape[0]
    if end >= rows:
        # a mean, and no draw: policy and reference must start as the same model
        model.resize_token_embeddings(end + 1, pad_to_multiple_of=8, mean_resizing=False)
        for embeddings in {model.get_input_embeddings(), model.get_output_embeddings()} - {None}:
            embeddings.weight[rows:] = embeddings.weight[:rows].mean(0)
    model.config.eos_token_id = end
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = end
