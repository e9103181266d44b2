"""What a provider that isolates promises of hostile payloads, as tests."""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import socket
from pathlib import Path
from typing import Any

import pytest

from hpcroll.sandboxes.base import Sandbox
from hpcroll.testing.sandbox_bench import PATIENCE_S, SandboxBench, living, python, sh

GIGABYTE = 1 << 30


class ContainmentSuite(SandboxBench):
    """Promises of providers with namespaces; each attack runs, and then the sandbox must still serve."""

    def survives(self, tmp_path: Path, argv: list[str], **config: Any) -> Any:
        """The result of the attack `argv`; the sandbox answered after it, and nothing of it was left."""
        marker = f"marker-{secrets.token_hex(8)}"

        async def body(sandbox: Sandbox) -> Any:
            result = await sandbox.exec([*argv, marker], timeout_s=PATIENCE_S)
            assert living(marker) == []
            after = await sandbox.exec(["cat"], stdin=b"fine", timeout_s=PATIENCE_S)
            assert (after.exit_code, after.stdout) == (0, b"fine")
            return result

        return self.run(tmp_path, body, **config)

    @pytest.mark.parametrize("target", ["0", "-1", "1"])
    def test_kill_of_everything_ends_at_the_command(self, tmp_path: Path, target: str) -> None:
        self.survives(tmp_path, python(f"import os; os.kill({target}, 9)"))

    def test_kill_of_everything_spares_other_commands(self, tmp_path: Path) -> None:
        async def body(sandbox: Sandbox) -> None:
            other = asyncio.create_task(
                sandbox.exec(
                    sh("touch up; while [ ! -e end ]; do sleep 0.01; done; echo ok"), timeout_s=PATIENCE_S
                )
            )
            await sandbox.exec(sh("while [ ! -e up ]; do sleep 0.01; done; kill -9 -1"), timeout_s=PATIENCE_S)
            await sandbox.exec(["touch", "end"], timeout_s=PATIENCE_S)
            assert (await other).stdout == b"ok\n"

        self.run(tmp_path, body)

    def test_double_forked_daemons_are_dead_on_return(self, tmp_path: Path) -> None:
        script = """
            import os, sys
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.execvp("sh", ["sh", "-c", "trap '' TERM; while :; do sleep 600; done", sys.argv[1]])
                os._exit(0)
            os.wait()
        """
        assert self.survives(tmp_path, python(script)).exit_code == 0

    def test_a_gigabyte_of_stderr_costs_the_worker_no_memory(self, tmp_path: Path) -> None:
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = self.survives(tmp_path, sh("head -c 1073741824 /dev/zero >&2"))
        grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
        assert result.stderr_bytes == GIGABYTE
        assert len(result.stderr) == 1 << 20
        assert grown_kb < 64 << 10

    def test_a_fork_bomb_meets_its_limit(self, tmp_path: Path) -> None:
        if "processes" in self.provider(tmp_path).probe().reasons:
            pytest.skip("capability missing: a limit on the processes of one sandbox")
        script = """
            import os, time
            made = 0
            try:
                while made < 100_000:
                    if os.fork() == 0:
                        time.sleep(600)
                    made += 1
            except BlockingIOError:
                print(made)
        """
        result = self.survives(tmp_path, python(script), processes=64)
        assert 1 <= int(result.stdout) <= 64

    def test_files_of_the_node_are_out_of_sight(self, tmp_path: Path) -> None:
        secret = tmp_path / "hidden_tests.py"
        secret.write_text("the answer")
        result = self.exec(tmp_path, ["cat", str(secret)])
        assert result.exit_code != 0
        assert b"the answer" not in result.stdout
        home = self.exec(tmp_path, ["ls", str(Path.home())])
        assert home.stdout == b"" or home.exit_code != 0

    def test_nothing_outside_the_scratch_can_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "outside").mkdir(mode=0o777)
        script = f"mkdir -p {tmp_path}/outside; touch {tmp_path}/outside/x /usr/x /proc/sys/kernel/x; exit 0"
        self.exec(tmp_path, sh(script))
        assert list((tmp_path / "outside").iterdir()) == []
        assert not Path("/usr/x").exists()

    def test_planted_links_do_not_lead_the_worker_out(self, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_text("untouched")

        async def body(sandbox: Sandbox) -> None:
            await sandbox.exec(
                sh(f"ln -s {secret} file; ln -s {tmp_path} dir; ln -s /proc/1/root root"),
                timeout_s=PATIENCE_S,
            )
            for path in ("file", "dir/secret", f"root{secret}"):
                with pytest.raises((OSError, Exception), match=r"."):
                    await sandbox.get(path)
            await sandbox.put(b"replaced", "file")

        self.run(tmp_path, body)
        assert secret.read_text() == "untouched"

    def test_the_nodes_processes_are_neither_seen_nor_signalled(self, tmp_path: Path) -> None:
        script = f"""
            import os
            pids = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
            try:
                os.kill({os.getpid()}, 9)
            except ProcessLookupError:
                pass
            print(len(pids), os.getpid() in pids)
        """
        count, own = self.exec(tmp_path, python(script)).stdout.split()
        assert int(count) <= 3
        assert own == b"True"

    def test_a_payload_has_no_privileges(self, tmp_path: Path) -> None:
        lines = self.exec(tmp_path, ["cat", "/proc/self/status"]).stdout.decode().splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        for name in ("CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb"):
            assert int(status[name], 16) == 0, name
        assert status["NoNewPrivs"] == "1"

    def test_the_process_that_runs_commands_cannot_be_touched(self, tmp_path: Path) -> None:
        script = """
            import ctypes, os
            PTRACE_ATTACH = 16
            assert ctypes.CDLL(None).ptrace(PTRACE_ATTACH, 1, 0, 0) == -1
            for name in ("mem", "environ", "root", "cwd", "fd/0"):
                try:
                    os.open(f"/proc/1/{name}", os.O_RDONLY)
                except PermissionError:
                    continue
                raise SystemExit(name)
            for number in (9, 15, 19, 10, 12, 2):
                os.kill(1, number)
            print("untouched")
        """
        result = self.survives(tmp_path, python(script))
        assert result.stdout == b"untouched\n", result.stderr

    def test_a_command_inherits_its_three_streams_and_nothing_else(self, tmp_path: Path) -> None:
        script = "import os; print(sorted(os.listdir('/proc/self/fd')))"
        assert (
            self.exec(tmp_path, python(script)).stdout == b"['0', '1', '2', '3']\n"
        )  # 3: the listing itself

    def test_closing_every_descriptor_harms_nobody(self, tmp_path: Path) -> None:
        self.survives(tmp_path, python("import os; os.closerange(0, 4096); os._exit(0)"))

    def test_the_network_ends_at_the_sandbox(self, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            script = f"""
                import socket
                for host, port in (("127.0.0.1", {port}), ("10.0.0.1", 80), ("8.8.8.8", 53)):
                    try:
                        socket.create_connection((host, port), timeout=5).close()
                        print("reached", host)
                    except OSError:
                        pass
                print(sorted(name for _i, name in socket.if_nameindex() if name not in ("tunl0", "sit0")))
            """
            assert self.exec(tmp_path, python(script)).stdout == b"['lo']\n"

    def test_a_handed_out_socket_is_the_way_in_and_the_only_one(self, tmp_path: Path) -> None:
        script = """
            import socket
            with socket.create_connection(("127.0.0.1", 8000), timeout=30) as client:
                client.sendall(b"ping")
                print(client.recv(4).decode())
        """

        async def body(sandbox: Sandbox) -> None:
            listener = await sandbox.listen(8000)
            with listener:
                listener.setblocking(False)
                loop = asyncio.get_running_loop()
                command = asyncio.create_task(sandbox.exec(python(script), timeout_s=PATIENCE_S))
                client, _address = await asyncio.wait_for(loop.sock_accept(listener), PATIENCE_S)
                with client:
                    assert await loop.sock_recv(client, 4) == b"ping"
                    await loop.sock_sendall(client, b"pong")
                    result = await command
            assert result.stdout == b"pong\n", result.stderr
            # Each sandbox has its own port 8000, and none of them is the node's.
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", 8000), timeout=5).close()

        self.run(tmp_path, body)

    def test_a_full_disk_is_the_payloads_error(self, tmp_path: Path) -> None:
        script = """
            import os
            for place in (".", os.environ["HOME"], "/tmp", "/var/tmp", "/dev/shm"):
                try:
                    with open(f"{place}/big", "wb") as file:
                        while True:
                            file.write(bytes(1 << 20))
                except OSError as error:
                    print(error.errno, end=" ")
            print(sum(os.path.getsize(p + "/big") for p in (".", "/tmp", "/dev/shm")) <= 32 << 20)
        """
        result = self.survives(tmp_path, python(script), disk_mb=32)
        assert result.stdout == b"28 28 28 28 28 True\n", result.stderr

    def test_memory_beyond_the_limit_is_freed_by_force(self, tmp_path: Path) -> None:
        script = (
            "import time\nblocks = []\nwhile True:\n  blocks.append(bytearray(4 << 20)); time.sleep(0.002)"
        )
        result = self.survives(tmp_path, python(script), memory_mb=128)
        assert result.exit_code == -9
        assert b"memory" in result.stderr
