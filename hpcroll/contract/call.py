"""One model call: what was asked, what the engine saw, what it sampled, and under which policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

import numpy as np
from pydantic import Field, JsonValue

from hpcroll.contract.schema import Frozen, Record
from hpcroll.contract.tokens import Floats, Ids, LogprobKind


class CallPurpose(StrEnum):
    """What a call is for, as its harness or its dialect declares it."""

    MAIN = "main"
    """The agent's own work, or nobody declared anything: the shape of the calls then decides."""
    SUBAGENT = "subagent"
    """A step of an agent that the main one called."""
    AUXILIARY = "auxiliary"
    """A title, a summary, a token count: not a step towards the task."""


class Sampling(Frozen):
    """Sampling parameters; None means that nobody set it.

    Semantics are those of the OpenAI Chat Completions API, with `top_k` and `min_p` as vLLM and SGLang
    define them.
    """

    temperature: float | None = Field(default=None, ge=0, le=10)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    """-1 and 0 mean all tokens."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    seed: int | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    stop: tuple[str, ...] | None = None

    def is_plain(self) -> bool:
        """True where sampling is from the model's own distribution at temperature 1.

        Then raw log-probabilities are those of the sampling distribution. A parameter that nobody set
        is not plain: the server's default governs, and servers differ.
        """
        return (
            self.temperature == 1.0
            and self.top_p == 1.0
            and self.top_k in (-1, 0)
            and self.min_p in (None, 0.0)
            and self.presence_penalty in (None, 0.0)
            and self.frequency_penalty in (None, 0.0)
            and self.repetition_penalty in (None, 1.0)
        )


class PolicyId(Frozen):
    """Which policy may have served a call: versions `version_low` to `version_high`, inclusive.

    The two are equal only where the engine itself said what it served.
    """

    policy_name: str
    lineage: str
    version_low: int = Field(ge=0)
    version_high: int = Field(ge=0)


class Usage(Frozen):
    """Token counts as the engine reported them and as the returned ids count (None: not reported)."""

    prompt_reported: int | None = None
    completion_reported: int | None = None
    prompt_counted: int = 0
    completion_counted: int = 0


class Latency(Frozen):
    """Seconds of one call on the gateway's monotonic clock; None where it cannot be told."""

    queue_s: float | None = None
    """Until the upstream accepted the request."""
    first_token_s: float | None = None
    total_s: float = 0.0


class Rendering(Frozen):
    """How the prompt of a call came about, where the gateway rendered it."""

    how: str
    """`bridged`: an earlier call's prompt and samples, then the new messages; `repeated`: an earlier call's
    prompt; `rendered`: from the messages."""
    from_call: int | None = None
    """`call_index` of that earlier call."""
    why: str | None = None
    """Why it was rendered and not bridged."""
    detail: str = ""


class VersionSpan(Frozen):
    """Sampled ids [start, start + length) of a call come from this version of the weights."""

    start: int = Field(ge=0)
    length: int = Field(ge=1)
    version: int = Field(ge=0)


class Call(Record):
    """One model call without its token arrays (those are in `CallTokens`)."""

    SCHEMA: ClassVar[str] = "1.0"

    call_index: int = Field(ge=0)
    """Order of start within the attempt."""
    rollout_id: str
    attempt: int = Field(ge=1)
    dialect: str
    """Entry point `hpcroll.dialects`, for example `openai_chat`."""
    model_name: str
    endpoint: str
    """Base URL of the engine that served it; empty where none was reached."""
    started_at: float
    """Unix seconds on the gateway's node; for people, never compared between nodes."""
    latency: Latency = Latency()
    sampling_asked: Sampling = Sampling()
    sampling_effective: Sampling = Sampling()
    constraints: tuple[str, ...] = ()
    """Fields by which the agent constrained sampling (`response_format`, `tool_choice` ...), sorted."""
    finish_reason: str | None = None
    usage: Usage = Usage()
    logprob_kind: LogprobKind = LogprobKind.NONE
    policy: PolicyId | None = None
    version_spans: tuple[VersionSpan, ...] = ()
    """Which version sampled which ids, all of them and in order, where the engine said so."""
    rendering: Rendering | None = None
    """None where the inference server rendered."""
    purpose: CallPurpose = CallPurpose.MAIN
    messages_base: int | None = None
    """`call_index` of the earlier call whose messages (its request's, then its reply) the request repeats."""
    messages_from: int = Field(default=0, ge=0)
    """The request repeats the first `messages_from` of them."""
    messages: tuple[JsonValue, ...] = ()
    """The request's messages from there on, as the agent sent them."""
    reply: JsonValue = None
    """The assistant message the agent got back."""
    tools_sha256: str | None = None
    error: str | None = None
    """Why the call gave no reply; its tokens, if any, were never shown to the agent."""


@dataclass(frozen=True, slots=True, eq=False)
class FoldedPrompt:
    """A prompt as the first `keep` ids of an earlier call (its prompt, then its samples), then `tail`.

    Only the tail is held, so that the prompts of a session take memory in proportion to what is new.
    """

    base_index: int
    """`call_index` of the earlier call."""
    base: CallTokens = field(repr=False)
    keep: int
    tail: Ids

    def __len__(self) -> int:
        return self.keep + len(self.tail)

    def unfold(self, known: Callable[[CallTokens], Ids | None] = lambda _: None) -> Ids:
        """The whole prompt, uint32 (P,), in time proportional to P and to the calls it leads back to.

        `known` gives the whole sequence (prompt, then samples) of a call that is at hand, and ends the way.
        """
        whole = np.empty(len(self), np.uint32)
        end, prompt = len(whole), self
        while True:
            whole[prompt.keep : end] = prompt.tail[: max(end - prompt.keep, 0)]
            end = min(end, prompt.keep)
            base = prompt.base
            if (sequence := known(base)) is not None:
                whole[:end] = sequence[:end]
                return whole
            start = base.prompt_length
            whole[start:end] = base.sampled_ids[: max(end - start, 0)]
            end = min(end, start)
            if base.folded is None:
                whole[:end] = base.prompt_ids[:end]
                return whole
            prompt = base.folded


class CallTokens:
    """Token arrays of one call; immutable.

    `prompt_ids`: uint32 (P,), what the engine was given; made anew at each access where it is folded.
    `sampled_ids`: uint32 (S,), what it sampled. `logprobs`: float32 (S,), entry i of `sampled_ids[i]`, NaN
    where the engine gave none.
    """

    __slots__ = ("_prompt", "logprobs", "sampled_ids")

    def __init__(self, prompt_ids: Ids | FoldedPrompt, sampled_ids: Ids, logprobs: Floats) -> None:
        self._prompt = prompt_ids
        self.sampled_ids = sampled_ids
        self.logprobs = logprobs

    @property
    def prompt_ids(self) -> Ids:
        return self._prompt.unfold() if isinstance(self._prompt, FoldedPrompt) else self._prompt

    @property
    def prompt_length(self) -> int:
        """P, without unfolding anything."""
        return len(self._prompt)

    @property
    def folded(self) -> FoldedPrompt | None:
        """The prompt as it is held; None where it is held whole."""
        return self._prompt if isinstance(self._prompt, FoldedPrompt) else None

    def __repr__(self) -> str:
        return f"CallTokens({self.prompt_length} prompt ids, {len(self.sampled_ids)} sampled ids)"


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call with its tokens, as the journal holds it."""

    call: Call
    tokens: CallTokens
