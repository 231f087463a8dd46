"""PPO's flags seen together: what one of them leaves open another decides, and what does not go together is refused."""

from __future__ import annotations

from argparse import Namespace

from rlhf.choices import CRITIC_FREE, GROUPED
from rlhf.steps import NOTHING, Done, count_steps

CUT_SAMPLING = (
    "--top_k and --top_p leave tokens out when answers are sampled; log-probabilities, ratios and KL stay those of the "
    "whole distribution, so that updates are biased"
)
GROUP_SIZE = 8  # answers a prompt of grpo and rloo when not said


def resolve_options(args: Namespace) -> None:
    """Fill in what the flags leave open, in place: a run's `run.json` then shows what it did.

    Raises:
        ValueError: flags that contradict one another, in one line.
    """
    estimator = args.advantage_estimator
    if args.num_samples_per_prompt is None:
        args.num_samples_per_prompt = GROUP_SIZE if estimator in GROUPED else 1
    if estimator in GROUPED and args.num_samples_per_prompt < 2:
        raise ValueError(
            f"--advantage_estimator {estimator} compares the answers to one prompt: give --num_samples_per_prompt of "
            f"at least 2, not {args.num_samples_per_prompt}"
        )
    _resolve_models(args)
    if args.kl_estimator is None:
        args.kl_estimator = "k3" if args.kl_in == "loss" else "k1"
    elif args.kl_estimator == "k3+" and args.kl_in == "reward":
        raise ValueError("--kl_estimator k3+ differs from k3 by its gradient, and a reward has none: use k3")
    if args.dual_clip is not None and args.dual_clip <= 1:
        raise ValueError(f"--dual_clip {args.dual_clip:g} must be above 1: it bounds losses whose ratio is far above 1")
    if args.overlong_buffer >= args.max_answer_seq_len:
        raise ValueError(
            f"--overlong_buffer {args.overlong_buffer} must be shorter than --max_answer_seq_len "
            f"{args.max_answer_seq_len}"
        )
    _check_budget(args)


def uses_reward_model(args: Namespace) -> bool:
    """A reward model scores where one is named, and where nothing else does."""
    return bool(args.reward_model_name_or_path) or not (args.reward_fn or args.reward_url)


def shares_reference(args: Namespace) -> bool:
    """The reference is the actor without its adapters, where they are all that trains of it."""
    return bool(args.actor_lora_dim) and args.only_optimize_lora


def _resolve_models(args: Namespace) -> None:
    has_model = uses_reward_model(args)
    if has_model and not args.reward_model_name_or_path:
        args.reward_model_name_or_path = args.critic_model_name_or_path
        if not args.reward_model_name_or_path:
            raise ValueError(
                "nothing scores the answers: give --reward_model_name_or_path, --reward_fn or --reward_url "
                "(or --critic_model_name_or_path, a reward model that serves as both)"
            )
    if args.advantage_estimator in CRITIC_FREE:
        return
    if not args.critic_model_name_or_path:
        args.critic_model_name_or_path = args.reward_model_name_or_path or args.actor_model_name_or_path
    if args.critic_head is None and not has_model:
        args.critic_head = "zero"  # a head of another scale than the rewards would only mislead
    # else it hangs on the critic's model: see `rlhf.ppo_models.load_critic`


def _check_budget(args: Namespace) -> None:
    budget = args.max_tokens_per_micro_batch
    if budget is None:
        return
    longest = args.max_prompt_seq_len + args.max_answer_seq_len
    if budget < longest:
        raise ValueError(
            f"--max_tokens_per_micro_batch {budget} is less than one sequence of --max_prompt_seq_len "
            f"{args.max_prompt_seq_len} + --max_answer_seq_len {args.max_answer_seq_len}: give at least {longest}"
        )
    answers = answers_per_iteration(args)
    update = args.per_device_training_batch_size * args.gradient_accumulation_steps
    if answers % update:
        raise ValueError(
            f"--max_tokens_per_micro_batch needs whole updates in an iteration: {answers} answers (generation batch x "
            f"generation_batches x samples) are no multiple of {update} (training batch x accumulation steps)"
        )


def answers_per_iteration(args: Namespace) -> int:
    """One rank's answers between two updates of the sampling policy."""
    return args.per_device_generation_batch_size * args.generation_batches * args.num_samples_per_prompt


def count_ppo_steps(iterations_per_epoch: int | None, answers: int, args: Namespace, done: Done = NOTHING) -> int:
    """Optimizer steps of the run: whole accumulation windows over all iterations, at most `--max_steps`. After `done`
    it is what that made and what remains makes.

    Raises:
        ValueError: there is not one whole step in the data, or a stream without `--max_steps`.
    """
    limits = [args.max_steps] if args.max_steps else []
    if args.enable_test_mode:
        limits.append(max(1, args.test_stop_step))
    if iterations_per_epoch is None:
        return min(limits) if limits else count_steps(None, args)
    micro = args.ppo_epochs * -(-answers // args.per_device_training_batch_size)
    remaining = max(0, args.num_train_epochs * iterations_per_epoch - done.batches)
    steps = done.steps + remaining * micro // args.gradient_accumulation_steps
    if steps == 0:
        raise ValueError(
            f"the prompts make {iterations_per_epoch} batch(es) of {answers} answers a process, too few for one "
            "optimizer step: lower --per_device_generation_batch_size or --gradient_accumulation_steps"
        )
    return min(steps, *limits) if limits else steps
