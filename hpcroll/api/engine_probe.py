"""What a running inference server says of itself: whether it is ready, what it is, which models it serves."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from hpcroll.policy import DEFAULT_KIND, KINDS

ANSWER_TIMEOUT_S = 10.0
_HEALTH_PATHS = ("/health", "/v1/models")
_SGLANG_PATHS = ("/get_model_info", "/model_info")


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """An inference server's own words."""

    kind: str
    """`vllm` or `sglang`; `vllm` where it does not say."""
    models: tuple[str, ...]
    """The model names that it serves; empty where it does not say."""


def listens(url: str, *, timeout_s: float = ANSWER_TIMEOUT_S) -> bool:
    """Whether anything speaks HTTP at base URL `url`, ready or not."""
    return _get(url, _HEALTH_PATHS[0], timeout_s=timeout_s) is not None


def is_ready(url: str, *, timeout_s: float = ANSWER_TIMEOUT_S) -> bool:
    """Whether the server at base URL `url` says that it takes calls.

    An engine that loads its weights or warms up answers `/health` with 503 while other paths already work;
    one that has no such path is asked for its models.
    """
    for path in _HEALTH_PATHS:
        answer = _get(url, path, timeout_s=timeout_s)
        if answer is None or answer[0] >= 500:
            return False
        if answer[0] == 200:
            return True
    return False


def identify(url: str, *, timeout_s: float = ANSWER_TIMEOUT_S) -> EngineIdentity:
    """Asks the server at base URL `url` what it is; never fails."""
    _, listing = _get(url, "/v1/models", timeout_s=timeout_s) or (0, None)
    data = listing.get("data") if isinstance(listing, dict) else None
    entries = [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []
    models = tuple(str(entry["id"]) for entry in entries if "id" in entry)
    owners = {str(entry.get("owned_by", "")).lower() for entry in entries}
    for kind in KINDS:
        if kind in owners:
            return EngineIdentity(kind, models)
    for path in _SGLANG_PATHS:
        _, about = _get(url, path, timeout_s=timeout_s) or (0, None)
        if isinstance(about, dict) and "model_path" in about:
            return EngineIdentity("sglang", models)
    return EngineIdentity(DEFAULT_KIND, models)


def _get(url: str, path: str, *, timeout_s: float) -> tuple[int, Any] | None:
    """Status and JSON (None where it is none) of the answer; None where there is no answer."""
    root = url.rstrip("/").removesuffix("/v1")
    try:
        with urllib.request.urlopen(root + path, timeout=timeout_s) as response:
            status, data = int(response.status), response.read(1 << 20)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, None
    except (OSError, http.client.HTTPException):
        return None
    try:
        return status, json.loads(data)
    except ValueError:
        return status, None
