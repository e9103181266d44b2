"""What a call is for, as far as the request itself declares it."""

from __future__ import annotations

from hpcroll.contract import CallPurpose
from hpcroll.gateway.chat import ChatRequest
from hpcroll.gateway.dialects.base import HttpCall

_DECLARING = (CallPurpose.AUXILIARY, CallPurpose.SUBAGENT)


def declared_purpose(
    request: ChatRequest, call: HttpCall, *, path_model: str | None, model: str
) -> CallPurpose:
    """The purpose of a call whose agent was told that the one `model` has several names.

    A harness gives its agent `<model>-auxiliary` for titles and summaries, or `<model>-subagent` for
    subagents, wherever the agent can be told of another model. A call that may sample a single token asks
    whether the server is there, and is auxiliary. `path_model`: the model that the address names, if any.
    """
    asked = path_model if path_model is not None else call.body.get("model")
    if isinstance(asked, str) and asked != model:
        for purpose in _DECLARING:
            if asked.endswith(f"{model}-{purpose}"):
                return purpose
    return CallPurpose.AUXILIARY if request.asked.max_tokens == 1 else request.purpose
