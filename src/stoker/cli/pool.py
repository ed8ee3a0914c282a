"""``stoker pool``: a server for the pool on this node, and what the servers of a pool hold."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from stoker.errors import ConfigError
from stoker.node.memory import read_memory
from stoker.pool.credentials import read_users
from stoker.pool.own_server import PoolService, default_directory
from stoker.pool.pool_address import PoolAddress
from stoker.pool.pool_tier import PoolTier, ServerState, advise
from stoker.types import format_bytes, parse_bytes

_DIRECTORY = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    help="Directory of the server's files; by default one in your home.",
)


@click.group()
def pool() -> None:
    """Run a server for the pool on this node; see docs/pool.md.

    Loaders on all nodes find samples there that any of them has read: Cache(pool="valkey://...").
    """


@pool.command()
@_DIRECTORY
@click.option(
    "--memory",
    default="20%",
    show_default=True,
    help="Maximum memory, or a share of the free memory.",
)
@click.option("--bind", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=6379, show_default=True, type=int)
@click.option(
    "--password-file",
    type=click.Path(path_type=Path),
    help="Password of the pool's other servers; by default a new one is made.",
)
@click.option(
    "--tls",
    is_flag=True,
    help="Encrypt what passes between nodes, with certificates made in the directory.",
)
@click.option(
    "--tls-files",
    type=click.Path(path_type=Path),
    help="Folder with ca.crt, tls.crt and tls.key to use for that, or with ca.crt and ca.key.",
)
@click.option(
    "--acl",
    type=click.Path(path_type=Path),
    help="Folder with a file for each further user, named after the user, with the password.",
)
def up(
    directory: Path | None,
    memory: str,
    bind: str,
    port: int,
    password_file: Path | None,
    tls: bool,
    tls_files: Path | None,
    acl: Path | None,
) -> None:
    """Start a server on this node, and print its address.

    It keeps nothing on disk and evicts by importance. Its users, one without --acl, have passwords
    and the rights that a pool needs. It runs until `stoker pool down`.
    """
    size = parse_bytes(memory, of=read_memory().available, name="--memory")
    service = PoolService(directory or default_directory())
    url = service.start(size, bind, port, password_file, tls=tls, tls_files=tls_files, acl=acl)
    click.echo(f"a server of {format_bytes(size)} is up: pool={url!r}")
    if acl is not None:
        for user in read_users(acl):
            click.echo(f"{user}: pool={service.url(user, acl.absolute() / user)!r}")


@pool.command()
@click.argument("address", required=False)
@_DIRECTORY
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def status(address: str | None, directory: Path | None, as_json: bool) -> None:
    """Show what the servers at ADDRESS hold, by default the one that `stoker pool up` started.

    Exits with status 1 if one of them does not answer.
    """
    if address is not None and directory is not None:
        raise ConfigError("give an address or --dir, not both")
    where = (
        PoolService(directory or default_directory()).address()
        if address is None
        else PoolAddress.parse(address)
    )
    states = _survey(where)
    if as_json:
        click.echo(json.dumps([asdict(state) for state in states], indent=1))
    else:
        for state in states:
            click.echo(_describe(state))
        for line in advise(states, where, None):
            click.echo(line, err=True)
    if any(state.error for state in states):
        raise SystemExit(1)


@pool.command()
@_DIRECTORY
def down(directory: Path | None) -> None:
    """Stop the server that `stoker pool up` started; its content is lost."""
    ended = PoolService(directory or default_directory()).stop()
    click.echo("the server has ended" if ended else "no server was running")


def _survey(address: PoolAddress) -> list[ServerState]:
    tier = PoolTier(address, "status", 1, 1)
    try:
        return tier.survey()
    finally:
        tier.close()


def _describe(state: ServerState) -> str:
    if state.error:
        return f"{state.name}: {state.error}"
    limit = format_bytes(state.limit_bytes) if state.limit_bytes else "no limit"
    return (
        f"{state.name}, version {state.version}\n"
        f"  memory {format_bytes(state.memory_bytes)} of {limit}, evicts by {state.policy}\n"
        f"  {state.keys:,} keys; {state.hits:,} found, {state.misses:,} missed, "
        f"{state.evicted:,} evicted since it started"
    )
