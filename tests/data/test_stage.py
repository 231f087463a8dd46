"""The data of a stage: dealt, tokenized, fitted, cached, and every row accounted for."""

from __future__ import annotations

import gzip
import json
import math
import random

import pytest
import torch

from data import chat, collate_sft, load_stage_data, split_rows
from data.items import shrink
from data.report import OTHER_STAGES
from tests.data.kit import CHATML, build, byte_level_fast, sentencepiece_fast

WORDS = "one two three four five six seven eight nine ten yes no hello world good day".split()


def dialogue_rows(n, seed=0):
    """Pairs over dialogues of one to three questions."""
    draw = random.Random(seed)
    some = lambda: " ".join(draw.choices(WORDS, k=draw.randint(1, 6)))  # noqa: E731
    rows = []
    for k in range(n):
        turns = "".join(f"\n\nHuman: {some()}\n\nAssistant: {some()}" for _ in range(draw.randint(0, 2)))
        prompt = f"{turns}\n\nHuman: question {k} {some()}\n\nAssistant:"
        rows.append({"prompt": prompt, "chosen": f"good {some()}", "rejected": f"bad {some()}"})
    return rows


def write(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


@pytest.fixture
def load(tmp_path):
    """load(stage, rows or paths, ...) with a cache of its own."""

    def run(stage, source, tokenizer=None, **options):
        if isinstance(source, list):
            source = write(tmp_path / "rows.jsonl", source)
        options = {"data_split": "1,1,1", "seed": 7, "data_output_path": tmp_path / "cache"} | options
        return load_stage_data(stage, tokenizer or build("byte-level"), data_path=source, **options)

    return run


def add_up(report):
    for part in [*report["sources"], report["totals"]]:
        assert part["rows_read"] == part["rows_train"] + part["rows_eval"] + sum(part["rows_dropped"].values())


def test_stages_share_no_row(load):
    rows = dialogue_rows(60)
    tokenizer = build("byte-level")
    seen = {}
    for stage in ("sft", "reward", "ppo"):
        parts = load(stage, rows)
        assert (len(parts.train), len(parts.eval)) == (18, 2)
        add_up(parts.report)
        assert parts.report["totals"]["rows_dropped"] == {OTHER_STAGES: 40}
        key = {"sft": "input_ids", "reward": "chosen_ids", "ppo": "prompt_ids"}[stage]
        texts = [tokenizer.decode(item[key]) for item in [*parts.train, *parts.eval]]
        seen[stage] = {text.partition("question ")[2].split()[0] for text in texts}
        assert len(seen[stage]) == 20
    assert not seen["sft"] & seen["reward"] and not seen["sft"] & seen["ppo"] and not seen["reward"] & seen["ppo"]
    assert len(set.union(*seen.values())) == 60


def test_items_are_what_chat_makes_of_the_rows(load):
    tokenizer = sentencepiece_fast()
    rows = dialogue_rows(30)
    by_prompt = {row["prompt"]: row for row in rows}
    ppo = load("ppo", rows, tokenizer, data_split="0,0,1")
    for item in ppo.train:
        assert item["prompt_ids"].tolist() == chat.encode_prompt(tokenizer, item["row"])
        assert item["row"] == by_prompt[item["row"]["prompt"]]
    sft = load("sft", rows, tokenizer, data_split="1,0,0")
    expected = {tuple(chat.encode_dialogue(tokenizer, row, row["chosen"])[0]): row for row in rows}
    for item in [*sft.train, *sft.eval]:
        row = expected.pop(tuple(item["input_ids"].tolist()))
        assert item["labels"].tolist() == chat.encode_dialogue(tokenizer, row, row["chosen"])[1]
    assert not expected
    for item in load("reward", rows, tokenizer, data_split="0,1,0").train:
        sides = [item["chosen_ids"].tolist(), item["rejected_ids"].tolist()]
        assert any(
            sides == [chat.encode_dialogue(tokenizer, row, row[side])[0] for side in ("chosen", "rejected")]
            for row in rows
        )


def test_train_on_prompt(load):
    parts = load("sft", dialogue_rows(6), train_on_prompt=True, data_split="1,0,0")
    assert all(torch.equal(item["labels"], item["input_ids"]) for item in parts.train)


def test_response_is_the_demonstration_before_chosen(load):
    rows = [{"prompt": f"q{k}", "chosen": "best", "rejected": "worst", "response": "shown"} for k in range(4)]
    tokenizer = build("byte-level")
    for item in load("sft", rows, data_split="1,0,0").train:
        assert tokenizer.decode(item["labels"][item["labels"] >= 0]) == " shown</s>"


def test_dropped_rows_are_counted_by_reason(load):
    rows = [
        *dialogue_rows(10),
        {"prompt": "same", "chosen": "yes", "rejected": " yes"},
        {"chosen": "\n\nHuman: a\n\nAssistant: x", "rejected": "\n\nHuman: b\n\nAssistant: y"},
        {"prompt": "p", "response": "only one"},
        {"prompt": "p", "response": "only one", "score": 1},
        {"messages": [{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}]},
        {"prompt": "empty", "chosen": "", "rejected": "no"},
    ]
    parts = load("reward", rows, data_split="0,1,0", eval_fraction=0.0, single_answers="pair")
    assert parts.report["totals"]["rows_dropped"] == {
        "both answers equal": 1,
        "prompts differ": 1,
        "no pair of answers": 1,
        "no answer of another score to the same prompt": 1,
        "tool turn": 1,
        "empty answer": 1,
    }
    add_up(parts.report)
    source = parts.report["sources"][0]
    assert source["first_dropped"]["both answers equal"].endswith("rows.jsonl row 11: both answers equal")
    assert "field messages[1]" in source["first_dropped"]["tool turn"]
    assert len(parts.train) == 10


def test_pairs_equal_as_tokens_only(load):
    rows = [{"prompt": "p", "chosen": "a  b", "rejected": "a b"}, *dialogue_rows(3)]
    parts = load("reward", rows, build("WordPiece"), data_split="0,1,0", eval_fraction=0.0)
    assert parts.report["totals"]["rows_dropped"] == {"both answers equal as tokens": 1}


def test_answers_marked_bad_are_not_taught(load):
    rows = [{"prompt": f"p{k}", "response": "yes", "reward": k % 2} for k in range(10)]
    sft = load("sft", rows, data_split="1,0,0", eval_fraction=0.0)
    assert len(sft.train) == 5
    assert sft.report["totals"]["rows_dropped"] == {"answer marked bad (score 0 or less)": 5}
    assert len(load("ppo", rows, data_split="0,0,1", eval_fraction=0.0).train) == 10


def test_a_weight_beyond_all_memory_is_refused(load, tmp_path):
    path = write(tmp_path / "rows.jsonl", dialogue_rows(20))
    with pytest.raises(ValueError, match=r"rows.jsonl: 6 rows with weight 1e\+12 are more than .*: lower the weight"):
        load("sft", f"{path}:1e12")


def test_weights_and_several_sources(load, tmp_path):
    half, twice, only = (tmp_path / f"{name}.jsonl" for name in ("half", "twice", "only"))
    for path in (half, twice, only):
        write(path, dialogue_rows(20))
    parts = load("sft", (f"{half}:0.5", f"{twice}:2"), sft_only_data_path=[only], eval_fraction=0.0)
    counts = [(source["rows_train"], source["items_train"]) for source in parts.report["sources"]]
    assert counts == [(4, 4), (7, 14), (20, 20)]  # 7 of 20 rows are SFT's; 3.5 rounds up
    assert parts.report["sources"][0]["rows_dropped"] == {OTHER_STAGES: 13, "left out by weight 0.5": 3}
    assert len(parts.train) == 38
    add_up(parts.report)
    assert len(load("reward", (half,), sft_only_data_path=[only], eval_fraction=0.0).train) == 6


def test_a_sources_own_evaluation_part_serves_every_stage(load, tmp_path):
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.jsonl", dialogue_rows(30))
    write(tmp_path / "set" / "eval.jsonl", dialogue_rows(5, seed=1))
    for stage in ("sft", "reward", "ppo"):
        parts = load(stage, (tmp_path / "set",))
        assert (len(parts.train), len(parts.eval)) == (10, 5)
        add_up(parts.report)


def test_empty_parts_are_errors_with_counts(load):
    rows = [{"instruction": f"q{k}", "output": "a"} for k in range(9)]
    with pytest.raises(ValueError, match="stage reward: 0 to train.*3 no pair of answers; first dropped: .* row 1: no"):
        load("reward", rows)
    with pytest.raises(ValueError, match="too few training rows for stage sft: 3 to train on .at least 5"):
        load("sft", rows, min_train=5, eval_fraction=0.0)
    with pytest.raises(ValueError, match="too few evaluation rows for stage sft: 1 to train"):
        load("sft", rows[:1], data_split="1,0,0")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": "dpo"}, "stage 'dpo' must be one of sft, reward, ppo"),
        ({"truncation": "middle"}, "truncation 'middle'"),
        ({"stage": "ppo", "truncation": "right"}, "truncation right would cut off"),
        ({"max_seq_len": 0}, "0 tokens must be at least 1"),
        ({"data_split": "1,2"}, "data_split '1,2'"),
        ({"eval_fraction": 2}, "eval_fraction 2"),
        ({"on_bad_row": "keep"}, "on_bad_row 'keep'"),
        ({"data_format": "square"}, "data_format 'square' is unknown"),
    ],
)
def test_arguments_are_checked_first(load, options, message):
    with pytest.raises(ValueError, match=message):
        load(options.pop("stage", "sft"), dialogue_rows(3), **options)


def test_on_bad_row_error_stops(load):
    with pytest.raises(ValueError, match="rows.jsonl row 2: tool turn, field messages"):
        load("sft", [dialogue_rows(1)[0], {"messages": [{"role": "tool"}]}], data_split="1,0,0", on_bad_row="error")


class TestLengths:
    long = "word " * 60

    def rows(self):
        start = f"\n\nHuman: old {self.long}\n\nAssistant: before\n\nHuman: {self.long}last question\n\nAssistant:"
        return [{"prompt": start, "chosen": "good answer", "rejected": "bad"}] * 2

    def test_prompts_are_dropped(self, load):
        rows = [*self.rows(), {"prompt": "short", "response": "x"}]
        parts = load("ppo", rows, data_split="0,0,1", max_prompt_len=50, eval_fraction=0.0)
        assert len(parts.train) == 1
        assert parts.report["totals"]["rows_dropped"] == {"longer than 50 tokens": 2}

    @pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
    def test_left_keeps_the_end_of_the_question_and_the_answer(self, load, stage):
        tokenizer = build("byte-level")
        split = {"sft": "1,0,0", "reward": "0,1,0", "ppo": "0,0,1"}[stage]
        limits = {"max_seq_len": 60, "max_prompt_len": 60, "truncation": "left"}
        parts = load(stage, self.rows(), data_split=split, eval_fraction=0.0, **limits)
        item = parts.train[0]
        sides = [value for key, value in item.items() if key.endswith("_ids")]
        for ids in sides:
            text = tokenizer.decode(ids)
            assert 50 < len(ids) <= 60
            assert text.startswith("\n\nHuman: word") and "old" not in text and "before" not in text
            assert "last question\n\nAssistant:" in text
        if stage != "ppo":
            assert tokenizer.decode(sides[0]).endswith(" good answer</s>")
        if stage == "reward":
            assert tokenizer.decode(sides[1]).endswith(" bad</s>")
            prompts = [tokenizer.decode(ids).rpartition("Assistant:")[0] for ids in sides]
            assert prompts[0] == prompts[1]
        assert parts.report["sources"][0]["rows_cut"] == {"left": 2}

    def test_left_drops_whole_turns_first_and_keeps_the_system_turn(self, load):
        rows = [
            {
                "messages": [
                    {"role": "system", "content": "be kind"},
                    {"role": "user", "content": self.long},
                    {"role": "assistant", "content": "one"},
                    {"role": "user", "content": "two?"},
                    {"role": "assistant", "content": "two"},
                ]
            }
        ]
        parts = load("sft", rows, data_split="1,0,0", eval_fraction=0.0, max_seq_len=60, truncation="left")
        text = build("byte-level").decode(parts.train[0]["input_ids"])
        assert text == "be kind\n\nHuman: two?\n\nAssistant: two</s>"

    @pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
    def test_left_cuts_a_script_without_spaces_before_any_letter(self, load, stage):
        """The byte-level tokenizer gives a token for each of a letter's three bytes."""
        question = "".join(chr(0x4E00 + k) for k in range(100))
        row = {"prompt": question, "chosen": "yes", "rejected": "no"}
        split = {"sft": "1,0,0", "reward": "0,1,0", "ppo": "0,0,1"}[stage]
        limits = {"max_seq_len": 200, "max_prompt_len": 200, "truncation": "left"}
        [item] = load(stage, [row], data_split=split, eval_fraction=0.0, **limits).train
        tokenizer = build("byte-level")
        (ids,) = (item[name] for name in ("input_ids", "chosen_ids", "prompt_ids") if name in item)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        kept = text.removeprefix("\n\nHuman: ").split("\n\n")[0]
        assert question.endswith(kept) and 198 <= len(ids) <= 200

    @pytest.mark.parametrize("n", [1, 2, 3, 7, 40])
    def test_left_keeps_the_longest_ending_that_fits(self, n):
        turns = [{"role": ("user", "assistant")[k % 2], "content": f"w{k}"} for k in range(2 * n + 1)]
        for fits in range(2 * n + 2):
            tried = []

            def accept(some, fits=fits, tried=tried):
                tried.append(some)
                return some if len(some) <= fits else None

            expected = turns[len(turns) - fits + (1 - fits % 2) :] if fits else None
            assert shrink(turns, accept) == expected
            assert len(tried) <= 2 * math.log2(2 * n + 1) + 4
        words = [{"role": "user", "content": " ".join(f"w{k}" for k in range(n))}]
        for fits in range(1, n + 1):
            found = shrink(words, lambda some, fits=fits: some if len(some[0]["content"].split()) <= fits else None)
            assert found[0]["content"].split() == words[0]["content"].split()[n - fits :]

    def test_left_keeps_answers_whole_but_for_one_too_long_by_itself(self, load):
        tokenizer = build("byte-level")
        rows = [{"prompt": self.long + "why?", "chosen": self.long, "rejected": "bad"}]
        limits = {"eval_fraction": 0.0, "max_seq_len": 100, "truncation": "left"}
        parts = load("reward", rows, data_split="0,1,0", **limits)
        chosen, rejected = (tokenizer.decode(parts.train[0][side]) for side in ("chosen_ids", "rejected_ids"))
        assert parts.report["sources"][0]["rows_cut"] == {"left, and the end of an answer": 1}
        assert len(parts.train[0]["chosen_ids"]) == 100
        prompt, _, answer = chosen.partition("Assistant:")
        assert prompt.startswith("\n\nHuman: ") and prompt.endswith("why?\n\n") and "</s>" not in answer
        assert rejected == prompt + "Assistant: bad</s>"
        with pytest.raises(ValueError, match="1 answer longer than 100 tokens"):
            load("sft", rows, data_split="1,0,0", **limits)

    def test_right_cuts_the_answer_without_an_end_token(self, load):
        tokenizer = build("byte-level")
        parts = load(
            "sft", [{"prompt": "q", "response": self.long}], data_split="1,0,0", eval_fraction=0.0, max_seq_len=40
        )
        item = parts.train[0]
        assert len(item["input_ids"]) == 40
        assert tokenizer.eos_token_id not in item["labels"].tolist()

    def test_right_leaves_no_marker_hanging(self, load):
        tokenizer = build("byte-level")
        rows = [
            {"messages": chat.parse_dialogue("Human: a\n\nAssistant: b\n\nHuman: " + self.long + "\n\nAssistant: c")}
        ]
        parts = load("sft", rows, data_split="1,0,0", eval_fraction=0.0, max_seq_len=40)
        assert tokenizer.decode(parts.train[0]["input_ids"]) == "\n\nHuman: a\n\nAssistant: b</s>"

    def test_nothing_of_the_answer_left(self, load):
        rows = [{"prompt": self.long, "response": "yes"}, {"prompt": "q", "response": "yes"}]
        parts = load("sft", rows, data_split="1,0,0", eval_fraction=0.0, max_seq_len=30)
        assert parts.report["totals"]["rows_dropped"] == {"no answer within 30 tokens": 1}

    def test_drop(self, load):
        rows = [{"prompt": self.long, "response": "yes"}, {"prompt": "q", "response": "yes"}]
        parts = load("sft", rows, data_split="1,0,0", eval_fraction=0.0, max_seq_len=30, truncation="drop")
        assert parts.report["totals"]["rows_dropped"] == {"longer than 30 tokens": 1}


def test_roles_the_template_refuses_are_counted(load):
    template = "{% if messages[0].role == 'assistant' %}{{ raise_exception('user first') }}{% endif %}" + CHATML
    rows = [
        {
            "messages": [
                {"role": "assistant", "content": "hi"},
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "a"},
            ]
        },
        {"prompt": "q", "response": "a"},
    ]
    parts = load("sft", rows, byte_level_fast(template=template), data_split="1,0,0", eval_fraction=0.0)
    assert parts.report["totals"]["rows_dropped"] == {"roles the chat template refuses": 1}


@pytest.mark.parametrize("name", ["byte-level, pad = eos", "byte-level", "byte-level, no pad"])
def test_loss_does_not_see_padding_and_learns_one_end_token(load, name):
    """The end token is supervised once, whatever the pad token, and padding changes no loss."""
    tokenizer = build(name)
    item = load("sft", [{"prompt": "q", "response": "yes"}], tokenizer, data_split="1,0,0", eval_fraction=0.0).train[0]
    assert item["labels"].tolist().count(tokenizer.eos_token_id) == 1
    torch.manual_seed(0)
    table = torch.randn(len(tokenizer), len(tokenizer), dtype=torch.float64)
    losses = []
    for padding in (0, 5, 50):
        batch = collate_sft([item], tokenizer.pad_token_id, pad_to_multiple_of=len(item["input_ids"]) + padding)
        assert batch["labels"].tolist()[0].count(tokenizer.eos_token_id) == 1
        assert (batch["labels"][~batch["attention_mask"]] == chat.IGNORE).all()
        logits = table[batch["input_ids"]]
        losses.append(torch.nn.functional.cross_entropy(logits[0, :-1], batch["labels"][0, 1:]).item())
    assert losses[1:] == pytest.approx(losses[:1] * 2, abs=1e-6)


def test_same_rows_in_every_shape_and_file_give_the_same_tensors(load, tmp_path):
    base = [{"prompt": f"q {k}\nמה", "chosen": f"yes {k} 😀", "rejected": f"no {k}"} for k in range(6)]
    turn = lambda role, text: {"role": role, "content": text}  # noqa: E731
    start = lambda row: f"\n\nHuman: {row['prompt']}\n\nAssistant: "  # noqa: E731
    shapes = {
        "plain.json": base,
        "dialogue.jsonl": [{side: start(row) + row[side] for side in ("chosen", "rejected")} for row in base],
        "turns.json": [
            {
                "conversations": [{"from": "human", "value": row["prompt"]}],
                "chosen": {"from": "gpt", "value": row["chosen"]},
                "rejected": {"from": "gpt", "value": row["rejected"]},
            }
            for row in base
        ],
        "lists.jsonl": [
            {side: [turn("user", row["prompt"]), turn("assistant", row[side])] for side in ("chosen", "rejected")}
            for row in base
        ],
    }
    results = []
    for name, rows in shapes.items():
        text = json.dumps(rows) if name.endswith("json") else "\n".join(map(json.dumps, rows))
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
        for _ in ("cold", "warm"):
            parts = load("reward", (tmp_path / f"{name}.gz",), data_split="0,1,0")
            results.append(
                [(i["chosen_ids"].tolist(), i["rejected_ids"].tolist()) for i in [*parts.train, *parts.eval]]
            )
    assert all(result == results[0] for result in results)
    assert len(results[0]) == 6


def test_fixed_format(load):
    rows = [{"prompt": f"q{k}", "chosen": "yes", "rejected": "no", "response": "shown"} for k in range(4)]
    parts = load("sft", rows, data_split="1,0,0", data_format="prompt-response")
    assert parts.report["sources"][0]["shape"] == {"prompt-response": 4}
    with pytest.raises(
        ValueError, match="4 of 4 rows are malformed.*missing column, field instruction: shape instruction"
    ):
        load("sft", rows, data_split="1,0,0", data_format="instruction")


def test_equal_rows_that_were_dealt_apart_are_counted(load, tmp_path):
    rows = [{"prompt": f"q {k // 3}", "chosen": "yes", "rejected": "no"} for k in range(60)]
    twice = write(tmp_path / "twice.jsonl", rows[:3] * 4)
    dealt = [rows, rows[:3] * 4]
    for number, stage in enumerate(("sft", "reward", "ppo")):
        parts = load(stage, (write(tmp_path / "rows.jsonl", rows), twice), eval_fraction=0.25)
        mine, others, held = [], set(), set()
        for source in dealt:
            deals = split_rows(len(source), "1,1,1", 7)
            cut = len(deals[number]) - round(len(deals[number]) * 0.25)
            mine.append(([source[k]["prompt"] for k in deals[number][:cut]], deals[number][cut:]))
            held |= {source[k]["prompt"] for k in deals[number][cut:]}
            others |= {source[k]["prompt"] for part in deals[:number] + deals[number + 1 :] for k in part}
        for report, source, (train, held_out) in zip(parts.report["sources"], dealt, mine, strict=True):
            every = train + [source[k]["prompt"] for k in held_out]
            assert report["rows_equal"] == {
                "equal to a row of another stage": sum(prompt in others for prompt in every),
                "trained on and equal to a row of evaluation": sum(prompt in held for prompt in train),
            }
        assert "equal to a row of another stage" in parts.report["lines"][0]
    assert "rows_equal" not in load("sft", dialogue_rows(60)).report["sources"][0]


def test_other_columns_of_a_prompt_are_kept_whatever_is_in_them(load, tmp_path):
    """Half a pair of surrogates is no Unicode, but JSON can write it."""
    extra = {"k\udfff": ["\ud800", {"a": None, "b": 0.1}], "id": "\u2028 é 😀"}
    rows = [{"prompt": f"q {k}", **(extra if k % 2 else {})} for k in range(6)]
    (tmp_path / "odd.jsonl").write_text("\n".join(map(json.dumps, rows)))
    items = load("ppo", tmp_path / "odd.jsonl", data_split="0,0,1", eval_fraction=0.0).train
    kept = {item["row"]["messages"][0]["content"]: item["row"].get("extra") for item in items}
    assert kept == {f"q {k}": extra if k % 2 else None for k in range(6)}


def test_why_a_chat_template_refuses_a_row_is_said(load):
    refusing = "{% if messages|length > 2 %}{{ raise_exception('too many') }}{% endif %}" + CHATML
    rows, reason = dialogue_rows(30), "roles the chat template refuses"
    options = {"tokenizer": byte_level_fast(template=refusing), "data_split": "1,0,0", "eval_fraction": 0.0}
    (source,) = load("sft", rows, **options).report["sources"]
    assert source["rows_dropped"] == {reason: sum("Assistant: " in row["prompt"] for row in rows)}
    assert source["first_dropped"][reason].endswith("user, assistant: too many)")
