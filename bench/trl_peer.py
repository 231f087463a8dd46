"""TRL's PPO (PyPI `trl==1.12.0`) as the peer of `bench.ppo`, in a process of its own: it imports nothing of ours.

    python bench/trl_peer.py FOLDER fp32|bf16 UPDATES EPOCHS

FOLDER has `actor`, `reward` (Hugging Face folders, the tokenizer in the first) and `prompts.jsonl`. Prints one JSON
line an update: its wall seconds, of them generation's, and the losses that TRL logged. With a last argument, a file,
the answers of all updates go there for `bench.ppo --check`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch


def main(folder: str, dtype: str, updates: int, epochs: int, answers_file: str | None = None) -> None:
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        TrainerCallback,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    root = Path(folder)
    setup = json.loads((root / "setup.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(root / "actor")
    kind = {"dtype": {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]}
    policy, reference = (AutoModelForCausalLM.from_pretrained(root / "actor", **kind) for _ in range(2))
    value, reward = (
        AutoModelForSequenceClassification.from_pretrained(root / "reward", num_labels=1, **kind) for _ in range(2)
    )
    prompts = [json.loads(line)["prompt"] for line in (root / "prompts.jsonl").open()]
    dataset = Dataset.from_dict({"input_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts]})
    args = PPOConfig(
        output_dir=str(root / "trl"),
        per_device_train_batch_size=setup["batch"],
        gradient_accumulation_steps=1,
        num_mini_batches=1,
        num_ppo_epochs=epochs,
        total_episodes=setup["batch"] * updates,
        response_length=setup["response"],
        learning_rate=setup["lr"],
        adam_beta2=setup["beta2"],
        lr_scheduler_type="constant",
        kl_coef=setup["kl_ctl"],
        temperature=1.0,
        num_sample_generations=0,
        save_strategy="no",
        report_to="none",
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    clock = {"generate": 0.0, "start": 0.0}
    answers = []
    generate = ppo_trainer.batch_generation

    def timed(*arguments, **options):
        started = time.perf_counter()
        result = generate(*arguments, **options)
        clock["generate"] = time.perf_counter() - started
        answers.append(result[0].cpu())
        return result

    ppo_trainer.batch_generation = timed

    class Clock(TrainerCallback):
        def on_train_begin(self, *_, **__):
            clock["start"] = time.perf_counter()

        def on_step_end(self, _, state, *__, **___):
            now = time.perf_counter()
            logged = state.log_history[-1]
            line = {"seconds": now - clock["start"], "generate_seconds": clock["generate"]}
            names = {"actor_loss": "loss/policy_avg", "critic_loss": "loss/value_avg", "kl": "objective/kl"}
            names["score"] = "objective/scores"
            line |= {name: logged[key] for name, key in names.items()}
            print("update " + json.dumps(line), flush=True)
            clock["start"] = time.perf_counter()

    trainer = PPOTrainer(
        args=args,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=reward,
        value_model=value,
        train_dataset=dataset,
        eval_dataset=dataset,
        callbacks=[Clock()],
    )
    trainer.train()
    if answers_file:
        torch.save(answers, answers_file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
