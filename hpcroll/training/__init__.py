"""Batches as torch tensors, and a run as a torch dataset. Imports torch; nothing else of hpcroll does."""

from hpcroll.errors import ConfigError

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ConfigError(
        f"hpcroll.training needs torch, which is not installed here ({error}); install the build that fits "
        "your machine, or read numpy batches from hpcroll.shards"
    ) from error

from hpcroll.training.dataset import TrajectoryDataset
from hpcroll.training.tensors import padded_tensors, tensors

__all__ = ["TrajectoryDataset", "padded_tensors", "tensors"]
