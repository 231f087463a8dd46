"""Step 3, PPO: the actor answers prompts, a reward model scores the answers, and actor and critic learn from it.

Each iteration: sample answers, judge them, turn scores and the KL to the reference into advantages, then update
actor and critic over micro-batches.

    rlhf ppo --actor_model_name_or_path SFT --critic_model_name_or_path REWARD --data_path FILE --output_dir OUTPUT
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import set_seed

import engine
from rlhf.advantage import gae, shape_rewards, whiten
from rlhf.arguments import parse, ppo_parser
from rlhf.evaluation import Evaluator, show
from rlhf.experience import Experience, response_logprobs
from rlhf.gold import load_gold
from rlhf.kl import make_controller
from rlhf.launch import stage_main
from rlhf.losses import policy_loss, value_loss
from rlhf.metrics import MetricsWriter, write_run_json
from rlhf.models import load_actor, load_score_model, load_tokenizer, response_values
from rlhf.ppo_metrics import StepMetrics, update_sums
from rlhf.progress import Progress
from rlhf.ptx import PTX
from rlhf.rollout import Models, generate, judge
from rlhf.score_scale import ScoreScale
from rlhf.stage_data import load_data
from rlhf.training import (
    batch_stream,
    checkpoint_folder,
    inference_config,
    is_due,
    prepare_module,
    refuse_to_bury,
    sampler_for,
    save_model,
    train_config,
)

EMA_BETA = 0.992


@stage_main("ppo")
def main(argv: list[str] | None = None) -> None:
    args = parse(ppo_parser(), argv)
    engine.init_distributed()
    set_seed(args.seed)
    refuse_to_bury(args)
    write_run_json(args.output_dir, args, status="running")

    tokenizer = load_tokenizer(args.actor_model_name_or_path)
    gold = load_gold(args.gold_fn) if args.gold_fn else None
    data = load_data("ppo", tokenizer, args)

    answers = args.per_device_generation_batch_size * args.generation_batches  # a rank's answers in one iteration
    prompts = sampler_for(data.train, answers, args.seed)
    total_steps = count_ppo_steps(len(prompts), answers, args)
    models = load_models(args, total_steps)
    actor, critic = models.actor, models.critic
    if args.enable_ema:
        actor.enable_ema(EMA_BETA)
    scale, kl = ScoreScale(), make_controller(args.kl_ctl, args.target_kl, args.kl_horizon)
    iteration = resume(args, models, scale, kl) if args.resume else 0

    ptx = None
    if args.unsupervised_dataset_name:
        block, size = args.max_prompt_seq_len + args.max_answer_seq_len, args.per_device_training_batch_size
        ptx = PTX(args.unsupervised_dataset_name, tokenizer, block, size, args.seed, start=actor.micro_steps)

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
        for epoch, indices in batch_stream(prompts, start=iteration):
            if actor.global_steps >= total_steps:
                break
            iteration += 1

            clock = time.perf_counter()
            rollout = generate(
                actor,
                [data.train[i] for i in indices],
                tokenizer,
                batch_size=args.per_device_generation_batch_size,
                seeds=[(args.seed * 1_000_003 + iteration) * 1_000_003 + i for i in indices],
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
                progress.note(show(tokenizer, data.train[indices[0]], rollout))
            if is_due(iteration, args.eval_interval) and actor.global_steps < total_steps:
                writer.log_eval(actor.global_steps, evaluator.run(models))
            if is_due(iteration, args.save_interval) and actor.is_gradient_accumulation_start():
                save(args, models, scale, kl, iteration)

    writer.log_eval(actor.global_steps, evaluator.run(models, "after"))
    output = Path(args.output_dir)
    save_model(actor, tokenizer, output / "actor")
    # the critic's own tokenizer: the stock classes find a text's end by its padding token, which the actor's may lack
    save_model(critic, load_tokenizer(args.critic_model_name_or_path), output / "critic")
    if args.enable_ema:
        save_model(actor, tokenizer, output / "actor_ema", ema=True)
    writer.close()
    write_run_json(args.output_dir, args, status="complete")


def count_ppo_steps(iterations_per_epoch: int, answers: int, args: Namespace) -> int:
    """Optimizer steps of the run: whole accumulation windows over all iterations, at most `--max_steps`.

    Raises:
        ValueError: there is not one whole step in the data.
    """
    micro = args.ppo_epochs * -(-answers // args.per_device_training_batch_size)
    steps = args.num_train_epochs * iterations_per_epoch * micro // args.gradient_accumulation_steps
    if steps == 0:
        raise ValueError(
            f"the prompts make {iterations_per_epoch} batch(es) of {answers} answers a process, too few for one "
            "optimizer step: lower --per_device_generation_batch_size or --gradient_accumulation_steps"
        )
    return min(steps, args.max_steps) if args.max_steps else steps


def load_models(args: Namespace, total_steps: int) -> Models:
    """Actor and critic to train, reference and reward model to ask; each on an engine of its own.

    Dropout is off in all of them unless asked for by flag: with it the first ratio would not be 1.
    """
    micro_batch = args.per_device_training_batch_size
    hybrid = {
        "enabled": True,
        "max_out_tokens": args.max_prompt_seq_len + args.max_answer_seq_len,
        "inference_tp_size": args.inference_tp_size,
        "release_inference_cache": args.release_inference_cache,
        "pin_parameters": not args.unpin_actor_parameters,
        "tp_gather_partition_size": args.tp_gather_partition_size,
    }
    actor_path, critic_path = args.actor_model_name_or_path, args.critic_model_name_or_path
    reward_path = args.reward_model_name_or_path or critic_path
    actor = engine.initialize(
        prepare_module(load_actor(actor_path, dropout=args.actor_dropout or 0.0), args.actor_gradient_checkpointing),
        train_config(
            args,
            zero_stage=args.actor_zero_stage,
            micro_batch=micro_batch,
            learning_rate=args.actor_learning_rate,
            weight_decay=args.actor_weight_decay,
            total_steps=total_steps,
            hybrid_engine=hybrid,
        ),
    )
    critic_model = load_score_model(critic_path, dropout=args.critic_dropout or 0.0)
    critic = engine.initialize(
        prepare_module(critic_model, args.critic_gradient_checkpointing),
        train_config(
            args,
            zero_stage=args.critic_zero_stage,
            micro_batch=micro_batch,
            learning_rate=args.critic_learning_rate,
            weight_decay=args.critic_weight_decay,
            total_steps=total_steps,
        ),
    )
    reference_config = inference_config(args, zero_stage=args.actor_zero_stage, micro_batch=micro_batch)
    reward_config = inference_config(args, zero_stage=args.critic_zero_stage, micro_batch=micro_batch)
    return Models(
        actor=actor,
        reference=engine.initialize(load_actor(actor_path, dropout=0.0), reference_config),
        critic=critic,
        reward=engine.initialize(load_score_model(reward_path, dropout=0.0), reward_config),
    )


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


def micro_batches(experience: Experience, args: Namespace, iteration: int) -> Iterator[Experience]:
    """The experience in micro-batches, `--ppo_epochs` times, each time in a fresh order."""
    generator = torch.Generator().manual_seed(args.seed + iteration)
    size, window = args.per_device_training_batch_size, args.gradient_accumulation_steps
    if -(-len(experience) // size) % window:
        window = 1  # updates reach over the end of an epoch: sorted rows would give each other lengths, not a fair mix
    for _ in range(args.ppo_epochs):
        for batch in experience.micro_batches(size, generator, window):
            yield batch.trimmed()


def update(models: Models, batch: Experience, args: Namespace, ptx: PTX | None):
    """One micro-batch of both losses, and a step of both engines; returns the figures for the metrics.

    Both losses are means over the response tokens of the whole minibatch, over micro-batches and ranks. A PTX
    batch comes with each micro-batch, in its weight.
    """
    actor, critic = models.actor, models.critic
    ids, mask, length = batch.input_ids, batch.attention_mask, batch.response_length
    tokens = int(batch.response_mask.sum())

    actor.train()
    logprobs = response_logprobs(actor, ids, mask, length, args.temperature)
    actor_loss, actor_figures = policy_loss(
        logprobs, batch.logprobs, batch.advantages, batch.response_mask, args.cliprange
    )
    ptx_loss = ptx.loss(actor) if ptx else None
    actor.backward(actor_loss + args.unsup_coef * ptx_loss if ptx else actor_loss, weight=tokens)
    actor.step()

    critic.train()
    new_values = response_values(critic, ids, mask, length)
    critic_loss, critic_figures = value_loss(
        new_values, batch.values, batch.returns, batch.response_mask, args.cliprange_value
    )
    critic_loss = critic.backward(critic_loss, weight=tokens)
    critic.step()
    return update_sums(actor_loss.detach(), critic_loss, ptx_loss, {**actor_figures, **critic_figures}, batch)


def save(args: Namespace, models: Models, scale: ScoreScale, kl, iteration: int) -> None:
    """Both engines under one tag, the critic last: its `latest` names a tag that both have."""
    state = {"iteration": iteration, "score_scale": scale.state_dict(), "kl": kl.state_dict()}
    tag = f"iteration{iteration}"
    models.actor.save_checkpoint(checkpoint_folder(args, "actor"), tag=tag, client_state=state)
    models.critic.save_checkpoint(checkpoint_folder(args, "critic"), tag=tag, client_state=state)


def resume(args: Namespace, models: Models, scale: ScoreScale, kl) -> int:
    """Load the last checkpoint that both engines have; returns the iteration to go on after."""
    path, state = models.critic.load_checkpoint(checkpoint_folder(args, "critic"))
    models.actor.load_checkpoint(checkpoint_folder(args, "actor"), tag=path.name)
    scale.load_state_dict(state["score_scale"])
    kl.load_state_dict(state["kl"])
    return state["iteration"]


if __name__ == "__main__":
    main()
