"""Damage, replacement, limits and kills: what is in a folder of checkpoints after anything happened to it."""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import time
from pathlib import Path

import pytest
import torch

import engine
from engine import checkpoint_files
from tests.engine.test_engine import micro_step
from tests.engine.test_stages import config_for
from tests.engine.tiny import tiny_llama, token_batch
from tests.helpers import fork_server, run_ranks


def start(**checkpoint):
    return engine.initialize(tiny_llama(), config_for(0, 1, 0.5, checkpoint=checkpoint))


def loaded(folder, tag=None):
    eng = start()
    path, state = eng.load_checkpoint(folder, tag)
    return path.name, state


def test_missing_ones_are_named_with_the_last_good_one(tmp_path):
    eng = start()
    with pytest.raises(FileNotFoundError, match="no checkpoint in .*'latest' is missing; there is no other good one"):
        eng.load_checkpoint(tmp_path)
    eng.save_checkpoint(tmp_path, tag="good")
    (tmp_path / "latest").write_text("gone")
    with pytest.raises(FileNotFoundError, match="no checkpoint .*gone; the last good one there is tag 'good'"):
        eng.load_checkpoint(tmp_path)
    (tmp_path / "latest").write_text("")
    with pytest.raises(FileNotFoundError, match="the file 'latest' in .* is empty; the last good .* tag 'good'"):
        eng.load_checkpoint(tmp_path)
    for tag in ("../x", ""):
        with pytest.raises(ValueError, match=f"tag '{tag}' cannot name a folder"):
            eng.save_checkpoint(tmp_path, tag=tag)
    assert eng.save_checkpoint(tmp_path, tag=5) == tmp_path / "5"  # a number of steps, as DeepSpeed takes it
    assert eng.load_checkpoint(tmp_path, tag=5)[0] == tmp_path / "5"


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "file", "message"),
    [
        (cut, "engine.pt", r"engine.pt has \d+ bytes instead of \d+"),
        (flip, "state/__0_0.distcp", "the content of state/__0_0.distcp has changed since it was written"),
        (Path.unlink, "state/.metadata", "state/.metadata is missing"),
        (Path.unlink, "files_0.json", "files_0.json is missing"),
        (cut, "files_0.json", "files_0.json cannot be read"),
    ],
)
def test_damage_is_named_and_nothing_is_loaded(tmp_path, damage, file, message):
    eng = start()
    eng.save_checkpoint(tmp_path, tag="one")
    eng.save_checkpoint(tmp_path, tag="two")
    damage(tmp_path / "two" / file)
    with pytest.raises(ValueError, match=f"two is damaged: {message}; the last good one there is tag 'one'") as caught:
        eng.load_checkpoint(tmp_path)
    assert "\n" not in str(caught.value) and eng.weights_version == 0
    assert loaded(tmp_path, "one")[0] == "one"


MISFITS = {
    "of another model: 'model.model.embed_tokens.weight' is [67, 32] there and [70, 32] here": ({"vocab_size": 70}, {}),
    "lacks 9 tensors of this model, such as": ({"num_hidden_layers": 3}, {}),
    "holds the state of AdamW, and this run's optimizer is SGD: resume it with AdamW": (
        {},
        {"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}},
    ),
    "has 2 parameter groups and this run's optimizer 1: resume it with the weight decay": (
        {},
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
    ),
}


@pytest.mark.parametrize("message", MISFITS)
def test_what_does_not_fit_is_named_and_nothing_is_loaded(tmp_path, message):
    trained = start()
    micro_step(trained, token_batch(2))
    trained.save_checkpoint(tmp_path)
    model, config = MISFITS[message]
    eng = engine.initialize(tiny_llama(**model), config_for(0, 1, 0.5, **config))
    before = [parameter.clone() for parameter in eng.module.parameters()]
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        eng.load_checkpoint(tmp_path)
    assert "\n" not in str(caught.value) and eng.global_steps == 0
    assert all(torch.equal(now, then) for now, then in zip(eng.module.parameters(), before, strict=True))


def damaged_on_two(rank, world, folder):
    eng = start()
    eng.save_checkpoint(folder, tag="one")
    if rank == 0:
        flip(folder / "one" / "rng_1.pt")
    engine.distributed.barrier()
    with pytest.raises(ValueError, match="the content of rng_1.pt has changed"):
        eng.load_checkpoint(folder)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        eng.load_checkpoint(folder, tag="two")
    return True


def test_all_ranks_learn_of_damage(tmp_path):
    assert all(run_ranks(damaged_on_two, 2, tmp_path))


def test_only_the_last_are_kept(tmp_path):
    eng = start(keep_last=2)
    for tag in ("a", "b", "c", "b", "d"):
        eng.save_checkpoint(tmp_path, tag=tag)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "d", "latest"]
    assert loaded(tmp_path)[0] == "d"


class Killed(Exception):
    pass


class Stopper:
    """Lets `left` changes of a folder pass, and stops before the next."""

    def __init__(self, left: int):
        self.left = left

    def before(self, change):
        def call(*args, **kwargs):
            self.left -= 1
            if self.left < 0:
                raise Killed
            return change(*args, **kwargs)

        return call


def test_every_moment_of_a_replacement_leaves_one_to_load(tmp_path, monkeypatch):
    """The same tag saved again, stopped before each change of the folder in turn."""
    eng = start()
    eng.save_checkpoint(tmp_path / "first", tag="a", client_state={"save": 1})
    seen = []
    for changes in range(20):
        folder = tmp_path / str(changes)
        shutil.copytree(tmp_path / "first", folder)
        stopper = Stopper(changes)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", stopper.before(os.replace))
            patch.setattr(shutil, "rmtree", stopper.before(shutil.rmtree))
            try:
                eng.save_checkpoint(folder, client_state={"save": 2}, tag="a")
            except Killed:
                pass
        tag, state = loaded(folder)
        assert tag == "a" and checkpoint_files.problem(folder / "a") is None
        seen.append(state["save"])
        eng.save_checkpoint(folder, client_state={"save": 3}, tag="a")
        assert loaded(folder) == ("a", {"save": 3})
        if stopper.left >= 0:
            break
    assert seen[0] == 1 and seen[-1] == 2 and seen == sorted(seen) and len(seen) > 5


def saving_loop(folder, pipe):
    """Runs until it is killed: saves under new tags and, every third time, under one that exists."""
    eng = start(keep_last=3)
    for number in itertools.count():
        micro_step(eng, token_batch(1, length=4, seed=number))
        eng.save_checkpoint(folder, tag="again" if number % 3 == 0 else None, client_state={"step": eng.global_steps})
        pipe.send(eng.global_steps)


def test_kill_9_at_any_moment_leaves_one_to_load(tmp_path):
    generator = random.Random(0)
    for _ in range(20):
        ours, theirs = fork_server().Pipe(duplex=False)
        process = fork_server().Process(target=saving_loop, args=(tmp_path, theirs))
        process.start()
        theirs.close()
        try:
            said = [ours.recv() for _ in range(generator.randint(2, 6))]
            time.sleep(generator.uniform(0.0, 0.05))
        finally:
            process.kill()
            process.join()
        while ours.poll():
            try:
                said.append(ours.recv())
            except EOFError:
                break
        assert loaded(tmp_path)[1]["step"] in (said[-1], said[-1] + 1)
