"""The command-line flags of PPO: DeepSpeed-Chat's step 3, and what it keeps fixed in its code."""

from __future__ import annotations

from rlhf.choices import AGGREGATIONS, ESTIMATORS, LOSS_ESTIMATORS
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
    finite_float,
    fraction,
    http_url,
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
    add("--unsupervised_dataset_name", help="texts for the PTX loss, a block of prompt and answer length an answer")
    add("--unsupervised_dataset_config_name", help="which of the text source's sets, where the hub has several")
    add("--preprocessing_num_workers", type=int, help="accepted and not needed: texts are tokenized as they are read")
    add("--unsup_coef", type=non_negative_float, default=27.8, help="weight of the PTX loss")

    add = parser.add_argument_group("models").add_argument
    add("--actor_model_name_or_path", required=True, help="the SFT model: folder or hub name")
    add("--critic_model_name_or_path", help="what gae's critic starts from; the reward model when not given")
    add("--reward_model_name_or_path", help="the reward model that scores; the critic's when nothing else scores")
    add(
        "--critic_head",
        choices=("keep", "zero"),
        help="start of the critic's head; keep where it has one and a reward model scores, else zero",
    )
    per_model(add, "dropout", type=fraction, help="dropout of the {} in training; none when not given")
    for model in ("actor", "critic"):
        older = {"dest": f"{model}_dropout", "action": "store_const", "const": 0.0}
        add(f"--disable_{model}_dropout", **older, help=f"an older name of --{model}_dropout 0")
    eot_flag(add)

    _reward_group(parser)
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
    add("--gold_fn", help="judge for evaluation, given and called as --reward_fn")

    output = output_group(parser)
    add = output.add_argument
    add("--print_answers", action="store_true", help="print one prompt with its answer now and then")
    add("--print_answers_interval", type=positive_int, default=1, help="iterations between printed answers")
    add("--enable_ema", action="store_true", help="keep and save a moving average of the actor")

    _ppo_scale_group(parser)
    inert_padding(parser)
    return parser


def _reward_group(parser: Parser) -> None:
    add = parser.add_argument_group("rewards (summed where several are given)").add_argument
    add("--reward_fn", metavar="SPEC", help="file.py:name or module:name, called with (prompt, answer) or with lists")
    add("--reward_url", type=http_url, help='HTTP endpoint: {"prompts", "answers"} by POST, {"rewards"} back')
    add("--reward_timeout", type=positive_float, default=60.0, help="longest wait for --reward_url, seconds")
    for name, what in (("model", "the reward model"), ("fn", "--reward_fn"), ("url", "--reward_url")):
        add(f"--reward_{name}_weight", type=finite_float, default=1.0, help=f"factor on the scores of {what}")
    add(
        "--clip_reward_value",
        type=non_negative_float,
        default=5.0,
        help="scores are clipped to plus and minus this",
    )
    add("--normalize_scores", action="store_true", help="shift and scale scores once, on the first actor's answers")
    add(
        "--missing_eos_penalty",
        type=non_negative_float,
        default=0.0,
        help="taken off the score of an answer that was cut off",
    )
    add("--mask_truncated", action="store_true", help="answers that were cut off train nothing")
    add(
        "--overlong_buffer",
        type=non_negative_int,
        default=0,
        help="last tokens before the longest answer, over which --overlong_penalty grows; 0: off",
    )
    add("--overlong_penalty", type=non_negative_float, default=1.0, help="taken off the score at the longest answer")


def _ppo_training_group(parser: Parser) -> None:
    add = parser.add_argument_group("training").add_argument
    size = {"type": positive_int, "default": 16}
    # the second names are those of scripts written before August 2023
    names = ("--per_device_generation_batch_size", "--per_device_train_batch_size")
    add(*names, **size, help="prompts per process and generation batch")
    names = ("--per_device_training_batch_size", "--per_device_mini_train_batch_size")
    add(*names, **size, help="sequences per process and micro-batch")
    add(
        "--num_samples_per_prompt",
        type=positive_int,
        help="answers to each prompt; 8 for grpo and rloo, else 1, when not given",
    )
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
    add(
        "--max_tokens_per_micro_batch",
        type=positive_int,
        help="cut an update by tokens, padding included, instead of by sequences; the update stays the same",
    )
    add(
        "--align_overflow",
        action="store_true",
        help="where the gradient of actor or critic is not finite, neither is updated",
    )
    per_model(add, "gradient_checkpointing", action="store_true", help="recompute the {}'s activations")


def _ppo_algorithm_group(parser: Parser) -> None:
    add = parser.add_argument_group("algorithm").add_argument
    add("--advantage_estimator", choices=ESTIMATORS, default="gae", help="all but gae work without a critic")
    add("--grpo_no_std", action="store_true", help="grpo without the division by the group's standard deviation")
    add("--gamma", type=fraction, default=1.0, help="discount per token")
    add("--lam", type=fraction, default=0.95, help="lambda of gae")
    add("--no_whiten_advantages", action="store_true", help="use the advantages of gae and reinforce++ as they are")
    add("--kl_ctl", type=non_negative_float, default=0.1, help="weight of the KL to the reference")
    add("--kl_in", choices=("reward", "loss"), default="reward", help="where the KL to the reference goes")
    add(
        "--kl_estimator",
        choices=LOSS_ESTIMATORS,
        help="of a token's KL: k1 in the reward, k3 in the loss, when not given; k3+ has k2's gradient",
    )
    add(
        "--target_kl",
        type=positive_float,
        help="adapt the KL weight towards this KL per answer; fixed without",
    )
    add("--kl_horizon", type=positive_int, default=10000, help="answers over which the KL weight adapts")
    add("--cliprange", type=non_negative_float, default=0.2, help="clip of the policy's ratio")
    add("--cliprange_high", type=non_negative_float, help="clip of the ratio above 1; as --cliprange when not given")
    add("--dual_clip", type=positive_float, help="bound of the loss where the advantage is negative, e.g. 3")
    add("--cliprange_value", type=non_negative_float, default=0.2, help="clip of the value's change")
    add("--loss_aggregation", choices=AGGREGATIONS, default="token-mean", help="what the policy's loss is a mean of")
    add("--entropy_coef", type=non_negative_float, default=0.0, help="weight of the entropy bonus in the loss")
    add("--tis_cap", type=positive_float, help="weigh tokens by trainer over sampler, at most this; e.g. 2")
    add("--stop_kl", type=positive_float, help="drop an iteration's remaining updates once approx_kl is above this")


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
    per_model(add, "offload", action="store_true", help="as --offload, of the {} alone")
    for model in ("reference", "reward"):
        add(f"--offload_{model}_model", action="store_true", help=f"keep the {model} model's parameters in CPU memory")
    unquantized(add)
