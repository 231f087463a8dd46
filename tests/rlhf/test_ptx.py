"""Plain text beside PPO: where it goes on, and over which texts."""

import json

import pytest
import torch

from rlhf.ptx import PTX
from tests.data.kit import byte_level_fast


class Recorder:
    """In place of a model: keeps the ids of each batch."""

    device = torch.device("cpu")

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, **options):
        self.seen.append(input_ids.tolist())
        return type("Output", (), {"logits": torch.zeros(*input_ids.shape, 400)})


def batches(ptx, count):
    model = Recorder()
    for _ in range(count):
        ptx.loss(model, 2)
    return model.seen


def test_goes_on_where_it_stopped_and_over_no_other_texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"text number {k}"}) + "\n" for k in range(20)))

    def make(block=8, seed=3):
        return PTX(str(path), byte_level_fast(), block, seed)

    whole = batches(make(), 30)
    for taken in (0, 1, 17):
        first, second = make(), make()
        assert batches(first, taken) == whole[:taken]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert batches(second, 30 - taken) == whole[taken:]
    state = make().state_dict()
    for other, named in ((make(block=9), "tokens of a text block 8, this run has 9"), (make(seed=4), "seed 3, this")):
        with pytest.raises(ValueError, match=f"of data with {named}.*: resume with the data flags"):
            other.load_state_dict(state)
    path.write_text(path.read_text().replace("number 7", "number 0"))
    with pytest.raises(ValueError, match="texts.jsonl with another content than this run's: put its files back"):
        make().load_state_dict(state)
