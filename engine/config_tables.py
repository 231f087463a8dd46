"""Names of DeepSpeed's JSON config that `engine.config` has no field for: aliases and unused keys.

Kept apart from the schema so that every field there is one the engine reads. A key listed here is accepted;
the unused ones are named in one notice. Sources: DeepSpeed's public config models and constants.
"""

from __future__ import annotations

# Old spelling -> today's, both as full dotted keys.
ALIASES: dict[str, str] = {
    "bfloat16": "bf16",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    **{
        f"zero_optimization.{name}": f"zero_optimization.stage3_{name}"
        for name in (
            "gather_16bit_weights_on_model_save",
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
            "partition_stream_chunk_size",
        )
    },
}

# Old switch of zero_optimization (true or false) -> the section it turns on.
OLD_SWITCHES: dict[str, str] = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
}

# None: any content is accepted. A tree: the names known inside.
Tree = dict[str, "Tree | None"]


def _names(text: str) -> Tree:
    return dict.fromkeys(text.split())


UNUSED: Tree = {
    **_names(
        "communication_data_type seq_parallel_communication_data_type seq_parallel_comm_data_type "
        "sparse_gradients zero_allow_untested_optimizer zero_force_ds_cpu_optimizer memory_breakdown "
        "dump_state disable_allgather dataloader_drop_last vocabulary_size graph_harvesting "
        "use_data_before_expert_parallelism log_level allgather_size gradient_allreduce_op "
        "managed_gradient_accumulation use_node_local_storage elasticity autotuning data_efficiency "
        "curriculum_learning compression_training sparse_attention amp torch_autocast tensor_parallel "
        "compile nebula eigenvalue weight_quantization pipeline checkpoint_engine sequence_parallel_size "
        "data_parallel_size inference datastates timers expert_parallel"
    ),
    "data_types": _names("grad_accum_dtype param_dtype buffer_dtype"),
    "progressive_layer_drop": _names("enabled theta gamma"),
    "aio": _names("block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds thread_count"),
    "wandb": _names("enabled group team project"),
    "comet": _names(
        "enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode"
    ),
    "flops_profiler": _names("enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file"),
    "comms_logger": _names("enabled verbose prof_all debug prof_ops"),
    "activation_checkpointing": _names(
        "partition_activations cpu_checkpointing contiguous_memory_optimization number_checkpoints "
        "synchronize_checkpoint_boundary profile"
    ),
    "checkpoint": {
        **_names("tag_validation load_universal use_node_local_storage writer"),
        "parallel_write": _names("pipeline_stage"),
    },
    "optimizer": _names("legacy_fusion"),
    "fp16": _names("auto_cast fused_mode fp16_master_weights_and_grads"),
    "bf16": _names("immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states"),
    "hybrid_engine": _names("enable_cuda_graph"),
    "zero_optimization": {
        **_names(
            "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions "
            "load_from_fp32_weights elastic_checkpoint sub_group_size round_robin_gradients "
            "ignore_unused_parameters legacy_stage1 pipeline_loading_checkpoint override_module_apply "
            "memory_efficient_linear log_trace_cache_warnings enable_sanity_checks overlap_comm "
            "reduce_bucket_size allgather_bucket_size stage3_prefetch_bucket_size "
            "stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance "
            "stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold "
            "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential "
            "stage3_partition_stream_chunk_size save_muon_momentum_buffer_in_memory zero_quantized_weights "
            "zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param mics_shard_size "
            "mics_hierarchical_params_gather leaf_module zenflow "
            # FSDP2 gathers a layer in one message, its small parameters with it: keeping those would save none
            "stage3_param_persistence_threshold"
        ),
        "offload_param": _names("nvme_path buffer_count buffer_size max_in_cpu"),
        "offload_optimizer": _names(
            "nvme_path buffer_count pipeline pipeline_read pipeline_write fast_init ratio super_offload "
            "convert_grad_on_cpu cpuadam_cores_perc"
        ),
    },
}

# Unused keys whose named value would make DeepSpeed train something else: ignoring them would not be the same
# run, so they are refused. Value: a test for the refused setting, and what to do instead.
REFUSED: dict[str, tuple[str, str]] = {
    "gradient_allreduce_op": (
        "sum",
        "gradients are averaged over ranks: use 'mean' and a larger learning rate",
    ),
    "amp.enabled": ("true", "use bf16.enabled or fp16.enabled"),
    "torch_autocast.enabled": ("true", "use bf16.enabled or fp16.enabled"),
    "progressive_layer_drop.enabled": ("true", "remove it: every layer is trained"),
    "curriculum_learning.enabled": ("true", "remove it and order the data before training"),
    "data_efficiency.enabled": ("true", "remove it and choose the data before training"),
    "managed_gradient_accumulation": ("false", "use gradient_accumulation_steps 1 to update at every step"),
    "tensor_parallel.autotp_size": (
        ">1",
        "use zero_optimization.stage 3 to train a model that one rank cannot hold",
    ),
    "sequence_parallel_size": (">1", "use 1"),
    "elasticity.enabled": ("true", "remove it and give the batch sizes"),
}
