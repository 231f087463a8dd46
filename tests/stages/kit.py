"""Small data, a small model, and stages run on them in this process or on ranks."""

from __future__ import annotations

import json
from pathlib import Path

from stages import dpo, ppo, reward, sft
from tests.rlhf import tiny_models

STAGES = {"sft": sft, "reward": reward, "dpo": dpo, "ppo": ppo}
# without the decorator, which ends the process on an error and leaves the process group
MAINS = {name: module.main.__wrapped__ for name, module in STAGES.items()}
WORDS = ["red", "blue", "green", "cold", "hot", "cat", "dog", "six", "ten", "sun"]


def write_rows(path: Path, count: int = 60) -> Path:
    """Pairs whose prompts and answers have unequal lengths, one in three of two turns."""
    rows = []
    for i in range(count):
        word, other = WORDS[i % 10], WORDS[(i * 7 + 3) % 10]
        if word == other:
            other = WORDS[(i + 1) % 10]
        earlier = f"\n\nHuman: Hello {i}.\n\nAssistant: Hello." if i % 3 == 0 else ""
        prompt = f"{earlier}\n\nHuman: Say {word}{' please' * (i % 4)} {i}.\n\nAssistant:"
        rows.append({"prompt": prompt, "chosen": f"It is {word}.", "rejected": f"It is {other}{' again' * (i % 3)}."})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(stage: str, output: Path, data: Path | list[Path], **flags) -> list[dict]:
    """Run one stage; True switches a flag on, False leaves it out, a list gives several values. Returns its lines."""
    models = () if stage == "ppo" else ("model_name_or_path",)
    defaults = {name: str(tiny_models.folder()) for name in models}
    settings = {
        "data_path": data,
        "data_output_path": output.parent / "cache",
        "data_split": "1,1,1",
        "output_dir": output,
        "seed": 5,
        **defaults,
        **flags,
    }
    argv: list[str] = []
    for name, value in settings.items():
        if value is False:
            continue
        words = [] if value is True else value if isinstance(value, list) else [value]
        argv += [f"--{name}", *map(str, words)]
    MAINS[stage](argv)
    return lines(output)


def lines(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def trained(metrics: list[dict]) -> list[dict]:
    return [line for line in metrics if not line.get("eval")]


PPO_SMALL = {
    "max_prompt_seq_len": 64,
    "max_answer_seq_len": 8,
    "per_device_generation_batch_size": 4,
    "per_device_training_batch_size": 2,
    "num_warmup_steps": 0,
    "actor_learning_rate": 1e-3,
    "critic_learning_rate": 1e-3,
    "max_steps": 4,
}


def ppo_models(actor: Path, critic: Path) -> dict:
    return {"actor_model_name_or_path": actor, "critic_model_name_or_path": critic}
