"""Watch every loader and pool of yours on this machine, on a web page.

\b
  outlive dash                    at http://127.0.0.1:7117/?token=…
  outlive dash --port 8080        there, or not at all
  outlive dash --host 0.0.0.0     for other machines
  outlive dash --list             links of those that run

Visitors need the token in the link that it prints. Programs, such as
Prometheus, send it in the header "Authorization: Bearer TOKEN".

Jobs need not be started with it: it reads what they publish, and the journal. It may come late, hang or be killed;
no job notices. From elsewhere, a tunnel is best: ssh -L 7117:localhost:7117 NODE

Exit status: 0 ended by Ctrl-C, 1 the address cannot be used or --list found none, 2 wrong usage.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable
from typing import NoReturn

import click

PORT = 7117


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), help=f"By default {PORT}, or any that is free.")
@click.option(
    "--token",
    envvar="OUTLIVE_DASH_TOKEN",
    metavar="TOKEN",
    help="What visitors must have; made up by default. In OUTLIVE_DASH_TOKEN other users do not see it.",
)
@click.option("--no-token", is_flag=True, help="Let in every user of this machine.")
@click.option("--list", "lists", is_flag=True, help="Print the links of dashboards that run, and end.")
@click.option("--beside", type=int, hidden=True, help="In the background, until that process and all pages are gone.")
@click.pass_context
def command(
    context: click.Context,
    host: str,
    port: int | None,
    token: str | None,
    no_token: bool,
    lists: bool,
    beside: int | None,
) -> None:
    if lists:
        _list(context)
    try:
        from outlive._metrics import viewing
        from outlive.dashboard import guard, server
    except ImportError as error:
        raise click.ClickException(
            f"outlive dash needs starlette and uvicorn ({error}): pip install 'outlive[dash]'"
        ) from None
    if no_token:
        if token is not None and context.get_parameter_source("token") is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError("--token and --no-token contradict each other")
        if not guard.is_loopback(host):
            raise click.UsageError(
                f"--host {host} can be reached from other machines, so it needs a token. To go without, stay at "
                f"127.0.0.1 and use a tunnel (ssh -L {port or PORT}:localhost:{port or PORT} {socket.gethostname()})"
            )
        token = None
    else:
        token = token or secrets.token_urlsafe(24)
        if len(token) < guard.LEAST_TOKEN:
            raise click.UsageError(
                f"--token must have at least {guard.LEAST_TOKEN} characters, got {len(token)} (without it, one is "
                "made up)"
            )
    try:
        listener = _listen(server.listen, host, port)
    except OSError as error:
        raise click.ClickException(f"{host}:{port or PORT} cannot be used: {error.strerror or error}") from None
    link = server.link_to(listener, host, token)
    viewing.stand_back()
    with listener:
        if beside is not None:
            click.echo(f"outlive: what this job does is shown at {link}", err=True)
            if _leave_for_background():
                return
            lives = _lives(beside)
            server.serve(listener, host, token=token, lives=lives)
            return
        click.echo(f"outlive dash: {link}  (Ctrl-C ends it, jobs go on)")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve(listener, host, token=token)


def _list(context: click.Context) -> NoReturn:
    from outlive.dashboard import links

    found = links.found()
    click.echo("\n".join(found) if found else "no dashboard of yours runs on this machine", err=not found)
    context.exit(0 if found else 1)


def _listen(listen: Callable[[str, int], socket.socket], host: str, port: int | None) -> socket.socket:
    if port is not None:
        return listen(host, port)
    try:
        return listen(host, PORT)
    except OSError:
        return listen(host, 0)  # another one runs: both may


def _leave_for_background() -> bool:
    """Whether this is the process that goes; the other has a session of its own, and no terminal."""
    if os.fork():
        return True
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):  # a pipe that the program writes to must end with the program
        os.dup2(nothing, number)
    os.close(nothing)
    return False


def _lives(pid: int) -> Callable[[], bool]:
    from outlive._metrics import runtime

    who = {"pid": pid, "start": runtime.start_of(pid)}
    return lambda: runtime.is_alive(who)
