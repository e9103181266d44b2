"""`python -m hpcroll.testing.policy_server`: the scripted policy server as a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

from hpcroll.errors import ConfigError
from hpcroll.testing.policy_server.script import load_scripts
from hpcroll.testing.policy_server.server import NOTICE, TEMPLATES, PolicyServer
from hpcroll.testing.tiny_tokenizer import write_tokenizer


def main(argv: list[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT; 2 for a script file that cannot be used."""
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    try:
        scripts = load_scripts(options.scripts) if options.scripts else ()
        if options.tokenizer_out is not None:
            write_tokenizer(options.tokenizer_out)
        server = PolicyServer(
            scripts,
            seed=options.seed,
            version=options.version,
            model=options.model,
            template=options.template,
            remember=options.remember,
            noncanonical=options.noncanonical,
            turn_latency_s=options.turn_latency_s,
            token_latency_s=options.token_latency_s,
            context_tokens=options.context_tokens,
            name_version=not options.hide_version,
            incremental=options.incremental,
            log_path=options.log,
        )
    except ConfigError as error:
        print(f"policy_server: {error}", file=sys.stderr)
        return 2
    asyncio.run(_serve(server, options.port, options.port_file))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hpcroll.testing.policy_server", description=NOTICE)
    parser.add_argument("--scripts", type=Path, help="JSON lines, one script each")
    parser.add_argument("--port", type=int, default=0, help="on 127.0.0.1; 0: any free one")
    parser.add_argument("--port-file", type=Path, help="written with the port once the server answers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--version", type=int, default=0, help="policy version that replies name")
    parser.add_argument("--model", default="policy")
    parser.add_argument("--hide-version", action="store_true", help="name no policy version, as vLLM")
    parser.add_argument("--template", choices=TEMPLATES, default="tekken")
    parser.add_argument("--tokenizer-out", type=Path, help="directory for the tokenizer of qwen3")
    parser.add_argument("--remember", action="store_true", help="put sampled ids into the next prompt")
    parser.add_argument("--noncanonical", type=float, help="share of replies, 0 to 1")
    parser.add_argument("--incremental", action="store_true", help="/generate streams what is new only")
    parser.add_argument("--turn-latency-s", type=float, default=0.0)
    parser.add_argument("--token-latency-s", type=float, default=0.0)
    parser.add_argument("--context-tokens", type=int, default=131_072)
    parser.add_argument("--log", type=Path, help="every reply with its ids, as JSON lines")
    return parser


async def _serve(server: PolicyServer, port: int, port_file: Path | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await server.start(port)
    try:
        if port_file is not None:
            # By rename, so that whoever waits for the file never reads half a number.
            partial = port_file.with_name(f"{port_file.name}.{os.getpid()}")
            partial.write_text(f"{server.port}\n")
            partial.replace(port_file)
        print(f"policy server: {server.base_url}/v1 ({NOTICE})", flush=True)
        await stop.wait()
    finally:
        await server.stop()


if __name__ == "__main__":
    sys.exit(main())
