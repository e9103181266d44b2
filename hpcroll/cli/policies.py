"""Commands on the policy: endpoint, and the group `policy`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcroll.cli.options import Json, RunDirectory

if TYPE_CHECKING:
    from hpcroll.policy import Allowance, Lineage
    from hpcroll.policy.ledger import PoolLine

_NAME = typer.Option("--name", help="Policy; the config's model.name where absent.")
_PARTY = typer.Option("--as", help="Whose pause it is; the pauses of several add up.")


def register(app: typer.Typer) -> None:
    """Adds the commands to `app`."""
    app.command()(endpoint)
    group = typer.Typer(no_args_is_help=True, help="Versions of the policy, pauses and the window.")
    group.command("list")(list_versions)
    for command in (publish, pause, resume, window, pool):
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
    """List the published versions, in order, with their lag; then lineages, pauses and the window.

    The lag counts versions up to the newest one, along the branches; none where that does not go back to it.
    """
    from hpcroll.api import Run
    from hpcroll.cli.output import print_rows, say

    policy = Run.open(run_dir).policy
    versions = policy.versions()
    lineages = {
        (lineage.policy_name, lineage.name): lineage
        for name in dict.fromkeys(entry.policy_name for entry in versions)
        for lineage in policy.lineages(name)
    }
    rows = [
        {
            "name": entry.policy_name,
            "lineage": entry.lineage,
            "version": entry.version,
            "lag": lineages[entry.policy_name, entry.lineage].behind(entry.version),
            "weights": entry.weights,
            "digest": entry.weights_digest,
            "published_at": entry.published_at,
        }
        for entry in versions
    ]
    print_rows(rows, as_json=json, empty="no version was published")
    for lineage in lineages.values():
        say(_describe(lineage))
    for pause in policy.pauses():
        say(f"paused by {pause.name} ({pause.made_by}), for at most {pause.max_s:g} s")
    if (allowed := policy.allowance()).bounds is not None:
        say(_allowed(allowed))


def publish(
    run_dir: RunDirectory,
    version: Annotated[int, typer.Argument(min=0, help="Number of the version.")],
    weights: Annotated[str | None, typer.Option(help="Where its weights lie.")] = None,
    digest: Annotated[str | None, typer.Option(help="Digest of the weights.")] = None,
    name: Annotated[str | None, _NAME] = None,
    lineage: Annotated[str, typer.Option(help="New after a restart from an older checkpoint.")] = "main",
    parent: Annotated[
        str | None, typer.Option(metavar="LINEAGE@VERSION", help="What a new lineage restarted from.")
    ] = None,
) -> None:
    """Publish a version; the same one again changes nothing, with other weights it is refused."""
    from hpcroll.api import Run

    policy = Run.open(run_dir).policy
    entry = policy.publish(
        version, weights=weights, digest=digest, name=name, lineage=lineage, parent=_parse_parent(parent)
    )
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


def window(
    run_dir: RunDirectory,
    groups: Annotated[
        int | None, typer.Option(min=1, help="Groups that may be started and not settled.")
    ] = None,
    versions: Annotated[
        int | None, typer.Option(min=0, help="Versions that rollouts may be ahead; with the next one.")
    ] = None,
    groups_per_version: Annotated[
        int | None, typer.Option("--groups-per-version", min=1, help="Groups trained on for each version.")
    ] = None,
    settle: Annotated[
        int | None, typer.Option(min=0, help="Say for the trainer that it is through with this many groups.")
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="Take the window away.")] = False,
    json: Json = False,
) -> None:
    """Set how far rollouts may be ahead of the trainer; without options, say what may be started."""
    from hpcroll.api import Run
    from hpcroll.cli.output import print_json
    from hpcroll.errors import ConfigError

    policy = Run.open(run_dir).policy
    given = (groups, versions, groups_per_version) != (None, None, None)
    if off and given:
        raise ConfigError("--off takes the window away; give it without bounds")
    if off:
        policy.lift_window()
    elif given:
        policy.window(groups=groups, versions=versions, groups_per_version=groups_per_version)
    if settle is not None:
        policy.settle(settle)
    allowed = policy.allowance()
    if json:
        print_json(_allowance_json(allowed))
    else:
        print(_allowed(allowed))


def pool(
    run_dir: RunDirectory,
    key: Annotated[str | None, typer.Argument(help="The pool's key; where absent, every pool.")] = None,
    json: Json = False,
) -> None:
    """Show the ledger of `Run.replenish`: groups that add up, what was replaced and cancelled, the bias.

    Numbers of groups are since the run began; kept and cut rollouts are those since the line before.
    """
    from hpcroll.api import Run
    from hpcroll.cli.output import print_rows

    pools = Run.open(run_dir).policy.pools()
    rows = [_pool_row(line) for name, lines in pools.items() if key is None or name == key for line in lines]
    print_rows(rows, as_json=json, empty="no pool was filled")


def _pool_row(line: PoolLine) -> dict[str, Any]:
    bias = line.bias
    return {
        "pool": line.key,
        "step": line.step,
        "between": line.between,
        "submitted": line.fates.submitted,
        **line.fates.model_dump(),
        "added": line.added,
        "epoch": line.epoch,
        "early": len(line.surplus),
        "excluded": len(line.excluded),
        "kept": bias.kept.rollouts,
        "kept_tokens_mean": bias.kept.tokens_mean,
        "kept_tokens_median": bias.kept.tokens_median,
        "kept_run_s_mean": bias.kept.run_s_mean,
        "kept_run_s_median": bias.kept.run_s_median,
        "cut": bias.cancelled.rollouts,
        "cut_tokens_mean": bias.cancelled.tokens_mean,
        "cut_tokens_median": bias.cancelled.tokens_median,
        "cut_run_s_mean": bias.cancelled.run_s_mean,
        "cut_run_s_median": bias.cancelled.run_s_median,
        "never_started": bias.never_started,
    }


def _parse_parent(text: str | None) -> tuple[str, int] | None:
    from hpcroll.errors import ConfigError

    if text is None:
        return None
    lineage, _, version = text.rpartition("@")
    if not lineage or not version.isdecimal():
        raise ConfigError(f"--parent {text!r} is not LINEAGE@VERSION, such as main@12")
    return lineage, int(version)


def _describe(lineage: Lineage) -> str:
    text = f"lineage {lineage.policy_name}/{lineage.name}: versions {lineage.first} to {lineage.latest}"
    if lineage.parent is not None:
        text += f", from {lineage.parent.lineage}@{lineage.parent.version}"
    if lineage.lag is None:
        return f"{text}; the newest version does not go back to it"
    return (
        f"{text}; {lineage.lag} behind from version {lineage.kept} on" if lineage.lag else f"{text}; newest"
    )


def _allowed(allowed: Allowance) -> str:
    if allowed.bounds is None:
        return f"no window; {allowed.settled} groups settled"
    bounds = [f"{by} by {name}" for name, by in _limits(allowed).items() if by is not None]
    return f"groups below {allowed.limit} may be started ({', '.join(bounds)}); {allowed.settled} settled"


def _limits(allowed: Allowance) -> dict[str, int | None]:
    return {"groups": allowed.by_groups, "versions": allowed.by_versions}


def _allowance_json(allowed: Allowance) -> dict[str, Any]:
    bounds = None if allowed.bounds is None else allowed.bounds.model_dump()
    return {
        "bounds": bounds,
        "limit": allowed.limit,
        "limits": _limits(allowed),
        "settled": allowed.settled,
        "dropped": allowed.dropped,
    }
