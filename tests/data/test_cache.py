"""Caches: found by content, built once, whole or not there, the same for every rank."""

from __future__ import annotations

import json
import multiprocessing
import os
import time

import pytest
import torch

from data import BatchSampler, cache, load_stage_data
from data.store import Item, StoreWriter
from tests.data.kit import CHATML, byte_level_fast, sentencepiece_fast
from tests.helpers import run_ranks


def write(path, n=40):
    rows = [{"prompt": f"question {k}", "chosen": f"good {k}", "rejected": f"bad {k}"} for k in range(n)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(tmp_path, stage="sft", tokenizer=None, **options):
    options = {"data_split": "1,1,1", "seed": 1, "max_seq_len": 100, "max_prompt_len": 100} | options
    source = options.pop("source", tmp_path / "rows.jsonl")
    return load_stage_data(
        stage, tokenizer or byte_level_fast(), data_path=source, data_output_path=tmp_path / "cache", **options
    )


def tensors(parts):
    items = [*parts.train, *parts.eval]
    return [[value.tolist() for value in item.values() if isinstance(value, torch.Tensor)] for item in items]


@pytest.fixture
def built(monkeypatch):
    """Counts the builds."""
    calls = []
    original = cache.build_once

    def counted(folder, build):
        return original(folder, lambda temporary: (calls.append(folder), build(temporary))[1])

    monkeypatch.setattr("data.builder.cache.build_once", counted)
    return calls


def test_second_call_reads_what_the_first_built(tmp_path, built):
    write(tmp_path / "rows.jsonl")
    for stage in ("sft", "reward", "ppo"):
        cold, warm = load(tmp_path, stage), load(tmp_path, stage)
        assert tensors(cold) == tensors(warm)
        assert cold.report == warm.report
    assert len(built) == 3
    assert not list((tmp_path / "cache").glob(".*"))


def test_everything_the_items_depend_on_is_in_the_key(tmp_path, built):
    write(tmp_path / "rows.jsonl")
    load(tmp_path)
    variants = [
        {"seed": 2},
        {"max_seq_len": 99},
        {"data_split": "2,1,1"},
        {"eval_fraction": 0.2},
        {"train_on_prompt": True},
        {"truncation": "drop"},
        {"tokenizer": sentencepiece_fast()},
        {"tokenizer": byte_level_fast(bos=True)},
        {"tokenizer": byte_level_fast(template=CHATML)},
        {"source": f"{tmp_path / 'rows.jsonl'}?limit=30"},
        {"source": f"{tmp_path / 'rows.jsonl'}:0.5"},
        {"sft_only_data_path": tmp_path / "rows.jsonl"},
    ]
    for number, options in enumerate(variants):
        load(tmp_path, **options)
        assert len(built) == number + 2, options
    load(tmp_path)
    assert len(built) == len(variants) + 1


def test_changed_content_is_noticed_even_with_the_same_size_and_time(tmp_path, built):
    path = write(tmp_path / "rows.jsonl")
    before, stamp = load(tmp_path), path.stat()
    path.write_text(path.read_text().replace("good", "fine"))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert tensors(load(tmp_path)) != tensors(before)
    assert len(built) == 2


def test_a_call_with_padding_does_not_change_the_key(tmp_path, built):
    write(tmp_path / "rows.jsonl")
    tokenizer = byte_level_fast()
    load(tmp_path, tokenizer=tokenizer)
    tokenizer(["a", "b c"], padding=True, truncation=True, max_length=5)
    load(tmp_path, tokenizer=tokenizer)
    assert len(built) == 1


@pytest.mark.parametrize("damage", ["short file", "missing file", "no meta data", "broken meta data", "other meta"])
def test_a_damaged_cache_is_built_again(tmp_path, built, damage):
    write(tmp_path / "rows.jsonl")
    before = tensors(load(tmp_path))
    folder = built[0]
    if damage == "short file":
        (folder / "train" / "ids.i32").write_bytes(b"\x00" * 4)
    elif damage == "missing file":
        (folder / "eval" / "ends.i64").unlink()
    elif damage == "no meta data":
        (folder / "meta.json").unlink()
    else:
        (folder / "meta.json").write_text("{" if damage == "broken meta data" else "[]")
    assert tensors(load(tmp_path)) == before
    assert len(built) == 2


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def build(folder):
        (folder / "half").write_text("x")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        cache.build_once(tmp_path / "cache" / "key", build)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("place", ["a file", "below a file"])
def test_a_folder_that_cannot_be_written_is_said_in_one_line(tmp_path, place):
    write(tmp_path / "rows.jsonl")
    (tmp_path / "cache").write_text("")
    output = tmp_path / "cache" / ("below" if place == "below a file" else "")
    with pytest.raises(
        ValueError, match=f"^the data cache cannot be written to {output} .*: give another folder by --"
    ):
        load_stage_data("sft", byte_level_fast(), data_path=tmp_path / "rows.jsonl", data_output_path=output)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("items", [1, 10_000])
def test_a_full_disk_is_said_in_one_line(tmp_path, items):
    with pytest.raises(
        ValueError, match=f"written to {tmp_path}/train .no space left for it.: make room, or give anot"
    ):
        with StoreWriter(tmp_path / "train", "sft") as writer:
            writer._files["ids.i32"] = open("/dev/full", "wb")
            writer.add([Item([[1] * 10], trained=[True] * 10)] * items, [1] * items)


def test_a_source_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "rows.jsonl")
    monkeypatch.setattr("data.opening.content_hash", lambda path: open("/proc/self/mem", "rb").read(1))
    with pytest.raises(ValueError, match=f"^{path}: cannot be read"):
        load(tmp_path)


def _slow_build(folder):
    (folder / "started").write_text(str(os.getpid()))
    time.sleep(0.5)
    (folder / "done").write_text(str(os.getpid()))
    return {"by": os.getpid()}


def _build_in_process(folder, queue):
    queue.put((os.getpid(), cache.build_once(folder, _slow_build)["by"]))


def test_two_runs_at_once_end_with_one_whole_cache(tmp_path):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    folder = tmp_path / "cache" / "key"
    processes = [context.Process(target=_build_in_process, args=(folder, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert len({by for _, by in results}) == 1, "both use the winner's"
    assert (folder / "started").read_text() == (folder / "done").read_text() == str(results[0][1])
    assert [path.name for path in folder.parent.iterdir()] == ["key"]


def _endless_build(folder):
    (folder / "started").write_text("")
    time.sleep(600)


def test_a_kill_in_the_middle_leaves_no_half_cache(tmp_path):
    context = multiprocessing.get_context("spawn")
    folder = tmp_path / "cache" / "key"
    process = context.Process(target=cache.build_once, args=(folder, _endless_build))
    process.start()
    while not list(tmp_path.glob("cache/.key*/started")):
        assert process.is_alive()
        time.sleep(0.02)
    process.kill()
    process.join()
    assert cache.read_meta(folder) is None
    assert cache.build_once(folder, lambda temporary: {"by": 0})["by"] == 0
    leftover = next(tmp_path.glob("cache/.key*"))
    (others := tmp_path / "cache" / ".others.tmp").mkdir()
    for path in (others, leftover):
        os.utime(path, (0, 0))
    cache.build_once(tmp_path / "cache" / "other", lambda temporary: {})
    assert leftover.exists() and others.exists(), "a build goes on that has written a file today"
    os.utime(leftover / "started", (0, 0))
    cache.build_once(tmp_path / "cache" / "another", lambda temporary: {})
    assert others.exists() and not leftover.exists()


def _rank_rows(rank, world_size, folder):
    os.environ["LOCAL_RANK"] = str(rank)
    builds = []
    original = cache.build_once

    def counted(path, build):
        return original(path, lambda temporary: (builds.append(rank), time.sleep(0.3), build(temporary))[2])

    cache.build_once = counted
    parts = load(folder, "ppo", eval_fraction=0.0, data_split="0,0,1")
    sampler = BatchSampler(len(parts.train), 2, rank=rank, world_size=world_size, seed=3, drop_last=False)
    seen = [parts.train[i]["row"]["messages"][0]["content"] for rows in sampler.iter(0) for i in rows]
    return builds, seen, len(sampler)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_one_cache_and_see_every_row_once(tmp_path, world_size):
    write(tmp_path / "rows.jsonl")
    results = run_ranks(_rank_rows, world_size, tmp_path)
    assert [builds for builds, _, _ in results] == [[0], *[[]] * (world_size - 1)]
    assert sorted(text for _, seen, _ in results for text in seen) == sorted(f"question {k}" for k in range(40))
    assert len({steps for _, _, steps in results}) == 1


def _rank_error(rank, world_size, folder, options):
    os.environ["LOCAL_RANK"] = str(rank)
    try:
        load(folder, "reward", **options)
    except (ValueError, FileNotFoundError) as error:
        return type(error).__name__, str(error)
    return None


def test_an_error_of_the_builder_reaches_every_rank(tmp_path):
    write(tmp_path / "rows.jsonl", n=1)
    results = run_ranks(_rank_error, 2, tmp_path, {})
    assert results[0] == results[1]
    assert results[0][0] == "ValueError" and "too few evaluation rows" in results[0][1]
