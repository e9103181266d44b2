"""Evaluation on prompts that are never trained on, through the same sandboxes and the same server."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from hpcroll import Run
from tiny_grpo.layout import Settings
from tiny_grpo.task import make_tasks


class HeldOut:
    """One submission per policy version to a run of its own; `reward` gives its mean once all have ended."""

    def __init__(self, run: Run, settings: Settings, *, seed: int) -> None:
        self._run, self._settings, self._seed = run, settings, seed
        self._submitted: set[int] = set()
        self._means: dict[int, float] = {}

    def submit(self, version: int, weights: Path) -> None:
        """Has `version` evaluated; the same again changes nothing."""
        self._run.policy.publish(version, weights=str(weights))
        tasks = make_tasks(self._settings.held_out_prompts, held_out=True, seed=self._seed)
        self._run.submit(tasks, samples=1, key=_key(version))
        self._submitted.add(version)

    def reward(self, version: int) -> float | None:
        """The mean reward of the evaluation of a version; None as long as not all of it is there.

        A rollout that failed, whoever's fault it was, counts as 0.
        """
        if version not in self._submitted:
            return None
        if version not in self._means:
            results = list(self._run.results(_key(version), wait=False))
            if len(results) < self._settings.held_out_prompts:
                return None
            self._means[version] = fmean(result.reward or 0.0 for result in results)
        return self._means[version]


def _key(version: int) -> str:
    return f"version {version}"
