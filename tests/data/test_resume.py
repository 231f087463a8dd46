"""A stream that was cut goes on as if it had not been: the same items, the same account, and over no other data."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from data import cache, stream_stage_data
from tests.data.kit import CHATML, build, byte_level_fast


def write(path, n=100, name="question", wrong=0, rejected=("no",)):
    """`n` rows, the first `wrong` of every ten not to be used."""
    lines = []
    for k in range(n):
        row = {"prompt": f"{name} {k}", "chosen": "yes", "rejected": [f"{text} {k}" for text in rejected]}
        lines.append("{broken" if k % 10 < wrong else json.dumps(row))
    path.write_text("\n".join(lines) + "\n")
    return path


def stream(path, stage="reward", **options):
    options = {"data_split": "0,1,0", "eval_fraction": 0.0, "buffer_rows": 16, "seed": 3} | options
    return stream_stage_data(stage, options.pop("tokenizer", build("byte-level")), data_path=path, **options)


def shown(items):
    return [item["rejected_ids"].tolist() for item in items]


def resumed(before, make):
    after = make()
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    return after


@pytest.mark.parametrize("case", range(12))
def test_cut_at_random_again_and_again(tmp_path, case):
    dice = random.Random(case)
    sources = []
    for number in range(dice.randint(1, 3)):
        answers = [f"no {k}" for k in range(dice.choice([1, 1, 3]))]
        path = tmp_path / f"{number}.jsonl"
        write(path, dice.randint(20, 150), f"{number}:", wrong=dice.randint(0, 3), rejected=answers)
        sources.append(f"{path}:{dice.choice([0.5, 1, 3])}")
    world_size = dice.choice([1, 1, 2, 3])
    options = {
        "buffer_rows": dice.choice([1, 2, 7, 64, 1000]),
        "seed": dice.randrange(100),
        "data_split": dice.choice(["0,1,0", "1,2,1"]),
        "eval_fraction": dice.choice([0.0, 0.2]),
        "rank": dice.randrange(world_size),
        "world_size": world_size,
    }
    size = dice.choice([1, 3, 8])

    def make():
        return stream(sources, **options)

    whole, cut = make(), make()
    steps, taken = dice.randint(20, 400) // size, 0
    while taken < steps:
        batches = dice.choice([0, 1, 1, dice.randint(0, 100 // size)])
        batches = min(batches, steps - taken)
        want, got = whole.batches(size), cut.batches(size)
        for _ in range(batches):
            assert shown(next(got)) == shown(next(want))
        assert cut.report() == whole.report()
        assert cut.passes == whole.passes
        taken += batches
        cut = resumed(cut, make)
        assert cut.report() == whole.report()
    for source in whole.report()["sources"]:
        assert source["rows_read"] == source["rows_train"] + sum(source["rows_dropped"].values())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"buffer_rows": 8}, "is of data with shuffle_buffer 16, this run has 8: resume with the data flags"),
        ({"seed": 4}, "is of data with seed 3, this run has 4: resume with the data flags"),
        ({"max_seq_len": 99}, "is of data with max_tokens None, this run has 99: resume"),
        ({"truncation": "drop"}, "is of data with truncation left, this run has drop: resume"),
        ({"data_split": "0,1,1"}, "is of .*rows.jsonl with data_split 0,1,0, this run has 0,1,1: resume"),
        ({"eval_fraction": 0.5}, "is of data with eval_fraction 0.0, this run has 0.5: resume"),
        ({"data_format": "prompt-pair"}, "is of .*rows.jsonl with shape None, this run has prompt-pair: resume"),
        ({"source": "?limit=50"}, "is of .*rows.jsonl with limit None, this run has 50: resume"),
        ({"source": "?columns=prompt>question"}, "is of .*rows.jsonl with columns {}, this run has .*question.*: res"),
        ({"source": ":2"}, "is of .*rows.jsonl with weight 1.0, this run has 2.0: resume"),
        ({"tokenizer": byte_level_fast(bos=True)}, "is of data with another tokenizer .*: resume with the tokeniz"),
        ({"tokenizer": byte_level_fast(template=CHATML)}, "is of data with another tokenizer than this run's: resume"),
    ],
)
def test_a_position_in_other_data_is_refused(tmp_path, change, named):
    path, change = write(tmp_path / "rows.jsonl"), dict(change)
    after = stream(f"{path}{change.pop('source', '')}", **change)
    with pytest.raises(ValueError, match=f"^the saved position {named}"):
        after.load_state_dict(stream(path).state_dict())


def test_a_position_in_other_sources_is_refused(tmp_path):
    paths = [write(tmp_path / f"{name}.jsonl", name=name) for name in ("one", "two")]
    with pytest.raises(ValueError, match="is of .*two.jsonl with source .*one.jsonl, this run has .*two.jsonl: resume"):
        stream(paths[::-1]).load_state_dict(stream(paths).state_dict())
    with pytest.raises(ValueError, match="of 2 sources, this run has 1"):
        stream(paths[0]).load_state_dict(stream(paths).state_dict())
    state = stream(tmp_path).state_dict()
    write(tmp_path / "test.jsonl", 5)
    with pytest.raises(ValueError, match="with an evaluation part False, this run has True"):
        stream(tmp_path).load_state_dict(state)


def test_files_that_changed_are_refused_and_moved_ones_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "END_BYTES", 1000)
    path = write(tmp_path / "rows.jsonl", 4000)
    before = stream(path)
    list(itertools.islice(before, 1000))
    state, text = before.state_dict(), path.read_text()
    path = path.rename(tmp_path / "moved.jsonl")
    assert shown([next(iter(resumed(before, lambda: stream(path))))]) == shown([next(iter(before))])

    path = path.rename(tmp_path / "rows.jsonl")
    for changed in (
        text + "\n",
        text.replace("question 3999", "QUESTION 3999"),
        text.replace("question 1", "Question 1", 1),
    ):
        path.write_text(changed)
        with pytest.raises(ValueError, match="of .*rows.jsonl with another content than this run's: put its files ba"):
            stream(path).load_state_dict(state)

    path.write_text(text.replace("question 900", "QUESTION 900"))  # in the middle: seen on the way
    after = stream(path)
    after.load_state_dict(state)
    with pytest.raises(ValueError, match="rows.jsonl: the rows before the saved position are not those that were read"):
        next(iter(after))
