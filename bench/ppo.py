"""Seconds of one whole PPO step beside TRL's last PPO, and the losses of both on the same answers.

    python -m bench.ppo --trl-python OTHER_ENVIRONMENT/bin/python      # with trl==1.12.0 in it
    python -m bench.ppo                                                # this framework alone

Both take the same models (actor, reference, critic and reward model of one size), 16 prompts of 32 tokens a step and
answers of 64 tokens, one pass of all 16 answers, AdamW. Each round runs `rlhf ppo` and then TRL, each in a process of
its own, and takes the median of its steps but the first; a line gives the median over rounds, and for this framework
also the ratio to TRL in the same round. In bf16 this framework trains fp32 master weights, TRL its bare bf16 weights.

`--check` compares losses instead: TRL's updates are made again by this framework from TRL's answers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.common import SIZES, make_llama

BATCH, PROMPT, RESPONSE = 16, 32, 64
SETUP = {"batch": BATCH, "response": RESPONSE, "lr": 1e-4, "beta2": 0.95, "kl_ctl": 0.05}
# One word is one token, and a prompt nothing but its words.
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% if message['role'] == 'assistant' %} "
    "{{ eos_token }}{% endif %}{% endfor %}"
)


def prepare(folder: Path, size: str, prompts: int) -> None:
    """Models, tokenizer and prompts as files."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    actor = make_llama(size, tied=False)
    vocabulary = SIZES[size][-1]
    words = [f"w{i}" for i in range(vocabulary - 2)]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*words, "</s>", "<pad>"])}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    actor.config.update({"bos_token_id": None, "eos_token_id": vocabulary - 2, "pad_token_id": vocabulary - 1})
    labels = {"id2label": {0: "score"}, "label2id": {"score": 0}}
    torch.manual_seed(1)
    reward = LlamaForSequenceClassification(type(actor.config)(**{**actor.config.to_dict(), **labels}))
    for name, model in (("actor", actor), ("reward", reward)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    dice = torch.Generator().manual_seed(2)
    with (folder / "prompts.jsonl").open("w") as file:
        for _ in range(prompts):
            ids = torch.randint(vocabulary - 2, (PROMPT,), generator=dice).tolist()
            row = {"prompt": " ".join(words[i] for i in ids), "response": "w1"}
            file.write(json.dumps(row) + "\n")
    (folder / "setup.json").write_text(json.dumps(SETUP))


def flags(folder: Path, dtype: str, steps: int) -> list[str]:
    values = {
        "actor_model_name_or_path": folder / "actor",
        "critic_model_name_or_path": folder / "reward",
        "data_path": folder / "prompts.jsonl",
        "data_split": "0,0,10",
        "eval_fraction": 0,
        "max_prompt_seq_len": PROMPT,
        "max_answer_seq_len": RESPONSE,
        "per_device_generation_batch_size": BATCH,
        "per_device_training_batch_size": BATCH,
        "max_steps": steps,
        "actor_learning_rate": SETUP["lr"],
        "critic_learning_rate": SETUP["lr"],
        "lr_scheduler_type": "constant",
        "num_warmup_steps": 0,
        "kl_ctl": SETUP["kl_ctl"],
        "dtype": dtype,
        "output_dir": folder / "ours",
    }
    return [f"--{name}={value}" for name, value in values.items()]


def run_ours(folder: Path, dtype: str, steps: int) -> list[dict[str, Any]]:
    """The figures of each step; its seconds by this process's clock, from one line of metrics to the next."""
    shutil.rmtree(folder / "ours", ignore_errors=True)
    metrics = folder / "ours" / "metrics.jsonl"
    command = [sys.executable, "-m", "rlhf", "ppo", "--nproc", "1", *flags(folder, dtype, steps)]
    with (folder / "ours.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        lines: list[dict[str, Any]] = []
        last = 0.0
        while process.poll() is None or len(lines) < steps:
            time.sleep(0.005)
            text = metrics.read_text().splitlines() if metrics.exists() else []
            steps_seen = [line for line in map(json.loads, text) if not line.get("eval")]
            if len(steps_seen) > len(lines):
                now = time.perf_counter()
                lines.append({**steps_seen[-1], "seconds": now - last})
                last = now
            if process.poll() is not None and len(steps_seen) < steps:
                raise SystemExit(f"error: rlhf ppo ended early:\n{(folder / 'ours.log').read_text()[-3000:]}")
    return lines


def run_trl(
    python: str, folder: Path, dtype: str, updates: int, epochs: int = 1, answers: Path | None = None
) -> list[dict[str, Any]]:
    command = [python, str(Path(__file__).with_name("trl_peer.py")), str(folder), dtype, str(updates), str(epochs)]
    result = subprocess.run([*command, *([str(answers)] if answers else [])], capture_output=True, text=True)
    lines = [json.loads(line[7:]) for line in result.stdout.splitlines() if line.startswith("update ")]
    if result.returncode or len(lines) < updates:
        raise SystemExit(f"error: TRL ended with status {result.returncode}:\n{result.stderr[-3000:]}")
    return lines


def report(folder: Path, dtype: str, args: argparse.Namespace) -> None:
    parts = ("seconds", "generate_seconds", "score_seconds", "train_seconds")
    rounds: dict[str, list[dict[str, float]]] = {"rlhf": [], "trl": []}
    for _ in range(args.rounds):
        runs = {"rlhf": run_ours(folder, dtype, args.steps)}
        if args.trl_python:
            runs["trl"] = run_trl(args.trl_python, folder, dtype, args.steps)
        for name, lines in runs.items():
            found = [part for part in parts if part in lines[0]]
            rounds[name].append({part: statistics.median(line[part] for line in lines[1:]) for part in found})
    for name, figures in rounds.items():
        if not figures:
            continue
        line: dict[str, Any] = {"size": args.size, "dtype": dtype, "name": name}
        line |= {part: round(statistics.median(f[part] for f in figures), 3) for part in figures[0]}
        if name == "rlhf" and rounds["trl"]:
            pairs = zip(figures, rounds["trl"], strict=True)
            line["times_faster"] = round(statistics.median(t["seconds"] / o["seconds"] for o, t in pairs), 2)
        print(json.dumps(line), flush=True)


def check(folder: Path, args: argparse.Namespace) -> None:
    """Losses, KL and scores of TRL's updates (fp32, two passes each), made again here from TRL's answers."""
    theirs = run_trl(args.trl_python, folder, "fp32", args.steps, epochs=2, answers=folder / "answers.pt")
    answers = torch.load(folder / "answers.pt")
    pad_or_end = SIZES[args.size][-1] - 2
    if any(bool((ids >= pad_or_end).any()) for ids in answers):
        raise SystemExit("error: an answer holds an end or padding token, which TRL and this framework treat unlike")
    for number, (line, ours) in enumerate(zip(theirs, replay(folder, answers), strict=True), 1):
        for name, value in ours.items():
            gap = abs(value - line[name])
            figures = {"rlhf": round(value, 7), "trl": round(line[name], 7), "gap": float(f"{gap:.1e}")}
            print(json.dumps({"update": number, "name": name, **figures}), flush=True)


def replay(folder: Path, answers: list[torch.Tensor]) -> Iterator[dict[str, float]]:
    """This framework's figures of one update after another on given answers `[B, P + T]`."""
    import engine
    from rlhf.arguments import parse, ppo_parser
    from rlhf.micro_batches import Cut, update_parts
    from rlhf.models import load_tokenizer
    from rlhf.ppo_models import load_models
    from rlhf.ppo_options import resolve_options
    from rlhf.ppo_update import update
    from rlhf.rollout import Rollout, judge
    from rlhf.score_scale import ScoreScale
    from stages.ppo import add_advantages

    (folder / "unclipped.json").write_text(json.dumps({"gradient_clipping": 0.0}))  # as TRL
    words = [*flags(folder, "fp32", 2 * len(answers)), "--ppo_epochs=2"]
    args = parse(ppo_parser(), [*words, f"--deepspeed_config={folder / 'unclipped.json'}"])
    resolve_options(args)
    engine.init_distributed()
    models = load_models(args, 2 * len(answers), load_tokenizer(folder / "actor"))
    cut, scale = Cut(BATCH), ScoreScale()
    for ids in answers:
        ones = torch.ones(len(ids), RESPONSE)
        rollout = Rollout(
            input_ids=ids,
            attention_mask=torch.ones_like(ids, dtype=torch.bool),
            response_mask=ones.bool(),
            gen_logprobs=torch.zeros_like(ones),
            lengths=torch.full((len(ids),), RESPONSE),
            finished=torch.zeros(len(ids), dtype=torch.bool),
            rows=[{}] * len(ids),
        )
        experience = judge(rollout, models, cut=cut, temperature=1.0)
        add_advantages(experience, rollout, scale, SETUP["kl_ctl"], args)
        losses = []
        order = torch.Generator().manual_seed(0)
        for part in update_parts(experience, cut, epochs=2, window=1, generator=order):
            figures = update(models, part, args, kl_ctl=SETUP["kl_ctl"], ptx=None)
            losses.append((float(figures.actor_loss), float(figures.critic_loss)))
        yield {
            "actor_loss": statistics.mean(actor for actor, _ in losses),
            "critic_loss": statistics.mean(critic for _, critic in losses),
            "kl": float((experience.logprobs - experience.ref_logprobs).sum(1).mean()),
            "score": float(experience.scores.mean()),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="34m")
    parser.add_argument("--dtypes", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="PPO steps of a run, of which the first does not count")
    parser.add_argument("--trl-python", help="interpreter of the environment that has trl")
    parser.add_argument("--check", action="store_true", help="compare losses on the same answers instead of seconds")
    args = parser.parse_args()
    if args.check and not args.trl_python:
        parser.error("--check compares with TRL: say with --trl-python where it is")
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), args.size, prompts=BATCH * args.steps)
        if args.check:
            return check(Path(folder), args)
        for dtype in args.dtypes:
            report(Path(folder), dtype, args)


if __name__ == "__main__":
    main()
