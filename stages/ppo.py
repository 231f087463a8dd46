"""Step 3, PPO: the actor answers prompts, a reward model scores the answers, and actor and critic learn from it.

Each iteration: sample answers, judge them, turn scores and the KL to the reference into advantages, then update
actor and critic over micro-batches.

    rlhf ppo --actor_model_name_or_path SFT --critic_model_name_or_path REWARD --data_path FILE --output_dir OUTPUT
"""

from __future__ import annotations

import time
from argparse import Namespace

import torch

import engine
from engine.monitor import warn_once
from rlhf.advantage import shape_rewards, shape_scores, whiten
from rlhf.arguments import parse, ppo_parser
from rlhf.choices import WHITENED
from rlhf.dry_run import dry_run
from rlhf.estimators import estimate_advantages
from rlhf.evaluation import Evaluator, show
from rlhf.experience import Experience
from rlhf.feed import Feed, open_feed, take_up
from rlhf.kl import make_controller
from rlhf.launch import stage_main
from rlhf.metrics import MetricsWriter
from rlhf.micro_batches import Cut, update_parts
from rlhf.position_limit import check_longest
from rlhf.ppo_metrics import StepMetrics
from rlhf.ppo_models import last_checkpoints, load_models, resume, save, save_models
from rlhf.ppo_options import CUT_SAMPLING, answers_per_iteration, count_ppo_steps, resolve_options
from rlhf.ppo_update import update
from rlhf.progress import Progress
from rlhf.ptx import PTX, text_source
from rlhf.rollout import Models, Rollout, generate, judge
from rlhf.score_scale import ScoreScale
from rlhf.scoring import function_source
from rlhf.stage_data import load_data, stage_tokenizer
from rlhf.stage_run import end_run, start_run
from rlhf.steps import is_due

EMA_BETA = 0.992
LOGGED_ANSWERS = 2  # of an evaluation; TensorBoard has --eval_samples


@stage_main("ppo")
def main(argv: list[str] | None = None) -> None:
    args = parse(ppo_parser(), argv)
    if args.dry_run:
        return dry_run("ppo", args)
    resolve_options(args)
    start_run(args)
    if args.top_k or args.top_p < 1:
        warn_once(CUT_SAMPLING)

    tokenizer = stage_tokenizer(args.actor_model_name_or_path, args, trained="--actor_model_name_or_path")
    gold = function_source(args.gold_fn, "--gold_fn") if args.gold_fn else None
    data = load_data("ppo", tokenizer, args)

    answers = answers_per_iteration(args)
    prompts = open_feed(data.train, answers // args.num_samples_per_prompt, args)
    done = take_up(prompts, last_checkpoints(args), args.per_device_training_batch_size, args)
    total_steps = count_ppo_steps(prompts.batches_per_epoch, answers, args, done)
    models = load_models(args, total_steps, tokenizer)
    actor, critic = models.actor, models.critic
    check_longest(actor.module, data.train, args.max_answer_seq_len)
    if args.enable_ema:
        actor.enable_ema(EMA_BETA)
    ptx = None
    if args.unsupervised_dataset_name:
        texts = text_source(args.unsupervised_dataset_name, args.unsupervised_dataset_config_name)
        ptx = PTX(texts, tokenizer, args.max_prompt_seq_len + args.max_answer_seq_len, args.seed)
    scale, kl = ScoreScale(), make_controller(args.kl_ctl, args.target_kl, args.kl_horizon)
    kept = {"score_scale": scale, "kl": kl, "data": prompts, **({"ptx": ptx} if ptx else {})}
    iteration = resume(args, models, kept) if args.resume else 0

    cut = Cut(args.per_device_training_batch_size, args.max_tokens_per_micro_batch)
    sampling = {
        "max_new_tokens": args.max_answer_seq_len,
        "do_sample": True,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
    }
    writer = MetricsWriter(args.output_dir, "ppo", args, start_step=actor.global_steps)
    evaluator = Evaluator(data.eval, tokenizer, args, sampling, gold, cut)
    metrics = StepMetrics()

    with Progress(total_steps, "PPO", start=actor.global_steps) as progress:
        if iteration == 0:
            evaluate(evaluator, models, writer, progress, "before")
        for epoch, numbers, items in prompts:
            if actor.global_steps >= total_steps or is_over(prompts, args):
                break
            iteration += 1

            clock = time.perf_counter()
            prompt_options = {
                "batch_size": args.per_device_generation_batch_size,
                "seeds": [(args.seed * 1_000_003 + iteration) * 1_000_003 + i for i in numbers],
            }
            samples = {**sampling, "num_return_sequences": args.num_samples_per_prompt}
            rollout = generate(actor, items, tokenizer, **prompt_options, **samples)
            greedy = None
            if args.advantage_estimator == "remax":
                greedy = generate(actor, items, tokenizer, **prompt_options, **{**sampling, "do_sample": False})
                metrics.add_generated(float(greedy.lengths.sum()))
            generated = time.perf_counter()
            experience = judge(rollout, models, cut=cut, temperature=args.temperature)
            if args.normalize_scores and not scale.is_set:
                scale.fit(experience.scores)
            if greedy is not None:
                greedy_scores = shaped_scores(models.scorer(greedy, cut), greedy, scale, args)
                experience.greedy_scores = greedy_scores.repeat_interleave(args.num_samples_per_prompt)
            add_advantages(experience, rollout, scale, kl.value, args)
            judged = time.perf_counter()
            metrics.add_rollout(rollout, experience, kl.value, generated - clock, judged - generated)

            order = torch.Generator().manual_seed(args.seed + iteration)
            for part in update_parts(
                experience, cut, epochs=args.ppo_epochs, window=args.gradient_accumulation_steps, generator=order
            ):
                started, lr = time.perf_counter(), actor.get_lr()[0]
                figures = update(models, part, args, kl_ctl=kl.value, ptx=ptx)
                metrics.add(*figures.sums())
                metrics.add_seconds("train_seconds", time.perf_counter() - started)
                if actor.is_gradient_accumulation_start():
                    line = metrics.flush(actor, critic, epoch, lr)
                    writer.log(actor.global_steps, line)
                    progress.update(
                        actor.global_steps,
                        **{k: line[k] for k in ("score_mean", "kl_ref", "response_length_mean")},
                    )
                    if actor.global_steps >= total_steps or (args.stop_kl and line["approx_kl"] > args.stop_kl):
                        break
            kl.update(metrics.last_kl, answers * engine.distributed.world_size())

            if args.print_answers and iteration % args.print_answers_interval == 0:
                progress.print(show(tokenizer, items[0], rollout))
            if is_due(iteration, args.eval_interval) and actor.global_steps < total_steps:
                evaluate(evaluator, models, writer, progress)
            if is_due(iteration, args.save_interval) and actor.is_gradient_accumulation_start():
                save(args, models, kept, iteration)

        save_models(args, models, tokenizer)
        evaluate(evaluator, models, writer, progress, "after")

    end_run(args, data, writer, actor, critic)


def evaluate(
    evaluator: Evaluator, models: Models, writer: MetricsWriter, progress: Progress, label: str | None = None
) -> None:
    """Figures to the metrics, answers to TensorBoard, the first few to the log."""
    step = models.actor.global_steps
    writer.log_eval(step, evaluator.run(models, label))
    writer.log_texts(step, "eval_answers", evaluator.shown)
    for text in evaluator.shown[:LOGGED_ANSWERS]:
        progress.print(f"step {step}: {' '.join(text.split())}")


def is_over(prompts: Feed, args: Namespace) -> bool:
    """Whether the prompts just taken are beyond all epochs: with --stop_kl there may be fewer steps in them than were
    counted."""
    per_epoch = prompts.batches_per_epoch
    return per_epoch is not None and prompts.given > args.num_train_epochs * per_epoch


def shaped_scores(scores: torch.Tensor, rollout: Rollout, scale: ScoreScale, args: Namespace) -> torch.Tensor:
    """What an answer earns at its last token, `[B]`."""
    return shape_scores(
        scale.apply(scores),
        rollout.lengths,
        rollout.finished,
        clip=args.clip_reward_value,
        missing_eos_penalty=args.missing_eos_penalty,
        max_length=args.max_answer_seq_len,
        overlong_buffer=args.overlong_buffer,
        overlong_penalty=args.overlong_penalty,
    )


def add_advantages(
    experience: Experience, rollout: Rollout, scale: ScoreScale, kl_ctl: float, args: Namespace
) -> None:
    """Fill in per-token rewards, advantages and returns, and which tokens train, all `[B, T]`."""
    mask = experience.response_mask
    experience.loss_mask = mask & rollout.finished.unsqueeze(1) if args.mask_truncated else mask
    experience.rewards = shape_rewards(
        experience.logprobs,
        experience.ref_logprobs,
        shaped_scores(experience.scores, rollout, scale, args),
        mask,
        kl_ctl if args.kl_in == "reward" else 0.0,
        clip_reward_value=None,
        kl_estimator=args.kl_estimator if args.kl_in == "reward" else "k1",
    )
    experience.raw_advantages, experience.returns = estimate_advantages(
        args.advantage_estimator,
        experience.rewards,
        mask,
        gamma=args.gamma,
        lam=args.lam,
        values=experience.values,
        group_size=args.num_samples_per_prompt,
        scale_by_std=not args.grpo_no_std,
        baseline=experience.greedy_scores,
    )
    whitened = args.advantage_estimator in WHITENED and not args.no_whiten_advantages
    experience.advantages = (
        whiten(experience.raw_advantages, experience.loss_mask) if whitened else experience.raw_advantages
    )


if __name__ == "__main__":
    main()
