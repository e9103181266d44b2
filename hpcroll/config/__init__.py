"""The configuration of a run: YAML for people, validated before anything is submitted."""

from hpcroll.config.load import load_config, parse_config
from hpcroll.config.models import (
    AttemptCaps,
    EvaluationConfig,
    HarnessConfig,
    LaunchConfig,
    LeaseConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    SandboxConfig,
    SeedPolicy,
    ShardConfig,
    StageConfig,
    StagesConfig,
    StartLimits,
    Strict,
    TimeoutRule,
)

__all__ = [
    "AttemptCaps",
    "EvaluationConfig",
    "HarnessConfig",
    "LaunchConfig",
    "LeaseConfig",
    "ModelConfig",
    "RunConfig",
    "SamplingConfig",
    "SandboxConfig",
    "SeedPolicy",
    "ShardConfig",
    "StageConfig",
    "StagesConfig",
    "StartLimits",
    "Strict",
    "TimeoutRule",
    "load_config",
    "parse_config",
]
