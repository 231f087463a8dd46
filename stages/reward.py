"""Step 2, the reward model: a backbone with a linear score head, trained on pairs of answers.

The score of a text is the head at its last real token, and the loss -log sigmoid(score_chosen - score_rejected).

    rlhf reward --model_name_or_path SFT_FOLDER --data_path FILE --output_dir OUTPUT
"""

from __future__ import annotations

import time

import torch
from transformers import set_seed

import engine
from data import collate_pairs
from engine.distributed import all_reduce_sums
from rlhf.arguments import parse, reward_parser
from rlhf.launch import stage_main
from rlhf.losses import pair_loss, pair_token_loss
from rlhf.metrics import MetricsWriter, write_run_json
from rlhf.models import end_scores, load_tokenizer, new_score_model
from rlhf.progress import Progress
from rlhf.stage_data import load_data
from rlhf.training import (
    batch_stream,
    checkpoint_folder,
    count_steps,
    is_due,
    prepare_module,
    refuse_to_bury,
    sampler_for,
    save_model,
    to_device,
    train_config,
)


@stage_main("reward")
def main(argv: list[str] | None = None) -> None:
    args = parse(reward_parser(), argv)
    engine.init_distributed()
    set_seed(args.seed)
    refuse_to_bury(args)
    write_run_json(args.output_dir, args, status="running")

    tokenizer = load_tokenizer(args.model_name_or_path)
    data = load_data("reward", tokenizer, args)

    sampler = sampler_for(data.train, args.per_device_train_batch_size, args.seed)
    total_steps = count_steps(len(sampler), args)
    model = new_score_model(args.model_name_or_path, tokenizer, seed=args.seed, dropout=args.dropout)
    model = prepare_module(model, args.gradient_checkpointing)
    config = train_config(
        args,
        zero_stage=args.zero_stage,
        micro_batch=args.per_device_train_batch_size,
        learning_rate=args.learning_rate,
        weight_decay=args.weight_decay,
        total_steps=total_steps,
    )
    eng = engine.initialize(model, config)
    if args.resume:
        eng.load_checkpoint(checkpoint_folder(args))

    accumulation = args.gradient_accumulation_steps
    eval_interval = args.eval_interval or max(1, len(sampler) // accumulation)
    batches = batch_stream(sampler, start=eng.global_steps * accumulation)
    writer = MetricsWriter(args.output_dir, "reward", args, start_step=eng.global_steps)
    with Progress(total_steps, "reward model", start=eng.global_steps) as progress:
        for step in range(eng.global_steps + 1, total_steps + 1):
            started, lr, totals = time.perf_counter(), eng.get_lr()[0], torch.zeros(6, dtype=torch.float64)
            eng.train()
            for _ in range(accumulation):
                epoch, indices = next(batches)
                batch = to_device(collate_pairs([data.train[i] for i in indices], tokenizer.pad_token_id), eng.device)
                loss, chosen, rejected = batch_loss(eng, batch, args.pair_loss)
                loss = eng.backward(loss, weight=len(indices))
                eng.step()
                totals += pair_sums(loss, chosen, rejected, batch)
            metrics = pair_means(totals)
            seconds = time.perf_counter() - started
            shown = {"loss": metrics["loss"], "accuracy": metrics["accuracy"], "lr": lr}
            writer.log(
                step,
                {
                    **metrics,
                    "lr": lr,
                    "grad_norm": eng.get_global_grad_norm(),
                    "epoch": epoch,
                    "skipped": eng.skipped_steps,
                    "step_seconds": seconds,
                    "tokens_per_second": metrics["tokens"] / seconds,
                },
            )
            progress.update(step, **shown)
            if is_due(step, eval_interval) or step == total_steps:
                limit = None if step == total_steps else args.eval_iters
                writer.log_eval(step, evaluate(eng, data.eval, tokenizer, args, limit))
            if is_due(step, args.save_interval):
                eng.save_checkpoint(checkpoint_folder(args))

    save_model(eng, tokenizer, args.output_dir)
    writer.close()
    write_run_json(args.output_dir, args, status="complete")


def batch_loss(model, batch: dict[str, torch.Tensor], kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The micro-batch's mean pair loss and the scores `[B]` of both sides, from one forward pass of `[2B, T]`."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    values = model(ids, mask)
    chosen, rejected = end_scores(values, mask).chunk(2)
    if kind == "end":
        loss = pair_loss(chosen, rejected)
    else:
        (ids_c, ids_r), (mask_c, mask_r), (values_c, values_r) = ids.chunk(2), mask.chunk(2), values.chunk(2)
        loss = pair_token_loss(values_c, values_r, ids_c, ids_r, mask_c, mask_r)
    return loss, chosen.detach(), rejected.detach()


def pair_sums(loss, chosen, rejected, batch) -> torch.Tensor:
    """Sums over the micro-batch: loss, right ones (a tie is not right), both scores, pairs, tokens. `[6]`"""
    pairs = len(chosen)
    right = (chosen > rejected).sum()
    figures = [float(loss) * pairs, right, chosen.sum(), rejected.sum(), pairs, batch["attention_mask"].sum()]
    return torch.tensor([float(figure) for figure in figures], dtype=torch.float64)


def pair_means(totals: torch.Tensor) -> dict[str, float]:
    """Means over the pairs of all ranks from the sums of `pair_sums`."""
    loss, right, chosen, rejected, pairs, tokens = all_reduce_sums(totals.tolist())
    pairs = max(pairs, 1)
    return {
        "loss": loss / pairs,
        "accuracy": right / pairs,
        "chosen_score": chosen / pairs,
        "rejected_score": rejected / pairs,
        "tokens": int(tokens),
    }


@torch.no_grad()
def evaluate(eng, items, tokenizer, args, limit: int | None) -> dict[str, float]:
    """Held-out loss, accuracy and mean scores over at most `limit` batches a rank (all of them for None)."""
    if not len(items):
        return {}
    eng.eval()
    totals = torch.zeros(6, dtype=torch.float64)
    sampler = sampler_for(items, args.per_device_eval_batch_size, args.seed, shuffle=False, drop_last=False)
    for number, indices in enumerate(sampler.iter(0)):
        if limit is not None and number >= limit:
            break
        # A rank whose share has run out still takes part in stage 3's gathers, with a pair that counts for nothing.
        batch = to_device(collate_pairs([items[i] for i in indices or [0]], tokenizer.pad_token_id), eng.device)
        outcome = batch_loss(eng, batch, args.pair_loss)
        if indices:
            totals += pair_sums(*outcome, batch)
    return pair_means(totals)


if __name__ == "__main__":
    main()
