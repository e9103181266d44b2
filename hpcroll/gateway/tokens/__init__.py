"""Mode `tokens`: ids go to the inference server and come back; rendering and reading happen here."""

from hpcroll.gateway.tokens.conversation import How, Rendered, TokenConversation, Why
from hpcroll.gateway.tokens.messages import CannotRenderError
from hpcroll.gateway.tokens.renderer import TokenRenderer, load_renderer
from hpcroll.gateway.tokens.stream import Finished, ReplyStream
from hpcroll.gateway.tokens.turn import TokenTurn

__all__ = [
    "CannotRenderError",
    "Finished",
    "How",
    "Rendered",
    "ReplyStream",
    "TokenConversation",
    "TokenRenderer",
    "TokenTurn",
    "Why",
    "load_renderer",
]
