"""Trainers read their exports: `trainers_read.py FORMAT OUT`, one JSON line per row.

A line has `ids`, `mask` and `logprobs` as the trainer's own structures hold them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file


def say(ids: Any, mask: Any, logprobs: Any, **more: Any) -> None:
    whole = {
        "ids": [int(value) for value in ids],
        "mask": [int(value) for value in mask],
        "logprobs": [float(value) for value in logprobs],
    }
    print(json.dumps({**whole, **more}))


def rows_of(path: Path) -> list[dict[str, Any]]:
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["rows"])


def read_verl(out: Path) -> None:
    from verl.protocol import DataProto
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    for path in sorted(out.glob("part-*.safetensors")):
        rows = rows_of(path)
        uid = np.array([row["group_id"] for row in rows], dtype=object)
        data = DataProto.from_dict(tensors=load_file(path), non_tensors={"uid": uid})
        halves = DataProto.concat(data.chunk(1))
        advantages, _ = compute_grpo_outcome_advantage(
            halves.batch["rm_scores"],
            halves.batch["response_mask"],
            halves.non_tensor_batch["uid"],
            norm_adv_by_std_in_grpo=False,
        )
        width = data.batch["prompts"].shape[1]
        for index, row in enumerate(rows):
            real = data.batch["attention_mask"][index].bool()
            blank = torch.zeros(width)
            mask = torch.cat([blank, data.batch["response_mask"][index]])[real]
            logprobs = torch.cat([blank, data.batch["rollout_log_probs"][index]])[real]
            trained = data.batch["response_mask"][index].bool()
            say(
                data.batch["input_ids"][index][real],
                mask,
                logprobs,
                group=row["group_id"],
                theirs=float(advantages[index][trained][0]),
                ours=float(data.batch["advantages"][index][trained][0]),
            )


def read_skyrl(out: Path) -> None:
    from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors

    class Tokenizer:
        pad_token_id = 0

    for path in sorted(out.glob("part-*.json")):
        output = json.loads(path.read_text())
        rewards = [
            [0.0] * (len(response) - 1) + [reward]
            for response, reward in zip(output["response_ids"], output["rewards"], strict=True)
        ]
        sequences, attention, action, _, masks, logprobs, *_ = convert_prompts_responses_to_batch_tensors(
            Tokenizer(),
            output["prompt_token_ids"],
            output["response_ids"],
            rewards,
            output["loss_masks"],
            output["rollout_logprobs"],
        )
        for index, prompt in enumerate(output["prompt_token_ids"]):
            response = action[index].bool()
            blank = torch.zeros(len(prompt))
            say(
                sequences[index][attention[index].bool()],
                torch.cat([blank, masks[index][response]]),
                torch.cat([blank, logprobs[index][response]]),
            )


def read_areal(out: Path) -> None:
    from areal.utils.data import concat_padded_tensors

    parts = [load_file(path) for path in sorted(out.glob("part-*.safetensors"))]
    batch = concat_padded_tensors(parts)
    for index in range(len(batch["rewards"])):
        real = batch["attention_mask"][index].bool()
        say(
            batch["input_ids"][index][real],
            batch["loss_mask"][index][real],
            batch["logprobs"][index][real],
            versions=batch["versions"][index][real].tolist(),
        )


def read_nemo_rl(out: Path) -> None:
    """Not NeMo-RL, which is not on PyPI: the fields, dtypes and shapes that its loss names."""
    wanted = {
        "input_ids": torch.int64,
        "input_lengths": torch.int64,
        "token_mask": torch.int64,
        "sample_mask": torch.float32,
        "generation_logprobs": torch.float32,
        "advantages": torch.float32,
        "total_reward": torch.float32,
    }
    for path in sorted(out.glob("part-*.safetensors")):
        batch = load_file(path)
        assert {name: tensor.dtype for name, tensor in batch.items()} == wanted
        rows, width = batch["input_ids"].shape
        for name in ("token_mask", "generation_logprobs", "advantages"):
            assert batch[name].shape == (rows, width)
        for name in ("input_lengths", "sample_mask", "total_reward"):
            assert batch[name].shape == (rows,)
        for index in range(rows):
            real = slice(0, int(batch["input_lengths"][index]))
            say(
                batch["input_ids"][index][real],
                batch["token_mask"][index][real],
                batch["generation_logprobs"][index][real],
            )


SAMPLE_FIELDS = {
    "group_index": int,
    "index": int,
    "rollout_id": int,
    "prompt": str,
    "tokens": list,
    "response": str,
    "response_length": int,
    "label": type(None),
    "reward": float,
    "loss_mask": list,
    "weight_versions": list,
    "rollout_log_probs": list,
    "remove_sample": bool,
    "status": str,
    "metadata": dict,
    "spec_info": dict,
    "prefix_cache_info": dict,
}
"""Of slime/utils/types.py (`Sample`) at 624b824: those that an export sets."""


def read_slime(out: Path) -> None:
    """Not slime, which is not on PyPI: `torch.load`, as its trainer does, and the fields of its `Sample`."""
    for number, path in enumerate(sorted(out.glob("rollout_*.pt"))):
        data = torch.load(path, weights_only=False)
        assert data["rollout_id"] == number
        assert torch.load(path, weights_only=True) == data
        for sample in data["samples"]:
            assert {name: type(value) for name, value in sample.items()} == SAMPLE_FIELDS
            assert sample["status"] in ("pending", "completed", "truncated", "aborted", "failed")
            assert min(sample["group_index"], sample["index"], sample["rollout_id"]) >= -(2**63)
            torch.tensor([sample["group_index"], sample["index"], sample["rollout_id"]])
            blank = [0] * (len(sample["tokens"]) - sample["response_length"])
            say(sample["tokens"], blank + sample["loss_mask"], blank + sample["rollout_log_probs"])


if __name__ == "__main__":
    reader = globals()[f"read_{sys.argv[1].replace('-', '_')}"]
    reader(Path(sys.argv[2]))
