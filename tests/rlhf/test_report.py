"""The report: what it reads, what it says, and that the page is one file with everything in it."""

import base64
import io
import json
import re
from html.parser import HTMLParser

import pytest
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console

from rlhf import curves, report, results
from rlhf.results import StageResult, over_optimised, read_folder, read_lines, shown_prompt, summarize


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def sft(folder):
    train = [{"stage": "sft", "step": n, "loss": 2.0 / n, "lr": 0.1} for n in (1, 2, 3)]
    evals = [{"stage": "sft", "step": n, "eval": True, "perplexity": 9.0 - n, "loss": 2.0} for n in (0, 3)]
    write_lines(folder / "metrics.jsonl", [evals[0], *train, evals[1]])


def ppo_eval(step, gold, score):
    return {
        "stage": "ppo",
        "step": step,
        "eval": True,
        "gold_rate": gold,
        "score_mean": score,
        "kl_ref": 0.1 * step,
    }


def ppo(folder, evals):
    train = [{"stage": "ppo", "step": n, "score_mean": 0.1 * n, "kl_ref": 0.01 * n} for n in (1, 2)]
    write_lines(folder / "metrics.jsonl", [evals[0], *train, *evals[1:]])


def text_of(call, *args):
    console = Console(file=io.StringIO(), width=100, soft_wrap=True, highlight=False)
    call(*args, console)
    return console.file.getvalue()


@pytest.mark.parametrize(
    "value, text", [(-0.0004, "0.000"), (-0.0006, "-0.001"), (0.0, "0.000"), (-10.0, "-10.000"), (None, "not measured")]
)
def test_a_figure_next_to_zero_has_no_sign(value, text):
    assert report._number(value, ".3f") == text


def test_a_pipeline_part_of_the_way_knows_what_it_knows(tmp_path):
    sft(tmp_path / "sft")
    found = read_folder(tmp_path)
    assert list(found) == ["sft"]
    assert summarize(found, {"sft": 3.0}) == {
        "sft_perplexity": 6.0,
        "reward_accuracy": None,
        "gold_rate_sft": None,
        "gold_rate_ppo": None,
        "kl_ref": None,
        "seconds": {"sft": 3.0, "reward": None, "ppo": None},
    }


def test_before_any_update_is_not_the_end(tmp_path):
    ppo(tmp_path / "ppo", [ppo_eval(0, 0.4, 0.0)])
    summary = summarize(read_folder(tmp_path), {})
    assert (summary["gold_rate_sft"], summary["gold_rate_ppo"], summary["kl_ref"]) == (0.4, None, None)


def test_the_end_is_the_last_evaluation_not_the_best(tmp_path):
    ppo(tmp_path / "ppo", [ppo_eval(0, 0.4, 0.0), ppo_eval(1, 0.8, 0.5), ppo_eval(2, 0.6, 0.9)])
    summary = summarize(read_folder(tmp_path), {})
    assert (summary["gold_rate_sft"], summary["gold_rate_ppo"], summary["kl_ref"]) == (0.4, 0.6, 0.2)
    text = text_of(report.write, tmp_path, {})
    assert (
        "60.0%  (+20.0 points)" in text and "over-optimised: the gold-right rate was 80.0% at step 1" in text
    )
    assert "over-optimised" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("points", "told"),
    [
        ([(0.4, 0.0), (0.8, 0.5), (0.6, 0.9)], True),
        ([(0.4, 0.0), (0.6, 0.5), (0.58, 0.9)], False),  # within the noise
        ([(0.4, 0.0), (0.8, 0.5), (0.6, 0.2)], False),  # the score fell too: not over-optimised, just worse
        ([(0.4, 0.0)], False),
    ],
)
def test_over_optimisation_is_told(tmp_path, points, told):
    evals = [ppo_eval(step, gold, score) for step, (gold, score) in enumerate(points)]
    assert bool(over_optimised(StageResult("ppo", tmp_path, evals=evals))) is told


def test_one_stages_folder(tmp_path):
    sft(tmp_path)
    text = text_of(report.write, tmp_path, {})
    assert "6.000" in text and (tmp_path / "report.html").exists()
    assert not (tmp_path / "summary.json").exists()


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.outside, self.pictures = [], [], []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.outside += [value for name, value in attrs if name in ("src", "href") and value[:5] != "data:"]
        if tag == "img":
            self.pictures.append(attributes["src"].removeprefix("data:image/png;base64,"))
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_one_whole_file_with_pictures(tmp_path):
    sft(tmp_path / "sft")
    ppo(tmp_path / "ppo", [ppo_eval(0, 0.4, 0.0), ppo_eval(2, 0.7, 0.5)])
    row = {"prompt": "\n\nHuman: <i>hi</i>\n\nAssistant:", "before": "a & b", "after": "c"}
    write_lines(tmp_path / "ppo" / "samples.jsonl", [{**row, "gold_before": None, "gold_after": None}])
    (tmp_path / "sft" / "run.json").write_text('{"status": "complete"}')
    (tmp_path / "sft" / "data_report.json").write_text('{"rows_dropped": {"too long": 3}}')
    text_of(report.write, tmp_path, {})
    page = (tmp_path / "report.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert tags.open == [] and tags.outside == []
    assert "&lt;i&gt;hi&lt;/i&gt;" in page and "a &amp; b" in page and "<i>" not in page
    assert "too long" in page and len(tags.pictures) == 2
    for picture in tags.pictures:
        image = Image.open(io.BytesIO(base64.b64decode(picture)))
        assert image.width > 600 and len(set(image.convert("L").resize((64, 32)).tobytes())) > 8  # not blank


def test_answers_are_shown_with_the_judges_word():
    rows = [
        {
            "prompt": "\n\nHuman: 1+1?\n\nAssistant:",
            "before": "3",
            "after": "2",
            "gold_before": 0,
            "gold_after": 1,
        }
    ]
    text = text_of(report.print_samples, rows)
    assert re.search(r"before: 3 +wrong", text) and re.search(r"after: 2 +right", text)


def test_prompts_are_shown_without_their_markers():
    assert shown_prompt("\n\nHuman: a\n\nAssistant:") == "a"
    two = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    assert shown_prompt(two) == "Human: a\n\nAssistant: b\n\nHuman: c"


def test_a_last_line_cut_short_is_left_out_and_another_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    assert read_lines(path) == [{"step": 1}]
    path.write_text('{"st\n{"step": 1}\n')
    with pytest.raises(ValueError, match="line 1: not JSON"):
        read_lines(path)


def test_a_wrong_folder_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="no metrics.jsonl in"):
        read_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match="no folder"):
        report.main([str(tmp_path / "none")])


def test_the_seconds_of_earlier_stages_are_kept(tmp_path):
    sft(tmp_path / "sft")
    report.write_summary(tmp_path, {"sft": 12.5})
    assert report.read_seconds(tmp_path) == {"sft": 12.5}
    assert results.read_stage(tmp_path / "reward") is None


def test_what_is_said_of_a_reward_model(tmp_path):
    line = {"stage": "reward", "step": 4, "eval": True, "accuracy": 0.75, "accuracy_low": 0.6, "accuracy_high": 0.86}
    line |= {"auc": 0.8, "auc_low": 0.71, "auc_high": 0.88, "ece": 0.043, "pairs": 4, "labels": 36, "score_error": 0.5}
    line |= {"accuracy_by_source": {"a/one.jsonl": 0.5, "b/two.jsonl": 1.0}}
    write_lines(tmp_path / "reward/metrics.jsonl", [line])
    rows = report.table_rows(read_folder(tmp_path), summarize(read_folder(tmp_path), {}))
    (result,) = read_folder(tmp_path).values()
    assert not curves.reliability(result, Figure().subplots())
    result.evals[-1]["calibration"] = [[0.6, 0.5, 10], [0.9, 1.0, 30]]
    axes = Figure().subplots()
    assert curves.reliability(result, axes)
    assert axes.collections[0].get_offsets().tolist() == [[0.6, 0.5], [0.9, 1.0]]
    assert "AUC and calibration" in dict(curves.draw(result))
    assert [(measure, value) for _, measure, value, _ in rows] == [
        ("accuracy, held-out pairs", "75.0%  (60.0% to 86.0%)"),
        ("  of one.jsonl", "50.0%"),
        ("  of two.jsonl", "100.0%"),
        ("AUC, good against bad answers", "0.800  (0.710 to 0.880)"),
        ("calibration error of its verdicts", "4.3%"),
        ("error of scores, root mean square", "0.500"),
    ]
