"""What a stage trains on: every row once an epoch on 1, 2 and 4 ranks, and exact where it goes on."""

import itertools
import json
from argparse import Namespace
from pathlib import Path

import pytest

from data import load_stage_data, stream_stage_data
from engine import distributed
from rlhf.feed import open_feed
from tests.data.kit import build
from tests.helpers import run_ranks

WORDS = ["a", "b c", "d e f", "g h i j k l m n o p"]


def write(path, count=24):
    rows = [{"prompt": f"q {k}", "response": WORDS[k % 4]} for k in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def flags(**changes):
    return Namespace(**{"seed": 3, "group_by_length": False, "packing": False, "max_seq_len": 64} | changes)


def stored(path):
    cache = Path(path).parent / "cache"
    options = {"data_split": "1,0,0", "eval_fraction": 0.0, "data_output_path": cache}
    return load_stage_data("sft", build("byte-level"), data_path=path, **options).train


def stream(path, rank=0, world_size=1):
    options = {"data_split": "1,0,0", "eval_fraction": 0.0, "buffer_rows": 5, "rank": rank, "world_size": world_size}
    return stream_stage_data("sft", build("byte-level"), data_path=path, **options)


def texts(items):
    """The questions of items, or of packs of items."""
    flat = [one for item in items for one in (item if isinstance(item, list) else [item])]
    return [build("byte-level").decode(item["input_ids"]).partition("Human: ")[2].partition("\n")[0] for item in flat]


MODES = {"stored": {}, "grouped": {"group_by_length": True}, "stream": {}}


def one_epoch(rank, world, path):
    """For each mode: this rank's questions, batch by batch, and the feed's state behind them."""
    found = {}
    for mode, changes in MODES.items():
        items = stream(path, rank, world) if mode == "stream" else stored(path)
        feed = open_feed(items, 4 // world, flags(**changes))
        batches = feed.batches_per_epoch or 6
        found[mode] = [texts(batch.items) for batch in itertools.islice(feed, batches)], feed.state_dict()
    return found


def test_every_row_exactly_once_an_epoch_on_any_number_of_ranks(tmp_path):
    path = write(tmp_path / "rows.jsonl")
    everything = sorted(f"q {k}" for k in range(24))
    alone = one_epoch(0, 1, path)
    for world in (1, 2, 4):
        results = [alone] if world == 1 else run_ranks(one_epoch, world, path)
        for mode in MODES:
            ranks = [result[mode][0] for result in results]
            assert sorted(sum((sum(batches, []) for batches in ranks), [])) == everything
            assert {len(batches) for batches in ranks} == {6}
            if mode != "stream":
                steps = [sorted(sum(step, [])) for step in zip(*ranks, strict=True)]
                assert steps == [sorted(step) for step in alone[mode][0]], "the same global batches"
                assert (results[0][mode][1]["epoch"], results[0][mode][1]["rows"]) == (1, 0)


@pytest.mark.parametrize("taken", [0, 1, 5, 6, 9])
@pytest.mark.parametrize("kind", ["stored", "grouped", "packed", "stream"])
def test_goes_on_exactly_where_it_stopped(tmp_path, kind, taken):
    path = write(tmp_path / "rows.jsonl")
    changes = {"group_by_length": kind == "grouped", "packing": kind == "packed"}

    def feed():
        return open_feed(stream(path) if kind == "stream" else stored(path), 2, flags(**changes))

    def shown(batches):
        return [(batch.epoch, batch.numbers, texts(batch.items)) for batch in batches]

    whole = shown(itertools.islice(feed(), 15))
    first, second = feed(), feed()
    assert shown(itertools.islice(first, taken)) == whole[:taken]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert shown(itertools.islice(second, 15 - taken)) == whole[taken:]


def test_half_as_many_ranks_go_on_with_the_same_rows(tmp_path):
    items = stored(write(tmp_path / "rows.jsonl"))
    small, large = open_feed(items, 2, flags()), open_feed(items, 4, flags())
    seen = [texts(batch.items) for batch in itertools.islice(small, 14)]  # as two ranks of 1, a rank and 2, ...
    large.load_state_dict(small.state_dict())
    assert texts(next(large).items) == texts(next(small).items) + texts(next(small).items)
    assert len(seen) == 14


def test_packs_fill_the_row_and_hold_every_dialogue(tmp_path):
    items = stored(write(tmp_path / "rows.jsonl"))
    feed = open_feed(items, 1, flags(packing=True, max_seq_len=100))
    packs = [batch.items[0] for batch in itertools.islice(feed, feed.batches_per_epoch)]
    assert sorted(texts(packs)) == sorted(f"q {k}" for k in range(24))
    sizes = [sum(len(item["input_ids"]) for item in pack) for pack in packs]
    assert max(sizes) <= 100 and len(packs) < 24


def test_flags_that_exclude_each_other_and_states_of_another_kind(tmp_path):
    path = write(tmp_path / "rows.jsonl")
    for flag in ("packing", "group_by_length"):
        with pytest.raises(ValueError, match=f"--{flag} needs all rows' lengths, unknown with --streaming"):
            open_feed(stream(path), 2, flags(**{flag: True}))
    with pytest.raises(ValueError, match="--packing fills rows .*: leave out --group_by_length"):
        open_feed(stored(path), 2, flags(packing=True, group_by_length=True))
    of_rows, of_stream = open_feed(stored(path), 2, flags()), open_feed(stream(path), 2, flags())
    with pytest.raises(ValueError, match="of a run with --streaming"):
        of_rows.load_state_dict(of_stream.state_dict())
    with pytest.raises(ValueError, match="of a run without --streaming"):
        of_stream.load_state_dict(of_rows.state_dict())
    state = of_stream.state_dict()
    with pytest.raises(ValueError, match=r"dealt to 2 process\(es\), this run has 1: resume with as many"):
        of_stream.load_state_dict({**state, "streams": state["streams"] * 2})


def test_a_position_in_other_items_or_another_order_is_refused(tmp_path):
    path = write(tmp_path / "rows.jsonl")
    state = json.loads(json.dumps(open_feed(stored(path), 2, flags()).state_dict()))
    grouped = flags(group_by_length=True)
    with pytest.raises(ValueError, match="of data with group_by_length False, this run has True: resume with the data"):
        open_feed(stored(path), 2, grouped).load_state_dict(state)
    with pytest.raises(ValueError, match="of data with global_batch_size 2, this run has 4: resume with the data flag"):
        open_feed(stored(path), 4, grouped).load_state_dict(open_feed(stored(path), 2, grouped).state_dict())
    moved = path.rename(tmp_path / "moved.jsonl")
    open_feed(stored(moved), 2, flags()).load_state_dict(state)
    with pytest.raises(ValueError, match="is of .*jsonl with limit None, this run has 9: resume with the data flags"):
        open_feed(stored(f"{moved}?limit=9"), 2, flags()).load_state_dict(state)
    path.write_text(moved.read_text().replace("q 7", "Q 7"))
    with pytest.raises(ValueError, match="is of .*rows.jsonl with another content than this run's: put its files back"):
        open_feed(stored(path), 2, flags()).load_state_dict(state)


def test_numbers_of_a_stream_are_never_given_twice(tmp_path, monkeypatch):
    path = write(tmp_path / "rows.jsonl")
    numbers = []
    for rank in range(2):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(distributed, "world_size", lambda: 2)
        for batch in itertools.islice(open_feed(stream(path, rank, 2), 2, flags()), 9):
            numbers += batch.numbers
    assert sorted(numbers) == list(range(36))
