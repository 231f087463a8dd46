"""A SentencePiece tokenizer trained on given texts, as a stock Hugging Face tokenizer.

Byte-pair merges on words, digits one by one, bytes for what was never seen, so that every text survives a round
trip unchanged, leading spaces and newlines included. The dialogue markers are single tokens.
"""

from __future__ import annotations

import io
from collections.abc import Iterable

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from data.markers import ASSISTANT, HUMAN

PAD, BOS, EOS, UNK = "<pad>", "<s>", "</s>", "<unk>"
SPACE = "\u2581"  # how SentencePiece writes a space
MAX_SENTENCES = 1_000_000  # of a larger corpus, a random sample is enough for merges
MAX_BYTES = 1 << 20  # longer texts are left out of training


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int, seed: int) -> PreTrainedTokenizerFast:
    """Train on `texts`; the same texts and seed give the same tokenizer.

    Args:
        vocab_size: at most so many tokens; a small corpus gives fewer.
        max_length: the longest sequence its model takes, tokens.

    Raises:
        ValueError: there is no text.
    """
    return as_hugging_face(train_sentencepiece(texts, vocab_size, seed), max_length)


def train_sentencepiece(texts: Iterable[str], vocab_size: int, seed: int) -> sentencepiece.SentencePieceProcessor:
    """The SentencePiece model behind `train_tokenizer`."""
    texts = (text for text in texts if text.strip())
    first = next(texts, None)
    if first is None:
        raise ValueError("no text to train a tokenizer on: the data sources gave no row with text")

    def sentences():
        yield first
        yield from texts

    sentencepiece.set_random_generator_seed(seed)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences(),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        character_coverage=1.0,
        byte_fallback=True,
        split_digits=True,
        # the text as it is: nothing normalised, no space put in front, none taken away
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        pad_piece=PAD,
        bos_piece=BOS,
        eos_piece=EOS,
        unk_piece=UNK,
        user_defined_symbols=[HUMAN, ASSISTANT],
        input_sentence_size=MAX_SENTENCES,
        shuffle_input_sentence=True,
        max_sentence_length=MAX_BYTES,
        num_threads=1,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def as_hugging_face(model: sentencepiece.SentencePieceProcessor, max_length: int) -> PreTrainedTokenizerFast:
    """The same tokenizer, with BOS in front of every text, as one that stock `AutoTokenizer` loads."""
    size = model.get_piece_size()
    pieces = [model.id_to_piece(i) for i in range(size)]
    normal = {
        piece: i
        for i, piece in enumerate(pieces)
        if not (model.is_control(i) or model.is_unknown(i) or model.is_byte(i) or piece in (HUMAN, ASSISTANT))
    }
    merges = [
        (piece[:cut], piece[cut:])
        # SentencePiece joins the pair whose result has the best score first; ids break ties
        for piece, _ in sorted(normal.items(), key=lambda entry: (-model.get_score(entry[1]), entry[1]))
        for cut in range(1, len(piece))
        if piece[:cut] in normal and piece[cut:] in normal
    ]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(BPE(vocabulary, merges, unk_token=UNK, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    # No piece holds a space but at its start, so words can be taken one by one (and their merges be cached).
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="never", split=True)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, vocabulary[BOS])]
    )
    # Markers are text, not control tokens: they stay in a decoded dialogue.
    tokenizer.add_tokens([AddedToken(marker, normalized=False, special=False) for marker in (HUMAN, ASSISTANT)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        pad_token=PAD,
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
