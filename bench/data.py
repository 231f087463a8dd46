"""How fast data goes in: a million short rows loaded, split, tokenized and cached, then started from the cache.

    python -m bench.data [--rows 1000000] [--folder FOLDER] [--tokenizer PATH]

Every part runs in a process of its own and reports wall seconds (imports included in the warm start, as a user
waits for them too), processor seconds and the peak of its resident memory, as one JSON line each.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = (
    "what is the of two plus three colour sky blue answer yes no good day hello there please tell me about red green "
    "cat dog house river seven nine ten large small over under before after where when who how many long short"
).split()


def make_rows(path: Path, rows: int) -> None:
    """Preference rows of one short question and two short answers, about 25 words in all."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(rows):
            question, good, bad = (" ".join(draw.choices(WORDS, k=draw.randint(4, 12))) for _ in range(3))
            file.write(json.dumps({"prompt": question + "?", "chosen": good + ".", "rejected": bad + "."}) + "\n")


def make_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer of 4,000 tokens trained on the same words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4000, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator([" ".join(WORDS), "\n\nHuman: \n\nAssistant:"] * 4, trainer)
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>").save_pretrained(folder)


def measure(stage: str, source: str, folder: str, tokenizer: str) -> None:
    """Loads the stage's data, whole, in this process, and prints the figures."""
    start = time.perf_counter()
    from transformers import AutoTokenizer

    import data

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    ready = time.perf_counter()
    split = {"sft": "1,0,0", "reward": "0,1,0", "ppo": "0,0,1"}[stage]
    parts = data.load_stage_data(
        stage, loaded, data_path=source, data_split=split, data_output_path=folder, max_seq_len=256, max_prompt_len=256
    )
    sampler = data.BatchSampler(len(parts.train), 16, seed=1)
    first = [parts.train[i] for i in next(iter(sampler.iter(0)))]
    end = time.perf_counter()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    figures = {
        "stage": stage,
        "items": len(parts.train) + len(parts.eval),
        "tokens": parts.report["parts"]["train"]["tokens"],
        "import_seconds": round(ready - start, 2),
        "seconds": round(end - start, 2),
        "processor_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_memory_gb": round(usage.ru_maxrss / 2**20, 3),
    }
    assert len(first) == 16
    print(json.dumps(figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where rows and caches go; a temporary folder by default")
    parser.add_argument("--tokenizer", help="a model's folder; a byte-level one is trained by default")
    parser.add_argument("--stages", nargs="+", default=["sft", "reward", "ppo"])
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(*args.measure)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows = folder / f"rows-{args.rows}.jsonl"
        if not rows.exists():
            make_rows(rows, args.rows)
        tokenizer = args.tokenizer or str(folder / "tokenizer")
        if not args.tokenizer:
            make_tokenizer(folder / "tokenizer")
        with tempfile.TemporaryDirectory(dir=folder) as caches:
            for stage in args.stages:
                for start in ("cold", "warm"):
                    command = [sys.executable, "-m", "bench.data", "--measure", stage, str(rows), caches, tokenizer]
                    environment = os.environ | {"TOKENIZERS_PARALLELISM": "true"}
                    out = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
                    print(json.dumps({"start": start} | json.loads(out.splitlines()[-1])), flush=True)


if __name__ == "__main__":
    main()
