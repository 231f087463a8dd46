"""The models of RLHF: causal language models, and a backbone with a score head for rewards and values.

A score model is a stock transformers sequence-classification model with one label, wrapped so that the head
is read at every position. Saved, it loads with `AutoModelForSequenceClassification` and gives the same scores,
and the critic of PPO starts from the same folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from data.chat import encode_dialogue, stop_token_ids
from data.markers import split_last_answer
from rlhf.experience import Experience, positions
from rlhf.model_files import quiet, read, read_config, resolve
from rlhf.position_limit import guard_positions

PAD_TOKEN = "<|pad|>"
# Names under which tokenizers ship a padding token that they do not announce.
KNOWN_PADS = ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", "<|padding|>")


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub name, with a padding token in any case.

    Where it has none, its end token pads. That is safe here because no mask is ever read off token ids: masks
    come from lengths, so an end token is learned however it looks beside padding. Only the stock
    sequence-classification classes find a text's end by its padding; `new_score_model` sees to that.

    Raises:
        FileNotFoundError, ValueError: no such tokenizer, or it has no end-of-sequence token. One line.
    """
    tokenizer = read(AutoTokenizer.from_pretrained, path, "tokenizer")
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {path} has no end-of-sequence token: set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_actor(
    path: str | Path, dtype: str | torch.dtype | None = None, dropout: float | None = None
) -> PreTrainedModel:
    """A causal language model, in fp32 unless a `dtype` is given, with its dropout probabilities set if asked.

    Raises:
        FileNotFoundError, ValueError: no such model; or the folder lacks weights of a causal model (a reward
            model's, say), which would otherwise be made up at random. One line.
    """
    config = read_config(path, dropout)
    if _has_score_head(config):
        # with tied embeddings no weight would be missing, and the reward model's backbone would pass for an actor
        raise ValueError(f"{resolve(path)} is no causal language model but a reward model ({_architecture(config)})")
    model, missing = _load(AutoModelForCausalLM, path, config, dtype)
    if missing:
        raise ValueError(f"{resolve(path)} is no whole causal language model: it lacks {_some(missing)}")
    return model


def new_score_model(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    dtype: str | torch.dtype | None = None,
    dropout: float | None = None,
) -> ScoreModel:
    """A causal model's backbone with a fresh score head: normal, standard deviation 1 / (hidden + 1), no bias.

    The stock classes read a score at the last token that is not padding, so a padding token that is also the
    end token would hide every text's end. Then `tokenizer` and model get one of their own (an unused one the
    vocabulary has, else a new one, for which the embedding grows); `tokenizer` is changed in place, to be
    saved beside the model, and pads on the right, as suits whole texts.

    A path that already holds a score model starts with its head.

    Raises:
        FileNotFoundError, ValueError: no such model, or a family without a sequence-classification class. One line.
    """
    config = read_config(path, dropout)
    config.num_labels = 1
    model, missing = _load(AutoModelForSequenceClassification, path, config, dtype)
    wrapped = ScoreModel(model)
    if missing:
        head = wrapped.head
        unexpected = [name for name in missing if name != f"{wrapped.head_name}.weight"]
        if unexpected:
            raise ValueError(f"{resolve(path)} lacks {_some(unexpected)}: not the weights of its {config.model_type}")
        std = 1.0 / (head.weight.shape[1] + 1)
        noise = torch.empty(head.weight.shape, dtype=torch.float32)
        noise.normal_(0.0, std, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            head.weight.copy_(noise)
    _separate_pad(model, tokenizer)
    return wrapped


def load_score_model(
    path: str | Path, dtype: str | torch.dtype | None = None, dropout: float | None = None
) -> ScoreModel:
    """A score model that the reward stage (or anyone else with one label) has saved; a critic starts so too.

    Raises:
        FileNotFoundError, ValueError: no such model, no score head in it, or more than one label. One line.
    """
    config = read_config(path, dropout)
    model, missing = _load(AutoModelForSequenceClassification, path, config, dtype)
    if missing:
        raise ValueError(
            f"{resolve(path)} is no reward model: it lacks {_some(missing)} (its config says {_architecture(config)}); "
            "train one with the reward stage"
        )
    if config.num_labels != 1:
        raise ValueError(f"{resolve(path)} has {config.num_labels} labels: a reward model has one")
    return ScoreModel(model)


def is_score_model(path: str | Path) -> bool:
    """Whether a model folder or hub name says that it is a sequence-classification model."""
    return _has_score_head(read_config(path, None))


def _has_score_head(config) -> bool:
    return any("ForSequenceClassification" in name for name in config.architectures or ())


class ScoreModel(nn.Module):
    """A sequence-classification model whose head is read at every position.

    `forward(input_ids, attention_mask) -> [B, T]` fp32. The head and its sum stay fp32 whatever the backbone
    computes in: in bf16 two scores closer than 1/256 of their size would be the same number. `model` is the
    stock model, which is what gets saved.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        self.head_name = "score" if isinstance(getattr(model, "score", None), nn.Linear) else ""
        if not self.head_name:
            raise ValueError(f"{type(model).__name__} has no linear head called score: this family is not supported")
        self.head.float()
        # read by the engine when it casts the rest
        self._keep_in_fp32_modules = [self.head_name]

    @property
    def config(self):
        return self.model.config

    @property
    def head(self) -> nn.Linear:
        return getattr(self.model, self.head_name)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.model.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask.long(),
            position_ids=positions(attention_mask),
            use_cache=False,
        ).last_hidden_state
        # a sum of one, not a view: FSDP2 warns of views among a module's outputs
        return self.head(hidden.to(self.head.weight.dtype)).sum(-1).float()

    def activation_checkpointing_enable(self, **options: Any) -> None:
        """As on the stock model: layers are run again in the backward pass instead of kept."""
        self.model.activation_checkpointing_enable(**options)

    def save_pretrained(self, folder: str | Path) -> None:
        with quiet():
            self.model.save_pretrained(folder)


def values(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The head at every position: `[B, L], [B, L] -> [B, L]` fp32.

    `model` is a `ScoreModel`, an engine around one, or a bare sequence-classification model.
    """
    if isinstance(model, PreTrainedModel):
        model = ScoreModel(model)
    return model(input_ids, attention_mask)


def response_values(
    model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, response_length: int
) -> torch.Tensor:
    """The value of each state a response token was chosen in, so read one position before it. `[B, T]` fp32."""
    return values(model, input_ids, attention_mask)[:, -response_length - 1 : -1]


def critic_values(critic: Any, batch: Experience) -> torch.Tensor:
    """The value of the state before each response token, `[B, T]` fp32; read in the critic's own tokens if need be."""
    if batch.critic_ids is None:
        return response_values(critic, batch.input_ids, batch.attention_mask, batch.response_length)
    return values(critic, batch.critic_ids, batch.critic_mask).gather(1, batch.critic_places)


def end_scores(values: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """`[B, L], [B, L] -> [B]`: the entry at the last True of each row of the mask, on whichever side it is padded.

    Raises:
        ValueError: a row of the mask has no True.
    """
    if not bool(attention_mask.any(1).all()):
        raise ValueError("a text without any token has no score: a row of the attention mask is all False")
    last = attention_mask.shape[1] - 1 - attention_mask.flip(1).int().argmax(1)
    return values.gather(1, last.unsqueeze(1)).squeeze(1)


def scores(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The score of each text, read at its last real token: `[B, L], [B, L] -> [B]` fp32."""
    return end_scores(values(model, input_ids, attention_mask), attention_mask)


def score_texts(
    model: Any, tokenizer: PreTrainedTokenizerBase, texts: list[str], batch_size: int = 16
) -> torch.Tensor:
    """Scores `[B]` of texts, tokenized as in training: with the end token after the last answer.

    A text is a dialogue in marker form that ends with the assistant's answer; one without any assistant marker
    is scored as plain text and its end token. The model is put into evaluation mode.
    """
    return score_ids(model, [text_ids(tokenizer, text) for text in texts], tokenizer.pad_token_id, batch_size)


@torch.no_grad()
def score_ids(model: Any, rows: list[list[int]], pad_token_id: int, batch_size: int = 16) -> torch.Tensor:
    """Scores `[B]` of texts given as token ids, `batch_size` at a time. The model is put into evaluation mode."""
    model.eval()
    device = getattr(model, "device", None) or next(model.parameters()).device
    results = []
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        width = max(map(len, part))
        ids = torch.full((len(part), width), pad_token_id)
        mask = torch.zeros((len(part), width), dtype=torch.bool)
        for i, row in enumerate(part):
            ids[i, : len(row)] = torch.tensor(row)
            mask[i, : len(row)] = True
        results.append(scores(model, ids.to(device), mask.to(device)))
    return torch.cat(results) if results else torch.zeros(0)


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a whole dialogue with its end token, as the reward stage trains on them."""
    split = split_last_answer(text)
    if split is None:
        ids = tokenizer(text)["input_ids"]
        return ids if ids and ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]
    prompt, response = split
    ids, _ = encode_dialogue(tokenizer, {"prompt": prompt}, response)
    return ids


def _load(auto_class, path, config, dtype) -> tuple[PreTrainedModel, list[str]]:
    """The model and the names of the weights its files do not have."""
    with quiet():
        model, report = read(
            auto_class.from_pretrained,
            path,
            "weights",
            config=config,
            dtype=torch.float32 if dtype is None else dtype,
            output_loading_info=True,
        )
    guard_positions(model)
    mismatched = [entry[0] if isinstance(entry, tuple) else entry for entry in report.get("mismatched_keys", ())]
    return model.eval(), sorted({*report["missing_keys"], *mismatched})


def _separate_pad(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give tokenizer and model a padding token that no text ends with."""
    rows = model.get_input_embeddings().weight.shape[0]
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in stop_token_ids(tokenizer):
        vocabulary = tokenizer.get_vocab()
        unused = [name for name in KNOWN_PADS if vocabulary.get(name, rows) < rows]
        tokenizer.add_special_tokens({"pad_token": unused[0] if unused else PAD_TOKEN})
    if tokenizer.pad_token_id >= rows:
        # a multiple of 8 keeps matrix shapes even; the new rows are padding's, which no mask ever lets through
        model.resize_token_embeddings(tokenizer.pad_token_id + 1, pad_to_multiple_of=8, mean_resizing=False)
    model.config.pad_token_id = tokenizer.pad_token_id
    tokenizer.padding_side = "right"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _architecture(config) -> str:
    return ", ".join(config.architectures or [config.model_type])
