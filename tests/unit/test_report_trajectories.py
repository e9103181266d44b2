"""What `hpcroll show` prints: everything that matters, nothing that steers a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcroll.contract import Action
from hpcroll.errors import ConfigError
from hpcroll.report import print_trajectory, trajectory_json
from hpcroll.report.token_view import load_decoder, stretches
from hpcroll.testing.trajectories import random_trajectory
from tests.call_graphs import imagine, trajectory_of

MOVES = [("rerender", 0), ("retry", 0), ("aside", 0), ("spawn", 0), ("lose", 0), ("cut", 0)]
TRAJECTORY = trajectory_of(imagine(3, MOVES))


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TERM", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)


def printed(capsys: pytest.CaptureFixture[str], trajectory: Any = TRAJECTORY, **options: Any) -> str:
    print_trajectory(trajectory, **options)
    return capsys.readouterr().out


def with_call(**fields: Any) -> Any:
    """A trajectory whose first call has other fields."""
    record = TRAJECTORY.record
    first = record.calls[0].model_copy(update=fields)
    changed = record.model_copy(update={"calls": (first, *record.calls[1:])})
    return type(TRAJECTORY)(changed, TRAJECTORY.tokens)


def test_overview_shows_each_segment_beneath_its_parent(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys).splitlines()
    for segment in TRAJECTORY.record.segments:
        [line] = [one for one in lines if f"─ {segment.segment_index} {segment.role}" in one]
        assert segment.began in line
        assert f"{segment.length} tokens" in line
        depth = line.index("─")
        if segment.parent is not None:
            assert f"at {segment.parent.length}" in line
            assert depth > 1
    assert any("log-probability" in line for line in lines if line.startswith("dropped"))


def test_output_into_a_file_is_plain_and_unbroken(capsys: pytest.CaptureFixture[str]) -> None:
    long = "word " * 60
    text = printed(capsys, with_call(messages=({"role": "user", "content": long},)))
    assert "\x1b" not in text
    assert f"    {long.strip()}" in text


def test_turns_show_roles_tool_calls_and_what_the_tools_did(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = json.dumps({"command": "ls -l\ncat a", "wait": 3})
    reply = {
        "role": "assistant",
        "reasoning_content": "perhaps",
        "content": "I look.",
        "tool_calls": [{"function": {"name": "bash", "arguments": arguments}}],
    }
    action = Action(
        call_index=0,
        name="bash",
        argument_sha256="",
        started_s=0,
        duration_s=1.5,
        exit_code=2,
        output_bytes=7,
    )
    trajectory = with_call(
        messages=({"role": "user", "content": [{"type": "text", "text": "Go"}]},), reply=reply
    )
    record = trajectory.record.model_copy(update={"actions": (action,)})
    text = printed(capsys, type(trajectory)(record, trajectory.tokens), call=0)
    expected = ["user", "Go", "assistant thinks", "perhaps", "I look.", "assistant calls bash"]
    expected += ["command: ls -l", "cat a", "wait: 3", "action bash: 1.50 s, exit 2, 7 bytes of output"]
    places = [text.index(words) for words in expected]
    assert places == sorted(places)
    assert "call 1 " not in text


def test_text_of_an_agent_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "a\x1b[2Jb\x07c\r\u202ed [bold]e[/bold]"
    text = printed(capsys, with_call(reply={"role": "assistant", "content": evil}), call=0)
    assert "a\\x1b[2Jb\\x07c\\x0d\\x202ed [bold]e[/bold]" in text


def test_long_texts_lose_their_middle(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, with_call(reply={"role": "assistant", "content": f"begin{'x' * 9000}end"}), call=0)
    assert "characters left out" in text
    assert "begin" in text
    assert "end" in text
    assert len(text) < 4000


def test_partial_trajectory_says_so_first(capsys: pytest.CaptureFixture[str]) -> None:
    record = TRAJECTORY.record.model_copy(update={"partial": "attempt 1 on w was killed with its worker"})
    text = printed(capsys, type(TRAJECTORY)(record, TRAJECTORY.tokens))
    assert "PARTIAL: attempt 1 on w was killed" in "\n".join(text.splitlines()[:3])
    assert "completed" not in text


def test_token_view_names_every_stretch_and_shows_every_sampled_id(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(capsys, tokens=True)
    for segment, arrays in zip(TRAJECTORY.record.segments, TRAJECTORY.tokens, strict=True):
        for item in stretches(TRAJECTORY, segment):
            assert f"[{item.start}, {item.stop})" in text
        shown = set(text.split())
        assert {str(token) for token in arrays.ids[arrays.sampled == 1].tolist()} <= shown
    assert "policy changes: p/main@" in text
    assert ", not trained, call " in text
    assert ", trained, call " in text


@pytest.mark.parametrize("seed", range(30))
def test_stretches_cover_each_segment_and_agree_with_its_arrays(seed: int) -> None:
    trajectory = random_trajectory(seed)
    for segment, arrays in zip(trajectory.record.segments, trajectory.tokens, strict=True):
        position = 0
        for item in stretches(trajectory, segment):
            assert item.start == position
            assert np.all(arrays.sampled[item.start : item.stop] == item.sampled)
            assert np.all(arrays.loss_mask[item.start : item.stop] == item.trained)
            position = item.stop
        assert position == len(arrays)


def test_colours_tell_probable_from_improbable_and_masked_from_trained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    segment = next(s.segment_index for s in TRAJECTORY.record.segments if s.role == "auxiliary")
    [token] = TRAJECTORY.tokens[segment].ids[TRAJECTORY.tokens[segment].sampled == 1][:1].tolist()
    text = printed(capsys, tokens=True)
    assert f"\x1b[9;32m{token} " in text  # struck through, and likely
    [trained] = TRAJECTORY.tokens[0].ids[TRAJECTORY.tokens[0].loss_mask == 1][:1].tolist()
    assert f"\x1b[32m{trained} " in text
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in printed(capsys, tokens=True)


def test_one_segment_or_one_call_is_shown_alone(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, tokens=True, segment=1)
    assert "segment 1 (" in text
    assert "segment 0 (" not in text
    text = printed(capsys, tokens=True, call=0)
    assert "call 0," in text
    assert "call 1," not in text
    assert "context," not in text
    with pytest.raises(ConfigError, match="none is 99"):
        print_trajectory(TRAJECTORY, segment=99)
    with pytest.raises(ConfigError, match="none is 999"):
        print_trajectory(TRAJECTORY, call=999)


def test_raw_is_one_line_for_each_token(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, raw=True, segment=0).splitlines()
    assert len(lines) == 1 + len(TRAJECTORY.tokens[0])
    position, token, who, mask, *_ = lines[1].split()
    assert (position, token, who, mask) == ("0", str(TRAJECTORY.tokens[0].ids[0]), "context", "0")


def test_json_holds_the_record_and_the_arrays_where_asked() -> None:
    assert "tokens" not in trajectory_json(TRAJECTORY)
    shown = json.loads(json.dumps(trajectory_json(TRAJECTORY, tokens=True), allow_nan=False))
    assert shown["rollout_id"] == TRAJECTORY.record.rollout_id
    for arrays, columns in zip(TRAJECTORY.tokens, shown["tokens"], strict=True):
        assert columns["ids"] == arrays.ids.tolist()
        assert [value is None for value in columns["logprobs"]] == (arrays.sampled == 0).tolist()


def test_tokens_are_decoded_with_characters_that_two_of_them_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({char: n for n, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    decode = load_decoder(tmp_path)
    ids = tokenizer.encode("né ok").ids
    assert "".join(decode(ids)) == "né ok"
    assert decode([*ids[:1], 100_000]) == ["n", "<100000>"]
    assert "<0>" not in printed(capsys, tokens=True, segment=0, decode=decode)
    with pytest.raises(ConfigError, match="does not exist"):
        load_decoder(tmp_path / "nowhere")
