"""Lineages: where a restart left an older training run, and how far a version is behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcroll.contract.policy import Branch
from hpcroll.errors import ConfigError
from hpcroll.fs import RunPaths, make_directories
from hpcroll.policy import PolicyRegistry


@pytest.fixture
def registry(tmp_path: Path) -> PolicyRegistry:
    paths = RunPaths(tmp_path)
    make_directories(list(paths.directories()))
    return PolicyRegistry(paths)


def publish_main(registry: PolicyRegistry, last: int) -> None:
    for version in range(last + 1):
        registry.publish(version, weights=f"ckpt/{version}")


def test_lag_counts_versions_of_one_lineage(registry: PolicyRegistry) -> None:
    assert registry.lag(0) is None
    publish_main(registry, 5)
    assert [registry.lag(version) for version in (5, 3, 0)] == [0, 2, 5]
    assert registry.lag(6) is None, "that was never published"
    assert registry.lag(0, lineage="other") is None


def test_lag_counts_along_the_branches(registry: PolicyRegistry) -> None:
    publish_main(registry, 20)
    for version in (12, 13, 14):
        registry.publish(version, weights=f"b/{version}", lineage="main-2", parent=("main", 12))
    assert registry.lag(13, lineage="main-2") == 1
    assert registry.lag(12, lineage="main") == 2, "12 of the new lineage is the parent itself"
    assert registry.lag(10, lineage="main") == 4
    assert registry.lag(13, lineage="main") is None, "the newest version does not go back to it"


def test_first_version_after_the_parent_is_one_further(registry: PolicyRegistry) -> None:
    publish_main(registry, 4)
    registry.publish(3, weights="b/3", lineage="main-2", parent=("main", 2))
    registry.publish(7, weights="c/7", lineage="main-3", parent=("main-2", 3))
    assert registry.lag(2, lineage="main") == 1
    assert registry.lag(3, lineage="main-2") == 0, "its numbers began anew with the parent's weights"
    assert registry.lag(4, lineage="main") is None


def test_lineages_tell_what_is_left_of_each(registry: PolicyRegistry) -> None:
    publish_main(registry, 20)
    registry.publish(12, weights="ckpt/12", lineage="main-2", parent=("main", 12))
    registry.publish(15, weights="b/15", lineage="main-2", parent=("main", 12))
    registry.publish(0, weights="x", lineage="stray")
    registry.publish(16, weights="b/16", lineage="main-2")
    found = {lineage.name: lineage for lineage in registry.lineages()}
    assert list(found) == ["main", "main-2", "stray"]
    main, second, stray = found.values()
    assert (main.first, main.latest, main.count, main.parent) == (0, 20, 21, None)
    assert (main.kept, main.lag) == (12, 4)
    assert (second.first, second.latest, second.count) == (12, 16, 3)
    assert second.parent == Branch(lineage="main", version=12)
    assert (second.kept, second.lag) == (16, 0)
    assert (stray.kept, stray.lag) == (None, None)
    assert registry.lineages("lora") == ()


def test_parent_that_was_never_published_is_refused(registry: PolicyRegistry) -> None:
    publish_main(registry, 3)
    with pytest.raises(ConfigError, match=r"from 'main' at version 7: .* known lineages: main"):
        registry.publish(7, weights="w", lineage="main-2", parent=("main", 7))
    assert len(registry.versions()) == 4


def test_lineage_has_one_parent(registry: PolicyRegistry) -> None:
    publish_main(registry, 3)
    registry.publish(2, weights="w", lineage="main-2", parent=("main", 1))
    with pytest.raises(ConfigError, match="began from 'main' at version 1, not from 'main' at version 2"):
        registry.publish(3, weights="w", lineage="main-2", parent=("main", 2))
    with pytest.raises(ConfigError, match="began with no parent"):
        registry.publish(4, weights="w", parent=("main", 2))


def test_window_starts_anew_where_a_lineage_begins(registry: PolicyRegistry) -> None:
    registry.publish(0, weights="ckpt/0")
    registry.window(versions=1, groups_per_version=4)
    for step in range(1, 6):
        registry.publish(step, weights=f"ckpt/{step}")
        registry.settle(4 * step)
    assert registry.allowance().limit == 28
    registry.publish(2, weights="ckpt/2", lineage="main-2", parent=("main", 2))
    assert registry.allowance().limit == 28, "20 are settled, and two versions' worth may follow"
    registry.publish(3, weights="b/3", lineage="main-2", parent=("main", 2))
    assert registry.allowance().limit == 32


def test_window_of_a_trainer_that_reads_old_groups_again_counts_from_its_own_progress(
    registry: PolicyRegistry,
) -> None:
    registry.publish(0, weights="ckpt/0")
    registry.window(versions=1, groups_per_version=4)
    for step in range(1, 6):
        registry.publish(step, weights=f"ckpt/{step}")
        registry.settle(4 * step)
    registry.publish(2, weights="ckpt/2", lineage="main-2", parent=("main", 2), settled=8)
    assert registry.allowance().limit == 16


@pytest.mark.parametrize("first", [0, 1, 7])
def test_trainer_may_publish_what_it_begins_with_or_not(registry: PolicyRegistry, first: int) -> None:
    """A first version 1 was made by a step on what nobody published."""
    registry.window(versions=0, groups_per_version=4)
    assert registry.allowance().limit == 4
    registry.publish(first, weights="w")
    assert registry.allowance().limit == (8 if first == 1 else 4)
    registry.publish(first + 1, weights="w")
    assert registry.allowance().limit == (12 if first == 1 else 8)
