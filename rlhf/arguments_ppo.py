"""The command-line flags of PPO: DeepSpeed-Chat's step 3, and what it keeps fixed in its code."""

from __future__ import annotations

from rlhf.data_flags import data_group
from rlhf.flag_groups import (
    dtype_and_inert,
    eot_flag,
    inert_padding,
    lora_group,
    output_group,
    per_model,
    shared_training,
    unquantized,
)
from rlhf.flags import (
    Parser,
    fraction,
    non_negative_float,
    non_negative_int,
    positive_float,
    positive_fraction,
    positive_int,
)


def ppo_parser() -> Parser:
    """Flags of step 3, PPO."""
    parser = Parser("rlhf ppo", "Step 3: PPO of the actor against the reward model.")
    add = data_group(parser, "ppo").add_argument
    add("--unsupervised_dataset_name", help="text source for the PTX loss; needs --unsup_coef above 0")
    add("--unsupervised_dataset_config_name", help="which of the text source's sets, where the hub has several")
    add("--preprocessing_num_workers", type=int, help="accepted and not needed: texts are tokenized as they are read")
    add("--unsup_coef", type=non_negative_float, default=27.8, help="weight of the PTX loss")

    add = parser.add_argument_group("models").add_argument
    add("--actor_model_name_or_path", required=True, help="the SFT model: folder or hub name")
    add("--critic_model_name_or_path", required=True, help="the reward model the critic starts from")
    add("--reward_model_name_or_path", help="the reward model that scores; the critic's when not given")
    per_model(add, "dropout", type=fraction, help="dropout of the {} in training; none when not given")
    for model in ("actor", "critic"):
        older = {"dest": f"{model}_dropout", "action": "store_const", "const": 0.0}
        add(f"--disable_{model}_dropout", **older, help=f"an older name of --{model}_dropout 0")
    eot_flag(add)

    _ppo_training_group(parser)
    lora_group(parser, ("actor_", "critic_"))
    _ppo_algorithm_group(parser)
    _ppo_sampling_group(parser)

    evaluation = parser.add_argument_group("evaluation")
    add = evaluation.add_argument
    add(
        "--eval_interval",
        type=non_negative_int,
        default=0,
        help="iterations between evaluations; 0: first and last",
    )
    add(
        "--num_eval_prompts",
        type=non_negative_int,
        default=0,
        help="held-out prompts judged each time; 0: all",
    )
    add(
        "--eval_samples", type=non_negative_int, default=8, help="prompts shown with answers before and after"
    )
    add("--gold_fn", help="module:name or file.py:name of a judge, called with (prompt, answer)")

    output = output_group(parser)
    add = output.add_argument
    add("--print_answers", action="store_true", help="print one prompt with its answer now and then")
    add("--print_answers_interval", type=positive_int, default=1, help="iterations between printed answers")
    add("--enable_ema", action="store_true", help="keep and save a moving average of the actor")

    _ppo_scale_group(parser)
    inert_padding(parser)
    return parser


def _ppo_training_group(parser: Parser) -> None:
    add = parser.add_argument_group("training").add_argument
    size = {"type": positive_int, "default": 16}
    # the second names are those of scripts written before August 2023
    names = ("--per_device_generation_batch_size", "--per_device_train_batch_size")
    add(*names, **size, help="prompts per process and generation batch")
    names = ("--per_device_training_batch_size", "--per_device_mini_train_batch_size")
    add(*names, **size, help="sequences per process and micro-batch")
    names = ("--generation_batches", "--generation_batch_numbers")
    add(*names, type=positive_int, default=1, help="generation batches of one PPO iteration")
    add("--ppo_epochs", type=positive_int, default=1, help="passes over one iteration's experience")
    add("--actor_learning_rate", type=non_negative_float, default=9.65e-6, help="peak rate of the actor")
    add("--critic_learning_rate", type=non_negative_float, default=5e-6, help="peak rate of the critic")
    per_model(
        add, "weight_decay", type=non_negative_float, default=0.0, help="of the {}; not on biases and norms"
    )
    add("--num_train_epochs", type=positive_int, default=1, help="passes over the prompts")
    add("--num_warmup_steps", type=non_negative_int, default=100, help="optimizer steps of linear warm-up")
    shared_training(add)
    add("--enable_test_mode", action="store_true", help="stop after --test_stop_step optimizer steps, at least one")
    add("--test_stop_step", type=non_negative_int, default=0, help="the last step with --enable_test_mode")
    per_model(add, "gradient_checkpointing", action="store_true", help="recompute the {}'s activations")


def _ppo_algorithm_group(parser: Parser) -> None:
    add = parser.add_argument_group("algorithm").add_argument
    add("--kl_ctl", type=non_negative_float, default=0.1, help="weight of the KL penalty in the reward")
    add(
        "--target_kl",
        type=non_negative_float,
        help="adapt the KL weight towards this KL per answer; fixed without",
    )
    add("--kl_horizon", type=positive_int, default=10000, help="answers over which the KL weight adapts")
    add(
        "--clip_reward_value",
        type=non_negative_float,
        default=5.0,
        help="scores are clipped to plus and minus this",
    )
    add(
        "--normalize_scores",
        action="store_true",
        help="shift and scale scores once, on the first actor's answers",
    )
    add("--cliprange", type=non_negative_float, default=0.2, help="clip of the policy's ratio")
    add("--cliprange_value", type=non_negative_float, default=0.2, help="clip of the value's change")
    add("--gamma", type=fraction, default=1.0, help="discount per token")
    add("--lam", type=fraction, default=0.95, help="lambda of the advantage estimate")
    add("--no_whiten_advantages", action="store_true", help="use advantages as they are")


def _ppo_sampling_group(parser: Parser) -> None:
    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", type=positive_float, default=1.0, help="of the answers that train the actor")
    add("--top_k", type=non_negative_int, default=0, help="sample among the k likeliest tokens; 0: all")
    add(
        "--top_p",
        type=positive_fraction,
        default=1.0,
        help="sample among the likeliest tokens of this total probability",
    )


def _ppo_scale_group(parser: Parser) -> None:
    add = parser.add_argument_group("scale").add_argument
    per_model(add, "zero_stage", type=int, choices=(0, 1, 2, 3), default=0, help="what is sharded of the {}")
    add("--inference_tp_size", type=positive_int, default=1, help="processes that share one generating model")
    add("--release_inference_cache", action="store_true", help="free the generation memory after each use")
    add("--unpin_actor_parameters", action="store_true", help="do not pin the generating weights in memory")
    add(
        "--tp_gather_partition_size",
        type=positive_int,
        default=8,
        help="layers laid out for generation at once",
    )
    add(
        "--enable_hybrid_engine",
        action="store_true",
        help="accepted and not needed: generation always uses it",
    )
    dtype_and_inert(add)
    add("--offload_reference_model", action="store_true", help="keep the reference's parameters in CPU memory")
    add("--offload_reward_model", action="store_true", help="keep the reward model's parameters in CPU memory")
    unquantized(add)
