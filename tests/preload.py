"""What the server process of `tests.helpers.run_ranks` imports before it forks ranks."""

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
from transformers.models.llama import modeling_llama

import engine

torch.set_num_threads(1)
LOADED = (torch, modeling_llama, engine)
