"""TRL's asynchronous GRPO takes an export to a loss: `trl_read.py OUT`, one JSON object.

Its batcher and collator pack the rows; the loss is that of its trainer, on a small model. Its tree attention
needs a GPU: the model goes over the paths of the tree one by one instead.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from types import SimpleNamespace

import datasets
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from trl.experimental.async_grpo import async_grpo_trainer as trl

rows = datasets.load_dataset(
    "parquet", data_files=f"{sys.argv[1]}/part-*.parquet", split="train", cache_dir=f"{sys.argv[1]}/.cache"
).with_format("numpy")
samples = [
    {key: row[key] for key in ("input_ids", "completion_mask", "old_log_probs")}
    | {
        "advantage": float(row["advantage"]),
        "group_id": int(row["group_id"]),
        "metrics": {key: float(value) for key, value in row["metrics"].items()},
    }
    for row in rows
]
batcher = trl.FixedCountBatcher(iter(samples), 1, len(samples))
batch = trl.DataCollatorForRollout(pad_token_id=0).torch_call([next(iter(batcher))])
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=32_000,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=4096,
)
model = LlamaForCausalLM(config)


class Forward:
    """What the packed forward gives: log-probability and entropy at each packed position."""

    def __call__(
        self, *, input_ids: torch.Tensor, shift_labels: torch.Tensor, **others: torch.Tensor
    ) -> SimpleNamespace:
        starts, ends = others["tree_cu_seqlens_q"][:-1], others["tree_cu_seqlens_q"][1:]
        path_starts, path_ends = others["tree_cu_seqlens_k"][:-1], others["tree_cu_seqlens_k"][1:]
        log_probs = torch.zeros(input_ids.shape[1])
        entropy = torch.zeros(input_ids.shape[1])
        for start, end, path_start, path_end in zip(starts, ends, path_starts, path_ends, strict=True):
            path = others["tree_kv_index"][path_start:path_end]
            logits = model(input_ids[:, path]).logits[0, -(end - start) :]
            scores = torch.log_softmax(logits, -1)
            labels = shift_labels[0, start:end].clamp(min=0)
            log_probs[start:end] = scores.gather(-1, labels[:, None])[:, 0]
            entropy[start:end] = -(scores.exp() * scores).sum(-1)
        return SimpleNamespace(log_probs=log_probs, entropy=entropy)


class Accelerator:
    num_processes = 1

    def reduce(self, value: torch.Tensor, reduction: str) -> torch.Tensor:
        return value

    def __getattr__(self, name: str) -> object:
        return lambda value, *_, **__: value


trainer = SimpleNamespace(
    aux_loss_enabled=False,
    epsilon_low=0.2,
    epsilon_high=0.2,
    accelerator=Accelerator(),
    current_gradient_accumulation_steps=1,
    _metrics={"train": defaultdict(list)},
    _step_forward_tokens=0.0,
    _step_trained_tokens=0.0,
    _step_seq_len_weighted=0.0,
    _step_samples=0.0,
    _step_forward_s=0.0,
)
loss = trl.AsyncGRPOTrainer.compute_loss(trainer, Forward(), batch)
loss.backward()
gradient = sum(float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None)
print(
    json.dumps(
        {
            "rows": len(samples),
            "trained": int(batch["token_index"].numel()),
            "old_log_probs": float(batch["old_log_probs"].double().sum()),
            "loss": float(loss.detach()),
            "gradient": gradient,
        }
    )
)
