"""DPO: preferences learned by the policy itself, without a reward model and without sampling.

On the pairs of the reward stage, with a frozen copy of the model as reference. With h the difference of the answers'
log-probability ratios,

    h = log pi(chosen) / ref(chosen) - log pi(rejected) / ref(rejected)

the loss is -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h), s the label smoothing (Rafailov et al. 2023). An
answer's log-probability is the sum over its own tokens and its end token, the prompt's not. Before the first update
h is 0 and the loss log 2.

    rlhf dpo --model_name_or_path SFT_FOLDER --data_path FILE --output_dir OUTPUT
"""

from __future__ import annotations

import time

import torch

import engine
from data import collate_answers
from rlhf.activations import activation_bytes
from rlhf.arguments import dpo_parser, parse
from rlhf.dry_run import dry_run
from rlhf.experience import answer_logprobs
from rlhf.feed import open_feed, take_up
from rlhf.launch import stage_main
from rlhf.lora import WithoutAdapters
from rlhf.losses import dpo_loss
from rlhf.metrics import MetricAccumulator, MetricsWriter
from rlhf.models import load_actor
from rlhf.position_limit import check_longest
from rlhf.progress import Progress
from rlhf.stage_data import collate_with, load_data, stage_tokenizer
from rlhf.stage_run import end_run, start_run, step_figures
from rlhf.steps import count_steps, evaluation_interval, is_due
from rlhf.training import (
    checkpoint_folder,
    inference_config,
    sampler_for,
    save_model,
    stage_engine,
    to_device,
)


@stage_main("dpo")
def main(argv: list[str] | None = None) -> None:
    args = parse(dpo_parser(), argv)
    if args.dry_run:
        return dry_run("dpo", args)
    start_run(args)

    tokenizer = stage_tokenizer(args.model_name_or_path, args, trained="--model_name_or_path")
    data = load_data("reward", tokenizer, args)

    micro_batch = args.per_device_train_batch_size
    feed = open_feed(data.train, micro_batch, args)
    collate = collate_with(collate_answers, tokenizer, args)
    done = take_up(feed, checkpoint_folder(args), micro_batch, args)
    total_steps = count_steps(feed.batches_per_epoch, args, done)
    # no dropout unless asked for: with it the policy would not start at the reference
    model = load_actor(args.model_name_or_path, dropout=args.dropout or 0.0)
    check_longest(model, data.train)
    eng = stage_engine(model, args, path=args.model_name_or_path, total_steps=total_steps)
    if args.lora_dim and args.only_optimize_lora:
        reference = WithoutAdapters(eng)
    else:
        reference = engine.initialize(
            load_actor(args.model_name_or_path, dropout=0.0),
            inference_config(args, zero_stage=args.zero_stage, micro_batch=micro_batch, offload=args.offload),
        ).eval()
    if args.resume:
        eng.load_checkpoint(checkpoint_folder(args))

    accumulation = args.gradient_accumulation_steps
    eval_interval = evaluation_interval(feed.batches_per_epoch, args)
    writer = MetricsWriter(args.output_dir, "dpo", args, start_step=eng.global_steps)
    if eng.global_steps == 0:
        writer.log_eval(0, evaluate(eng, reference, data.eval, collate, args))
    with Progress(total_steps, "DPO", start=eng.global_steps) as progress:
        for step in range(eng.global_steps + 1, total_steps + 1):
            started, lr, meter = time.perf_counter(), eng.get_lr()[0], MetricAccumulator()
            eng.train()
            tokens = activations = 0
            for _ in range(accumulation):
                epoch, _, items = next(feed)
                batch = to_device(collate(items), eng.device)
                with activation_bytes(eng.module) as kept:
                    loss, figures = batch_loss(eng, reference, batch, args)
                activations = max(activations, *kept)
                eng.backward(loss, weight=len(items))
                eng.step()
                add(meter, figures)
                tokens += int(batch["attention_mask"].sum())
            metrics = meter.reduce()
            tokens = int(engine.distributed.all_reduce_sums([tokens])[0])
            seconds = time.perf_counter() - started
            shown = {"loss": metrics["loss"], "accuracy": metrics["accuracy"], "margin": metrics["reward_margin"]}
            line = step_figures(eng, lr=lr, epoch=epoch, tokens=tokens, seconds=seconds, activations=activations)
            writer.log(step, {**metrics, **line})
            progress.update(step, **shown)
            if is_due(step, eval_interval) or step == total_steps:
                writer.log_eval(step, evaluate(eng, reference, data.eval, collate, args))
            if is_due(step, args.save_interval):
                eng.save_checkpoint(checkpoint_folder(args), client_state={"data": feed.state_dict()})

    save_model(eng, tokenizer, args.output_dir)
    end_run(args, data, writer, eng)


def batch_loss(model, reference, batch: dict[str, torch.Tensor], args) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The micro-batch's mean loss over its pairs, and its figures, `[B]` each, detached."""
    text = (batch["input_ids"], batch["attention_mask"], batch["response_mask"])
    with torch.no_grad():  # first: the reference may be the policy's own engine without its adapters
        ref_chosen, ref_rejected = answer_logprobs(reference, *text).chunk(2)
    chosen, rejected = answer_logprobs(model, *text).chunk(2)
    losses, chosen_reward, rejected_reward = dpo_loss(
        chosen, rejected, ref_chosen, ref_rejected, beta=args.beta, label_smoothing=args.label_smoothing
    )
    figures = {
        "loss": losses,
        "accuracy": chosen_reward > rejected_reward,
        "chosen_reward": chosen_reward,
        "rejected_reward": rejected_reward,
        "reward_margin": chosen_reward - rejected_reward,
        "chosen_logprob": chosen,
        "rejected_logprob": rejected,
    }
    return losses.sum() / max(1, len(losses)), {name: figure.detach() for name, figure in figures.items()}


def add(meter: MetricAccumulator, figures: dict[str, torch.Tensor]) -> None:
    for name, figure in figures.items():
        meter.add(name, figure.double().sum(), len(figure))


@torch.no_grad()
def evaluate(eng, reference, items, collate, args) -> dict[str, float]:
    """Means over all held-out pairs of all ranks."""
    if not len(items):
        return {}
    eng.eval()
    meter = MetricAccumulator()
    for indices in sampler_for(
        items, args.per_device_eval_batch_size, args.seed, shuffle=False, drop_last=False
    ).iter(0):
        # A rank whose share has run out still takes part in stage 3's gathers, with a pair that counts for nothing.
        batch = to_device(collate([items[i] for i in indices or [0]]), eng.device)
        _, figures = batch_loss(eng, reference, batch, args)
        add(meter, {name: figure[: len(indices)] for name, figure in figures.items()})
    return meter.reduce()


if __name__ == "__main__":
    main()
