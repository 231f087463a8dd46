"""A rank that dies, stays away or takes another path is named, within the time limit."""

from __future__ import annotations

import os
import re
import time

import pytest

import engine
from engine.peers import PeerError
from tests.engine.test_engine import micro_step
from tests.engine.test_stages import config_for
from tests.engine.tiny import tiny_llama, token_batch
from tests.helpers import run_ranks

LIMIT = 3.0


def fault(rank, world, folder, stage, kind):
    """Rank 1 of three goes astray after one good step; the others write down what they are told."""
    eng = engine.initialize(tiny_llama(), config_for(stage, 1, 0.5))
    micro_step(eng, token_batch(1, seed=rank))
    started = time.monotonic()
    try:
        if rank == 1 and kind == "dead":
            os._exit(0)
        if rank == 1 and kind == "path":
            eng.save_pretrained(folder)
        micro_step(eng, token_batch(1, seed=rank))
        engine.distributed.barrier()
        line = "no error"
    except PeerError as error:
        line = str(error)
    (folder / f"{rank}.txt").write_text(f"{time.monotonic() - started}\n{line}")
    time.sleep(1.0)  # rank 0 keeps the store that the others read
    os._exit(0)


def told(folder, rank):
    seconds, *lines = (folder / f"{rank}.txt").read_text().split("\n")
    assert len(lines) == 1 and float(seconds) < LIMIT + 8
    return lines[0]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_dead_rank_is_named(tmp_path, stage):
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(fault, 3, tmp_path, stage, "dead", limit_seconds=LIMIT)
    for rank in (0, 2):
        assert re.fullmatch(
            rf"rank {rank}: \w+ failed because .*: rank 1 died or is still busy with something else",
            told(tmp_path, rank),
        )


def test_ranks_on_different_paths_are_named(tmp_path):
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(fault, 3, tmp_path, 0, "path", limit_seconds=LIMIT)
    lines = [told(tmp_path, rank) for rank in range(3)]
    assert "took different paths" in lines[0] and "rank 1 was in save_pretrained" in lines[0], lines


def test_a_time_limit_is_a_positive_number():
    with pytest.raises(ValueError, match="timeout_seconds is 0: .* give a positive number"):
        engine.init_distributed(timeout_seconds=0)
