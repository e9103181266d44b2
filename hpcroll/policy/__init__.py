"""The policy registry: versions, the servers that sample from them, pauses, and the window."""

from hpcroll.contract.policy import PolicyVersion
from hpcroll.policy.endpoints import DEFAULT_KIND, KINDS, Endpoint, EndpointLease
from hpcroll.policy.gates import Gate, GateReport
from hpcroll.policy.lineages import Lineage
from hpcroll.policy.pauses import AdmissionState, Pause, PauseMode, Pauses
from hpcroll.policy.registry import PauseOutcome, PolicyRegistry
from hpcroll.policy.window import Allowance, Bounds, WindowState, WindowWatch

__all__ = [
    "DEFAULT_KIND",
    "KINDS",
    "AdmissionState",
    "Allowance",
    "Bounds",
    "Endpoint",
    "EndpointLease",
    "Gate",
    "GateReport",
    "Lineage",
    "Pause",
    "PauseMode",
    "PauseOutcome",
    "Pauses",
    "PolicyRegistry",
    "PolicyVersion",
    "WindowState",
    "WindowWatch",
]
