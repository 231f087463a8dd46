"""Tokenizers built on the spot, one of each kind that treats spaces and control tokens in its own way."""

from __future__ import annotations

import functools
import io
import json

import sentencepiece
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "Human: Assistant: what is two plus three? it is five.",
    "the answer to the question is yes, no, or perhaps; hello world, good day",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z A B C D E F G H I J K L M N O P Q R S T U V W X Y Z",
    "0 1 2 3 4 5 6 7 8 9 . , : ; ! ? ( ) [ ] { } < > / | _ - + = * & % $ # @ ' \"",
    "system user assistant end of turn\n\nnew line\n\n\nthree lines",
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@functools.cache
def byte_level(vocab: int = 400) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def byte_level_fast(bos: bool = False, pad: str | None = "<pad>", template: str | None = None, eos: str = "</s>"):
    """Byte-level BPE as GPT-2 has it; `bos` opens every text with <s>."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token=pad, bos_token="<s>")
    fast.chat_template = template
    return fast


@functools.cache
def _sentencepiece_model() -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 3),
        model_writer=model,
        vocab_size=360,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return model.getvalue()


@functools.cache
def _sentencepiece_json() -> str:
    """The SentencePiece model written out as a `tokenizers` one, Llama's way: dummy prefix, byte fallback."""
    proto = sentencepiece.SentencePieceProcessor(model_proto=_sentencepiece_model())
    vocab = {proto.id_to_piece(i): i for i in range(proto.get_piece_size())}
    merges = []
    for piece in sorted(vocab, key=vocab.get):
        cuts = [(piece[:k], piece[k:]) for k in range(1, len(piece)) if piece[:k] in vocab and piece[k:] in vocab]
        merges += [cut for cut in cuts if not piece.startswith("<")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return tokenizer.to_str()


def sentencepiece_fast(metaspace: str | None = None):
    """SentencePiece BPE with dummy prefix and BOS, no pad token. `metaspace`: "always" or "first" writes the
    prefix as newer conversions do."""
    tokenizer = Tokenizer.from_str(_sentencepiece_json())
    if metaspace:
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=metaspace, split=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@functools.cache
def _wordpiece_json() -> str:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer.to_str()


def wordpiece_fast():
    """WordPiece as BERT has it: no newline or double space survives, [CLS] and [SEP] around a text."""
    tokenizer = Tokenizer.from_str(_wordpiece_json())
    ids = {name: tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]")}
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=list(ids.items()))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="[CLS]", eos_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]"
    )


def unigram_fast():
    """Unigram as T5 and ALBERT have it: the control tokens are words of the vocabulary too."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def words_fast(model=models.WordLevel):
    """Whole words between spaces, the control tokens among them; `model` may be WordPiece."""
    words = ["<unk>", "<s>", "</s>", "say", "no", "here", "now", "Human:", "Assistant:"]
    tokenizer = Tokenizer(model({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def plainly_added_fast():
    """ChatML whose delimiters were added as plain tokens, not as control tokens, behind another plain token."""
    core = json.loads(byte_level().to_str())
    delimiters = ["<think>", "<|im_start|>", "<|im_end|>"]
    for token in delimiters[1:]:
        core["model"]["vocab"][f"unused {token}"] = core["model"]["vocab"].pop(token)
    core["added_tokens"] = [token for token in core["added_tokens"] if token["content"] not in delimiters]
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(core)), eos_token="</s>")
    fast.add_tokens(delimiters)
    fast.chat_template = CHATML
    return fast


ALL = {
    "byte-level": lambda: byte_level_fast(),
    "byte-level, BOS": lambda: byte_level_fast(bos=True),
    "byte-level, pad = eos": lambda: byte_level_fast(pad="</s>"),
    "byte-level, no pad": lambda: byte_level_fast(pad=None),
    "byte-level, ChatML": lambda: byte_level_fast(template=CHATML, eos="<|im_end|>", pad="<|im_end|>"),
    "byte-level, ChatML, other eos": lambda: byte_level_fast(template=CHATML),
    "SentencePiece": lambda: sentencepiece_fast(),
    "SentencePiece, metaspace always": lambda: sentencepiece_fast("always"),
    "SentencePiece, metaspace first": lambda: sentencepiece_fast("first"),
    "WordPiece": lambda: wordpiece_fast(),
}


@functools.cache
def build(name: str):
    """The tokenizer of that name, made once."""
    return ALL[name]()
