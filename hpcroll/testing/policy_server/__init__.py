"""A scripted policy server: it speaks like an inference server and samples nothing."""

from hpcroll.testing.policy_server.faults import Fault, FaultKind
from hpcroll.testing.policy_server.record import Sampled
from hpcroll.testing.policy_server.script import (
    Aside,
    Behaviour,
    Script,
    ToolCall,
    Turn,
    fails,
    garbage,
    load_scripts,
    loops,
    solves,
    stalls,
    write_scripts,
)
from hpcroll.testing.policy_server.server import PolicyServer
from hpcroll.testing.policy_server.tokens import Tokens

__all__ = [
    "Aside",
    "Behaviour",
    "Fault",
    "FaultKind",
    "PolicyServer",
    "Sampled",
    "Script",
    "Tokens",
    "ToolCall",
    "Turn",
    "fails",
    "garbage",
    "load_scripts",
    "loops",
    "solves",
    "stalls",
    "write_scripts",
]
