"""Packed rows give each dialogue the loss it has alone, for every kind of positions; models that cannot are refused."""

import pytest
import torch

from data import collate_packs, collate_sft
from rlhf.experience import positions
from rlhf.losses import causal_lm_loss
from rlhf.packing import check_packing, packed_logits
from tests.rlhf.tiny_models import FAMILIES, VOCABULARY, causal_model

SEES_ITS_OWN = sorted(FAMILIES.keys() - {"bloom"})  # rotary (llama, qwen2, gpt_neox) and learned positions


def items():
    generator = torch.Generator().manual_seed(1)
    found = []
    for length, prompt in ((9, 3), (4, 1), (7, 5), (3, 2), (6, 1)):
        ids = torch.randint(VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[:prompt] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", SEES_ITS_OWN)
def test_the_loss_and_its_gradient_are_those_of_rows_by_themselves(family, attention):
    if attention == "sdpa" and family == "gpt_neo":
        pytest.skip("gpt_neo has no sdpa attention")
    model = causal_model(family)
    model.set_attn_implementation(attention)
    rows = items()
    batch = collate_sft(rows, 0)
    mask = batch["attention_mask"]
    logits = model(input_ids=batch["input_ids"], attention_mask=mask, position_ids=positions(mask)).logits
    loss, count = causal_lm_loss(logits, batch["labels"])
    expected = torch.autograd.grad(loss, list(model.parameters()))

    packed = collate_packs([[rows[0], rows[1], rows[2]], [rows[3], rows[4]]], 0, pad_to_multiple_of=8)
    packed_loss, packed_count = causal_lm_loss(packed_logits(model, packed), packed["labels"])
    assert packed_count == count
    assert packed_loss.item() == pytest.approx(loss.item(), abs=1e-5)
    for got, want in zip(torch.autograd.grad(packed_loss, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    check_packing(model, 64)


def test_a_model_that_cannot_is_refused():
    with pytest.raises(ValueError, match="--packing: bloom "):
        check_packing(causal_model("bloom"), 64)


def test_a_model_that_mixes_dialogues_is_refused():
    model = causal_model("llama")
    forward = model.forward
    # as one that knows of no dialogues within a row
    model.forward = lambda input_ids, **_: forward(input_ids, attention_mask=torch.ones_like(input_ids))
    with pytest.raises(ValueError, match="--packing: llama mixes the dialogues of a packed row"):
        check_packing(model, 64)


def test_a_window_shorter_than_a_row_is_refused():
    with pytest.raises(ValueError, match="llama looks back 32 tokens, less than --max_seq_len 64"):
        check_packing(causal_model("llama", sliding_window=32), 64)
