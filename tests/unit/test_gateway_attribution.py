"""Which versions may have served a call: never fewer than may have, never two lineages in one range."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hpcroll.contract import PolicyId
from hpcroll.gateway.attribution import served_by


def policy(version: int, lineage: str = "main") -> PolicyId:
    return PolicyId(policy_name="p", lineage=lineage, version_low=version, version_high=version)


def spans(found: PolicyId | None) -> tuple[str, int, int]:
    assert found is not None
    return found.lineage, found.version_low, found.version_high


def test_engines_word_is_exact() -> None:
    assert spans(served_by(policy(3), policy(5), name="p", named=(4,))) == ("main", 4, 4)
    assert spans(served_by(policy(3), policy(5), name="p", named=(4, 5, 4))) == ("main", 4, 5)


def test_version_of_a_fixed_server_counts_where_the_engine_is_silent() -> None:
    assert spans(served_by(policy(3), policy(5), name="p", fixed=2)) == ("main", 2, 2)
    assert spans(served_by(policy(3), policy(5), name="p", named=(4,), fixed=2)) == ("main", 4, 4)


def test_silent_engine_gets_the_range_and_never_a_single_version() -> None:
    assert spans(served_by(policy(3), policy(5), name="p")) == ("main", 2, 5)
    assert spans(served_by(policy(5), policy(5), name="p")) == ("main", 4, 5)
    assert spans(served_by(policy(0), policy(0), name="p")) == ("main", 0, 0)


def test_numbers_that_a_trainer_left_out_are_no_versions() -> None:
    history = [policy(10), policy(20), policy(30), policy(25, "other")]
    assert spans(served_by(policy(30), policy(30), name="p", history=history)) == ("main", 20, 30)
    assert spans(served_by(policy(20), policy(30), name="p", history=history)) == ("main", 10, 30)
    assert spans(served_by(policy(10), policy(10), name="p", history=history)) == ("main", 9, 10)


def test_call_between_two_lineages_is_the_older_ones() -> None:
    assert spans(served_by(policy(7), policy(3, "restart"), name="p")) == ("main", 6, 7)


def test_named_version_has_the_lineage_that_published_it() -> None:
    history = [policy(6), policy(7), policy(3, "restart"), policy(4, "restart")]
    before = after = policy(4, "restart")
    assert spans(served_by(before, after, name="p", named=(7,), history=history)) == ("main", 7, 7)
    assert spans(served_by(before, after, name="p", named=(3,), history=history)) == ("restart", 3, 3)
    assert spans(served_by(before, after, name="p", named=(9,), history=history)) == ("restart", 9, 9)
    # Reloaded in the middle of the call.
    assert spans(served_by(before, after, name="p", named=(7, 3), history=history)) == ("main", 3, 7)


def test_without_a_registry_the_engines_word_is_all_there_is() -> None:
    assert served_by(None, None, name="p") is None
    found = served_by(None, None, name="p", named=(4,))
    assert found == PolicyId(policy_name="p", lineage="", version_low=4, version_high=4)
    assert spans(served_by(None, policy(2), name="p")) == ("main", 1, 2)
    assert spans(served_by(policy(2), None, name="p")) == ("main", 1, 2)


@settings(max_examples=400, deadline=None, database=None)
@given(st.data())
def test_range_holds_whatever_the_engine_served(data: st.DataObject) -> None:
    """A trainer publishes, the engine loads it at any time after that, and samples a token at any time.

    The gateway's knowledge before the call is as old as it likes, that after the call is not older than the
    last token. The engine does not lag by more than one version when the call begins.
    """
    published = sorted(data.draw(st.lists(st.integers(0, 100), min_size=1, max_size=12)))
    loaded: list[int] = []
    for number, at in enumerate(published):
        latest = published[number + 1] if number + 1 < len(published) else 130
        earliest = max([at, *loaded])
        loaded.append(data.draw(st.integers(earliest, max(earliest, latest))))
    begin = data.draw(st.integers(loaded[0], 140))
    end = data.draw(st.integers(begin, 150))
    seen_before = data.draw(st.integers(published[0], begin))

    def newest(times: list[int], now: int) -> int:
        return max(number for number, at in enumerate(times) if at <= now)

    found = served_by(policy(newest(published, seen_before)), policy(newest(published, end)), name="p")
    assert found is not None
    for token_at in {begin, end, data.draw(st.integers(begin, end))}:
        served = newest(loaded, token_at)
        assert found.version_low <= served <= found.version_high
