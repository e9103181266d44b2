"""The gateway: the node-local model endpoint that records every token before an agent sees it."""

from hpcroll.gateway.endpoint import ModelEndpoint
from hpcroll.gateway.journal import Journal, read_journal
from hpcroll.gateway.prefix import unfold_messages
from hpcroll.gateway.refusal import NOT_RECORDED_CODE, limit_of
from hpcroll.gateway.server import Gateway
from hpcroll.gateway.session import GatewaySession
from hpcroll.gateway.upstream import Upstream

__all__ = [
    "NOT_RECORDED_CODE",
    "Gateway",
    "GatewaySession",
    "Journal",
    "ModelEndpoint",
    "Upstream",
    "limit_of",
    "read_journal",
    "unfold_messages",
]
