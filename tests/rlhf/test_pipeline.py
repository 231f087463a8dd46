"""The pipeline with stages that train nothing: order, skipping, resuming, failures, files, flags."""

import functools
import json
from pathlib import Path

import pytest

from rlhf import pipeline
from rlhf.flags import spelled
from rlhf.launch import StageFailed, run_stage
from rlhf.pipeline_recipes import PRETRAINED, SAMPLE, SAMPLE_JUDGE
from rlhf.pipeline_state import changed_arguments, content_hashes, read_run


@pytest.fixture
def run(tmp_path, monkeypatch):
    """``run(*flags)`` runs the pipeline into ``tmp_path/out`` with fake stages."""
    monkeypatch.setattr(pipeline, "run_stage", functools.partial(run_stage, module="tests.rlhf.fake_stage"))
    monkeypatch.setenv("NPROC", "1")
    return lambda *flags: pipeline.main(["--output-dir", str(tmp_path / "out"), *flags])


def runs(tmp_path):
    """How often each stage ran."""
    folders = [tmp_path / "out" / stage / "runs" for stage in pipeline.STAGES]
    return [len(path.read_text()) if path.exists() else 0 for path in folders]


def plan(*flags, world_size=1):
    args = pipeline.parse(pipeline.parser(), pipeline.join_pass_through(flags))
    return {step.stage: step.args for step in pipeline.plan(args, world_size)}


def test_all_three_stages_and_their_files(tmp_path, run, capsys):
    run()
    out = capsys.readouterr().out
    assert out.index("Running Step 1 (SFT)") < out.index("Finished Step 1 (SFT) in 0:00:0")
    assert out.index("Finished Step 2 (reward model)") < out.index("Running Step 3 (PPO)")
    assert "45.0%" in out and "75.0%  (+30.0 points)" in out and "93.0%" in out and "3.500" in out
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    seconds = summary.pop("seconds")
    assert summary == {
        "sft_perplexity": 3.5,
        "reward_accuracy": 0.93,
        "gold_rate_sft": 0.45,
        "gold_rate_ppo": 0.75,
        "kl_ref": 0.31,
    }
    assert list(seconds) == ["sft", "reward", "ppo"] and all(value > 0 for value in seconds.values())
    page = (tmp_path / "out" / "report.html").read_text()
    assert "data:image/png;base64," in page and "3 &lt;b&gt;" in page


def test_complete_stages_are_not_run_again_and_keep_their_seconds(tmp_path, run, capsys):
    run()
    before = json.loads((tmp_path / "out" / "summary.json").read_text())
    run()
    assert runs(tmp_path) == [1, 1, 1]
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == before
    assert "Step 3 (PPO) is complete" in capsys.readouterr().out


def test_other_arguments_run_a_stage_and_what_starts_from_it_again(tmp_path, run, capsys):
    run()
    run("--reward-args", "--learning_rate 0.25")
    assert runs(tmp_path) == [1, 2, 2]
    out = capsys.readouterr().out
    assert (
        "Running Step 2 (reward model): ran before with other arguments (learning_rate was 0.0005, is 0.25)"
        in out
    )
    assert "Running Step 3 (PPO): ran before, and what it starts from has changed" in out


def test_flags_that_change_no_result_run_nothing_again(tmp_path, run):
    run()
    run("--sft-args", "--print_loss --save_interval 5")
    assert runs(tmp_path) == [1, 1, 1]


def test_a_result_renewed_by_hand_renews_what_starts_from_it(tmp_path, run):
    run()
    run("--step", "1", "--seed", "5")
    assert runs(tmp_path) == [2, 1, 1]
    run("--seed", "5")
    assert runs(tmp_path) == [2, 2, 2]


@pytest.mark.parametrize(
    ("mode", "cause"), [("kill", "rank 0 was killed by signal 9"), ("user", "no folder")]
)
def test_the_first_failure_stops_the_run(tmp_path, run, monkeypatch, mode, cause):
    monkeypatch.setenv("FAKE_MODE", f"{mode}:reward")
    with pytest.raises(StageFailed, match=f"stage reward failed: {cause}"):
        run()
    assert runs(tmp_path) == [1, 0, 0]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["sft_perplexity"] == 3.5 and summary["gold_rate_ppo"] is None
    monkeypatch.delenv("FAKE_MODE")
    run()
    assert runs(tmp_path) == [1, 1, 1]


def test_a_stage_cut_short_goes_on_from_its_checkpoint(tmp_path, run, capsys):
    run("--step", "1", "--sft-args", "--save_interval 1")
    folder = tmp_path / "out" / "sft"
    cut_short = read_run(folder) | {"status": "running"}
    (folder / "run.json").write_text(json.dumps(cut_short))
    run("--step", "1", "--sft-args", "--save_interval 1")
    assert "goes on from its last checkpoint" in capsys.readouterr().out
    assert (folder / "resumed").read_text() == "True"
    # Other arguments: from the beginning, and the old checkpoint is gone before the stage starts.
    (folder / "run.json").write_text(json.dumps(cut_short))
    run("--step", "1", "--sft-args", "--learning_rate 1")
    assert (folder / "resumed").read_text() == "False"
    assert not (folder / "checkpoints" / "latest").exists()


def test_a_resume_that_was_asked_for_keeps_what_it_resumes_from(tmp_path, run, capsys):
    run("--step", "1", "--sft-args", "--save_interval 1")
    folder = tmp_path / "out" / "sft"
    run("--step", "1", "--sft-args", "--learning_rate 1 --resume")
    assert "ran before with other arguments (" in capsys.readouterr().out
    assert (folder / "resumed").read_text() == "True"
    assert (folder / "checkpoints" / "latest").exists()


def test_one_step_needs_the_ones_it_starts_from(tmp_path, run):
    with pytest.raises(FileNotFoundError, match=r"Step 3 \(PPO\) starts from .*sft.*: run --step 1 first"):
        run("--step", "3")
    run("--step", "2", "--reward-model", "some/model")
    assert runs(tmp_path) == [0, 1, 0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--actor_modl", "x"], "unknown flag --actor_modl; did you mean --actor-model?"),
        (
            ["--sft-args", "--lerning_rate 1"],
            "rlhf sft: unknown flag --lerning_rate; did you mean --learning_rate?",
        ),
        (["--ppo-args=--max_steps -1"], "rlhf ppo: argument --max_steps"),
        (["--step", "4"], "invalid choice: 4"),
    ],
)
def test_slips_are_one_line_before_anything_starts(tmp_path, run, capsys, flags, words):
    with pytest.raises(SystemExit) as stop:
        run(*flags)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and words in error and error.count("\n") == 1
    assert runs(tmp_path) == [0, 0, 0]


def test_pass_through_flags_are_read_in_either_spelling():
    words = pipeline.join_pass_through(spelled(["--sft_args", "--resume", "--output_dir", "a_b"], ["--sft-args"]))
    assert words == ["--sft-args=--resume", "--output_dir", "a_b"]


def test_several_machines_need_an_address(run):
    with pytest.raises(ValueError, match="multi_node needs --nnodes"):
        run("--deployment-type", "multi_node")


def test_the_stages_are_wired_to_each_other():
    args = plan("--output-dir", "o", "--data-path", "a.jsonl", "b.jsonl:2", "--seed", "7")
    assert args["sft"].model_name_or_path == "recipe:llama-1m"
    assert args["reward"].model_name_or_path == args["ppo"].actor_model_name_or_path == str(Path("o/sft"))
    assert args["ppo"].critic_model_name_or_path == str(Path("o/reward"))
    assert [a.output_dir for a in args.values()] == [str(Path("o") / stage) for stage in pipeline.STAGES]
    assert all(a.data_path == ["a.jsonl", "b.jsonl:2"] and a.seed == 7 for a in args.values())
    assert args["ppo"].gold_fn is None  # the judge knows the bundled dialogues alone


def test_one_process_shards_nothing_and_several_share_the_batch():
    one, four = plan(), plan(world_size=4)
    assert (one["sft"].zero_stage, one["ppo"].actor_zero_stage, one["ppo"].critic_zero_stage) == (0, 0, 0)
    assert (four["sft"].zero_stage, four["ppo"].actor_zero_stage, four["ppo"].critic_zero_stage) == (3, 3, 3)
    for name in ("per_device_generation_batch_size", "per_device_training_batch_size"):
        assert getattr(one["ppo"], name) == 4 * getattr(four["ppo"], name)
    assert one["sft"].per_device_train_batch_size == 4 * four["sft"].per_device_train_batch_size
    chosen = plan("--actor-zero-stage", "1", "--reward-zero-stage", "2", world_size=4)
    assert chosen["sft"].zero_stage == chosen["ppo"].actor_zero_stage == 1
    assert chosen["reward"].zero_stage == chosen["ppo"].critic_zero_stage == 2


def test_group_estimators_take_several_answers_a_prompt_as_many_in_all():
    alone, grouped = plan()["ppo"], plan("--advantage_estimator", "rloo")["ppo"]
    assert (alone.advantage_estimator, alone.num_samples_per_prompt) == ("gae", 1)
    assert (grouped.advantage_estimator, grouped.num_samples_per_prompt) == ("rloo", 8)
    assert grouped.per_device_generation_batch_size * 8 == alone.per_device_generation_batch_size
    assert plan("--advantage_estimator", "remax")["ppo"].num_samples_per_prompt == 1


def test_pass_through_flags_win():
    args = plan("--sft-args", "--max_steps 3 --zero_stage 2", "--ppo-args", "--print_answers")
    assert (args["sft"].max_steps, args["sft"].zero_stage, args["ppo"].print_answers) == (3, 2, True)


def test_the_sample_and_a_pretrained_model_have_their_own_numbers():
    sample, opt = plan(), plan("--actor-model", "1.3b", "--reward-model", "350m")
    assert (
        sample["sft"].learning_rate == SAMPLE["sft"]["learning_rate"]
        and sample["ppo"].gold_fn == SAMPLE_JUDGE
    )
    assert opt["sft"].learning_rate == PRETRAINED["sft"]["learning_rate"] == 9.65e-6
    assert opt["sft"].model_name_or_path == "facebook/opt-1.3b"
    assert opt["reward"].model_name_or_path == "facebook/opt-350m"
    assert pipeline.model_name("models/1.3b") == "models/1.3b"


def test_what_changed_in_words():
    run = {"arguments": {"seed": 1, "dropout": None, "output_dir": "a", "lr": 1.0}}
    assert changed_arguments(run, {"seed": 1, "dropout": None, "output_dir": "b", "lr": 1.0}) == ""
    assert changed_arguments(run, {"seed": 2, "lr": 1.0}) == "seed was 1, is 2"
    many = changed_arguments(run, {"seed": 2, "dropout": 0.1, "lr": 2.0, "new": 1, "newer": 2})
    assert many.endswith("and 2 more")


def test_a_file_that_changed_under_its_name_is_a_change(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"gradient_clipping": 1.0}')
    arguments = {"deepspeed_config": str(path), "reward_fn": None}
    run = {"arguments": dict(arguments), "file_hashes": content_hashes(arguments)}
    assert changed_arguments(run, arguments) == ""
    path.write_text('{"gradient_clipping": 0.5}')
    assert changed_arguments(run, arguments) == "the file of deepspeed_config has changed"


def test_a_broken_run_file_says_what_to_remove(tmp_path):
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match="run.json is not JSON .*: remove it"):
        read_run(tmp_path)


def test_large_opt_actors_train_adapters_and_share_their_generating_model():
    for size, world, sharing in (("13b", 8, 2), ("66b", 64, 8), ("66b", 4, 1), ("6.7b", 1, 1)):
        args = plan("--actor-model", size, "--reward-model", "350m", world_size=world)
        assert args["sft"].model_name_or_path == f"facebook/opt-{size}" and args["sft"].lora_dim == 128
        assert args["ppo"].actor_lora_dim == 128 and args["ppo"].only_optimize_lora
        assert args["ppo"].inference_tp_size == sharing and args["ppo"].critic_lora_dim == 0
        assert args["reward"].model_name_or_path == "facebook/opt-350m" and args["reward"].lora_dim == 0
    assert plan("--actor-model", "facebook/opt-13b", world_size=8)["ppo"].inference_tp_size == 2
    assert plan("--actor-model", "1.3b", world_size=8)["sft"].lora_dim == 0


def test_the_launchers_zero_stages_reach_the_stages():
    args = plan("--actor-zero-stage", "2", "--reward-zero-stage", "1", "--step", "3", "1", world_size=2)
    assert args["sft"].zero_stage == args["ppo"].actor_zero_stage == 2 and args["ppo"].critic_zero_stage == 1
    assert set(args) == {"sft", "ppo"}
    args = plan("--actor-zero-stage", "", world_size=2)
    assert args["sft"].zero_stage == args["reward"].zero_stage == 3
