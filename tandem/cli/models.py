"""`tandem pull`, `tandem list` and `tandem rm`: the models in the cache."""

from __future__ import annotations

import argparse
import sys
from datetime import datetime

from tandem.cli.loading import add_mmproj, model_file
from tandem.cli.terminal import human_size, print_json, print_table, printable
from tandem.errors import RequestError
from tandem.model import locate
from tandem.model.catalogue import DEFAULT_MODEL


def main(options: argparse.Namespace) -> int:
    return {"pull": pull, "list": list_, "rm": remove}[options.command](options)


def pull(options: argparse.Namespace) -> int:
    path = model_file(options.model)
    if locate.is_known(options.model) and locate.is_in_cache(path):
        from tandem.model.model_files import find_mmproj
        from tandem.model.vision import takes_images  # imported late: it takes a tenth of a second

        if not find_mmproj(path) and takes_images(path):
            add_mmproj(options.model, path)
    if options.json:
        print_json({"model": options.model, "path": str(path)})
    else:
        print(path)
    return 0


def list_(options: argparse.Namespace) -> int:
    models = locate.list_models()
    if options.json:
        keys = ("name", "size", "modified", "files")
        print_json([{key: getattr(model, key) for key in keys} for model in models])
    elif models:
        dates = [f"{datetime.fromtimestamp(model.modified):%Y-%m-%d %H:%M}" for model in models]
        rows = [(m.name, human_size(m.size), date) for m, date in zip(models, dates, strict=True)]
        print_table(("MODEL", "SIZE:", "DOWNLOADED"), rows)
    else:
        print(f"no models yet: `tandem pull {DEFAULT_MODEL}` downloads a small one", file=sys.stderr)
    return 0


def remove(options: argparse.Namespace) -> int:
    model = locate.find(options.model)
    what = f"{model.name} ({human_size(model.size)})"
    if not options.yes:
        if not sys.stdin.isatty():
            raise RequestError(f"{what} was not deleted, for there is no terminal to confirm it: add --yes")
        print(f"Delete {printable(what)}? [y/N] ", end="", flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return 0
    locate.remove(model)
    if options.json:
        print_json({"deleted": model.name, "size": model.size})
    else:
        print(f"deleted {printable(what)}")
    return 0
