"""Sampling is the run's: what is in effect, whatever an agent asks."""

from __future__ import annotations

import xxhash

from hpcroll.config import ModelConfig, SeedPolicy
from hpcroll.contract import Sampling

_SEED_BITS = 31
"""Servers take seeds as signed 32-bit numbers or longer ones."""


def force_sampling(asked: Sampling, config: ModelConfig, *, budget: int, identity: str) -> Sampling:
    """`asked`, overruled by what the config sets; `max_tokens` is the least of both and `budget`.

    `identity` names the call within the run: equal ones get equal derived seeds.
    """
    effective = asked.model_dump(exclude_none=True)
    effective |= config.sampling.model_dump(exclude_none=True)
    bounds = (asked.max_tokens, config.sampling.max_tokens, budget)
    effective["max_tokens"] = min(bound for bound in bounds if bound is not None)
    if config.seeds is not SeedPolicy.AGENT:
        effective.pop("seed", None)
    if config.seeds is SeedPolicy.DERIVED:
        effective["seed"] = xxhash.xxh3_64_intdigest(identity.encode()) >> (64 - _SEED_BITS)
    return Sampling(**effective)
