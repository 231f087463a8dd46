"""A stage that trains nothing: it leaves the files of one, or fails as FAKE_MODE says.

Its folder (``--output_dir``) is named after the stage it plays. Each rank leaves its process id there.
"""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

from rlhf.arguments import STAGE_PARSERS, parse
from rlhf.launch import stage_main
from rlhf.ppo_options import resolve_options
from rlhf.results import read_folder

EVALS = {
    "sft": [{"perplexity": 40.0, "loss": 3.7}, {"perplexity": 3.5, "loss": 1.25}],
    "reward": [
        {"accuracy": 0.5, "chosen_score": 0.0, "rejected_score": 0.0},
        {"accuracy": 0.93, "chosen_score": 1.5, "rejected_score": -1.5},
    ],
    "ppo": [
        {"gold_rate": 0.45, "score_mean": -0.1, "kl_ref": 0.0, "response_length_mean": 5.0},
        {"gold_rate": 0.75, "score_mean": 0.9, "kl_ref": 0.31, "response_length_mean": 4.5},
    ],
}
SAMPLE = {"prompt": "\n\nHuman: 1+1?\n\nAssistant:", "before": "3 <b>", "after": "2", "gold_before": 0.0}


@stage_main("fake")
def main(argv=None):
    import sys

    words = sys.argv[1:] if argv is None else argv
    folder = Path(words[words.index("--output_dir") + 1])
    args = parse(STAGE_PARSERS[folder.name](), words)
    if folder.name == "ppo":
        resolve_options(args)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    if world > 1:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.barrier()
    mode = os.environ.get("FAKE_MODE", "train").split(":")
    if mode[0] == "hang" and rank == 0:
        child = subprocess.Popen(["sleep", "300"])
        (folder / "pid-child").write_text(str(child.pid))
    if mode[-1] in ("hang", folder.name) and rank == world - 1:
        fail(mode[0], folder)
    if world > 1:
        dist.all_reduce(torch.ones(1))
    if rank == 0:
        leave_files(folder, args)


def fail(mode, folder):
    if mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif mode == "user":
        read_folder(folder / "no-such-run")
    elif mode == "bug":
        raise ValueError("raised outside of our packages")
    elif mode == "exit":
        os._exit(3)
    else:
        time.sleep(300)


def leave_files(folder, args):
    stage = folder.name
    lines = [{"stage": stage, "step": 0, "eval": True, **EVALS[stage][0]}]
    lines += [{"stage": stage, "step": n, "loss": 3.0 / n, "lr": 1e-3, "kl_ref": 0.1} for n in (1, 2)]
    lines += [{"stage": stage, "step": 2, "eval": True, **EVALS[stage][1]}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if stage == "ppo":
        (folder / "samples.jsonl").write_text(json.dumps({**SAMPLE, "gold_after": 1.0}) + "\n")
        (folder / "actor").mkdir(exist_ok=True)
    if args.save_interval:
        (folder / "checkpoints").mkdir(exist_ok=True)
        (folder / "checkpoints" / "latest").write_text("step-2")
    runs = folder / "runs"
    runs.write_text(runs.read_text() + "." if runs.exists() else ".")
    (folder / "resumed").write_text(str(args.resume))
    run = {"status": "complete", "arguments": json.loads(json.dumps(vars(args), default=str))}
    (folder / "run.json").write_text(json.dumps(run))


if __name__ == "__main__":
    main()
