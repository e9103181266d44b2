"""The errors of hpcroll: a leaf exists only where some caller acts differently.

A message says what failed, on which id or path, and what to do next. Step, token and time limits are
stop reasons (`hpcroll.contract.StopReason`), not errors.
"""

from __future__ import annotations

from typing import ClassVar


class HpcrollError(Exception):
    """Base of all errors that hpcroll raises on purpose.

    `retryable` says whether the same call may succeed later without anyone changing anything.
    """

    retryable: ClassVar[bool] = False


class ConfigError(HpcrollError):
    """A file or argument of the user is wrong; raised before anything is submitted."""


class PluginError(HpcrollError):
    """An unknown plug-in name, or a plug-in that does not load; lists the known ones."""


class LaunchError(HpcrollError):
    """Workers could not be started, or their state could not be learnt."""


class SubmitError(LaunchError):
    """The scheduler refused a job."""


class JobLostError(LaunchError):
    """The scheduler no longer knows a job that never reported its end."""


class SpoolError(HpcrollError):
    """A spool operation failed."""


class LeaseLostError(SpoolError):
    """Another incarnation took the rollout over; whatever this one still produces is discarded."""


class CorruptRecordError(SpoolError):
    """A file of the spool is not what its checksum or schema says."""


class UnsafeFilesystemError(SpoolError):
    """The file system lacks a property that claims and commits rest on."""


class ShardError(HpcrollError):
    """A trajectory shard could not be written or read."""


class ShardCorruptError(ShardError):
    """A finished shard holds bytes whose checksum does not match."""


class SchemaVersionError(ShardError):
    """A record was written by a newer major version of its schema."""


class RolloutError(HpcrollError):
    """A rollout's attempt failed; recorded on its trajectory, never ends a worker."""


class SandboxError(RolloutError):
    """A sandbox did not start, or died under its payload."""

    retryable = True


class ImageError(SandboxError):
    """An image is missing, broken or cannot be built."""

    retryable = False


class IsolationUnavailableError(SandboxError):
    """This node cannot isolate what the config asks to isolate."""

    retryable = False


class ModelError(RolloutError):
    """No inference server gave a usable answer."""

    retryable = True


class HarnessError(RolloutError):
    """The agent program itself is broken (not: it failed its task)."""


class EvaluatorError(RolloutError):
    """The verifier could not reach a verdict."""
