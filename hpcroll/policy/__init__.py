"""The policy registry: versions that a trainer publishes, and the servers that sample from them."""

from hpcroll.contract.policy import PolicyVersion
from hpcroll.policy.endpoints import Endpoint, EndpointLease
from hpcroll.policy.registry import PolicyRegistry

__all__ = ["Endpoint", "EndpointLease", "PolicyRegistry", "PolicyVersion"]
