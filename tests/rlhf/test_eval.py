"""`rlhf eval`: a reward model on data and on two texts, and models side by side."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.chat import encode_dialogue, encode_prompt, stop_token_ids
from rlhf import cli, eval_prompts
from rlhf.answering import contrastive_search
from rlhf.eval_flags import prompt_eval_parser
from rlhf.flags import parse
from rlhf.models import load_score_model, load_tokenizer, new_score_model, score_texts, scores
from tests.rlhf import tiny_models


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    tokenizer = load_tokenizer(tiny_models.folder())
    new_score_model(tiny_models.folder(), tokenizer, seed=3).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    some = [{"prompt": f"Say {k}.", "chosen": f"It is {k}.", "rejected": "No." * (k % 4 + 1)} for k in range(20)]
    some += [{"prompt": f"Tell {k}.", "response": f"So {k}!", "label": k % 2} for k in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in some))
    return path, some


def text(prompt, answer):
    return f"\n\nHuman: {prompt}\n\nAssistant: {answer}"


def test_a_reward_model_on_data(tmp_path, reward_model, rows, capsys):
    path, some = rows
    flags = ["--data_path", str(path), "--data_split", "0,1,0", "--part", "all", "--data_output_path", str(tmp_path)]
    flags += ["--per_device_eval_batch_size", "7", "--output", str(tmp_path / "found.json")]
    cli.main(["eval", "reward", "--model_name_or_path", str(reward_model), *flags])
    found = json.loads((tmp_path / "found.json").read_text())
    model, tokenizer = load_score_model(reward_model), load_tokenizer(reward_model)
    score = lambda prompt, answer: float(score_texts(model, tokenizer, [text(prompt, answer)]))  # noqa: E731
    pairs = [(score(r["prompt"], r["chosen"]), score(r["prompt"], r["rejected"])) for r in some[:20]]
    labels = [(score(r["prompt"], r["response"]), r["label"]) for r in some[20:]]
    right = sum(a > b for a, b in pairs) + sum((s > 0) == bool(label) for s, label in labels)
    assert found["accuracy"] == pytest.approx(right / 30)
    good = [a for a, _ in pairs] + [s for s, label in labels if label]
    bad = [b for _, b in pairs] + [s for s, label in labels if not label]
    assert found["auc"] == pytest.approx(sum(a > b for a in good for b in bad) / len(good) / len(bad), abs=1e-3)
    assert found["chosen_score"] == pytest.approx(sum(good) / 25, abs=1e-5)
    assert found["rejected_score"] == pytest.approx(sum(bad) / 25, abs=1e-5)
    saved = [(row["chosen_score"], row["rejected_score"]) for row in found["items"] if row["kind"] == "pair"]
    assert sorted(saved) == [pytest.approx(pair, abs=1e-5) for pair in sorted(pairs)]
    table = capsys.readouterr().out
    assert f"{found['auc']:.4f}" in table and "mean score, bad answers" in table


def test_the_part_held_out_is_the_stages(tmp_path, reward_model, rows):
    flags = ["--data_path", str(rows[0]), "--data_split", "0,1,0", "--data_output_path", str(tmp_path)]
    flags += ["--eval_fraction", "0.2", "--output", str(tmp_path / "found.json")]
    cli.main(["eval", "reward", "--model_name_or_path", str(reward_model), *flags])
    assert len(json.loads((tmp_path / "found.json").read_text())["items"]) == 6
    assert len([path for path in tmp_path.iterdir() if path.name.startswith("reward_")]) == 1  # its cache


def test_two_texts(tmp_path, reward_model, capsys):
    base = ["eval", "reward", "--model_name_or_path", str(reward_model), "--prompt", "Say red."]
    cli.main([*base, "--chosen", "It is red.", "--rejected", "No.", "--output", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    model, tokenizer = load_score_model(reward_model), load_tokenizer(reward_model)
    wanted = score_texts(model, tokenizer, [text("Say red.", "It is red."), text("Say red.", "No.")]).tolist()
    assert [found["chosen_score"], found["rejected_score"]] == pytest.approx(wanted, abs=1e-5)
    assert f"{wanted[0]:+.4f}" in capsys.readouterr().out
    cli.main([*base, "--chosen", "It is red.", "--dtype", "bf16", "--output", str(tmp_path / "rounded.json")])
    rounded = score_texts(load_score_model(reward_model, torch.bfloat16), tokenizer, [text("Say red.", "It is red.")])
    found = json.loads((tmp_path / "rounded.json").read_text())["chosen_score"]
    assert found == pytest.approx(float(rounded), abs=1e-6) and found != pytest.approx(wanted[0], abs=1e-6)
    with pytest.raises(SystemExit):
        cli.main(base)
    assert "--prompt needs --prompt and --chosen beside it" in capsys.readouterr().err


def compare(*flags):
    models = ["--model_name_or_path_baseline", str(tiny_models.folder())]
    models += ["--model_name_or_path_finetune", str(tiny_models.folder("opt")), str(tiny_models.folder(seed=1))]
    return eval_prompts.compare(parse(prompt_eval_parser(), [*models, "--max_new_tokens", "6", *flags]))


def test_an_answer_that_runs_on_is_scored_whole(reward_model):
    """Markers that a model writes begin no turn: the score is that of these tokens behind this prompt."""
    said = "A.\n\nHuman: and?\n\nAssistant: B"
    rows = [{"prompt": text("Say red.", "").rstrip(), "answers": {"greedy": {"m": [{"text": said}]}}}]
    args = parse(prompt_eval_parser(), ["--model_name_or_path_baseline", "b", "--model_name_or_path_finetune", "f",
                                        "--reward_model_name_or_path", str(reward_model)])  # fmt: skip
    eval_prompts._score([{"prompt": rows[0]["prompt"]}], rows, args)
    model, tokenizer = load_score_model(reward_model), load_tokenizer(reward_model)
    prompt = encode_prompt(tokenizer, rows[0]["prompt"])
    ids = prompt + tokenizer(" " + said, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    with torch.no_grad():
        wanted = float(scores(model, torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool)))
    assert rows[0]["answers"]["greedy"]["m"][0]["score"] == pytest.approx(wanted, abs=1e-5)


def test_models_side_by_side(reward_model, tmp_path):
    judge = tmp_path / "judge.py"
    judge.write_text("def longer(prompt, answer):\n    return len(answer)\n")
    flags = ["--reward_model_name_or_path", str(reward_model), "--gold_fn", f"{judge}:longer"]
    found = compare(*flags, "--prompt", "Say red.", "Spell cat.", "--num_return_sequences", "3")
    base, opt, other = found["models"]
    assert [row["prompt"] for row in found["prompts"]] == [text(ask, "").rstrip() for ask in ("Say red.", "Spell cat.")]
    for row in found["prompts"]:
        assert [len(row["answers"]["greedy"][path]) for path in found["models"]] == [1, 1, 1]
        assert [len(row["answers"]["sample"][path]) for path in found["models"]] == [3, 3, 3]
    model, tokenizer = load_score_model(reward_model), load_tokenizer(reward_model)

    @torch.no_grad()
    def score(prompt, answer):
        ids = torch.tensor([encode_dialogue(tokenizer, prompt, answer)[0]])
        return float(scores(model, ids, torch.ones_like(ids).bool()))

    for decoding in ("greedy", "sample"):
        wins, of_mine = [], []
        for row in found["prompts"]:
            mine, theirs = ([one["text"] for one in row["answers"][decoding][path]] for path in (other, base))
            # by their tokens: some of these random answers have markers in them
            mine, theirs = ([score(row["prompt"], answer) for answer in some] for some in (mine, theirs))
            of_mine += mine
            beaten = [1 if a > b else 0.5 if a == b else 0 for a in mine for b in theirs]
            wins.append(sum(beaten) / len(beaten))
        summary = found["summary"][decoding]
        assert summary[other]["score_mean"] == pytest.approx(sum(of_mine) / len(of_mine), abs=1e-5)
        assert summary[other]["score_win_rate"] == pytest.approx(sum(wins) / 2)
        assert summary[other]["gold_mean"] == pytest.approx(summary[other]["length_mean"])
        assert "score_win_rate" not in summary[base]
    again = compare(*flags, "--prompt", "Say red.", "Spell cat.", "--num_return_sequences", "3")
    assert again == found


def test_models_answer_in_the_type_asked_for():
    models = ["--model_name_or_path_baseline", "b", "--model_name_or_path_finetune", "f", "--max_new_tokens", "3"]
    for name, dtype in (("auto", torch.float32), ("bf16", torch.bfloat16)):
        answerer = eval_prompts.Answerer(
            tiny_models.folder(), parse(prompt_eval_parser(), [*models, "--dtype", name])
        )
        assert answerer.model.dtype == dtype
        for decoding in ("greedy", "sample", "contrastive"):
            assert len(answerer.answers([text("Say red.", "").rstrip()], decoding)) == 1


def greedy_reference(folder, prompt, **options):
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([encode_prompt(tokenizer, [{"role": "user", "content": prompt}])])
    stops = stop_token_ids(tokenizer)
    found = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=stops, pad_token_id=0, **options)
    return [tokenizer.decode(row[ids.shape[1] :], skip_special_tokens=True).strip() for row in found]


def test_beams_and_greedy_are_transformers(capsys):
    for flags, options in (
        ([], {}),
        (["--num_beams", "3", "--num_return_sequences", "2"], {"num_beams": 3, "num_return_sequences": 2}),
    ):
        (row,) = compare("--decoding", "greedy", "--prompt", "Say red.", *flags)["prompts"]
        texts = [one["text"] for one in row["answers"]["greedy"][str(tiny_models.folder())]]
        assert texts == greedy_reference(tiny_models.folder(), "Say red.", **options)
    with pytest.raises(SystemExit):
        cli.main(["eval", "prompts", "--model_name_or_path_baseline", "a", "--model_name_or_path_finetune", "b",
                  "--num_beam_groups", "2"])  # fmt: skip
    assert "--num_beam_groups above 1" in capsys.readouterr().err


def test_contrastive_search_step_by_step():
    """Against a loop over candidates in float64, one forward pass each."""
    model = tiny_models.causal_model().double()
    ids = torch.tensor([[5, 9, 17, 3]])
    found = contrastive_search(model, ids, 5, top_k=3, penalty_alpha=0.6, stops=[])[0].tolist()
    wanted = ids[0].tolist()
    with torch.no_grad():
        for _ in range(5):
            p = model(torch.tensor([wanted])).logits[0, -1].softmax(-1)
            best = None
            for token in p.argsort(descending=True)[:3].tolist():
                states = model(torch.tensor([[*wanted, token]]), output_hidden_states=True).hidden_states[-1][0]
                near = max(float(torch.cosine_similarity(states[-1], state, dim=0)) for state in states[:-1])
                value = 0.4 * float(p[token]) - 0.6 * near
                best = max(best or (value, token), (value, token))
            wanted.append(best[1])
    assert found == wanted
    assert len(contrastive_search(model, ids, 5, 3, 0.6, stops=[found[5]])[0]) == 6
    # without a penalty it is greedy search
    greedy = contrastive_search(model, ids, 4, 3, 0.0, stops=[])
    stock = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(greedy, stock)


def test_prompts_of_a_source_and_the_built_in_ones(rows, tmp_path):
    flags = ["--model_name_or_path_baseline", "a", "--model_name_or_path_finetune", "b"]
    choose = lambda *more: eval_prompts.choose_prompts(parse(prompt_eval_parser(), [*flags, *more]))  # noqa: E731
    drawn = choose("--data_path", str(rows[0]), "--num_prompts", "5")
    assert len(drawn) == 5 and {row["prompt"] for row in drawn} <= {text(r["prompt"], "").rstrip() for r in rows[1]}
    assert drawn == choose("--data_path", str(rows[0]), "--num_prompts", "5")
    assert drawn != choose("--data_path", str(rows[0]), "--num_prompts", "5", "--seed", "2")
    for language in eval_prompts.BUILT_IN:
        assert len({row["prompt"] for row in choose("--language", language)}) == 6


def test_the_whole_command_prints_both_models(capsys, tmp_path):
    flags = ["--model_name_or_path_baseline", str(tiny_models.folder()), "--prompt", "Say red."]
    flags += ["--model_name_or_path_finetune", str(tiny_models.folder("opt")), "--max_new_tokens", "4"]
    flags += ["--output", str(tmp_path / "out.json")]
    cli.main(["eval", "prompts", *flags, "--decoding", "greedy", "contrastive"])
    out = capsys.readouterr().out
    saved = json.loads((tmp_path / "out.json").read_text())
    assert "contrastive" in out and "Say red." in out and set(saved["summary"]) == {"greedy", "contrastive"}


@pytest.mark.parametrize("words", [["eval"], ["eval", "models"]])
def test_another_command_is_answered_in_one_line(words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2 and "rlhf eval knows two commands" in capsys.readouterr().err
