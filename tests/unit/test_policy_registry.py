"""Publications have one order, and a published version never changes."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path

import pytest

from hpcroll.errors import ConfigError
from hpcroll.fs import RunPaths, make_directories
from hpcroll.policy import PolicyRegistry


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path)
    make_directories(list(paths.directories()))
    return paths


def test_nothing_is_published_at_first(paths: RunPaths) -> None:
    assert PolicyRegistry(paths).latest() is None
    assert PolicyRegistry(paths).versions() == ()


def test_newest_publication_is_the_latest_for_everyone(paths: RunPaths) -> None:
    trainer, gateway = PolicyRegistry(paths), PolicyRegistry(paths)
    for version in (0, 1, 5):
        trainer.publish(version, weights=f"ckpt/{version}")
        latest = gateway.latest()
        assert latest is not None
        assert (latest.version, latest.weights, latest.lineage) == (version, f"ckpt/{version}", "main")
    assert [entry.version for entry in gateway.versions()] == [0, 1, 5]


def test_same_publication_again_changes_nothing(paths: RunPaths) -> None:
    registry = PolicyRegistry(paths)
    first = registry.publish(0, weights="ckpt/0", digest="d0")
    registry.publish(1, weights="ckpt/1")
    assert PolicyRegistry(paths).publish(0, weights="moved/0", digest="d0") == first
    latest = registry.latest()
    assert latest is not None
    assert latest.version == 1
    assert len(registry.versions()) == 2


@pytest.mark.parametrize(
    "change", [{"weights": "other", "digest": None}, {"weights": "ckpt/1", "digest": "other"}]
)
def test_published_version_with_other_weights_is_refused(
    paths: RunPaths, change: dict[str, str | None]
) -> None:
    registry = PolicyRegistry(paths)
    registry.publish(1, weights="ckpt/1", digest="d1")
    with pytest.raises(ConfigError, match=r"version 1 .* was published with .* new\s+lineage"):
        PolicyRegistry(paths).publish(1, **change)
    assert len(registry.versions()) == 1


def test_older_version_needs_a_new_lineage_and_is_then_the_latest(paths: RunPaths) -> None:
    registry = PolicyRegistry(paths)
    registry.publish(7, weights="a/7")
    with pytest.raises(ConfigError, match="older than version 7"):
        registry.publish(3, weights="b/3")
    registry.publish(3, weights="b/3", lineage="restart")
    latest = registry.latest()
    assert latest is not None
    assert (latest.lineage, latest.version) == ("restart", 3)


def test_policies_of_other_names_stand_apart(paths: RunPaths) -> None:
    registry = PolicyRegistry(paths)
    registry.publish(4, weights="p")
    registry.publish(1, weights="l", name="org/lora ä")
    policy, lora = registry.latest(), registry.latest("org/lora ä")
    assert policy is not None
    assert lora is not None
    assert (policy.version, lora.version) == (4, 1)


def test_publisher_that_died_before_the_pointer_moved_is_repaired_by_the_next_call(paths: RunPaths) -> None:
    registry = PolicyRegistry(paths)
    registry.publish(0, weights="a")
    pointer = paths.policy_latest("policy").read_bytes()
    registry.publish(1, weights="b")
    paths.policy_latest("policy").write_bytes(pointer)
    PolicyRegistry(paths).publish(1, weights="b")
    latest = registry.latest()
    assert latest is not None
    assert latest.version == 1


def test_bad_versions_are_refused(paths: RunPaths) -> None:
    with pytest.raises(ConfigError, match="cannot be published"):
        PolicyRegistry(paths).publish(-1, weights=None)
    with pytest.raises(ConfigError, match="cannot be published"):
        PolicyRegistry(paths).publish(0, weights=None, name="")


def test_two_publishers_of_one_version_have_one_winner(paths: RunPaths) -> None:
    outcomes: list[str] = []
    start = threading.Barrier(8)

    def work(number: int) -> None:
        registry = PolicyRegistry(paths)
        start.wait()
        for version in range(5):
            try:
                registry.publish(version, weights=f"{number}/{version}")
            except ConfigError:
                outcomes.append("refused")
            else:
                outcomes.append("published")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    versions = [entry.version for entry in PolicyRegistry(paths).versions()]
    assert len(versions) == len(set(versions))
    assert versions == sorted(versions)
    assert outcomes.count("published") == len(versions)
    latest = PolicyRegistry(paths).latest()
    assert latest is not None
    assert latest.version == 4


def _publish(root: str, digest: str, start: object, name: str, versions: int) -> None:
    start.wait()  # type: ignore[attr-defined]
    registry = PolicyRegistry(RunPaths(Path(root)))
    for version in range(versions):
        try:
            mine = registry.publish(version, weights="same/place", digest=digest, name=name)
        except ConfigError:
            continue
        assert mine.weights_digest == digest, "published means published as asked"


def test_racing_digests_of_one_version_leave_one_for_everybody(paths: RunPaths) -> None:
    """Four trainers that believe to be the only one, two on each of two policies."""
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(4)
    names = ["policy", "policy", "org/lora", "org/lora"]
    processes = [
        context.Process(target=_publish, args=(str(paths.root), f"digest-{number}", start, name, 20))
        for number, name in enumerate(names)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    entries = PolicyRegistry(paths).versions()
    for name in set(names):
        line = [entry.version for entry in entries if entry.policy_name == name]
        assert line == sorted(set(line)), "each version once, in order"
        assert line[-1] == 19
        latest = PolicyRegistry(paths).latest(name)
        assert latest is not None
        assert latest.version == 19


def test_registry_of_a_run_means_the_runs_own_policy(paths: RunPaths) -> None:
    registry = PolicyRegistry(paths, name="qwen")
    registry.publish(3, weights="w")
    assert registry.latest() == registry.latest("qwen")
    assert PolicyRegistry(paths).latest() is None
