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
