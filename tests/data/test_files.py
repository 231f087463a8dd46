"""The same rows through every file type, packed or not, and errors that name file and row."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data import load_rows
from data.files import file_kind, read_file
from data.unpacking import BadRecord

ROWS = [
    {"prompt": f'question {k}, with "quotes"\nand lines', "chosen": text, "rejected": f"no {k}"}
    for k, text in enumerate(["yes", "ünï", "שלום", "zero\u200bwidth", "line\u2028sep", "a,b\tc", "😀", "x" * 5000])
]


def write(path, rows=ROWS):
    kind = file_kind(path)
    if kind == "json":
        content = json.dumps(rows).encode()
    elif kind == "jsonl":
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    elif kind in ("csv", "tsv"):
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(rows[0]), delimiter="," if kind == "csv" else "\t")
        writer.writeheader()
        writer.writerows(rows)
        content = text.getvalue().encode()
    else:
        table, sink = pyarrow.Table.from_pylist(rows), io.BytesIO()
        if kind == "parquet":
            pyarrow.parquet.write_table(table, sink)
        else:
            with pyarrow.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
        content = sink.getvalue()
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        content = zstandard.compress(content)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", ["json", "jsonl", "ndjson", "csv", "tsv", "parquet", "arrow", "feather"])
def test_same_rows_from_every_file_type(tmp_path, kind, packing):
    rows, report = load_rows(write(tmp_path / f"rows.{kind}{packing}"))
    expected, _ = load_rows(write(tmp_path / "plain.jsonl"))
    assert rows == expected
    assert [row["chosen"] for row in rows] == [row["chosen"].strip() for row in ROWS]
    assert report["rows_read"] == report["rows_used"] == len(ROWS)
    assert report["shape"] == {"prompt-pair": len(ROWS)}


def test_arrow_stream_format(tmp_path):
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.ipc.new_stream(str(tmp_path / "rows.arrow"), table.schema) as writer:
        writer.write_table(table)
    assert list(read_file(tmp_path / "rows.arrow")) == ROWS


def test_byte_order_mark_windows_lines_and_blank_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(row) for row in ROWS]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(lines).encode() + b"\r\n\n")
    assert list(read_file(path)) == ROWS


def test_json_variants(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"version": 1, "data": ROWS}))
    assert list(read_file(path)) == ROWS
    path.write_text("\n".join(map(json.dumps, ROWS)))
    assert list(read_file(path)) == ROWS
    single = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    path.write_text(json.dumps(single, indent=2))
    assert list(read_file(path)) == [single]


def test_bad_records_are_counted_and_the_rest_is_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    good = json.dumps(ROWS[0]).encode()
    path.write_bytes(b"\n".join([good, b"{broken", b"[1]", b'{"prompt": "\xff"}', good, good, good]))
    found = list(read_file(path))
    assert [record.reason for record in found if isinstance(record, BadRecord)] == [
        "not JSON",
        "not an object",
        "not UTF-8",
    ]
    rows, report = load_rows(path)
    assert len(rows) == 4
    assert report["rows_read"] == 7
    assert report["rows_dropped"] == {"not JSON": 1, "not an object": 1, "not UTF-8": 1}
    assert "rows.jsonl row 2: not JSON: line 2, column 2" in report["first_dropped"]["not JSON"]
    with pytest.raises(ValueError, match=r"rows.jsonl row 2: not JSON"):
        load_rows(path, on_bad_row="error")


def test_too_many_malformed_rows_stop(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([json.dumps(ROWS[0]), *["{broken"] * 3]))
    with pytest.raises(
        ValueError, match=r"3 of 4 rows are malformed, more than the 50% allowed; 3 because of: .*row 2"
    ):
        load_rows(path)


def test_table_with_a_short_line(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("prompt,response\nhi,yes\nhi\nho,no\n")
    rows, report = load_rows(path)
    assert [row["response"] for row in rows] == ["yes", "no"]
    assert report["rows_dropped"] == {"wrong number of cells": 1}


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet", "rows.arrow"])
def test_two_columns_of_one_name_are_refused_and_names_are_stripped(tmp_path, name):
    path = tmp_path / name
    if name == "rows.csv":
        path.write_text("\nprompt, response,,\nq,a,,\n")
        assert list(read_file(path)) == [{"prompt": "q", "response": "a", "": None}]
        path.write_text("prompt,response, prompt\nq,a,b\n")
    else:
        table = pyarrow.table([["q"], ["a"], ["b"]], names=["prompt", "response", "prompt"])
        if name == "rows.parquet":
            pyarrow.parquet.write_table(table, path)
        else:
            with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
                writer.write_table(table)
    with pytest.raises(ValueError, match=f"^{path}: it has several columns named 'prompt': rename or remove all but"):
        list(read_file(path))


BINARY = ["rows.jsonl.gz", "rows.parquet", "rows.arrow", "rows.jsonl.zst"]


@pytest.mark.parametrize(("name", "part"), [("rows.json", 0.5), *itertools.product(BINARY, (0, 0.5))])
def test_damaged_files_are_named(tmp_path, name, part):
    path = tmp_path / name
    content = write(path, ROWS * 20).read_bytes()
    path.write_bytes(content[: int(len(content) * part)])
    with pytest.raises(ValueError, match=f"^{path}") as error:
        list(read_file(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("line", [f'{{"prompt": {"1" * 5000}}}', "[" * 100_000], ids=["digits", "nested"])
def test_json_that_python_refuses_is_a_bad_record_or_names_the_file(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(ROWS[0])}\n{line}\n{json.dumps(ROWS[0])}\n")
    rows, report = load_rows(path)
    assert len(rows) == 2 and report["rows_dropped"] == {"not JSON": 1}
    assert "rows.jsonl row 2" in report["first_dropped"]["not JSON"]
    path = tmp_path / "rows.json"
    path.write_text(line)
    with pytest.raises(ValueError, match=f"^{path}"):
        load_rows(path)


def test_a_table_by_columns_is_rows(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('{"prompt": ["a", "b"], "response": ["c", "d"]}')
    assert list(read_file(path)) == [{"prompt": "a", "response": "c"}, {"prompt": "b", "response": "d"}]


def test_empty_cells_of_a_table_are_no_columns(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("prompt,response,chosen,rejected,label\na,b,,,1\na,,c,d,\n")
    rows, report = load_rows(path)
    assert report["shape"] == {"prompt-response": 1, "prompt-pair": 1}
    assert rows[0]["score"] == 1 and (rows[1]["chosen"], rows[1]["rejected"]) == ("c", "d")


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_text_that_is_no_utf8_in_one_row_costs_that_row(tmp_path, name):
    path = tmp_path / name
    texts = pyarrow.array([b"a", b"\xff\xfe", b"c"], pyarrow.binary())
    table = pyarrow.table({"prompt": texts.view(pyarrow.string()), "response": ["x", "y", "z"]})
    if name == "rows.parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    rows, report = load_rows(path)
    assert [row["response"] for row in rows] == ["x", "z"]
    assert report["rows_dropped"] == {"not UTF-8": 1}


def test_when_no_row_is_usable_the_first_says_why(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("prompt;response\na;b\n")
    with pytest.raises(ValueError, match=r"rows.csv row 1: unknown shape, field columns: prompt;response"):
        load_rows(path, max_bad_rows=1.0)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.jsonl.gz"])
def test_empty_file_is_one_clear_line(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"") if name.endswith("gz") else b"")
    with pytest.raises(ValueError, match="no usable row in .*0 rows read"):
        load_rows(path)


def test_unknown_file_kind(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match="notes.txt: not a data file: its name must end in one of .json"):
        load_rows(tmp_path / "notes.txt")
