"""The data flags of the stages: each reaches the data, and what was dropped is said."""

import json
import re

import pytest

from data.chat import IGNORE
from rlhf.arguments import STAGE_PARSERS, parse
from rlhf.stage_data import load_data, source_names, stage_tokenizer
from tests.data.kit import CHATML, byte_level_fast
from tests.rlhf import tiny_models

MODELS = {
    "sft": ["--model_name_or_path", "m"],
    "reward": ["--model_name_or_path", "m"],
    "ppo": ["--actor_model_name_or_path", "a", "--critic_model_name_or_path", "c"],
}
SPLIT = {"sft": "1,0,0", "reward": "0,1,0", "ppo": "0,0,1"}
LONG = "one two three four five six seven eight nine ten"


@pytest.fixture
def load(tmp_path):
    """`load(stage, rows, *flags)`: the stage's data of a file of `rows`, all of them dealt to the stage."""

    def run(stage, rows, *flags, tokenizer=None):
        source = tmp_path / "rows.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        argv = [*MODELS[stage], "--output_dir", str(tmp_path / "out"), "--data_path", str(source)]
        argv += ["--data_output_path", str(tmp_path / "cache"), "--data_split", SPLIT[stage], *flags]
        return load_data(stage, tokenizer or byte_level_fast(), parse(STAGE_PARSERS[stage](), argv))

    return run


def rows(count=10, answer="yes"):
    return [{"prompt": f"q {i}", "chosen": answer, "rejected": f"no {i}"} for i in range(count)]


@pytest.mark.parametrize("stage", MODELS)
def test_eval_fraction_and_the_report_on_disk(load, stage, tmp_path, capsys):
    data = load(stage, rows(), "--eval_fraction", "0.3")
    assert (len(data.train), len(data.eval)) == (7, 3)
    report = json.loads((tmp_path / "out/data_report.json").read_text())
    assert (report["totals"]["rows_train"], report["totals"]["rows_eval"]) == (7, 3)
    assert re.search(r"^data: .*rows.jsonl: 10 rows read, 7 used, 3 evaluated on$", capsys.readouterr().out, re.M)
    assert len(load(stage, rows(), "--eval_fraction", "0").eval) == 0


def test_an_end_token_beside_a_chat_template_is_refused(tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text(CHATML)
    argv = ["--model_name_or_path", str(tiny_models.folder()), "--output_dir", "o", "--add_eot_token"]
    argv += ["--chat_template", str(template)]
    with pytest.raises(ValueError, match="--add_eot_token: the tokenizer has a chat template"):
        stage_tokenizer(tiny_models.folder(), parse(STAGE_PARSERS["sft"](), argv))


def test_sources_of_one_name_are_told_apart():
    report = {"sources": [{"name": name} for name in ("a", "owner/set", "owner/set")]}
    assert source_names(report) == ["a", "owner/set (2)", "owner/set (3)"]


@pytest.mark.parametrize("stage", MODELS)
def test_truncation(load, stage):
    limit = ["--max_prompt_seq_len" if stage == "ppo" else "--max_seq_len", "40"]
    prompt = LONG + " " + LONG
    some = [{"prompt": prompt, "chosen": "yes", "rejected": "no"}, *rows(3)]
    dropped = load(stage, some, *limit, "--truncation", "drop").report["totals"]
    assert dropped["rows_dropped"] == {"longer than 40 tokens": 1}
    cut = load(stage, some, *limit, "--truncation", "left").report
    assert cut["totals"]["rows_dropped"] == {} and cut["sources"][0]["rows_cut"] == {"left": 1}


def test_an_answer_cut_on_the_right_has_no_end_token(load):
    tokenizer = byte_level_fast()
    data = load("sft", rows(2, answer=LONG), "--max_seq_len", "30", "--truncation", "right", "--eval_fraction", "0")
    for item in data.train:
        assert len(item["input_ids"]) == 30 and item["labels"][-1] not in (IGNORE, tokenizer.eos_token_id)


def test_bad_rows_are_counted_or_stop_the_run(load, capsys):
    some = [*rows(18), {"messages": [{"role": "nobody", "content": "x"}]}, {"prompt": "q"}]
    report = load("reward", some).report["totals"]
    assert report["rows_dropped"] == {"unknown role": 1, "no pair of answers": 1}
    assert "dropped: 1 unknown role, 1 no pair of answers" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"rows\.jsonl row 19: unknown role, field messages\[0\]: 'nobody'"):
        load("reward", some, "--on_bad_row", "error")
    with pytest.raises(ValueError, match="1 of 20 rows are malformed, more than the 1% allowed"):
        load("reward", some, "--max_bad_rows", "0.01")


def test_the_share_of_bad_rows_is_of_those_looked_into(load):
    """Rows dealt to the other stages are not: a file that is bad throughout is found out by any stage."""
    some = [{"prompt": "q", "answer": "a"}, {"x": 1}, {"x": 2}, {"x": 3}] * 5
    with pytest.raises(ValueError, match=r"\d of 10 rows are malformed, .*; \d because of: .* unknown shape, field"):
        load("sft", some, "--data_split", "1,1,0")


def test_data_format_fixes_the_shape(load):
    both = [{"prompt": f"q {i}", "response": "b", "text": f"\n\nHuman: t {i}\n\nAssistant: a"} for i in range(3)]
    assert load("sft", both).report["sources"][0]["shape"] == {"prompt-response": 3}
    assert load("sft", both, "--data_format", "dialogue-text").report["sources"][0]["shape"] == {"dialogue-text": 3}
    with pytest.raises(ValueError, match="data_format 'pairs' is unknown: the shapes are turns-pair"):
        load("sft", both, "--data_format", "pairs")


@pytest.mark.parametrize("stage", MODELS)
def test_a_chat_template_from_a_file(load, stage, tmp_path):
    (tmp_path / "chat.jinja").write_text(CHATML)
    for part in (byte_level_fast(), tiny_models.causal_model("llama").config):
        part.save_pretrained(tmp_path / "model")

    def with_template(path):
        argv = [*MODELS[stage], "--output_dir", "out", "--chat_template", str(path)]
        return stage_tokenizer(tmp_path / "model", parse(STAGE_PARSERS[stage](), argv))

    tokenizer = with_template(tmp_path / "chat.jinja")
    data = load(stage, rows(), tokenizer=tokenizer)
    ids = data.train[0][{"sft": "input_ids", "reward": "chosen_ids", "ppo": "prompt_ids"}[stage]]
    assert tokenizer.decode(ids).startswith("<|im_start|>user\nq ")
    assert tokenizer.chat_template == CHATML  # and is saved with the model
    with pytest.raises(FileNotFoundError, match=r"no chat template at .*nowhere"):
        with_template(tmp_path / "nowhere")


def test_limits_and_columns_of_one_source(load, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"ask": f"q {i}", "say": "a"}) + "\n" for i in range(20)))
    source = f"{other}:2?limit=5&columns=ask>prompt,say>response"
    data = load("sft", rows(4), "--eval_fraction", "0", "--data_path", source, str(tmp_path / "rows.jsonl"))
    first, second = data.report["sources"]
    assert (first["rows_read"], first["rows_train"], first["items_train"]) == (5, 5, 10)
    assert (second["rows_read"], second["items_train"], len(data.train)) == (4, 4, 14)
