"""Makes a tiny model of the Qwen3 family with random weights: about 1 MB, float32, the same for a seed.

    python make_model.py TOKENIZER OUT --seed 0 [--context 32768] [--teach STEPS]

`--teach` trains it until most of its replies are a call of a tool `bash`, whatever stands before: an agent
then really acts. 400 steps take about a minute on an idle core.

Runs in the engine's environment (tests/setup/install-engine); needs torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

Example = Callable[[int], tuple[list[int], int]]

# What a chat model ships and a rollout must not be governed by.
SHIPPED_DEFAULTS = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
LOGIT_SPREAD = 1.5
"""Standard deviation of the logits: wide enough that weights, temperatures and neighbours differ."""
REPLY = """\
<think>
Try {command}.
</think>

<tool_call>
{{"name": "bash", "arguments": {{"command": "{command}"}}}}
</tool_call><|im_end|>"""
COMMANDS = ("ls", "pwd", "date", "id", "echo hello", "cat a.txt", "ls -la", "uname", "wc -l a.txt", "env")
LENGTHS = (16, 64, 256, 1024, 3000)
"""Longest contexts of the batches that are learnt from, in tokens."""
BATCH_TOKENS = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tokenizer", type=Path, help="directory with tokenizer.json")
    parser.add_argument("out", type=Path, help="directory to make")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--context", type=int, default=32_768, help="longest sequence in tokens")
    parser.add_argument("--teach", type=int, default=0, metavar="STEPS", help="0: random weights")
    arguments = parser.parse_args()
    shutil.copytree(arguments.tokenizer, arguments.out, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    ids = tokenizer.get_vocab().values()
    model = random_model(max(ids) + 1, seed=arguments.seed, context=arguments.context)
    model.config.eos_token_id = tokenizer.eos_token_id
    if arguments.teach:
        teach(model, tokenizer, seed=arguments.seed, steps=arguments.teach)
    model.save_pretrained(arguments.out)
    defaults = {**SHIPPED_DEFAULTS, "eos_token_id": tokenizer.eos_token_id}
    (arguments.out / "generation_config.json").write_text(json.dumps(defaults))


def random_model(vocabulary: int, *, seed: int, context: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        initializer_range=0.1,
        dtype=torch.float32,
    )
    model = Qwen3ForCausalLM(config).to(torch.float32)
    # The last norm makes every hidden state's entries of size 1.
    torch.nn.init.normal_(model.lm_head.weight, std=LOGIT_SPREAD / config.hidden_size**0.5)
    return model


def teach(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, *, seed: int, steps: int) -> None:
    """Trains `model` on replies that call a tool, behind contexts of random ids or of some text."""
    # Two threads wait for each other more than they compute.
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    chance = random.Random(seed)
    example = imagined(tokenizer, chance)
    for _ in range(steps):
        length = chance.choice(LENGTHS)
        batch = [example(length) for _ in range(max(1, min(8, BATCH_TOKENS // length)))]
        longest = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in batch])
        ends = torch.tensor([len(ids) for ids, _ in batch])[:, None]
        starts = ends - torch.tensor([reply for _, reply in batch])[:, None]
        places = torch.arange(1, longest)[None]
        learnt = (places >= starts) & (places < ends)
        states = model.model(ids, use_cache=False).last_hidden_state[:, :-1][learnt]
        loss = torch.nn.functional.cross_entropy(model.lm_head(states), ids[:, 1:][learnt])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    print(f"loss {loss.item():.3f}")


def imagined(tokenizer: PreTrainedTokenizerBase, chance: random.Random) -> Example:
    """Makes examples: given a longest context, the ids of a dialogue and how many are its last reply."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    text = encode(Path(__file__).read_text())
    head = encode("<|im_start|>assistant\n")
    size = max(tokenizer.get_vocab().values()) + 1

    def turn() -> list[int]:
        return encode(REPLY.format(command=chance.choice(COMMANDS)))

    def example(length: int) -> tuple[list[int], int]:
        count = chance.randrange(length)
        if chance.random() < 0.5:
            context = [chance.randrange(size) for _ in range(count)]
        else:
            start = chance.randrange(len(text))
            context = (text[start:] + text * (count // len(text) + 1))[:count]
        if chance.random() < 0.5:
            place = chance.randrange(count + 1)
            context[place:place] = head + turn()
        reply = turn()
        return context + head + reply, len(reply)

    return example


if __name__ == "__main__":
    main()
