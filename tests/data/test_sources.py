"""Finding sources: files, folders with parts, saved data sets, weights and options; a local path always wins."""

from __future__ import annotations

import json

import datasets
import pytest

from data import load_rows, open_source, parse_source
from data.sources import Source
from rlhf.pipeline_recipes import recipe

ROWS = [{"prompt": f"q{k}", "response": f"a{k}"} for k in range(6)]


def write(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answers(rows):
    return [row["response"] for row in rows]


def test_weight_and_options():
    assert parse_source("a/b:0.5") == Source("a/b", weight=0.5)
    source = parse_source(
        "a/b:2?limit=5&split=tr&eval=te&subset=en&revision=r1&shape=turns&columns=q>prompt,a>response"
    )
    assert source == Source("a/b", 2.0, 5, "tr", "te", "en", "r1", "turns", {"q": "prompt", "a": "response"})
    assert parse_source("C:\\data\\rows.json").name == "C:\\data\\rows.json"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "source '' names nothing: give a file, a folder, a hub name, or sample"),
        ("x?limt=5", "unknown option 'limt'"),
        ("x?limit=five", "limit 'five' must be a number of rows"),
        ("x:-1", "weight -1 must be a number of at least 0"),
        ("x?shape=square", "unknown shape 'square'"),
        ("x?columns=a", "columns 'a' must be written like question>prompt"),
        ("x?columns=a>b,c>b", "columns 'c>b': each name and each meaning can be there once"),
    ],
)
def test_mistakes_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        parse_source(text)


def test_a_file_whose_name_has_a_colon_is_a_file(tmp_path):
    path = write(tmp_path / "rows:2.jsonl")
    assert open_source(str(path)).source.weight == 1.0
    assert open_source(f"{path}:3").source == Source(str(path), weight=3.0)


def test_folder_with_parts(tmp_path):
    write(tmp_path / "train-0.jsonl", ROWS[:2])
    write(tmp_path / "train-1.jsonl", ROWS[2:4])
    write(tmp_path / "validation.jsonl", ROWS[4:])
    write(tmp_path / "notes.json", [{"a": 1}])
    write(tmp_path / ".hidden.jsonl")
    assert answers(load_rows(tmp_path)[0]) == ["a0", "a1", "a2", "a3"]
    assert answers(load_rows(tmp_path, "eval")[0]) == ["a4", "a5"]
    assert open_source(tmp_path).unused == ["notes.json"]


def test_folder_of_part_folders_and_of_plain_files(tmp_path):
    write(tmp_path / "a" / "train" / "x.jsonl", ROWS[:3])
    write(tmp_path / "a" / "test" / "x.jsonl", ROWS[3:])
    assert answers(load_rows(tmp_path / "a", "eval")[0]) == ["a3", "a4", "a5"]
    write(tmp_path / "b" / "one.jsonl", ROWS[:1])
    write(tmp_path / "b" / "two.jsonl", ROWS[1:])
    assert len(load_rows(tmp_path / "b")[0]) == 6
    with pytest.raises(ValueError, match="has no evaluation part"):
        load_rows(tmp_path / "b", "eval")


def test_saved_datasets(tmp_path):
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(str(tmp_path / "one"))
    assert answers(load_rows(tmp_path / "one")[0]) == [f"a{k}" for k in range(6)]
    parts = datasets.DatasetDict({"train": table.select([0, 1]), "test": table.select([2])})
    parts.save_to_disk(str(tmp_path / "two"))
    assert answers(load_rows(tmp_path / "two")[0]) == ["a0", "a1"]
    assert answers(load_rows(tmp_path / "two", "eval")[0]) == ["a2"]
    with pytest.raises(ValueError, match="has no split 'dev': it has train, test"):
        open_source(f"{tmp_path / 'two'}?split=dev")
    (file,) = (tmp_path / "one").glob("*.arrow")
    before = open_source(tmp_path / "one")
    for mark in ("content_hash", "content_mark"):
        assert getattr(open_source(tmp_path / "one"), mark)() == getattr(before, mark)()
    old, content = (before.content_hash(), before.content_mark()), file.read_bytes()
    file.write_bytes(content.replace(b"a5", b"A5"))
    after = open_source(tmp_path / "one")
    assert after.content_hash() != old[0] and after.content_mark() != old[1]
    with pytest.raises(ValueError, match=f"^{tmp_path / 'one'} row 1: unknown shape"):
        load_rows(f"{tmp_path / 'one'}?columns=prompt>x", on_bad_row="error")
    file.write_bytes(content[:100])
    with pytest.raises(ValueError, match="one: the saved data set is damaged or not whole .*: save it again"):
        open_source(tmp_path / "one")


def test_limit_and_columns(tmp_path):
    path = write(tmp_path / "x.jsonl", [{"q": "hi", "prompt": "other", "a": f"a{k}"} for k in range(4)])
    rows, report = load_rows(f"{path}?limit=2&columns=q>prompt,a>response")
    assert [(row["prompt"], row["response"]) for row in rows] == [
        ("\n\nHuman: hi\n\nAssistant:", "a0"),
        ("\n\nHuman: hi\n\nAssistant:", "a1"),
    ]
    assert report["rows_read"] == 2


def test_a_column_that_no_row_has_is_named(tmp_path):
    path = write(tmp_path / "rows.jsonl", [*ROWS, {"ask": "q", "response": "a"}])
    assert load_rows(f"{path}?columns=ask>prompt", max_bad_rows=1.0)[1]["rows_used"] == 1  # others have none
    with pytest.raises(ValueError, match="rows.jsonl: columns names 'reply', which no row has"):
        load_rows(f"{path}?columns=prompt>prompt,reply>response")


def test_local_path_wins_over_a_hub_name(tmp_path, monkeypatch):
    write(tmp_path / "owner" / "name" / "train.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: pytest.fail("the network was touched"))
    assert len(load_rows("owner/name")[0]) == 6


def test_local_path_wins_over_the_bundled_sample(tmp_path, monkeypatch):
    write(tmp_path / "sample" / "train.jsonl")
    assert recipe("recipe:llama-1m", ["sample"], 1)["ppo"]["gold_fn"]
    monkeypatch.chdir(tmp_path)
    assert len(load_rows("sample?limit=9")[0]) == 6
    assert "gold_fn" not in recipe("recipe:llama-1m", ["sample"], 1)["ppo"], "the judge knows the bundled set alone"


@pytest.mark.parametrize("name", ["./nothing", "/no/where", "nothing.jsonl", "a/b/c", "~/no/such/folder"])
def test_missing_path(name):
    with pytest.raises(FileNotFoundError, match=f"^no data at {name}: give a file"):
        load_rows(name)


def test_hub_set_out_of_reach_is_one_line(monkeypatch):
    def offline(*args, **kwargs):
        raise ConnectionError("Couldn't reach the hub\n  Pick one of its subsets: a, b")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(
        ValueError, match=r"no data at owner/name: it is no local path.*the hub Pick one of its subsets: a, b\)$"
    ):
        load_rows("owner/name")


def test_folder_without_data(tmp_path):
    with pytest.raises(ValueError, match="holds no data file"):
        load_rows(tmp_path)
    write(tmp_path / "test.jsonl")
    with pytest.raises(ValueError, match="only evaluation files"):
        load_rows(tmp_path)


def test_bundled_sample():
    rows, report = load_rows("sample")
    assert report["rows_read"] == report["rows_used"] > 1000
    assert {"prompt", "chosen", "rejected", "response"} <= rows[0].keys()
    assert load_rows("sample", "eval")[1]["rows_read"] >= 300
