"""What every sandbox provider promises, as tests: subclass `SandboxSuite` and say what to test.

    class TestMySandbox(SandboxSuite):
        def make(self, config: SandboxConfig) -> SandboxProvider:
            return MyProvider(config)

The image must have `sh`, `cat` and `python3`. A promise that the provider does not make on this node (see
`Capabilities`) is skipped by the name of the capability. `ContainmentSuite` is for those that isolate.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path

import pytest

from hpcroll.errors import SandboxError
from hpcroll.sandboxes.base import Sandbox, SandboxSpec
from hpcroll.testing.sandbox_bench import PATIENCE_S, living, python, sh, until
from hpcroll.testing.sandbox_files import FilePromises


class SandboxSuite(FilePromises):
    """Promises of every provider, isolating or not."""

    def test_streams_are_separate_and_the_exit_status_is_the_commands(self, tmp_path: Path) -> None:
        result = self.exec(tmp_path, sh("echo out; echo err >&2; exit 7"))
        assert (result.exit_code, result.stdout, result.stderr) == (7, b"out\n", b"err\n")
        assert not result.timed_out
        assert not result.truncated

    def test_death_by_a_signal_is_a_negative_exit_code(self, tmp_path: Path) -> None:
        assert self.exec(tmp_path, sh("kill -SEGV $$")).exit_code == -11

    def test_a_missing_program_is_an_exit_code_and_not_an_error(self, tmp_path: Path) -> None:
        result = self.exec(tmp_path, ["no-such-program-anywhere"])
        assert result.exit_code == 127
        assert b"no-such-program-anywhere" in result.stderr

    def test_a_missing_directory_is_an_exit_code_and_not_an_error(self, tmp_path: Path) -> None:
        result = self.exec(tmp_path, ["cat"], cwd="no/such/directory")
        assert result.exit_code in (126, 127)
        assert b"no/such/directory" in result.stderr

    @pytest.mark.parametrize("argument", ["a\0b", "\ud800", "x" * (1 << 18)])
    def test_an_argument_that_no_program_can_be_given_is_an_exit_code(
        self, tmp_path: Path, argument: str
    ) -> None:
        async def body(sandbox: Sandbox) -> None:
            result = await sandbox.exec(["cat", argument], timeout_s=PATIENCE_S)
            assert result.exit_code == 126
            assert result.stderr.startswith(b"hpcroll: ")
            with pytest.raises((SandboxError, OSError)):
                await sandbox.get(argument)
            assert await sandbox.alive()

        self.run(tmp_path, body)

    def test_invalid_utf8_passes_unchanged(self, tmp_path: Path) -> None:
        assert self.exec(tmp_path, sh(r"printf '\377\376\000a'")).stdout == b"\xff\xfe\x00a"

    def test_standard_input_arrives_whole_and_ends(self, tmp_path: Path) -> None:
        data = os.urandom(3 << 20)
        result = self.exec(tmp_path, ["cat"], stdin=data, output_bytes=4 << 20)
        assert result.stdout == data
        assert self.exec(tmp_path, ["cat"]).stdout == b""

    def test_commands_start_in_the_empty_writable_work_directory(self, tmp_path: Path) -> None:
        async def body(sandbox: Sandbox) -> None:
            result = await sandbox.exec(sh("pwd; ls -A; mkdir -p a/b"), timeout_s=PATIENCE_S)
            assert result.stdout.decode() == f"{sandbox.workdir}\n"
            inner = await sandbox.exec(["pwd"], cwd="a/b", timeout_s=PATIENCE_S)
            assert inner.stdout.decode() == f"{sandbox.workdir}/a/b\n"

        self.run(tmp_path, body)

    def test_the_environment_is_the_configs_and_nothing_of_the_nodes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HPCROLL_TEST_SECRET", "leaked")
        config = {"env": {"FROM_CONFIG": "1", "BOTH": "config"}}
        result = self.exec(tmp_path, ["env"], config=config, env={"FROM_CALL": "2", "BOTH": "call"})
        env = dict(line.split("=", 1) for line in result.stdout.decode().splitlines())
        assert (env["FROM_CONFIG"], env["FROM_CALL"], env["BOTH"]) == ("1", "2", "call")
        assert {"PATH", "HOME", "TMPDIR"} <= env.keys()
        assert env["LANG"] == "C.UTF-8"
        assert "HPCROLL_TEST_SECRET" not in env

    def test_home_and_temporary_directory_are_writable(self, tmp_path: Path) -> None:
        result = self.exec(tmp_path, sh('touch "$HOME/x" "$TMPDIR/x" && echo done'))
        assert result.stdout == b"done\n", result.stderr

    def test_signals_that_slurm_sends_to_a_step_do_not_end_a_payload(self, tmp_path: Path) -> None:
        result = self.exec(
            tmp_path, python("import os; [os.kill(os.getpid(), n) for n in (10, 12)]; print(1)")
        )
        assert result.stdout == b"1\n"

    def test_other_signals_have_their_default_effect(self, tmp_path: Path) -> None:
        for number in (1, 2, 13, 15):
            result = self.exec(tmp_path, sh(f"kill -{number} $$; sleep 60"))
            assert result.exit_code == -number

    def test_a_timed_out_command_is_reported_and_the_sandbox_stays_usable(self, tmp_path: Path) -> None:
        async def body(sandbox: Sandbox) -> None:
            result = await sandbox.exec(sh("echo before; sleep 600"), timeout_s=0.5)
            assert result.timed_out
            assert result.exit_code is None
            assert result.stdout == b"before\n"
            assert 0.5 <= result.duration_s < PATIENCE_S
            after = await sandbox.exec(["cat"], stdin=b"fine", timeout_s=PATIENCE_S)
            assert (after.exit_code, after.stdout) == (0, b"fine")

        self.run(tmp_path, body)

    def test_a_timed_out_command_leaves_no_process(self, tmp_path: Path) -> None:
        marker = f"marker-{secrets.token_hex(8)}"
        script = f"(setsid sh -c 'sleep 600; : {marker}' &) ; sh -c 'sleep 600; : {marker}'"

        async def body(sandbox: Sandbox) -> None:
            assert (await sandbox.exec(sh(script), timeout_s=0.5)).timed_out
            assert living(marker) == []

        self.run(tmp_path, body)

    def test_a_background_process_neither_delays_nor_outlives_its_command(self, tmp_path: Path) -> None:
        marker = f"marker-{secrets.token_hex(8)}"
        # It keeps both output pipes open, in a session of its own, as a grandchild of nobody.
        script = f"""
            import os, sys
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.execvp("sh", ["sh", "-c", "echo ready; while :; do sleep 600; done", "{marker}"])
                os._exit(0)
            os.wait()
            print("parent done", flush=True)
        """

        async def body(sandbox: Sandbox) -> None:
            result = await sandbox.exec(python(script), timeout_s=PATIENCE_S)
            assert result.exit_code == 0
            assert b"parent done" in result.stdout
            assert result.duration_s < PATIENCE_S / 2
            assert living(marker) == []

        self.run(tmp_path, body)

    def test_cancelling_an_exec_kills_its_command(self, tmp_path: Path) -> None:
        marker = f"marker-{secrets.token_hex(8)}"

        async def body(sandbox: Sandbox) -> None:
            task = asyncio.create_task(
                sandbox.exec(sh(f"(sleep 600; : {marker}) & sleep 600; : {marker}"), timeout_s=600)
            )
            await until(lambda: bool(living(marker)), "the command starts")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert living(marker) == []
            assert (await sandbox.exec(["cat"], stdin=b"fine", timeout_s=PATIENCE_S)).stdout == b"fine"

        self.run(tmp_path, body)

    def test_output_is_capped_with_its_beginning_and_end_kept(self, tmp_path: Path) -> None:
        result = self.exec(tmp_path, python("print('a' * 9 + 'b' * 9_000_000 + 'c' * 9)"), output_bytes=1000)
        assert len(result.stdout) == 1000
        assert result.stdout_bytes == 9_000_019
        assert result.stdout.startswith(b"aaaaaaaaab")
        assert result.stdout.endswith(b"bccccccccc\n")
        assert result.truncated

    def test_commands_run_side_by_side(self, tmp_path: Path) -> None:
        # Each waits for the other's file: one after the other they would never end.
        script = "touch {0}; while [ ! -e {1} ]; do sleep 0.01; done; echo {0}"

        async def body(sandbox: Sandbox) -> None:
            results = await asyncio.gather(
                sandbox.exec(sh(script.format("x", "y")), timeout_s=PATIENCE_S),
                sandbox.exec(sh(script.format("y", "x")), timeout_s=PATIENCE_S),
            )
            assert [result.stdout for result in results] == [b"x\n", b"y\n"]

        self.run(tmp_path, body)

    def test_the_end_of_one_command_leaves_the_others_alone(self, tmp_path: Path) -> None:
        async def body(sandbox: Sandbox) -> None:
            long = asyncio.create_task(
                sandbox.exec(
                    sh("touch up; while [ ! -e end ]; do sleep 0.01; done; echo ok"), timeout_s=PATIENCE_S
                )
            )
            await sandbox.exec(sh("while [ ! -e up ]; do sleep 0.01; done"), timeout_s=PATIENCE_S)
            assert (await sandbox.exec(["sleep", "600"], timeout_s=0.1)).timed_out
            await sandbox.exec(sh("sleep 600 & touch end"), timeout_s=PATIENCE_S)
            assert (await long).stdout == b"ok\n"

        self.run(tmp_path, body)

    def test_a_file_beyond_the_size_limit_is_cut_off(self, tmp_path: Path) -> None:
        script = "with open('big', 'wb') as f:\n while True: f.write(bytes(1 << 20))"
        result = self.exec(tmp_path, python(script), config={"file_mb": 4})
        assert result.exit_code != 0

    def test_a_stopped_sandbox_is_gone_and_says_so(self, tmp_path: Path) -> None:
        marker = f"marker-{secrets.token_hex(8)}"

        async def body(sandbox: Sandbox) -> None:
            assert await sandbox.alive()
            running = asyncio.create_task(sandbox.exec(sh(f"sleep 600; : {marker}"), timeout_s=600))
            await until(lambda: bool(living(marker)), "the command starts")
            await sandbox.stop()
            assert living(marker) == []
            with pytest.raises(SandboxError):
                await running
            assert not await sandbox.alive()
            for call in (sandbox.exec(["cat"], timeout_s=1), sandbox.put(b"", "x"), sandbox.get("x")):
                with pytest.raises(SandboxError):
                    await call
            await sandbox.stop()

        self.run(tmp_path, body)

    def test_stop_removes_the_scratch_whatever_a_payload_left_in_it(self, tmp_path: Path) -> None:
        script = """
            import os
            os.makedirs("closed/inner")
            open("closed/inner/file", "w").close()
            os.chmod("closed/inner", 0)
            os.chmod("closed", 0)
            for _ in range(1500):
                os.mkdir("deep")
                os.chdir("deep")
        """
        result = self.exec(tmp_path, python(script))
        assert result.exit_code == 0, result.stderr
        assert [path.name for path in (tmp_path / "scratch").rglob("test-*")] == []

    def test_a_cancelled_start_leaves_nothing(self, tmp_path: Path) -> None:
        provider = self.provider(tmp_path)

        async def body() -> None:
            for delay_s in (0.0, 0.02, 0.05, 0.1):
                task = asyncio.create_task(provider.start(SandboxSpec(name="test-cancelled", image=None)))
                await asyncio.sleep(delay_s)
                if task.done():
                    await task.result().stop()
                    continue
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert living(str(tmp_path / "scratch")) == []

        asyncio.run(body())
        assert [path.name for path in (tmp_path / "scratch").rglob("test-*")] == []
