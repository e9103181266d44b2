"""Where an agent finds its model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelEndpoint:
    """A model as an agent is given it."""

    base_url: str
    """OpenAI-style base URL, `/v1` included."""
    api_key: str
    model: str
    context_tokens: int = 32_768
    """Longest prompt plus reply that a call may have; agents are told, so that they compact in time."""
    reply_tokens: int = 4096
    """Longest reply."""
