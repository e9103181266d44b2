"""NeMo Gym reads rollout lines: `nemo_gym_read.py OUT`, one JSON line per row."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from nemo_gym.base_resources_server import BaseVerifyResponse
from nemo_gym.openai_utils import TokenIDLogProbMixin

for path in sorted(Path(sys.argv[1]).glob("part-*.jsonl")):
    for line in path.read_text().splitlines():
        answer = BaseVerifyResponse.model_validate_json(line)
        ids, mask, logprobs = [], [], []
        for item in answer.response.output:
            if not isinstance(item, TokenIDLogProbMixin):
                continue
            # As nemo_rl/environments/nemo_gym.py puts the turns together.
            assert item.prompt_token_ids[: len(ids)] == ids, "non-contiguous"
            fresh = item.prompt_token_ids[len(ids) :]
            ids += fresh + item.generation_token_ids
            mask += [0] * len(fresh) + [1] * len(item.generation_token_ids)
            logprobs += [0.0] * len(fresh) + item.generation_log_probs
        print(json.dumps({"ids": ids, "mask": mask, "logprobs": logprobs, "reward": answer.reward}))
