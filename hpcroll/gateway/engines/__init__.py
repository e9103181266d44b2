"""What inference servers speak: how each is asked, and how its replies are read."""

from hpcroll.config import EngineKind, ModelConfig, ModelMode
from hpcroll.gateway.engines.base import Engine
from hpcroll.gateway.engines.chat import ChatEngine
from hpcroll.gateway.engines.sglang_generate import SglangGenerate
from hpcroll.gateway.engines.vllm_completions import VllmCompletions
from hpcroll.gateway.engines.vllm_generate import VllmGenerate


def engine_of(kind: str, config: ModelConfig) -> Engine:
    """How a server of `kind` is asked in the mode of `config`."""
    if config.mode is ModelMode.CHAT or config.tokens is None:
        return ChatEngine()
    if kind == EngineKind.SGLANG:
        return SglangGenerate()
    return VllmGenerate() if config.tokens.scale_out else VllmCompletions()
