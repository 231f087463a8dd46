"""SFT learns every assistant turn with its end token and nothing else, in training and in evaluation."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.chat import encode_dialogue, encode_prompt
from stages import sft
from tests.rlhf import tiny_models
from tests.stages.kit import WORDS, run, trained, write_rows


def dialogue(number: int) -> list[dict[str, str]]:
    """Two to four questions, each answered."""
    turns = []
    for k in range(2 + number % 3):
        word = WORDS[(number + k) % 10]
        turns.append({"role": "user", "content": f"Say {word}{' please' * (number % 4)}."})
        turns.append({"role": "assistant", "content": f"It is {word}{' again' * k}."})
    return turns


def slow_loss(model, tokenizer, dialogues) -> tuple[float, int]:
    """Each turn by itself in float64: its answer and end token behind all that was said before, no padding."""
    total, count = 0.0, 0
    for turns in dialogues:
        for place in range(1, len(turns), 2):
            start = len(encode_prompt(tokenizer, turns[:place]))
            ids, _ = encode_dialogue(tokenizer, turns[:place], turns[place]["content"])
            assert ids[-1] == tokenizer.eos_token_id
            with torch.no_grad():
                logprobs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            total -= sum(float(logprobs[k - 1, ids[k]]) for k in range(start, len(ids)))
            count += len(ids) - start
    return total / count, count


@pytest.mark.parametrize("pad", ["own", "eos"])
def test_loss_and_perplexity_are_those_of_every_assistant_turn(tmp_path, pad):
    dialogues = [dialogue(number) for number in range(12)]
    for name, some in (("train", dialogues[:8]), ("eval", dialogues[8:])):
        rows = "".join(json.dumps({"messages": turns}) + "\n" for turns in some)
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / f"data/{name}.jsonl").write_text(rows)
    base = tiny_models.folder(pad=pad)
    flags = {"model_name_or_path": base, "data_split": "1,0,0", "per_device_train_batch_size": 8, "max_steps": 2}
    metrics = run("sft", tmp_path / "out", tmp_path / "data", **flags, per_device_eval_batch_size=3)
    tokenizer = AutoTokenizer.from_pretrained(base)
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder).double().eval() for folder in (base, tmp_path / "out")
    )
    loss, _ = slow_loss(before, tokenizer, dialogues[:8])
    first = trained(metrics)[0]
    assert first["loss"] == pytest.approx(loss, abs=1e-5)
    whole = [encode_dialogue(tokenizer, turns[:-1], turns[-1]["content"])[0] for turns in dialogues[:8]]
    assert first["tokens"] == sum(map(len, whole)) and (first["epoch"], first["skipped"]) == (0, 0)
    assert first["lr"] == pytest.approx(1e-3)
    assert first["tokens_per_second"] == pytest.approx(first["tokens"] / first["step_seconds"])
    # the logits at least: of all positions behind the shortest prompt, padding too
    longest, shortest = max(map(len, whole)), min(len(encode_prompt(tokenizer, turns[:1])) for turns in dialogues[:8])
    assert first["activation_bytes"] > 4 * 8 * (longest - shortest) * tiny_models.VOCABULARY
    for line, model in ((metrics[0], before), (metrics[-1], after)):
        loss, tokens = slow_loss(model, tokenizer, dialogues[8:])
        assert (line["loss"], line["tokens"]) == (pytest.approx(loss, abs=1e-5), tokens)
        assert line["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert [line["step"] for line in metrics if line.get("eval")][0] == 0


def test_logits_are_asked_for_where_answers_are_predicted():
    """From the last token of the shortest prompt on; of all positions where nothing, or the prompt too, is trained."""
    model, asked = tiny_models.causal_model(), []
    model.register_forward_pre_hook(lambda module, args, given: asked.append(given["logits_to_keep"]), with_kwargs=True)
    ids = torch.arange(3, 23).view(2, 10)
    for starts, kept in (((4, 6), 7), ((9, 8), 3), ((0, 5), 10), ((1, 5), 10), ((10, 10), 10)):
        labels = ids.clone()
        for row, start in zip(labels, starts, strict=True):
            row[:start] = -100
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool), "labels": labels}
        with torch.no_grad():
            loss, count = sft.batch_loss(model, batch)
            assert asked.pop() == kept and count == int((labels[:, 1:] != -100).sum())
            whole = model(ids, labels=labels, logits_to_keep=0).loss
        asked.clear()
        assert count == 0 or loss.item() == pytest.approx(whole.item(), abs=1e-5)


def test_print_loss_prints_every_step(tmp_path, capsys):
    data = write_rows(tmp_path / "rows.jsonl")
    (line,) = trained(run("sft", tmp_path / "sft", data, print_loss=True, max_steps=1, per_device_train_batch_size=4))
    assert f"step 1: loss {line['loss']:.4f}\n" in capsys.readouterr().out
