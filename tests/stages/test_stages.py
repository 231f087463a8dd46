"""The three stages end to end on tiny models: files, figures, resuming, ranks."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf.models import load_score_model, score_texts
from tests.helpers import run_ranks
from tests.rlhf import tiny_models
from tests.stages.kit import PPO_SMALL, ppo_models, run, trained, write_rows

COMMON = {"stage", "step", "epoch", "loss", "lr", "grad_norm", "tokens", "skipped", "step_seconds", "tokens_per_second"}
COMMON |= {"activation_bytes"}
REWARD = COMMON | {"accuracy", "chosen_score", "rejected_score"}
PPO = COMMON | {
    "actor_loss", "critic_loss", "ptx_loss", "ratio_mean", "ratio_max", "clip_fraction", "approx_kl", "kl_ref",
    "kl_coef",
    "score_mean", "score_std", "reward_mean", "advantage_mean", "advantage_std", "value_mean", "explained_variance",
    "entropy", "response_length_mean", "response_length_max", "truncated_fraction", "rollout_logprob_gap",
    "generate_seconds", "score_seconds", "train_seconds", "generate_tokens_per_second",
}  # fmt: skip


def check_files(output, kind: str) -> None:
    record = json.loads((output / "run.json").read_text())
    assert record["status"] == "complete" and record["arguments"]["seed"] == 5 and record["versions"]["torch"]
    assert record["dtype"] == "fp32"  # what `--dtype auto` comes to on a CPU
    report = json.loads((output / "data_report.json").read_text())
    (source,) = report["sources"]
    assert source["rows_read"] == 60
    folders = [output] if kind != "ppo" else [output / "actor"]
    for folder in folders:
        AutoTokenizer.from_pretrained(folder)
        loader = AutoModelForSequenceClassification if kind == "reward" else AutoModelForCausalLM
        _, info = loader.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]


def all_stages(rank, world, folder, data, zero, model):
    sft, reward, ppo = folder / "sft", folder / "reward", folder / "ppo"
    small = {"per_device_train_batch_size": 2, "max_steps": 3, "zero_stage": zero, "per_device_eval_batch_size": 2}
    run("sft", sft, data, **small, model_name_or_path=model)
    run("reward", reward, data, **{**small, "model_name_or_path": sft})
    stages = {"actor_zero_stage": zero, "critic_zero_stage": zero, "enable_ema": True}
    run("ppo", ppo, data, **PPO_SMALL, **ppo_models(sft, reward), **stages)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl")


@pytest.fixture(scope="module")
def chain(tmp_path_factory, data):
    """SFT, reward and PPO in one process."""
    folder = tmp_path_factory.mktemp("chain")
    all_stages(0, 1, folder, data, 0, tiny_models.folder())
    return folder


@pytest.mark.parametrize("ranks", [1, 2])
def test_files_and_figures(tmp_path, chain, data, ranks):
    folder = chain
    if ranks == 2:
        folder = tmp_path
        run_ranks(all_stages, 2, folder, data, 3, tiny_models.folder(), timeout=240)
    for stage, keys, steps in (("sft", COMMON, 3), ("reward", REWARD, 3), ("ppo", PPO, 4)):
        metrics = [json.loads(line) for line in (folder / stage / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in trained(metrics)] == list(range(1, steps + 1))
        assert keys <= trained(metrics)[0].keys(), stage
        assert any(line.get("eval") for line in metrics)
        check_files(folder / stage, stage)
    for name in ("critic", "actor_ema"):
        assert (folder / "ppo" / name / "model.safetensors").exists()


def test_before_any_update_ppo_is_at_its_start(chain):
    first, second, third, _ = trained([json.loads(s) for s in (chain / "ppo/metrics.jsonl").read_text().splitlines()])
    assert first["ratio_mean"] == pytest.approx(1.0, abs=1e-5) and first["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert first["clip_fraction"] == 0 and abs(first["approx_kl"]) < 1e-8 and first["kl_ref"] == 0
    assert first["rollout_logprob_gap"] < 1e-4
    # the second step works on the same rollout with other weights, the third on a new one
    assert second["ratio_max"] > 1 + 1e-5
    assert third["ratio_max"] == pytest.approx(1.0, abs=1e-5) and third["kl_ref"] != 0


def test_two_ranks_make_the_update_of_one(tmp_path, data):
    """The same global batches, dealt over two ranks in stage 3: the same weights, the same losses."""
    flags = {"per_device_train_batch_size": 4, "max_steps": 3, "learning_rate": 1e-3}
    flags["model_name_or_path"] = tiny_models.folder()
    one = trained(run("sft", tmp_path / "one", data, **flags))
    run_ranks(two_rank_sft, 2, tmp_path / "two", data, {**flags, "per_device_train_batch_size": 2, "zero_stage": 3})
    two = trained([json.loads(s) for s in (tmp_path / "two/metrics.jsonl").read_text().splitlines()])
    for left, right in zip(one, two, strict=True):
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-5)
        assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-4)
        assert left["tokens"] == right["tokens"] and left["lr"] == right["lr"]
    left, right = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=1e-5, rtol=0)


def two_rank_sft(rank, world, output, data, flags):
    run("sft", output, data, **flags)


# actor and critic each in a stage of its own, and what else may differ from model to model
APART = {
    "3 and 1": {"actor_zero_stage": 3, "critic_zero_stage": 1, "critic_gradient_checkpointing": True, "offload": True},
    "0 and 2": {"actor_zero_stage": 0, "critic_zero_stage": 2, "actor_lora_dim": 4, "only_optimize_lora": True,
                "offload_reward_model": True, "critic_offload": True},
}  # fmt: skip


def test_ppo_on_two_ranks_samples_and_learns_as_on_one(tmp_path, chain, data):
    """Answers hang on the prompt's own seed, so a rollout does not depend on how many ranks share it."""
    flags = {**PPO_SMALL, **ppo_models(chain / "sft", chain / "reward"), "max_steps": 3, "normalize_scores": True}
    flags |= {"enable_ema": True, "unsupervised_dataset_name": write_texts(tmp_path), "unsup_coef": 0.5}
    sizes = ("per_device_generation_batch_size", "per_device_training_batch_size")
    runs = {name: {**flags, **apart, **dict.fromkeys(sizes, 4)} for name, apart in APART.items()}
    run_ranks(two_rank_ppo, 2, tmp_path, data, runs)
    for name, apart in APART.items():
        one = run("ppo", tmp_path / "one" / name, data, **{**flags, **apart, **dict.fromkeys(sizes, 8)})
        two = [json.loads(s) for s in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for left, right in zip(timeless(one), timeless(two), strict=True):
            left, right = (uncut(line) for line in (left, right))
            # after an update Adam has blown up the rounding of tiny gradients
            assert left == pytest.approx(right, rel=1e-5 if left["step"] < 2 else 2e-3, abs=1e-5)
        for saved in ("actor", "actor_ema", "critic"):
            AutoTokenizer.from_pretrained(tmp_path / name / saved)
            loader = AutoModelForSequenceClassification if saved == "critic" else AutoModelForCausalLM
            _, info = loader.from_pretrained(tmp_path / name / saved, output_loading_info=True)
            assert not info["missing_keys"] and not info["unexpected_keys"]


def test_a_ppo_update_is_the_same_however_it_is_cut(tmp_path, chain, data):
    flags = {**PPO_SMALL, **ppo_models(chain / "sft", chain / "reward"), "max_steps": 2}
    flags["per_device_generation_batch_size"] = 8
    size, window = "per_device_training_batch_size", "gradient_accumulation_steps"
    whole = timeless(run("ppo", tmp_path / "whole", data, **{**flags, size: 8}))
    parts = timeless(run("ppo", tmp_path / "parts", data, **{**flags, size: 2, window: 4}))
    for left, right in zip(whole, parts, strict=True):
        left, right = (uncut(line) for line in (left, right))
        assert left == pytest.approx(right, rel=1e-5 if left["step"] < 2 else 2e-3, abs=1e-5)


def two_rank_ppo(rank, world, folder, data, runs):
    for name, flags in runs.items():
        run("ppo", folder / name, data, **flags)


UNTIMED = {"step_seconds", "tokens_per_second", "generate_seconds", "score_seconds", "train_seconds"}
UNTIMED |= {"generate_tokens_per_second"}


def timeless(metrics):
    return [{key: value for key, value in line.items() if key not in UNTIMED} for line in metrics]


def uncut(line):
    """The numbers of a line that must not depend on how its batch was cut: all but the bytes of a micro-batch."""
    return {k: v for k, v in line.items() if isinstance(v, int | float) and k != "activation_bytes"}


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo", "ppo"])
def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path, chain, data, stage):
    """Dropout is on, so that random states count too; the cut is in the middle of an epoch."""
    flags = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4, "dropout": 0.1}
    if stage == "ppo":
        flags = {**PPO_SMALL, **ppo_models(chain / "sft", chain / "reward"), "max_steps": 6, "kl_ctl": 0.2}
        flags |= {"normalize_scores": True, "target_kl": 0.1, "enable_ema": True, "per_device_training_batch_size": 3}
        flags["unsupervised_dataset_name"] = write_texts(tmp_path)
    whole = run(stage, tmp_path / "whole", data, save_interval=2, **flags)
    with pytest.raises(ValueError, match="holds checkpoints of an earlier run"):
        run(stage, tmp_path / "whole", data, **flags)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for checkpoints in (tmp_path / "cut/checkpoints").rglob("latest"):
        names = sorted(path.name for path in checkpoints.parent.iterdir() if path.is_dir())
        checkpoints.write_text(names[0])
    for weights in (tmp_path / "cut").rglob("model.safetensors"):
        if "checkpoints" not in weights.parts:
            weights.unlink()
    resumed = run(stage, tmp_path / "cut", data, save_interval=2, resume=True, **flags)
    assert timeless(resumed) == timeless(whole)
    files = [path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("model.safetensors")]
    assert files
    for file in files:
        left, right = load_file(tmp_path / "whole" / file), load_file(tmp_path / "cut" / file)
        assert all(torch.equal(left[name], right[name]) for name in left), file


def test_nothing_moves_at_learning_rate_0(tmp_path, chain, data):
    flags = {**PPO_SMALL, "actor_learning_rate": 0, "critic_learning_rate": 0, "max_steps": 6}
    metrics = trained(run("ppo", tmp_path / "ppo", data, **flags, **ppo_models(chain / "sft", chain / "reward")))
    for name, start in (("actor", "sft"), ("critic", "reward")):
        before = load_file(chain / start / "model.safetensors")
        after = load_file(tmp_path / "ppo" / name / "model.safetensors")
        assert all(torch.equal(before[key], after[key]) for key in before)
    assert all(line["kl_ref"] == 0 and line["ratio_max"] == pytest.approx(1.0, abs=1e-5) for line in metrics)


def write_texts(folder):
    texts = folder / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"The sun is hot. It is {i}. " * 10}) + "\n" for i in range(20)))
    return texts


def test_ptx_keeps_its_weight_out_of_the_reported_loss(tmp_path, chain, data):
    texts = write_texts(tmp_path)
    flags = {**PPO_SMALL, **ppo_models(chain / "sft", chain / "reward"), "unsup_coef": 2.0}
    plain = trained(run("ppo", tmp_path / "plain", data, **flags))
    mixed = trained(run("ppo", tmp_path / "mixed", data, **flags, unsupervised_dataset_name=texts))
    assert plain[0]["ptx_loss"] is None and mixed[0]["ptx_loss"] > 1
    assert mixed[0]["actor_loss"] == pytest.approx(plain[0]["actor_loss"], abs=1e-6)
    assert mixed[0]["grad_norm"] > plain[0]["grad_norm"]


def test_the_reward_folder_scores_as_the_stage_does(chain):
    texts = ["\n\nHuman: Say red.\n\nAssistant: It is red.", "\n\nHuman: Say.\n\nAssistant: It is six again again."]
    tokenizer = AutoTokenizer.from_pretrained(chain / "reward")
    stock = AutoModelForSequenceClassification.from_pretrained(chain / "reward")
    ours = score_texts(load_score_model(chain / "reward"), tokenizer, texts)
    from rlhf.models import text_ids

    for text, score in zip(texts, ours, strict=True):
        ids = torch.tensor([text_ids(tokenizer, text)])
        with torch.no_grad():
            assert float(stock(ids).logits) == pytest.approx(float(score), abs=1e-5)


@pytest.mark.parametrize("pad", ["eos", "none"])
def test_stock_classes_score_in_batches_where_the_base_has_no_padding_of_its_own(tmp_path, data, pad):
    base, reward = tiny_models.folder(pad=pad), tmp_path / "reward"
    run("reward", reward, data, model_name_or_path=base, per_device_train_batch_size=2, max_steps=1)
    run("ppo", tmp_path / "ppo", data, **{**PPO_SMALL, **ppo_models(base, reward), "max_steps": 1})
    for folder in (reward, tmp_path / "ppo" / "critic"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        stock = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        end = tokenizer.eos_token
        texts = [f"Say red. It is red.{end}", f"Say.{end}", f"Say six, please, please. It is six again again.{end}"]
        for side in ("right", "left"):
            tokenizer.padding_side = side
            batch = tokenizer(texts, padding=True, return_tensors="pt")
            with torch.no_grad():
                scores = stock(**batch).logits[:, 0].tolist()
                alone = [float(stock(**tokenizer(text, return_tensors="pt")).logits) for text in texts]
            assert scores == pytest.approx(alone, abs=1e-5), side


@pytest.mark.parametrize("pair_loss", ["end", "token"])
def test_pair_losses_train(tmp_path, data, pair_loss):
    flags = {"per_device_train_batch_size": 6, "num_train_epochs": 12, "learning_rate": 3e-3, "data_split": "0,1,0"}
    flags["eval_interval"] = 1000  # at the end only
    metrics = run("reward", tmp_path / "reward", data, pair_loss=pair_loss, **flags)
    steps = trained(metrics)
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"]
    assert all(0 <= line["accuracy"] <= 1 for line in metrics)


def test_gradient_checkpointing_changes_nothing(tmp_path, data):
    flags = {"per_device_train_batch_size": 4, "max_steps": 2, "model_name_or_path": tiny_models.folder("opt")}
    plain = trained(run("sft", tmp_path / "plain", data, **flags))
    saved = trained(run("sft", tmp_path / "saved", data, **flags, gradient_checkpointing=True))
    for left, right in zip(plain, saved, strict=True):
        assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-5)
