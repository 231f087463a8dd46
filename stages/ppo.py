"""Step 3, PPO: the actor answers prompts, a reward model scores the answers, and actor and critic learn from it.

Each iteration: sample answers, judge them, turn scores and the KL to the reference into advantages, then update
actor and critic over micro-batches.

    rlhf ppo --actor_model_name_or_path SFT --critic_model_name_or_path REWARD --data_path FILE --output_dir OUTPUT
"""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path

from transformers import set_seed

import engine
from rlhf.advantage import gae, shape_rewards, whiten
from rlhf.arguments import parse, ppo_parser
from rlhf.dry_run import dry_run
from rlhf.end_token import use_eot_token
from rlhf.evaluation import Evaluator, show
from rlhf.experience import Experience
from rlhf.feed import open_feed
from rlhf.gold import load_gold
from rlhf.kl import make_controller
from rlhf.launch import stage_main
from rlhf.metrics import MetricsWriter, write_run_json
from rlhf.models import load_tokenizer
from rlhf.ppo_metrics import StepMetrics
from rlhf.ppo_models import load_models, resume, save
from rlhf.ppo_update import micro_batches, update
from rlhf.progress import Progress
from rlhf.ptx import PTX, text_source
from rlhf.rollout import generate, judge
from rlhf.score_scale import ScoreScale
from rlhf.stage_data import load_data, report_stream
from rlhf.training import count_steps, is_due, refuse_to_bury, save_model

EMA_BETA = 0.992


@stage_main("ppo")
def main(argv: list[str] | None = None) -> None:
    args = parse(ppo_parser(), argv)
    if args.dry_run:
        return dry_run("ppo", args)
    engine.init_distributed()
    set_seed(args.seed)
    refuse_to_bury(args)
    write_run_json(args.output_dir, args, status="running")

    tokenizer = load_tokenizer(args.actor_model_name_or_path)
    if args.add_eot_token:
        use_eot_token(tokenizer, trained="--actor_model_name_or_path")
    gold = load_gold(args.gold_fn) if args.gold_fn else None
    data = load_data("ppo", tokenizer, args)

    answers = args.per_device_generation_batch_size * args.generation_batches  # a rank's answers in one iteration
    prompts = open_feed(data.train, answers, args)
    total_steps = count_ppo_steps(prompts.batches_per_epoch, answers, args)
    models = load_models(args, total_steps)
    actor, critic = models.actor, models.critic
    if args.enable_ema:
        actor.enable_ema(EMA_BETA)
    scale, kl = ScoreScale(), make_controller(args.kl_ctl, args.target_kl, args.kl_horizon)
    iteration = resume(args, models, scale, kl, prompts) if args.resume else 0

    ptx = None
    if args.unsupervised_dataset_name:
        block, size = args.max_prompt_seq_len + args.max_answer_seq_len, args.per_device_training_batch_size
        texts = text_source(args.unsupervised_dataset_name, args.unsupervised_dataset_config_name)
        ptx = PTX(texts, tokenizer, block, size, args.seed, start=actor.micro_steps)

    sampling = {
        "max_new_tokens": args.max_answer_seq_len,
        "do_sample": True,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
    }
    writer = MetricsWriter(args.output_dir, "ppo", args, start_step=actor.global_steps)
    samples_file = Path(args.output_dir) / "samples.jsonl"
    evaluator = Evaluator(data.eval, tokenizer, args, sampling, gold, samples_file)
    metrics = StepMetrics()
    if iteration == 0:
        writer.log_eval(0, evaluator.run(models, "before"))

    with Progress(total_steps, "PPO", start=actor.global_steps) as progress:
        for epoch, numbers, items in prompts:
            if actor.global_steps >= total_steps:
                break
            iteration += 1

            clock = time.perf_counter()
            rollout = generate(
                actor,
                items,
                tokenizer,
                batch_size=args.per_device_generation_batch_size,
                seeds=[(args.seed * 1_000_003 + iteration) * 1_000_003 + i for i in numbers],
                **sampling,
            )
            generated = time.perf_counter()
            experience = judge(
                rollout, models, micro_batch=args.per_device_training_batch_size, temperature=args.temperature
            )
            if args.normalize_scores and not scale.is_set:
                scale.fit(experience.scores)
            add_advantages(experience, scale, kl.value, args)
            judged = time.perf_counter()
            metrics.add_rollout(rollout, experience, kl.value, generated - clock, judged - generated)

            for micro_batch in micro_batches(experience, args, iteration):
                started, lr = time.perf_counter(), actor.get_lr()[0]
                metrics.add(*update(models, micro_batch, args, ptx))
                metrics.add_seconds("train_seconds", time.perf_counter() - started)
                if actor.is_gradient_accumulation_start():
                    line = metrics.flush(actor, critic, epoch, lr)
                    writer.log(actor.global_steps, line)
                    progress.update(
                        actor.global_steps,
                        **{k: line[k] for k in ("score_mean", "kl_ref", "response_length_mean")},
                    )
                    if actor.global_steps >= total_steps:
                        break
            kl.update(metrics.last_kl, answers * engine.distributed.world_size())

            if args.print_answers and iteration % args.print_answers_interval == 0:
                progress.note(show(tokenizer, items[0], rollout))
            if is_due(iteration, args.eval_interval) and actor.global_steps < total_steps:
                writer.log_eval(actor.global_steps, evaluator.run(models))
            if is_due(iteration, args.save_interval) and actor.is_gradient_accumulation_start():
                save(args, models, scale, kl, prompts, iteration)

    writer.log_eval(actor.global_steps, evaluator.run(models, "after"))
    output = Path(args.output_dir)
    save_model(actor, tokenizer, output / "actor")
    # the critic's own tokenizer: the stock classes find a text's end by its padding token, which the actor's may lack
    save_model(critic, load_tokenizer(args.critic_model_name_or_path), output / "critic")
    if args.enable_ema:
        save_model(actor, tokenizer, output / "actor_ema", ema=True)
    report_stream(data, args)
    writer.close()
    write_run_json(args.output_dir, args, status="complete")


def count_ppo_steps(iterations_per_epoch: int | None, answers: int, args: Namespace) -> int:
    """Optimizer steps of the run: whole accumulation windows over all iterations, at most `--max_steps`.

    Raises:
        ValueError: there is not one whole step in the data, or a stream without `--max_steps`.
    """
    if iterations_per_epoch is None:
        return count_steps(None, args)
    micro = args.ppo_epochs * -(-answers // args.per_device_training_batch_size)
    steps = args.num_train_epochs * iterations_per_epoch * micro // args.gradient_accumulation_steps
    if steps == 0:
        raise ValueError(
            f"the prompts make {iterations_per_epoch} batch(es) of {answers} answers a process, too few for one "
            "optimizer step: lower --per_device_generation_batch_size or --gradient_accumulation_steps"
        )
    limits = [args.max_steps] if args.max_steps else []
    if args.enable_test_mode:
        limits.append(max(1, args.test_stop_step))
    return min(steps, *limits) if limits else steps


def add_advantages(experience: Experience, scale: ScoreScale, kl_ctl: float, args: Namespace) -> None:
    """Fill in per-token rewards, advantages and returns, all `[B, T]`."""
    mask = experience.response_mask
    experience.rewards = shape_rewards(
        experience.logprobs,
        experience.ref_logprobs,
        scale.apply(experience.scores),
        mask,
        kl_ctl,
        args.clip_reward_value,
    )
    experience.raw_advantages, experience.returns = gae(
        experience.rewards, experience.values, mask, args.gamma, args.lam
    )
    whitened = args.no_whiten_advantages is False
    experience.advantages = whiten(experience.raw_advantages, mask) if whitened else experience.raw_advantages


if __name__ == "__main__":
    main()
