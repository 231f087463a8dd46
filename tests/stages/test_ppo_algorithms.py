"""PPO end to end with its choices: estimators, reward sources, token budgets, early stop."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoTokenizer

from rlhf.models import new_score_model
from tests.helpers import run_ranks
from tests.rlhf import tiny_models
from tests.rlhf.test_retokenize import other
from tests.stages.kit import PPO_SMALL, run, trained, write_rows

GROUPED = {"num_samples_per_prompt": 3, "per_device_training_batch_size": 4}
ESTIMATORS = {
    "gae": {"normalize_scores": True},
    "grpo": GROUPED,
    "rloo": {"kl_in": "loss", **GROUPED},
    "reinforce++": {},
    "remax": GROUPED,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl")


@pytest.fixture(scope="module")
def rewards(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(
        "def constant(prompt, answer): return 0.7\n"
        "def length(prompts, answers): return [len(answer) / 10 for answer in answers]\n"
    )
    return path


def ppo(output, data, **flags):
    return run("ppo", output, data, **{**PPO_SMALL, "actor_model_name_or_path": tiny_models.folder(), **flags})


def moved(output) -> bool:
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny_models.folder(), output / "actor"))
    return any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_constant_reward_moves_nothing_and_another_does(tmp_path, data, rewards, estimator):
    flags = {"advantage_estimator": estimator, "max_steps": 5, **ESTIMATORS[estimator]}
    metrics = trained(ppo(tmp_path / "still", data, reward_fn=f"{rewards}:constant", **flags))
    assert not moved(tmp_path / "still") and all(line["kl_ref"] == 0 for line in metrics)
    assert all(line["score_mean"] == pytest.approx(0.7) and line["score_std"] < 1e-6 for line in metrics)
    metrics = trained(ppo(tmp_path / "moves", data, reward_fn=f"{rewards}:length", **flags))
    assert moved(tmp_path / "moves") and metrics[-1]["kl_ref"] != 0
    # nobody builds or saves a critic that the estimator does not need
    assert (tmp_path / "moves" / "critic").exists() == (estimator == "gae")
    assert (metrics[0]["critic_loss"] is None) == (estimator != "gae")


def test_a_large_kl_coefficient_holds_the_policy_at_the_reference(tmp_path, data, rewards):
    flags = {"reward_fn": f"{rewards}:length", "per_device_generation_batch_size": 16, "num_train_epochs": 20}
    flags |= {"per_device_training_batch_size": 16, "max_steps": 20, "lr_scheduler_type": "constant"}
    kl = {}
    for weight in (0, 10):
        metrics = trained(ppo(tmp_path / str(weight), data, **flags, kl_ctl=weight))
        kl[weight] = sum(line["kl_ref"] for line in metrics[10:]) / 10
    assert abs(kl[10]) < 0.1 and kl[0] > 0.3


def two_rank_ppo(rank, world, output, data, flags):
    ppo(output, data, **flags)


def test_groups_are_the_same_on_two_ranks(tmp_path, data, rewards):
    flags = {"actor_model_name_or_path": tiny_models.folder(), "reward_fn": f"{rewards}:length", "max_steps": 2}
    flags |= {"advantage_estimator": "grpo", "num_samples_per_prompt": 3}
    sizes = ("per_device_generation_batch_size", "per_device_training_batch_size")
    one = trained(ppo(tmp_path / "one", data, **flags, **dict(zip(sizes, (4, 12), strict=True))))
    flags |= {**dict(zip(sizes, (2, 6), strict=True)), "actor_zero_stage": 2, "max_tokens_per_micro_batch": 200}
    run_ranks(two_rank_ppo, 2, tmp_path / "two", data, flags)
    lines = [json.loads(text) for text in (tmp_path / "two/metrics.jsonl").read_text().splitlines()]
    for left, right in zip(one, trained(lines), strict=True):
        for name in ("score_mean", "score_std", "advantage_std", "actor_loss", "grad_norm", "response_length_mean"):
            assert left[name] == pytest.approx(right[name], rel=1e-4, abs=1e-5), name


def test_a_budget_of_tokens_changes_no_figure_and_resumes(tmp_path, data, rewards):
    flags = {"reward_fn": f"{rewards}:length", "per_device_generation_batch_size": 8, "max_steps": 4}
    flags |= {"per_device_training_batch_size": 4, "ppo_epochs": 2, "normalize_scores": True}
    size = trained(ppo(tmp_path / "size", data, **flags))
    flags |= {"max_tokens_per_micro_batch": 120, "save_interval": 1}
    budget = ppo(tmp_path / "budget", data, **flags)
    for left, right in zip(size, trained(budget), strict=True):
        assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-3)
        assert left["critic_loss"] == pytest.approx(right["critic_loss"], rel=1e-3)
    latest = list((tmp_path / "budget/checkpoints").rglob("latest"))
    assert len(latest) == 2
    for file in latest:
        file.write_text("iteration1\n")
    again = trained(ppo(tmp_path / "budget", data, resume=True, **flags))
    names = ("actor_loss", "critic_loss", "grad_norm", "score_mean", "kl_ref")
    for left, right in zip(trained(budget), again, strict=True):
        assert [left[name] for name in names] == [right[name] for name in names]


def test_an_update_stops_once_the_policy_has_gone_too_far(tmp_path, data, rewards):
    """8 answers in updates of 2, twice: with a tiny bound each iteration ends after the first step that has moved."""
    flags = {"reward_fn": f"{rewards}:length", "per_device_generation_batch_size": 8, "ppo_epochs": 2, "max_steps": 0}
    whole = trained(ppo(tmp_path / "whole", data, **flags))
    cut = trained(ppo(tmp_path / "cut", data, stop_kl=1e-9, **flags))
    iterations = len(whole) // 8
    assert len(whole) == 8 * iterations and len(cut) == 2 * iterations
    assert [line["approx_kl"] > 1e-9 for line in cut] == [False, True] * iterations


def test_where_nothing_trains_the_end_says_so(tmp_path, data, rewards, caplog):
    """Every answer is cut off at once, and masked. A PTX loss trains all the same."""
    flags = {"reward_fn": f"{rewards}:length", "advantage_estimator": "reinforce++", "max_steps": 2, "top_p": 0.9}
    flags |= {"mask_truncated": True, "max_answer_seq_len": 1}
    metrics = trained(ppo(tmp_path / "still", data, **flags))
    assert not moved(tmp_path / "still") and metrics[-1]["truncated_fraction"] == 1 and metrics[-1]["skipped"] == 2
    assert "2 of 2 updates of LlamaForCausalLM changed nothing" in caplog.text
    assert "--top_k and --top_p leave tokens out" in caplog.text
    caplog.clear()
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "It is hot. " * 99}))
    metrics = trained(ppo(tmp_path / "ptx", data, **{**flags, "top_p": 1.0}, unsupervised_dataset_name=texts))
    assert moved(tmp_path / "ptx") and metrics[-1]["skipped"] == metrics[-1]["actor_loss"] == 0
    assert not caplog.text


def test_every_flag_of_the_losses_runs_in_one(tmp_path, data, rewards):
    flags = {
        "reward_fn": f"{rewards}:length", "reward_fn_weight": 2.0, "kl_in": "loss", "kl_estimator": "k3+",
        "tis_cap": 2.0, "dual_clip": 3.0, "cliprange_high": 0.3, "entropy_coef": 0.01, "mask_truncated": True,
        "missing_eos_penalty": 1.0, "overlong_buffer": 2, "align_overflow": True, "offload_reference_model": True,
        "critic_offload": True, "critic_zero_stage": 1, "loss_aggregation": "seq-mean-token-sum",
    }  # fmt: skip
    metrics = trained(ppo(tmp_path / "all", data, **flags))
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert all(line["tis_weight_mean"] == pytest.approx(1.0, abs=1e-3) or line["truncated_fraction"] == 1
               for line in metrics)  # fmt: skip
    assert metrics[0]["kl_loss"] == 0


def test_critic_and_reward_model_may_speak_another_tokenizer(tmp_path, data):
    words = other("bytes")
    model = new_score_model(tiny_models.folder(seed=4), words, seed=4)
    model.save_pretrained(tmp_path / "reward")
    words.save_pretrained(tmp_path / "reward")
    flags = {"critic_model_name_or_path": tmp_path / "reward", "per_device_generation_batch_size": 8, "max_steps": 3}
    flags |= {"per_device_training_batch_size": 8, "normalize_scores": True}
    whole = trained(ppo(tmp_path / "whole", data, **flags))
    flags |= {"per_device_training_batch_size": 2, "gradient_accumulation_steps": 4}
    parts = trained(ppo(tmp_path / "parts", data, **flags))
    for left, right in zip(whole, parts, strict=True):
        for name in ("score_mean", "value_mean", "critic_loss", "critic_grad_norm", "explained_variance"):
            assert left[name] == pytest.approx(right[name], rel=1e-3, abs=1e-4), name
    assert whole[0]["score_std"] > 0 and whole[-1]["critic_loss"] != whole[0]["critic_loss"]
    saved = AutoTokenizer.from_pretrained(tmp_path / "whole" / "critic")
    assert saved("Say red.")["input_ids"] == words("Say red.")["input_ids"]
    actors = AutoTokenizer.from_pretrained(tmp_path / "whole" / "actor")
    assert actors.get_vocab() == tiny_models.tokenizer().get_vocab()


def two_rank_eval(rank, world, output, data, flags):
    ppo(output, data, **flags)


def test_evaluation_compares_with_the_reference_and_shows_answers(tmp_path, data, rewards, capsys):
    """The score is the answer's length, and gold says whether it is above 12 characters."""
    gold = tmp_path / "gold.py"
    gold.write_text("def judge(prompts, answers): return [float(len(answer) > 12) for answer in answers]\n")
    flags = {"reward_fn": f"{rewards}:length", "gold_fn": f"{gold}:judge", "advantage_estimator": "reinforce++"}
    flags |= {"eval_fraction": 0.5, "actor_learning_rate": 0.01, "max_steps": 4, "eval_interval": 1}
    flags |= {"actor_model_name_or_path": tiny_models.folder(), "enable_tensorboard": True, "save_interval": 1}
    metrics = ppo(tmp_path / "one", data, **flags, print_answers=True)
    evals = [line for line in metrics if line.get("eval")]
    assert [line["step"] for line in evals] == [0, 2, 4]
    assert evals[0]["win_rate"] == evals[0]["gold_win_rate"] == 0.5 and evals[0]["kl_ref"] == 0
    reference = json.loads((tmp_path / "one/reference_eval.json").read_text())
    assert len(reference["score"]) == evals[0]["prompts"] == 10
    assert evals[0]["score_mean"] == pytest.approx(sum(reference["score"]) / 10)
    samples = [json.loads(line) for line in (tmp_path / "one/samples.jsonl").read_text().splitlines()]
    lengths = [(len(row["after"]), len(row["before"])) for row in samples]
    by_hand = [(after > before) + (after == before) / 2 for after, before in lengths]
    golds = [0.5 + (row["gold_after"] - row["gold_before"]) / 2 for row in samples]
    ppo(tmp_path / "few", data, **flags, num_eval_prompts=8)
    last = [json.loads(line) for line in (tmp_path / "few/metrics.jsonl").read_text().splitlines()][-1]
    assert last["win_rate"] == pytest.approx(sum(by_hand) / 8) and last["win_rate"] != 0.5
    assert last["gold_win_rate"] == pytest.approx(sum(golds) / 8)
    # a resumed run with more prompts than were judged before has nothing to compare with, and says so at its end
    again = {**flags, "max_steps": 6}
    resumed = ppo(tmp_path / "few", data, **again, resume=True)[-1]
    assert resumed["eval"] and "win_rate" not in resumed and resumed["prompts"] == 10

    out = capsys.readouterr().out
    assert f"step 4: {' '.join(samples[0]['prompt'].split())} {samples[0]['after']}" in out.replace("  ", " ")
    (events,) = (tmp_path / "one/tensorboard").iterdir()
    reader = EventAccumulator(str(events))
    reader.Reload()
    texts = [event.tensor_proto.string_val[0].decode() for event in reader.Tensors("ppo/eval_answers/text_summary")]
    assert len(texts) == 3 and samples[0]["after"] in texts[-1] and samples[0]["before"] in texts[0]

    for file in (tmp_path / "one/checkpoints").rglob("latest"):
        file.write_text("iteration1\n")
    resumed = ppo(tmp_path / "one", data, **flags, resume=True)
    assert [line for line in resumed if line.get("eval")][-1] == evals[-1]
    run_ranks(two_rank_eval, 2, tmp_path / "two", data, {**flags, "per_device_generation_batch_size": 2,
                                                         "per_device_training_batch_size": 1})  # fmt: skip
    two = [json.loads(line) for line in (tmp_path / "two/metrics.jsonl").read_text().splitlines()]
    first = next(line for line in two if line.get("eval"))
    assert first == pytest.approx(evals[0])
