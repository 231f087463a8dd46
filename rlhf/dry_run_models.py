"""The models a stage would run, built without room for their numbers, each with its engine's config."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig

from rlhf.architectures import architecture
from rlhf.choices import CRITIC_FREE
from rlhf.lora import Lora, actor_lora, add_adapters, critic_lora, lora_of
from rlhf.models import ScoreModel
from rlhf.ppo_configs import actor_config, critic_config, reference_config, reward_config
from rlhf.ppo_options import shares_reference, uses_reward_model
from rlhf.training import inference_config, stage_config


@dataclass
class Planned:
    """One model on its engine: `module` on torch's meta device, `config` as the engine takes it."""

    name: str
    module: nn.Module
    config: dict[str, Any]
    shape: PretrainedConfig

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def trained(self) -> int:
        """Number of parameters that train."""
        if "optimizer" not in self.config:
            return 0
        return sum(parameter.numel() for parameter in self.module.parameters() if parameter.requires_grad)


def planned_models(stage: str, args: Namespace, stand_ins: Mapping[str, str]) -> list[Planned]:
    """What `stage` loads and places under `args`; `stand_ins` are other models' names for folders not there yet.

    Raises:
        FileNotFoundError, ValueError: a model without a configuration at hand, or adapters that match nothing.
    """
    if stage == "ppo":
        return _ppo(args, stand_ins)
    path, micro_batch = _known(args.model_name_or_path, stand_ins), args.per_device_train_batch_size
    lora = lora_of(args)
    name = {"sft": "model", "reward": "reward model", "dpo": "policy"}[stage]
    models = [_planned(name, path, stage_config(args, 1), score=stage == "reward", lora=lora)]
    if stage == "dpo" and not (lora and args.only_optimize_lora):
        frozen = inference_config(args, zero_stage=args.zero_stage, micro_batch=micro_batch, offload=args.offload)
        models.append(_planned("reference", path, frozen))
    return models


def _ppo(args: Namespace, stand_ins: Mapping[str, str]) -> list[Planned]:
    actor_path = _known(args.actor_model_name_or_path, stand_ins)
    models = [_planned("actor", actor_path, actor_config(args, 1), lora=actor_lora(args))]
    if not shares_reference(args):
        models.append(_planned("reference", actor_path, reference_config(args)))
    if args.advantage_estimator not in CRITIC_FREE:
        path = _known(args.critic_model_name_or_path, stand_ins)
        models.append(_planned("critic", path, critic_config(args, 1), score=True, lora=critic_lora(args)))
    if uses_reward_model(args):
        path = _known(args.reward_model_name_or_path, stand_ins)
        models.append(_planned("reward model", path, reward_config(args), score=True))
    return models


def _known(path: str, stand_ins: Mapping[str, str]) -> str:
    return path if Path(path).exists() else stand_ins.get(path, path)


def _planned(
    name: str, path: str, config: dict[str, Any], *, score: bool = False, lora: Lora | None = None
) -> Planned:
    shape = architecture(str(path))
    shape.num_labels = 1
    with torch.device("meta"):
        if score:
            module = ScoreModel(AutoModelForSequenceClassification.from_config(shape))
        else:
            module = AutoModelForCausalLM.from_config(shape)
        if lora is not None:
            add_adapters(module, lora, path)
    if "optimizer" not in config:
        module.requires_grad_(False)
    return Planned(name, module, config, shape)
