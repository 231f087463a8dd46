"""vLLM as a contender of `bench.generate`: a process of its own environment that waits for loads on its input.

`VllmPeer` is this side. Run as a script by vLLM's interpreter, the file is the other side: it imports nothing of ours.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys


class VllmPeer:
    """Call it with [(prompt ids, new tokens), ...]; it returns when all are answered.

    Raises:
        RuntimeError: vLLM's process ended; what it said is on standard error.
    """

    def __init__(self, python: str, folder: str, dtype: str):
        self._process = subprocess.Popen(
            [python, __file__, folder, dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # GiB; by itself it takes nearly all memory there is, and dies of the other contenders'
            env={"VLLM_CPU_KVCACHE_SPACE": "2", **os.environ},
            start_new_session=True,
        )
        self._answer()
        self._signal(signal.SIGSTOP)

    def __call__(self, load: list[tuple[list[int], int]]) -> None:
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(load) + "\n")
        self._process.stdin.flush()
        produced = self._answer()
        assert produced == sum(new for _, new in load), produced
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        # waiting, its processes look for work all the time: they sleep while others are measured
        os.killpg(self._process.pid, number)

    def _answer(self) -> int:
        for line in self._process.stdout:  # its log goes there too
            if line.startswith("tokens "):
                return int(line.split()[1])
        raise RuntimeError(f"vLLM's process ended with status {self._process.wait()}")

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self._process.stdin.close()
        self._process.wait()


def serve(folder: str, dtype: str) -> None:
    from vllm import LLM, SamplingParams

    model = LLM(
        model=folder,
        dtype={"bf16": "bfloat16", "fp32": "float32"}[dtype],
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=128,
        enable_prefix_caching=False,  # the same prompts come round after round
    )
    print("tokens 0", flush=True)
    for line in sys.stdin:
        load = json.loads(line)
        settings = [
            SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False) for _, new in load
        ]
        outputs = model.generate([{"prompt_token_ids": prompt} for prompt, _ in load], settings, use_tqdm=False)
        print("tokens", sum(len(output.outputs[0].token_ids) for output in outputs), flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
