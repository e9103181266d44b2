"""The config: what it refuses, and how it says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcroll.config import RunConfig, load_config, parse_config
from hpcroll.errors import ConfigError


def test_an_empty_file_is_the_defaults() -> None:
    assert parse_config("", source="x") == RunConfig()


def test_an_unknown_key_is_named_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"config run\.yaml: stages\.run\.widht: unknown key"):
        parse_config("stages: {run: {widht: 2, width: 1, timeout_s: 5}}", source="run.yaml")


def test_every_wrong_field_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config("model: {context_tokens: 1}\nlaunch: {cpus: none}", source="run.yaml")
    assert "model.context_tokens" in str(caught.value)
    assert "launch.cpus" in str(caught.value)


@pytest.mark.parametrize("text", ["- a list", "just text", "a: [1", "a: 1\na: {b"])
def test_what_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        parse_config(text, source="run.yaml")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml cannot be read"):
        load_config(tmp_path / "nothing.yaml")


def test_overrides_reach_any_depth(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("stages: {run: {width: 1, timeout_s: 5}}")
    config = load_config(path, ["stages.run.width=3", "launch.setup=[module load x]", "sandbox.network=true"])
    assert config.stages.run.width == 3
    assert config.launch.setup == ("module load x",)
    assert config.sandbox.network is True


@pytest.mark.parametrize("override", ["stages.run.width", "=3", "model.name.deeper=1"])
def test_a_malformed_override_is_refused(tmp_path: Path, override: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {name: x}")
    with pytest.raises(ConfigError, match="override"):
        load_config(path, [override])


@pytest.mark.parametrize(
    "legs",
    ["[[init], [run, eval]]", "[[run, init], [eval]]", "[[init, run]]", "[[init, run], [], [eval]]", "[]"],
)
def test_legs_must_cover_the_stages_in_order(legs: str) -> None:
    with pytest.raises(ConfigError, match=r"legs|leg of init"):
        parse_config(f"legs: {legs}", source="x")


def test_legs_are_named_by_their_stages() -> None:
    assert RunConfig().leg_names == ("init+run+eval",)
    split = parse_config("legs: [[init, run], [eval]]", source="x")
    assert split.leg_names == ("init+run", "eval")


def test_a_lease_shorter_than_six_heartbeats_is_refused() -> None:
    with pytest.raises(ConfigError, match="six heartbeats"):
        parse_config("lease: {beat_s: 10, silence_s: 59}", source="x")


def test_the_digest_tells_configs_apart() -> None:
    one = parse_config("model: {name: a}", source="x")
    assert one.digest() == parse_config("{model: {name: a}}", source="y").digest()
    assert one.digest() != RunConfig().digest()
