"""The policy registry: versions that a trainer publishes, and the servers that sample from them."""

from hpcroll.contract.policy import PolicyVersion
from hpcroll.policy.endpoints import DEFAULT_KIND, KINDS, Endpoint, EndpointLease
from hpcroll.policy.gates import Gate, GateReport
from hpcroll.policy.pauses import AdmissionState, Pause, PauseMode, Pauses
from hpcroll.policy.registry import PauseOutcome, PolicyRegistry

__all__ = [
    "DEFAULT_KIND",
    "KINDS",
    "AdmissionState",
    "Endpoint",
    "EndpointLease",
    "Gate",
    "GateReport",
    "Pause",
    "PauseMode",
    "PauseOutcome",
    "Pauses",
    "PolicyRegistry",
    "PolicyVersion",
]
