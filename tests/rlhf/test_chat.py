"""The chat: turns and commands, what is shown of a growing answer, and a real model's answers."""

import io

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.chat import decode_response, encode_prompt, stop_token_ids
from engine.hybrid import Generator
from rlhf import chat, recipes


def talk(lines, answer, interactive=False):
    out = io.StringIO()
    chat.converse(answer, iter(lines), out, interactive)
    return out.getvalue()


@pytest.mark.parametrize(("clear", "leave"), [("/clear", "/quit"), ("clear", "quit")])
def test_turns_are_remembered_until_cleared(clear, leave):
    seen = []

    def answer(turns, emit):
        seen.append([(turn["role"], turn["content"]) for turn in turns])
        emit("yes")
        return "yes"

    out = talk(["one\n", "\n", "two\n", f"{clear}\n", "three\n", f"{leave}\n", "four\n"], answer)
    assert out == "yes\nyes\nyes\n"
    assert seen == [
        [("user", "one")],
        [("user", "one"), ("assistant", "yes"), ("user", "two")],
        [("user", "three")],
    ]


def test_an_unknown_command_is_no_question():
    assert "/clear forgets" in talk(["/help\n"], lambda *_: pytest.fail("asked"))


def test_an_answer_cut_short_is_forgotten():
    seen = []

    def answer(turns, emit):
        seen.append(len(turns))
        if len(seen) == 1:
            emit("ye")
            raise KeyboardInterrupt
        return "yes"

    assert "cut short and forgotten" in talk(["one\n", "two\n"], answer)
    assert seen == [1, 1]


def test_a_question_too_long_is_told_and_forgotten():
    encode = lambda turns: [0] * sum(len(turn["content"]) for turn in turns)  # noqa: E731

    def answer(turns, emit):
        chat.fitting(turns, encode, room=5)
        emit("yes")
        return "yes"

    out = talk(["a question\n", "one\n"], answer)
    assert out == "the question has 10 tokens and the model has room for 5: ask a shorter one\nyes\n"


def test_a_growing_answer_shows_no_part_of_a_next_turn():
    whole = "It is 4.\n\nReally.\n\nHuman: and 5?"
    shown = [chat.visible(whole[:n], finished=False) for n in range(len(whole) + 1)]
    assert all(later.startswith(earlier) for earlier, later in zip(shown, shown[1:], strict=False))
    assert shown[-1] == chat.visible(whole, finished=True) == "It is 4.\n\nReally."
    assert chat.visible("It is\n\nHum", finished=True) == "It is\n\nHum"
    assert chat.visible("caf\ufffd", finished=False) == "caf"


def test_the_oldest_turns_give_way():
    turns = [
        {"role": role, "content": text}
        for role, text in zip(["user", "assistant"] * 3, "abcdef", strict=True)
    ]
    turns = turns[:5]
    encode = lambda some: [ord(turn["content"]) for turn in some]  # noqa: E731
    assert bytes(chat.fitting(turns, encode, room=5)) == b"abcde"
    assert bytes(chat.fitting(turns, encode, room=4)) == b"cde"
    with pytest.raises(ValueError, match="has 1 tokens and the model has room for 0"):
        chat.fitting(turns, encode, room=0)


def test_a_wrong_folder_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "none")):
        chat.main(["--path", str(tmp_path / "none")])


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    texts = [
        "\n\nHuman: what is one and one?\n\nAssistant: two",
        "\n\nHuman: hello\n\nAssistant: good day",
    ] * 5
    recipes.build("recipe:llama-1m", texts, folder / "m", seed=4)
    return str(folder / "m")


def ask(folder, *flags, lines=("hello", "what is one?")):
    answer = chat.load(chat.parse(chat.parser(), ["--path", folder, "--max_new_tokens", "12", *flags]))
    pieces, replies, turns = [], [], []
    for line in lines:
        turns.append({"role": "user", "content": line})
        replies.append(answer(turns, pieces.append))
        turns.append({"role": "assistant", "content": replies[-1]})
    assert "".join(pieces) == "".join(replies)  # streamed is what is remembered
    return replies


def test_bf16_weights(model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    ids = torch.tensor([encode_prompt(tokenizer, [{"role": "user", "content": "hello"}])])
    out = Generator(model).generate(ids, max_new_tokens=12, eos_token_id=stop_token_ids(tokenizer))
    expected = chat.visible(decode_response(tokenizer, out[0, ids.shape[1] :]), finished=True)
    assert ask(model_folder, "--greedy", "--dtype", "bf16", lines=["hello"]) == [expected]


def test_greedy_answers_are_transformers_own(model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    turns = []
    for line, reply in zip(("hello", "what is one?"), ask(model_folder, "--greedy"), strict=True):
        turns.append({"role": "user", "content": line})
        ids = torch.tensor([encode_prompt(tokenizer, turns)])
        stops = stop_token_ids(tokenizer)
        out = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=stops)
        assert reply == chat.visible(decode_response(tokenizer, out[0, ids.shape[1] :]), finished=True)
        turns.append({"role": "assistant", "content": reply})


def test_a_seed_repeats_the_answers(model_folder):
    once, again, other = (ask(model_folder, "--temperature", "2", "--seed", seed) for seed in ("5", "5", "6"))
    assert once == again != other


def test_piped_lines_are_answered_one_a_line(model_folder, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/quit\nnot read\n"))
    chat.main(["--path", model_folder, "--max_new_tokens", "3", "--greedy"])
    out = capsys.readouterr().out
    assert out.strip() == ask(model_folder, "--greedy", "--max_new_tokens", "3", lines=["hello"])[0]
