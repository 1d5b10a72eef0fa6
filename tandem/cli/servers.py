"""`tandem ps` and `tandem stop`: the running servers of this user."""

from __future__ import annotations

import argparse
import sys
from datetime import datetime

from tandem.cli.terminal import print_json, print_table
from tandem.errors import RequestError
from tandem.server.instances import Instance, running, stop


def main(options: argparse.Namespace) -> int:
    return {"ps": show, "stop": end}[options.command](options)


def show(options: argparse.Namespace) -> int:
    found = running()
    if options.json:
        print_json([instance._asdict() for instance in found])
    elif found:
        dates = [f"{datetime.fromtimestamp(instance.started):%Y-%m-%d %H:%M}" for instance in found]
        rows = [(i.url, str(i.pid), ", ".join(i.models), date) for i, date in zip(found, dates, strict=True)]
        print_table(("SERVER", "PID:", "MODELS", "SINCE"), rows)
    else:
        print("no server is running: `tandem serve MODEL` starts one", file=sys.stderr)
    return 0


def end(options: argparse.Namespace) -> int:
    stopped = _chosen(options.server)
    for instance in stopped:
        if not stop(instance, options.wait):
            raise RequestError(f"{instance.url} is still running after {options.wait:g} s: wait, or kill it")
        if not options.json:
            print(f"stopped {instance.url}")
    if options.json:
        print_json([instance._asdict() for instance in stopped])
    return 0


def _chosen(name: str | None) -> list[Instance]:
    """The servers with this port, process id, URL or model; all servers if `name` is None."""
    found = running()
    if name is not None:
        found = [i for i in found if name in (i.url, i.url.rpartition(":")[2], str(i.pid), *i.models)]
    if not found:
        wanted = f"server {name}" if name else "server"
        raise RequestError(f"no {wanted} is running: `tandem ps` lists the running servers")
    return found
