"""A loop that learns on a CPU: rollouts in sandboxes, shards, a GRPO trainer; see README.md."""
