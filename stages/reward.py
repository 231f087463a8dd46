"""Step 2, the reward model: a backbone with a linear score head, trained on judged answers.

The score of a text is the head at its last real token. The loss of a pair is -log sigmoid(chosen - rejected - margin)
of the scores; that of one answer with a 0/1 label the cross-entropy of sigmoid(score), with a score of its own the
squared error. The kinds may be mixed: the loss is the mean over all pairs and single answers of a batch, each counting
one. A row with several rejected answers is as many pairs.

    rlhf reward --model_name_or_path SFT_FOLDER --data_path FILE --output_dir OUTPUT
"""

from __future__ import annotations

import time

import torch

from data import collate_answers
from rlhf.activations import activation_bytes
from rlhf.arguments import parse, reward_parser
from rlhf.dry_run import dry_run
from rlhf.end_token import fit_end_token
from rlhf.feed import open_feed, take_up
from rlhf.launch import stage_main
from rlhf.losses import pair_loss, pair_token_loss, single_loss
from rlhf.metrics import MetricsWriter
from rlhf.models import end_scores, new_score_model
from rlhf.position_limit import check_longest
from rlhf.progress import Progress
from rlhf.reward_metrics import Judged, RewardEvaluation, RewardMeter
from rlhf.stage_data import collate_with, load_data, source_names, stage_tokenizer
from rlhf.stage_run import end_run, start_run, step_figures
from rlhf.steps import count_steps, evaluation_interval, is_due
from rlhf.training import (
    checkpoint_folder,
    sampler_for,
    save_model,
    stage_engine,
    to_device,
)


@stage_main("reward")
def main(argv: list[str] | None = None) -> None:
    args = parse(reward_parser(), argv)
    if args.dry_run:
        return dry_run("reward", args)
    start_run(args)

    tokenizer = stage_tokenizer(args.model_name_or_path, args)
    data = load_data("reward", tokenizer, args)

    feed = open_feed(data.train, args.per_device_train_batch_size, args)
    collate = collate_with(collate_answers, tokenizer, args)
    done = take_up(feed, checkpoint_folder(args), args.per_device_train_batch_size, args)
    total_steps = count_steps(feed.batches_per_epoch, args, done)
    model = new_score_model(args.model_name_or_path, tokenizer, seed=args.seed, dropout=args.dropout)
    if args.add_eot_token:
        fit_end_token(model.model, tokenizer)
    check_longest(model, data.train)
    eng = stage_engine(model, args, path=args.model_name_or_path, total_steps=total_steps)
    if args.resume:
        eng.load_checkpoint(checkpoint_folder(args))

    accumulation = args.gradient_accumulation_steps
    eval_interval = evaluation_interval(feed.batches_per_epoch, args)
    writer = MetricsWriter(args.output_dir, "reward", args, start_step=eng.global_steps)
    with Progress(total_steps, "reward model", start=eng.global_steps) as progress:
        for step in range(eng.global_steps + 1, total_steps + 1):
            started, lr, meter = time.perf_counter(), eng.get_lr()[0], RewardMeter()
            eng.train()
            activations = 0
            for _ in range(accumulation):
                epoch, _, items = next(feed)
                batch = to_device(collate(items), eng.device)
                with activation_bytes(eng.module) as kept:
                    loss, judged = batch_loss(eng, batch, args)
                activations = max(activations, *kept)
                eng.backward(loss, weight=len(items))
                eng.step()
                meter.add(judged)
            metrics = meter.reduce()
            seconds = time.perf_counter() - started
            shown = {"loss": metrics["loss"], "accuracy": metrics["accuracy"], "lr": lr}
            tokens = metrics["tokens"]
            line = step_figures(eng, lr=lr, epoch=epoch, tokens=tokens, seconds=seconds, activations=activations)
            writer.log(step, {**metrics, **line})
            progress.update(step, **shown)
            if is_due(step, eval_interval) or step == total_steps:
                limit = None if step == total_steps else args.eval_iters
                writer.log_eval(step, evaluate(eng, data, collate, args, limit))
            if is_due(step, args.save_interval):
                eng.save_checkpoint(checkpoint_folder(args), client_state={"data": feed.state_dict()})

    save_model(eng, tokenizer, args.output_dir)
    end_run(args, data, writer, eng)


def batch_loss(model, batch: dict[str, torch.Tensor], args) -> tuple[torch.Tensor, Judged]:
    """The micro-batch's loss, the mean over its items, and the scores it comes from, in one forward pass.

    A pair and a single answer each count one, whatever kinds of data are mixed.
    """
    ids, mask, margins = batch["input_ids"], batch["attention_mask"], args.margin_scale * batch["margins"]
    pairs, singles = len(margins), len(batch["targets"])
    sizes = [pairs, pairs, singles]
    values = model(ids, mask)
    chosen, rejected, single = end_scores(values, mask).split(sizes)
    if args.pair_loss == "end":
        of_pairs = pair_loss(chosen, rejected, margins)
    else:
        sides = [tensor.split(sizes)[side] for tensor in (values, ids, mask) for side in (0, 1)]
        of_pairs = pair_token_loss(*sides, margins)
    of_singles = single_loss(single, batch["targets"], batch["is_label"])
    loss = (of_pairs * pairs + of_singles * singles) / (pairs + singles)
    judged = Judged(
        loss=float(loss.detach()),
        chosen=chosen.detach(),
        rejected=rejected.detach(),
        single=single.detach(),
        targets=batch["targets"],
        is_label=batch["is_label"],
        sources=batch["sources"],
        tokens=int(mask.sum()),
    )
    return loss, judged


@torch.no_grad()
def evaluate(eng, data, collate, args, limit: int | None) -> dict[str, object]:
    """Held-out figures over at most `limit` batches a rank (all of them for None), see `RewardEvaluation.result`."""
    items = data.eval
    if not len(items):
        return {}
    eng.eval()
    evaluation = RewardEvaluation()
    sampler = sampler_for(items, args.per_device_eval_batch_size, args.seed, shuffle=False, drop_last=False)
    for number, indices in enumerate(sampler.iter(0)):
        if limit is not None and number >= limit:
            break
        # A rank whose share has run out still takes part in stage 3's gathers, with an item that counts for nothing.
        batch = to_device(collate([items[i] for i in indices or [0]]), eng.device)
        _, judged = batch_loss(eng, batch, args)
        if indices:
            evaluation.add(judged)
    return evaluation.result(source_names(data.report))


if __name__ == "__main__":
    main()
