"""`tandem convert`: a Hugging Face folder becomes a GGUF file."""

from __future__ import annotations

import argparse
from pathlib import Path

from tandem.cli import interruptible
from tandem.cli.terminal import print_json, progress_bar
from tandem.convert.convert import convert


def main(options: argparse.Namespace) -> int:
    folder: Path = options.folder
    output: Path = options.output or Path(f"{folder.resolve().name}-{options.type}.gguf")
    with interruptible(), progress_bar("converting") as progress:
        convert(folder, output, options.type, progress)
    if options.json:
        print_json({"path": str(output), "size": output.stat().st_size})
    else:
        print(output)
    return 0
