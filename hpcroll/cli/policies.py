"""Commands on the policy: endpoint, and the group `policy`."""

from __future__ import annotations

from typing import Annotated

import typer

from hpcroll.cli.options import Json, RunDirectory

_NAME = typer.Option("--name", help="Policy; the config's model.name where absent.")
_PARTY = typer.Option("--as", help="Whose pause it is; the pauses of several add up.")


def register(app: typer.Typer) -> None:
    """Adds the commands to `app`."""
    app.command()(endpoint)
    group = typer.Typer(no_args_is_help=True, help="Versions of the policy, and pauses for new weights.")
    group.command("list")(list_versions)
    for command in (publish, pause, resume):
        group.command()(command)
    app.add_typer(group, name="policy")


def endpoint(
    run_dir: RunDirectory,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="Starts the server.")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port that the server listens on.")] = 8000,
    host: Annotated[str | None, typer.Option(help="Name under which workers reach it; this host's.")] = None,
    kind: Annotated[
        str | None, typer.Option(help="vllm or sglang; asked of the server where absent.")
    ] = None,
    served_name: Annotated[
        str | None, typer.Option("--served-name", help="Model name that the server expects.")
    ] = None,
    version: Annotated[
        int | None, typer.Option(min=0, help="Policy version that it serves for good, if it does.")
    ] = None,
    ready_s: Annotated[float, typer.Option("--ready-s", help="Longest until it is ready.")] = 1800,
) -> int:
    """Start an inference server, register it with the run once it is ready, withdraw it at its end."""
    from hpcroll.api import Run

    return Run.open(run_dir).serve(
        command,
        port=port,
        host=host,
        kind=kind,
        served_name=served_name,
        version=version,
        ready_timeout_s=ready_s,
    )


def list_versions(run_dir: RunDirectory, json: Json = False) -> None:
    """List the published versions, in order of publication, and say which pauses are in force."""
    from hpcroll.api import Run
    from hpcroll.cli.output import print_rows, say

    policy = Run.open(run_dir).policy
    rows = [
        {
            "name": entry.policy_name,
            "lineage": entry.lineage,
            "version": entry.version,
            "weights": entry.weights,
            "digest": entry.weights_digest,
            "published_at": entry.published_at,
        }
        for entry in policy.versions()
    ]
    print_rows(rows, as_json=json, empty="no version was published")
    for pause in policy.pauses():
        say(f"paused by {pause.name} ({pause.made_by}), for at most {pause.max_s:g} s")


def publish(
    run_dir: RunDirectory,
    version: Annotated[int, typer.Argument(min=0, help="Number of the version.")],
    weights: Annotated[str | None, typer.Option(help="Where its weights lie.")] = None,
    digest: Annotated[str | None, typer.Option(help="Digest of the weights.")] = None,
    name: Annotated[str | None, _NAME] = None,
    lineage: Annotated[str, typer.Option(help="New after a restart from an older checkpoint.")] = "main",
) -> None:
    """Publish a version; the same one again changes nothing, with other weights it is refused."""
    from hpcroll.api import Run

    policy = Run.open(run_dir).policy
    entry = policy.publish(version, weights=weights, digest=digest, name=name, lineage=lineage)
    print(f"published: {entry.policy_name}/{entry.lineage}@{entry.version}")


def pause(
    run_dir: RunDirectory,
    party: Annotated[str, _PARTY] = "operator",
    mode: Annotated[str, typer.Option(help="cut or keep what is in flight after --drain-s.")] = "cut",
    drain_s: Annotated[float, typer.Option("--drain-s", min=0, help="What calls in flight may take.")] = 30,
    max_s: Annotated[float, typer.Option("--max-s", help="The pause ends by itself after this.")] = 300,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout-s", help="Longest wait for workers; --drain-s and 15.")
    ] = None,
    json: Json = False,
) -> int:
    """Let workers start no model call until `policy resume`; status 1 where some have not acted in time."""
    from hpcroll.api import Run
    from hpcroll.cli.output import print_rows

    outcome = Run.open(run_dir).policy.pause(
        name=party, mode=mode, drain_s=drain_s, max_s=max_s, timeout_s=timeout_s
    )
    rows = [{"worker": worker, "missing": missing} for worker, missing in outcome.waiting.items()]
    print_rows(rows, as_json=json, empty="paused: no live worker has a call under way")
    return 0 if outcome.complete else 1


def resume(
    run_dir: RunDirectory,
    party: Annotated[str, _PARTY] = "operator",
    everyone: Annotated[bool, typer.Option("--all", help="Take every party's pause back.")] = False,
) -> None:
    """Take a pause back, so that workers start model calls again."""
    from hpcroll.api import Run

    policy = Run.open(run_dir).policy
    lifted = policy.resume(None if everyone else party)
    left = ", ".join(pause.name for pause in policy.pauses())
    print(("resumed" if lifted else "nothing to resume") + (f"; still paused by {left}" if left else ""))
