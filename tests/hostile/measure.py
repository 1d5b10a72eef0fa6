"""What 8 streams notice of each attack: `python -m tests.hostile.measure` prints a table.

    quiet     no attack
    p99, max  gaps between tokens, in medians of the quiet rows
    >3        the part of the gaps that are longer than three of them
    /health   the slowest, in ms
    memory    growth in MiB

The streams go on all the time, so a row takes `--seconds` and not a multiple of it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.hostile.attacks import (
    EXHAUSTION,
    MAX_GAP,
    MAX_HEALTH,
    MAX_LOG,
    MAX_MEMORY,
    Harm,
    MiB,
    attacking,
    serving_streams,
    watched,
)
from tests.hostile.cores import SERVER, apart
from tests.hostile.stall_attacks import ATTACKS, FLOODS
from tests.hostile.streams import Streams
from tests.packages import model_path

QUIET = "quiet"
STREAMS, TOKENS = 8, 256  # of a response: steps of longer ones take longer, whatever happens meanwhile
REST_SECONDS = 0.3  # between two attacks, for what the first has left


def pairs() -> list[tuple[str, ...]]:
    """Each attack on the server's time, together with one on what it has."""
    return list(zip([*ATTACKS, *FLOODS], itertools.cycle(EXHAUSTION), strict=False))


@dataclass
class Row:
    names: tuple[str, ...]
    harm: Harm
    begun: float
    ended: float
    gaps: list[tuple[float, float]]  # the times of two tokens, one after the other


def measure(
    model: Path, options: list[str], cores: int, attacks: list[tuple[str, ...]], seconds: float
) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        server = stack.enter_context(serving_streams(Path(folder), model, *options, cores=cores))
        streams = stack.enter_context(Streams(server.url, STREAMS, TOKENS))
        for names in attacks:
            with watched(server) as harm, attacking(server, *(name for name in names if name != QUIET)):
                begun = time.perf_counter()
                time.sleep(seconds)
                rows.append(Row(names, harm, begun, time.perf_counter(), []))
            time.sleep(REST_SECONDS)
        for before, after in itertools.chain.from_iterable(map(itertools.pairwise, streams.stop())):
            for row in rows:
                if before < row.ended and after > row.begun:
                    row.gaps.append((before, after))
    return rows


def quiet_median(rows: list[Row]) -> float:
    return statistics.median(
        after - before for row in rows if row.names == (QUIET,) for before, after in row.gaps
    )


def print_table(rows: list[Row]) -> None:
    median = quiet_median(rows)
    print(f"{'attack':50}{'gaps':>7}{'p99':>6}{'max':>6}{'>3':>7}{'/health':>9}{'memory':>8}{'log':>8}")
    for row in rows:
        gaps, harm = sorted((after - before) / median for before, after in row.gaps), row.harm
        late = sum(gap > MAX_GAP for gap in gaps) / len(gaps)
        good = gaps[-1] <= MAX_GAP and harm.health < MAX_HEALTH
        good = good and harm.memory < MAX_MEMORY and harm.log < MAX_LOG
        print(
            f"{' + '.join(row.names):50}{len(gaps):7}{gaps[int(0.99 * len(gaps))]:6.2f}{gaps[-1]:6.2f}{late:7.2%}"
            f"{harm.health * 1e3:9.0f}{harm.memory / MiB:8.0f}{harm.log:8}{'' if good else '  missed'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF file (default: SmolLM2)")
    parser.add_argument(
        "--cores", type=int, default=SERVER, help=f"of the server, if the machine has enough ({SERVER})"
    )
    parser.add_argument("--threads", help="of the engine (as many as the server's cores)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each attack (4)")
    parser.add_argument("--part", default="1/1", help="2/3: the second third of the attacks")
    given = parser.parse_args()
    part, parts = map(int, given.part.split("/"))
    own = pairs()[part - 1 :: parts]
    attacks = [(QUIET,), *own[: len(own) // 2], (QUIET,), *own[len(own) // 2 :], (QUIET,)]
    options = ["--threads", given.threads] if given.threads else []
    rows = measure(given.model or model_path("smollm2"), options, given.cores, attacks, given.seconds)
    where = f"{given.cores} cores of its own" if apart(given.cores) else "cores that all share"
    print(f"server on {where} {' '.join(options)}, quiet median {quiet_median(rows) * 1e3:.2f} ms")
    print_table(rows)


if __name__ == "__main__":
    main()
