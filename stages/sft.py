"""Step 1, supervised fine-tuning: next-token cross-entropy on the assistant's tokens and their end token.

rlhf sft --model_name_or_path FOLDER --data_path FILE --output_dir OUTPUT
torchrun --nproc-per-node 2 -m stages.sft ...
"""

from __future__ import annotations

import math
import time

import torch

from data import load_rows
from data.chat import IGNORE
from data.sources import with_shape
from engine.distributed import all_reduce_sums
from rlhf import recipes
from rlhf.activations import activation_bytes
from rlhf.arguments import parse, sft_parser
from rlhf.dry_run import dry_run
from rlhf.end_token import fit_end_token
from rlhf.experience import positions
from rlhf.feed import open_feed, take_up
from rlhf.launch import stage_main
from rlhf.losses import causal_lm_loss
from rlhf.metrics import MetricsWriter
from rlhf.models import load_actor
from rlhf.packing import check_packing, packed_logits
from rlhf.position_limit import check_longest
from rlhf.progress import Progress
from rlhf.stage_data import load_data, sft_collates, stage_tokenizer
from rlhf.stage_run import end_run, start_run, step_figures
from rlhf.steps import count_steps, evaluation_interval, is_due
from rlhf.training import (
    checkpoint_folder,
    sampler_for,
    save_model,
    stage_engine,
    to_device,
)


@stage_main("sft")
def main(argv: list[str] | None = None) -> None:
    args = parse(sft_parser(), argv)
    if args.dry_run:
        return dry_run("sft", args)
    start_run(args)

    model_path = args.model_name_or_path
    if recipes.is_recipe(model_path):
        model_path = new_model(args)
    tokenizer = stage_tokenizer(model_path, args)
    data = load_data("sft", tokenizer, args)

    feed = open_feed(data.train, args.per_device_train_batch_size, args)
    collate, collate_eval = sft_collates(tokenizer, args)
    done = take_up(feed, checkpoint_folder(args), args.per_device_train_batch_size, args)
    total_steps = count_steps(feed.batches_per_epoch, args, done)
    model = load_actor(model_path, dropout=args.dropout)
    if args.add_eot_token:
        fit_end_token(model, tokenizer)
    if args.packing:
        check_packing(model, args.max_seq_len)
    check_longest(model, data.train)
    eng = stage_engine(model, args, path=model_path, total_steps=total_steps)
    if args.resume:
        eng.load_checkpoint(checkpoint_folder(args))

    accumulation = args.gradient_accumulation_steps
    eval_interval = evaluation_interval(feed.batches_per_epoch, args)
    writer = MetricsWriter(args.output_dir, "sft", args, start_step=eng.global_steps)
    if eng.global_steps == 0:
        writer.log_eval(0, evaluate(eng, data.eval, collate_eval, args))
    with Progress(total_steps, "SFT", start=eng.global_steps) as progress:
        for step in range(eng.global_steps + 1, total_steps + 1):
            started, lr, totals = time.perf_counter(), eng.get_lr()[0], torch.zeros(3, dtype=torch.float64)
            eng.train()
            activations = 0
            for _ in range(accumulation):
                epoch, _, items = next(feed)
                batch = to_device(collate(items), eng.device)
                with activation_bytes(eng.module) as kept:
                    loss, count = batch_loss(eng, batch)
                activations = max(activations, *kept)
                loss = eng.backward(loss, weight=count)
                eng.step()
                totals += torch.tensor([float(loss) * count, count, int(batch["attention_mask"].sum())])
            loss_sum, count, tokens = all_reduce_sums(totals.tolist())
            seconds = time.perf_counter() - started
            shown = {"loss": loss_sum / max(count, 1), "lr": lr, "grad_norm": eng.get_global_grad_norm()}
            line = step_figures(eng, lr=lr, epoch=epoch, tokens=tokens, seconds=seconds, activations=activations)
            writer.log(step, {**shown, **line})
            progress.update(step, **shown)
            if args.print_loss:
                progress.print(f"step {step}: loss {shown['loss']:.4f}")
            if is_due(step, eval_interval) or step == total_steps:
                writer.log_eval(step, evaluate(eng, data.eval, collate_eval, args))
            if is_due(step, args.save_interval):
                eng.save_checkpoint(checkpoint_folder(args), client_state={"data": feed.state_dict()})

    save_model(eng, tokenizer, args.output_dir)
    end_run(args, data, writer, eng)


def batch_loss(model, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Mean cross-entropy over the micro-batch's supervised tokens, and their number."""
    if "dialogue_ids" in batch:
        return causal_lm_loss(packed_logits(model, batch), batch["labels"])
    ids, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
    # logits, the largest tensor of all, from where the first supervised token of the batch is predicted
    kept = labels.shape[1] - max(0, int((labels != IGNORE).any(0).int().argmax()) - 1)
    logits = model(
        input_ids=ids, attention_mask=mask, position_ids=positions(mask), use_cache=False, logits_to_keep=kept
    ).logits[:, -kept:]
    return causal_lm_loss(logits, labels[:, -kept:])


@torch.no_grad()
def evaluate(eng, items, collate, args) -> dict[str, float]:
    """Held-out loss and perplexity, a mean over all supervised tokens of all ranks."""
    if not len(items):
        return {}
    eng.eval()
    loss_sum, count_sum = 0.0, 0
    size = args.per_device_eval_batch_size
    for indices in sampler_for(items, size, args.seed, shuffle=False, drop_last=False).iter(0):
        # A rank whose share has run out still takes part in the gathers of stage 3, with a row that counts for nothing.
        batch = to_device(collate([items[i] for i in indices or [0]]), eng.device)
        loss, count = batch_loss(eng, batch)
        if indices:
            loss_sum, count_sum = loss_sum + float(loss) * count, count_sum + count
    loss_sum, count_sum = all_reduce_sums([loss_sum, count_sum])
    loss = loss_sum / max(count_sum, 1)
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": int(count_sum)}


def new_model(args) -> str:
    """Make the recipe's model and a tokenizer trained on all sources' text; returns their folder."""
    folder = checkpoint_folder(args, "initial_model")

    def texts():
        for source in [*args.data_path, *args.sft_only_data_path]:
            shaped = with_shape(source, args.data_format)
            for row in load_rows(shaped, on_bad_row=args.on_bad_row, max_bad_rows=args.max_bad_rows)[0]:
                yield from (row["prompt"] + " " + row[key] for key in ("response", "chosen") if row.get(key))

    recipes.build(args.model_name_or_path, texts(), folder, args.seed)
    return str(folder)


if __name__ == "__main__":
    main()
