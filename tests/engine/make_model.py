"""Makes a tiny model of the Qwen3 family with random weights: about 1 MB, float32, the same for a seed.

    python make_model.py TOKENIZER OUT --seed 0 [--context 32768]

Runs in the engine's environment (tests/setup/install-engine); needs torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

# What a chat model ships and a rollout must not be governed by.
SHIPPED_DEFAULTS = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
LOGIT_SPREAD = 1.5
"""Standard deviation of the logits: wide enough that weights, temperatures and neighbours differ."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tokenizer", type=Path, help="directory with tokenizer.json")
    parser.add_argument("out", type=Path, help="directory to make")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--context", type=int, default=32_768, help="longest sequence in tokens")
    arguments = parser.parse_args()
    shutil.copytree(arguments.tokenizer, arguments.out, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    ids = tokenizer.get_vocab().values()
    model = random_model(max(ids) + 1, seed=arguments.seed, context=arguments.context)
    model.config.eos_token_id = tokenizer.eos_token_id
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


if __name__ == "__main__":
    main()
