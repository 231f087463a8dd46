"""The look at data before training: counts that add up, lengths, and tokens as the model sees them."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from data import chat
from data.inspection import byte_tokenizer, histogram, inspect_data, main, print_inspection, token_texts
from data.loading import BadRows
from tests.data.kit import CHATML, build


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    records = [
        {"prompt": "what is two?", "response": "it is 2 [really] 😀"},
        {"prompt": "too long " * 50, "response": "yes"},
        {"messages": [{"role": "tool", "content": "x"}]},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_counts_lengths_and_examples(rows):
    tokenizer = build("byte-level")
    found = inspect_data("sft", tokenizer, rows, max_seq_len=60, truncation="drop")
    (source,) = found.as_dict()["sources"]
    assert source["rows_read"] == 3 == source["rows_train"] + sum(source["rows_dropped"].values())
    assert source["rows_dropped"] == {"longer than 60 tokens": 1, "tool turn": 1}
    assert source["shape"] == {"prompt-response": 2}
    ids, labels = chat.encode_dialogue(tokenizer, {"prompt": "what is two?"}, "it is 2 [really] 😀")
    assert found.lengths == [len(ids)]
    ((pieces,),) = found.examples
    assert "".join(text for text, own in pieces if own) == " it is 2 [really] 😀</s>"
    assert "".join(text for text, own in pieces if not own) == "\n\nHuman: what is two?\n\nAssistant:"


def test_printed(rows):
    out = io.StringIO()
    console = Console(file=out, width=120)
    for stage in ("sft", "ppo"):
        print_inspection(inspect_data(stage, build("byte-level"), rows, max_prompt_len=60), console)
    text = out.getvalue()
    for part in (
        "3 read = 2 used + 1 dropped",
        "prompt-response: 2 rows",
        "dropped: tool turn",
        "it is 2 [really] 😀</s>",
    ):
        assert part in text
    assert "dropped: longer than 60 tokens" in text


def test_trained_tokens_are_green_and_the_others_dim(rows):
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True, color_system="standard")
    print_inspection(inspect_data("sft", build("byte-level"), rows, limit=1), console)
    shown = out.getvalue().partition("example 1")[2]
    dim, green = ("".join(re.findall(rf"\x1b\[{colour}m(.*?)\x1b", shown)) for colour in (2, 32))
    assert dim == "Human: what is two?Assistant:dim: not trained"
    assert green == " it is 2 [really] 😀</s>green: trained"


def test_anybodys_text_is_printed_as_it_is(tmp_path, capsys):
    """Brackets are no markup, and what steers a terminal is written out."""
    path = tmp_path / "rows[bold].jsonl"
    row = {"[/red]": "x", "prompt": "[/b] [bold]q[/bold] \x1b[2J\u202e\r", "response": "[red]a[/x] \x07"}
    path.write_text("\n".join(map(json.dumps, [row, {"foo[/z]": 1}, {"k\ud800": 1}])))
    out = io.StringIO()
    found = inspect_data("sft", build("byte-level"), path, bad_rows=BadRows(limit=1.0))
    print_inspection(found, Console(file=out, width=400))
    text = out.getvalue()
    for part in ("rows[bold].jsonl", "has the columns [/red], prompt", "field columns: foo[/z]"):
        assert part in text
    for part in (r"[/b] [bold]q[/bold] \x1b[2J\u202e", r"[red]a[/x] \x07</s>"):
        assert part in text
    text.encode()
    assert "\x1b" not in text and "\x07" not in text
    main([str(path), "--json"])
    assert json.loads(capsys.readouterr().out)["sources"][0]["first_dropped"]["unknown shape"].endswith("foo[/z]")


def test_a_very_long_example_is_not_shown_whole(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "q", "response": "a" * 100_000}))
    [[pieces]] = inspect_data("sft", byte_tokenizer(), path).examples
    assert len(pieces) == 2001
    whole = len("\n\nHuman: q\n\nAssistant: ") + 100_000 + 1
    assert pieces[-1] == (f" ... and {whole - 2000} more tokens", False)


@pytest.mark.parametrize("name", ["byte-level", "SentencePiece", "SentencePiece, metaspace first"])
def test_token_texts_join_to_the_whole(name):
    tokenizer = build(name)
    ids, labels = chat.encode_dialogue(tokenizer, "say é and 😀 שלום", "the answer  is 😀")
    pieces = token_texts(tokenizer, ids, [label >= 0 for label in labels])
    assert len(pieces) <= len(ids)
    joined = "".join(text for text, _ in pieces)
    assert (
        joined.removeprefix("<s>")
        .lstrip(" ")
        .startswith("\n\nHuman: say é and 😀 שלום\n\nAssistant: the answer  is 😀</s>")
    )
    assert "".join(text for text, own in pieces if own).strip() == "the answer  is 😀</s>"


def test_limit_reads_no_more(rows):
    assert inspect_data("sft", build("byte-level"), rows, limit=1).sources[0].rows_read == 1


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], []),
        ([0], [(0, 0, 1)]),
        ([1, 2, 2, 5], [(0, 0, 0), (1, 1, 1), (2, 2, 2), (3, 3, 0), (4, 4, 0), (5, 5, 1)]),
        ([10, 119], [(0, 9, 0), (10, 19, 1), *[(k, k + 9, 0) for k in range(20, 110, 10)], (110, 119, 1)]),
    ],
)
def test_histogram(lengths, expected):
    assert histogram(lengths) == expected


def test_command(rows, capsys):
    main([str(rows), "--json", "--max_seq_len", "60", "--truncation", "drop"])
    found = json.loads(capsys.readouterr().out)
    assert found["totals"]["rows_dropped"]["tool turn"] == 1
    main([str(rows), "--stage", "ppo", "--examples", "1"])
    assert "what is two?" in capsys.readouterr().out
    with pytest.raises(FileNotFoundError, match="no data at nothing.jsonl"):
        main(["nothing.jsonl"])
    with pytest.raises(ValueError, match=r"no tokenizer at /nothing \(.*\): give the folder or the hub name of"):
        main([str(rows), "--tokenizer", "/nothing"])
    for wrong in (["--limit", "0"], ["--examples", "-1"]):
        with pytest.raises(ValueError, match="must be at least 0, limit .* at least 1"):
            main([str(rows), *wrong])


def test_byte_tokenizer_counts_bytes():
    tokenizer = byte_tokenizer()
    text = "aé😀\n  \x00"
    assert len(tokenizer(text).input_ids) == len(text.encode())
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_shapes_are_explained_or_fixed_and_bad_rows_shown(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "q", "response": "a", "text": "\\n\\nHuman: x\\n\\nAssistant: y"}\n{broken\n{"a": 1}\n')
    found = inspect_data("sft", build("byte-level"), path, bad_rows=BadRows(limit=1.0)).as_dict()["sources"][0]
    assert found["shape_reasons"] == {"prompt-response": f"{path} row 1 has the columns prompt, response, text"}
    main([str(path), "--data_format", "dialogue-text", "--json"])
    found = json.loads(capsys.readouterr().out)["sources"][0]
    assert found["shape_reasons"] == {"dialogue-text": "asked for; the columns are prompt, response, text"}
    assert found["rows_dropped"] == {"not JSON": 1, "missing column": 1}
    with pytest.raises(ValueError, match="row 2: not JSON"):
        main([str(path), "--on_bad_row", "error"])
    with pytest.raises(ValueError, match="2 of 3 rows are malformed, more than the 50% allowed"):
        main([str(path), "--max_bad_rows", "0.5"])


def test_a_chat_template_from_a_file(rows, tmp_path, capsys):
    (tmp_path / "chat.jinja").write_text(CHATML)
    main([str(rows), "--chat_template", str(tmp_path / "chat.jinja"), "--examples", "1"])
    assert "<|im_start|>assistant" in capsys.readouterr().out
