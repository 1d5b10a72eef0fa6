"""Reads the images that clients send in a separate process (job_process.py), one after the other.

A file of a few KB may become gigabytes, and a library that reads it holds the GIL or has bugs. As for grammars, a quick
process has the ordinary images, and those that need longer go to a slow one.
"""

from __future__ import annotations

import json
import math
import pickle
import struct
from contextlib import suppress

import numpy as np

from tandem.engine.images import ImageParts
from tandem.engine.job_process import CRASHED, OUT_OF_TIME, OUT_OF_WALL, JobLimits, JobProcess, serve_jobs
from tandem.errors import OutOfMemoryError, QueueFullError, RequestError
from tandem.model.encoders import ENCODERS
from tandem.model.encoders.config import CHANNELS, VisionConfig
from tandem.model.image_file import read_image

# A photo of 12 million pixels takes 0.1 s of CPU time, one of 50 million 1 s.
QUICK, SLOW = JobLimits(0.2, 10.0, 5), JobLimits(5.0, 20.0, 10)
MEMORY = 512 << 20  # bytes for an image; one of 50 million pixels takes 250 to 450 MB, in WebP more
SIZE = struct.Struct("<I")  # of the encoder's configuration in a job, and of the list of parts in a result
READ, REFUSED = b"\0", b"\1"  # first byte of a result


class ImageReader:
    """Reads images. For one event loop."""

    def __init__(self) -> None:
        self._quick, self._slow = (JobProcess(__name__, "image", limits) for limits in (QUICK, SLOW))

    async def read(self, source: bytes | bytearray, vision: VisionConfig) -> ImageParts:
        """Reads a file, and makes of it what the encoder takes. Raises RequestError as `read_image` does,
        QueueFullError if too many others wait, and OutOfMemoryError if a process cannot start or is killed."""
        config = pickle.dumps(vision)
        job = SIZE.pack(len(config)), config, source
        ended, result = await self._quick.run(*job)
        if ended in (OUT_OF_TIME, OUT_OF_WALL):
            ended, result = await self._slow.run(*job)
        if ended == OUT_OF_WALL:
            raise QueueFullError("an image takes too long on a busy server: give a smaller one, or try again")
        if ended in (OUT_OF_TIME, *CRASHED):
            raise RequestError(
                "an image takes too much time or memory to read: give a smaller one, or another format"
            )
        if ended:
            raise OutOfMemoryError
        if result[:1] == REFUSED:
            raise RequestError(result[1:].decode())
        return _parts(result)

    async def close(self) -> None:
        await self._quick.close()
        await self._slow.close()


def _parts(result: bytes) -> ImageParts:
    """The parts of a result. Nothing in it is run: what the file did to the process is not known."""
    at = 1 + SIZE.size + SIZE.unpack_from(result, 1)[0]
    parts = ImageParts()
    for part in json.loads(result[1 + SIZE.size : at]):
        if isinstance(part, str):
            parts.append(part)
        else:
            shape = *map(int, part), CHANNELS
            parts.append(np.frombuffer(result, np.uint8, math.prod(shape), at).reshape(shape))
            at += math.prod(shape)
    return parts


# ---- in the process


def main() -> None:
    with suppress(ImportError):  # read_image says what to install
        from PIL import Image

        Image.init()  # once, not in each child
    serve_jobs(_work, MEMORY)


def _work(job: bytes) -> bytes:
    end = SIZE.size + SIZE.unpack_from(job)[0]
    vision = pickle.loads(job[SIZE.size : end])  # of the server itself
    try:
        parts = ENCODERS[vision.projector].parts(vision, read_image(job[end:]))
    except RequestError as error:
        return REFUSED + str(error).encode()
    listed = json.dumps([part if isinstance(part, str) else part.shape[:2] for part in parts]).encode()
    pixels = (np.ascontiguousarray(part).tobytes() for part in parts if not isinstance(part, str))
    return b"".join((READ, SIZE.pack(len(listed)), listed, *pixels))


if __name__ == "__main__":
    main()
