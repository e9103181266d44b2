"""What the scripted policy has to know of each agent program: its tools, and how it says that it is done."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import JsonValue

from hpcroll.testing.policy_server import Behaviour, Turn
from hpcroll.testing.policy_server.faults import Fault, FaultKind
from hpcroll.testing.policy_server.script import ToolCall

WORKDIR = "/work"
PROMPT = "The function add of calc.py does not add. Put it right, and write süß behind it."
LAST_WORDS = "Fertig: die Prüfung besteht ✓."
BUG = "    return a - b\n"
FIX = "    return a + b  # süß ☕ 日本語\n"
TEST = "python3 -m unittest test_calc"


@dataclass(frozen=True)
class Agent:
    """An agent program and its tools."""

    name: str
    """Of the harness."""
    run: Callable[[str], ToolCall]
    read: Callable[[str], ToolCall]
    replace: Callable[[str, str, str], ToolCall]
    """Path, old text, new text."""
    refusal: str
    """What its edit tool says of a text that is not in the file."""
    done: ToolCall | None = None
    """What ends it; None: a reply that calls no tool."""
    answers: bool = True
    """That reply is the rollout's answer."""
    insists: bool = False
    """A reply that calls no tool is taken out of the history, and a user message asks for one."""


def work(
    agent: Agent,
    *,
    rounds: int = 0,
    look: str = "wc -l calc.py test_calc.py",
    fault: Fault | None = None,
) -> Behaviour:
    """Solves the task: looks, reads two files at once, fails an edit, makes it, tests; `rounds` looks more.

    A quarter of the replies or more is tokenised otherwise than its text encodes, with characters beyond
    ASCII byte by byte and across chunks. The policy becomes one version newer in the middle of a reply.
    """
    newer = Fault(kind=FaultKind.VERSION, after_tokens=3)
    turns = [
        Turn(
            text="Ich schaue mir das an: café ☕, 日本語.",
            reasoning="Zuerst ein Blick über alles: süß.",
            tools=(agent.run("ls; git log --oneline"),),
            bytewise=True,
        ),
        Turn(
            text="Both files.",
            reasoning="I read them at once.",
            tools=(agent.read("calc.py"), agent.read("test_calc.py")),
            noncanonical=1,
        ),
        Turn(text="What fails?", tools=(agent.run(TEST),), fault=newer),
        Turn(
            text="I change it.",
            reasoning="It subtracts.",
            tools=(agent.replace("calc.py", "    return a * b\n", FIX),),
        ),
        Turn(
            text="That text is not there.",
            reasoning="I look again.",
            tools=(agent.read("calc.py"),),
            fault=fault,
        ),
        Turn(reasoning="Now the right one.", tools=(agent.replace("calc.py", BUG, FIX),), noncanonical=1),
        *(
            Turn(
                text=f"Look number {number}.",
                reasoning=f"I want to be sure, for the {number}. time.",
                tools=(agent.run(f"echo look {number}; {look}"),),
                noncanonical=number % 4 == 0,
            )
            for number in range(rounds)
        ),
        Turn(
            text="Does it pass?",
            reasoning="Test and difference.",
            tools=(agent.run(TEST), agent.run("git diff | cat")),
        ),
        Turn(text="Once more, as a whole.", tools=(agent.run("cat calc.py"),)),
    ]
    if agent.insists and rounds:
        turns.insert(rounds // 2, Turn(text="I think aloud.", reasoning="And I call nothing."))
    done = () if agent.done is None else (agent.done,)
    turns.append(Turn(text=LAST_WORDS, reasoning="Nothing is left to do.", tools=done, bytewise=True))
    plain = {"noncanonical": 0}
    turns = [turn.model_copy(update=plain) if turn.noncanonical is None else turn for turn in turns]
    return Behaviour(name=agent.name, turns=tuple(turns), count="requests")


def _call(name: str, **arguments: JsonValue) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def _cat(run: Callable[[str], ToolCall]) -> Callable[[str], ToolCall]:
    return lambda path: run(f"cat {shlex.quote(path)}")


def _exec_command(command: str) -> ToolCall:
    return _call("exec_command", cmd=command)


def _apply_patch(path: str, old: str, new: str) -> ToolCall:
    patch = f"*** Begin Patch\n*** Update File: {path}\n@@\n-{old}+{new}*** End Patch"
    return _exec_command(f"apply_patch <<'EOP'\n{patch}\nEOP")


def _bash(command: str) -> ToolCall:
    return _call("bash", command=command)


def _by_python(path: str, old: str, new: str) -> ToolCall:
    program = (
        f"from pathlib import Path\nfile, old, new = Path({path!r}), {old!r}, {new!r}\n"
        "text = file.read_text()\nassert old in text, 'no such text'\n"
        "file.write_text(text.replace(old, new))\n"
    )
    return _bash(f"python3 - <<'EOP'\n{program}EOP")


def _like_opencode(name: str) -> Agent:
    return Agent(
        name,
        run=lambda command: _call("bash", command=command, description="a step"),
        read=lambda path: _call("read", filePath=f"{WORKDIR}/{path}"),
        replace=lambda path, old, new: _call(
            "edit", filePath=f"{WORKDIR}/{path}", oldString=old, newString=new
        ),
        refusal="Could not find oldString in the file",
    )


AGENTS = {
    agent.name: agent
    for agent in (
        Agent(
            "claude_code",
            run=lambda command: _call("Bash", command=command, description="a step"),
            read=lambda path: _call("Read", file_path=f"{WORKDIR}/{path}"),
            replace=lambda path, old, new: _call(
                "Edit", file_path=f"{WORKDIR}/{path}", old_string=old, new_string=new
            ),
            refusal="String to replace not found in file",
        ),
        Agent(
            "cline",
            run=lambda command: _call("run_commands", commands=[command]),
            read=lambda path: _call("read_files", files=[{"path": f"{WORKDIR}/{path}"}]),
            replace=lambda path, old, new: _call(
                "editor", path=f"{WORKDIR}/{path}", old_text=old, new_text=new
            ),
            refusal="No replacement performed",
            answers=False,
        ),
        Agent(
            "codex",
            run=_exec_command,
            read=_cat(_exec_command),
            replace=_apply_patch,
            refusal="Failed to find expected lines",
        ),
        Agent(
            "continue_cli",
            run=lambda command: _call("Bash", command=command),
            read=lambda path: _call("Read", filepath=path),
            replace=lambda path, old, new: _call("Edit", file_path=path, old_string=old, new_string=new),
            refusal="string not found in file",
        ),
        Agent(
            "deepagents_code",
            run=lambda command: _call("execute", command=command),
            read=lambda path: _call("read_file", file_path=f"{WORKDIR}/{path}"),
            replace=lambda path, old, new: _call(
                "edit_file", file_path=f"{WORKDIR}/{path}", old_string=old, new_string=new
            ),
            refusal="String not found in file",
        ),
        Agent(
            "gemini_cli",
            run=lambda command: _call("run_shell_command", command=command),
            read=lambda path: _call("read_file", file_path=path),
            replace=lambda path, old, new: _call(
                "replace", file_path=path, instruction="put it right", old_string=old, new_string=new
            ),
            refusal="Could not find an exact match",
        ),
        Agent(
            "grok_cli",
            run=_bash,
            read=lambda path: _call("view_file", path=path),
            replace=lambda path, old, new: _call("str_replace_editor", path=path, old_str=old, new_str=new),
            refusal="String not found in file",
            answers=False,
        ),
        _like_opencode("kilo_code"),
        Agent(
            "mini_swe_agent",
            run=_bash,
            read=_cat(_bash),
            replace=_by_python,
            refusal="no such text",
            answers=False,
            done=_bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
            insists=True,
        ),
        Agent(
            "mistral_vibe",
            run=_bash,
            read=lambda path: _call("read_file", path=path),
            replace=lambda path, old, new: _call("edit", file_path=path, old_string=old, new_string=new),
            refusal="old_str not found in",
        ),
        _like_opencode("opencode"),
        Agent(
            "openhands",
            run=lambda command: _call("terminal", command=command),
            read=lambda path: _call("file_editor", command="view", path=f"{WORKDIR}/{path}"),
            replace=lambda path, old, new: _call(
                "file_editor", command="str_replace", path=f"{WORKDIR}/{path}", old_str=old, new_str=new
            ),
            refusal="did not appear verbatim",
            answers=False,
            done=_call("finish", message=LAST_WORDS),
        ),
        Agent(
            "pi",
            run=_bash,
            read=lambda path: _call("read", path=path),
            replace=lambda path, old, new: _call("edit", path=path, edits=[{"oldText": old, "newText": new}]),
            refusal="Could not find the exact text",
        ),
        Agent(
            "qwen_code",
            run=lambda command: _call("run_shell_command", command=command, is_background=False),
            read=lambda path: _call("read_file", file_path=f"{WORKDIR}/{path}"),
            replace=lambda path, old, new: _call(
                "edit", file_path=f"{WORKDIR}/{path}", old_string=old, new_string=new
            ),
            refusal="0 occurrences found for old_string",
        ),
    )
}
