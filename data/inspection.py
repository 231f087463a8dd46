"""A look at data before training on it: what it is, what would be dropped and why, how long it is, and a few rows as
the model sees them.

    found = inspect_data("sft", tokenizer, ["sample", "more.jsonl"], max_seq_len=512)
    print_inspection(found, rich.console.Console())

`main` is the command: SOURCE... [--tokenizer PATH] [--stage sft] [--max_seq_len N] ...
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from data.chat import use_template_file
from data.items import STAGES, TRUNCATIONS, Refused, make_items, make_rules
from data.loading import BadRows, new_report, read_rows
from data.opening import open_source
from data.report import SourceReport, totals
from data.sources import SourceLike, as_list, with_shape
from data.store import Item
from data.unpacking import one_line

BAR = 40
MOST_TOKENS_OF_A_LETTER = 4
MOST_TOKENS_SHOWN = 2000
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


@dataclass
class Inspection:
    """What was found. `lengths`: tokens of each item (of a pair, its longer side); `examples`: the first items of
    each source, as sequences of (text of one token, trained)."""

    stage: str
    limit: int | None
    sources: list[SourceReport]
    lengths: list[int] = field(default_factory=list)
    examples: list[list[list[tuple[str, bool]]]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The counts, JSON-ready; `lengths` as a histogram of (from, to, count)."""
        return {
            "stage": self.stage,
            "sources": [source.as_dict() for source in self.sources],
            "totals": totals(self.sources),
            "lengths": histogram(self.lengths),
        }


def inspect_data(
    stage: str,
    tokenizer: Any,
    data_path: SourceLike | Sequence[SourceLike],
    *,
    max_seq_len: int | None = None,
    max_prompt_len: int | None = None,
    truncation: str | None = None,
    train_on_prompt: bool = False,
    data_format: str | None = None,
    bad_rows: BadRows = BadRows(),  # noqa: B008 - it is frozen
    examples: int = 3,
    limit: int | None = None,
) -> Inspection:
    """Reads and tokenizes sources as `stage` would, whole (no deal to stages), and keeps the account of it.

    Args: as of `data.load_stage_data`, and
        bad_rows: what becomes of rows that cannot be used.
        examples: items of each source to show.
        limit: most records of each source's part to read.

    Raises:
        FileNotFoundError, ValueError: as `data.load_stage_data`, but an empty result is no error here.
    """
    if examples < 0 or (limit is not None and limit < 1):
        raise ValueError(f"examples {examples} must be at least 0, limit {limit} at least 1")
    # single answers are looked at one by one: whether they would be paired or not, they are as long
    rules = make_rules(stage, max_seq_len, max_prompt_len, truncation, train_on_prompt, single_answers="score")
    found = Inspection(stage, rules.limit, [])
    for path in as_list(data_path):
        opened = open_source(with_shape(path, data_format))
        report = new_report(opened)
        found.sources.append(report)
        shown = 0
        for records in filter(None, (opened.train, opened.eval)):
            held_out = records is opened.eval
            if limit is not None:
                records.limit = limit if records.limit is None else min(limit, records.limit)
            for _, place, rows in read_rows(records, opened.source, report, bad_rows=bad_rows):
                made = make_items(rows, tokenizer, rules, report)
                items = [item for item in made if isinstance(item, Item)]
                if not items:
                    refused = next(item for item in made if isinstance(item, Refused))
                    report.drop(str(refused), refused.example(place))
                    continue
                report.rows_eval += held_out
                report.rows_train += not held_out
                found.lengths += [max(map(len, item.sequences)) for item in items]
                for item in items[: max(examples - shown, 0)]:
                    found.examples.append(_pieces(tokenizer, item))
                    shown += 1
    return found


def _pieces(tokenizer: Any, item: Item) -> list[list[tuple[str, bool]]]:
    trained = item.trained or []
    shown = []
    for ids in item.sequences:
        pieces = token_texts(tokenizer, ids[:MOST_TOKENS_SHOWN], (trained or [False] * len(ids))[:MOST_TOKENS_SHOWN])
        rest = len(ids) - MOST_TOKENS_SHOWN
        shown.append([*pieces, (f" ... and {rest} more tokens", False)] if rest > 0 else pieces)
    return shown


def token_texts(tokenizer: Any, ids: Sequence[int], trained: Sequence[bool]) -> list[tuple[str, bool]]:
    """(text, trained) of each token; tokens that are only parts of one letter come as one piece."""
    pieces: list[tuple[str, bool]] = []
    earlier = start = 0
    for end in range(1, len(ids) + 1):
        # Decoded behind the piece before it: a token's own space is only written inside a text.
        context = list(ids[earlier:start])
        before = tokenizer.decode(context, skip_special_tokens=False)
        text = tokenizer.decode(context + list(ids[start:end]), skip_special_tokens=False)
        piece = text[len(before) :] if text.startswith(before) else tokenizer.decode(ids[start:end])
        whole = not piece.endswith("\ufffd") or end - start == MOST_TOKENS_OF_A_LETTER
        if whole or end == len(ids) or trained[end] != trained[start]:
            pieces.append((piece, bool(trained[start])))
            earlier, start = start, end
    return pieces


def histogram(lengths: Sequence[int], bins: int = 12) -> list[tuple[int, int, int]]:
    """(from, to, count) of lengths, `to` included, in at most `bins` steps of one round width."""
    if not lengths:
        return []
    top = max(lengths)
    width = next(step for step in _round_steps() if step * bins > top)
    counts = np.bincount(np.asarray(lengths) // width)
    return [(k * width, (k + 1) * width - 1, int(count)) for k, count in enumerate(counts)]


def _round_steps() -> Iterator[int]:
    step = 1
    while True:
        for factor in (1, 2, 5):
            yield step * factor
        step *= 10


def print_inspection(found: Inspection, console: Any) -> None:
    """The inspection as tables and coloured text on a `rich` console."""
    from rich.table import Table
    from rich.text import Text

    for source in found.sources:
        # names, columns and examples are anybody's text, in which brackets are no markup
        table = Table(title=Text(visible(source.name)), show_header=False, title_justify="left")
        table.add_row("files", Text(visible(", ".join(source.files) or "a data set")))
        if source.files_unused:
            table.add_row("files not read", Text(visible(", ".join(source.files_unused))))
        shapes = [
            f"{shape}: {count} rows ({source.shape_reasons[shape]})" for shape, count in source.shapes.most_common()
        ]
        table.add_row("shape", Text(visible("\n".join(shapes) or "none recognised")))
        used = source.rows_train + source.rows_eval
        table.add_row("rows", f"{source.rows_read} read = {used} used + {source.rows_read - used} dropped")
        for reason, count in source.rows_dropped.most_common():
            first = visible(source.first_dropped.get(reason, ""))
            table.add_row(f"dropped: {reason}", Text(f"{count}   first: {first}"))
        for side, count in source.rows_cut.items():
            table.add_row(f"cut to fit, {side}", str(count))
        console.print(table)
    bars = histogram(found.lengths)
    if bars:
        table = Table(title=f"tokens, stage {found.stage}", show_header=False, title_justify="left")
        most = max(count for _, _, count in bars)
        for low, high, count in bars:
            table.add_row(f"{low}-{high}", str(count), "█" * -(-BAR * count // most))
        console.print(table)
    for number, sequences in enumerate(found.examples, 1):
        for side, pieces in zip(("chosen", "rejected") if len(sequences) == 2 else ("",), sequences, strict=True):
            text = Text().append(f"example {number} {side}".rstrip() + "\n", style="bold")
            for piece, own in pieces:
                text.append(visible(piece), style="green" if own else "dim")
            console.print(text)
    if any(own for sequences in found.examples for pieces in sequences for _, own in pieces):
        console.print(Text("green: trained", style="green"), Text("dim: not trained", style="dim"))


def visible(text: str) -> str:
    """`text` with the characters that steer a terminal, or turn its direction, written out."""
    return _UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def byte_tokenizer() -> Any:
    """A tokenizer of bytes, for looking at data before there is a model: lengths are then bytes of UTF-8."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")


def main(argv: Sequence[str] | None = None) -> None:
    """The command: prints the inspection of the sources it names.

    Raises:
        FileNotFoundError, ValueError: in one line, what cannot be read.
    """
    parser = argparse.ArgumentParser("rlhf data inspect", description="Look at data as a stage would see it.")
    add = parser.add_argument
    add("sources", nargs="+", metavar="SOURCE", help="files, folders, hub names, or sample")
    add("--tokenizer", help="folder or name of the model whose tokenizer is used; bytes are counted without")
    add("--stage", choices=STAGES, default="sft", help="the stage whose items are made (default: sft)")
    add("--max_seq_len", type=int, help="longest dialogue, tokens")
    add("--max_prompt_len", type=int, help="longest prompt of stage ppo, tokens")
    add("--truncation", choices=TRUNCATIONS, help="what is done with longer ones")
    add("--data_format", metavar="SHAPE", help="shape of all rows; recognised by columns when not given")
    add("--chat_template", metavar="FILE", help="Jinja file in place of the tokenizer's own chat template")
    add("--on_bad_row", choices=("drop", "error"), default="drop", help="count rows that cannot be read, or stop")
    add("--max_bad_rows", type=float, default=1.0, help="share of rows that cannot be read, above which to stop")
    add("--examples", type=int, default=3, help="items of each source to show (default: 3)")
    add("--limit", type=int, help="most rows to read of each source")
    add("--json", action="store_true", help="print the counts as JSON and no examples")
    args = parser.parse_args(argv)
    if args.tokenizer:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"no tokenizer at {args.tokenizer} ({one_line(error)}): give the folder or the hub name of a model"
            ) from error
    else:
        tokenizer = byte_tokenizer()
    if args.chat_template:
        use_template_file(tokenizer, args.chat_template)
    found = inspect_data(
        args.stage,
        tokenizer,
        args.sources,
        max_seq_len=args.max_seq_len,
        max_prompt_len=args.max_prompt_len,
        truncation=args.truncation,
        data_format=args.data_format,
        bad_rows=BadRows(args.on_bad_row, args.max_bad_rows),
        examples=args.examples,
        limit=args.limit,
    )
    if args.json:
        text = json.dumps(found.as_dict(), indent=1, ensure_ascii=False)
        print(text.encode("utf-8", "backslashreplace").decode())  # half a pair of surrogates as JSON writes it
        return
    from rich.console import Console

    print_inspection(found, Console())
