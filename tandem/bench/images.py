"""`tandem bench --images`: the time from a request with an image to its first token, and the encoder's part of it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from tandem.bench.result import ImageRow
from tandem.devices.device import Device
from tandem.engine.engine import Engine
from tandem.engine.images import PLACEHOLDER, Image, ImageSpan, PromptIds
from tandem.engine.params import SamplingParams
from tandem.errors import RequestError
from tandem.model.model import Model
from tandem.model.vision import VisionModel

WORD = 1  # a token id that every vocabulary has
TEXT = 16  # tokens of a text before and after the image, and of each text in it


def time_images(
    model: Model, device: Device, vision: VisionModel, sides: Sequence[int], rounds: int, kv: str = "f16"
) -> list[ImageRow]:
    """Squares of noise, `sides` pixels long and high, one at a time; each is new, so it is encoded and computed."""
    prompts = [_prompt(model, vision, side, 0) for side in sides]
    context = max(map(len, prompts)) + 1
    if context > model.config.trained_context:
        raise RequestError(
            f"an image has {context} tokens, more than the trained context: use smaller --images"
        )
    engine = Engine.load(model, device, context=context, batch=1, kv=kv, vision=vision)
    rows: list[ImageRow] = []
    for side, prompt in zip(sides, prompts, strict=True):
        times = [_time(engine, _prompt(model, vision, side, seed)) for seed in range(rounds + 1)]
        del times[0]  # it warms up
        encoding, first = (np.median(each) for each in zip(*times, strict=True))
        rows.append({
            "side": side, "tokens": sum(span.image.tokens for span in prompt.images),
            "encoding": float(encoding), "ttft": float(first), "seconds": [seconds for _, seconds in times],
        })  # fmt: skip
    return rows


def _prompt(model: Model, vision: VisionModel, side: int, seed: int) -> PromptIds:
    from PIL import Image as pillow

    noise = np.random.default_rng((side, seed)).integers(0, 256, (side, side, 3), np.uint8)
    ids, spans = PromptIds([WORD] * TEXT), list[ImageSpan]()
    for part in vision.parts(pillow.fromarray(noise)):
        if isinstance(part, str):
            ids += [WORD] * TEXT
            continue
        c = vision.config
        image = Image(part, c.tokens(part), is_whole=model.config.whole_images, grid=c.grid(part))
        spans.append(ImageSpan(len(ids), image))
        ids += [PLACEHOLDER] * image.tokens
    ids += [WORD] * TEXT
    ids.images = spans
    return ids


def _time(engine: Engine, prompt: PromptIds) -> tuple[float, float]:
    """Seconds until its images are encoded, and until the first token. The step that encodes the last part of an image
    may begin the prompt, too."""
    begun = time.perf_counter()
    sequence = engine.submit(prompt, SamplingParams(max_tokens=1, ignore_eos=True, temperature=0))
    encoded = 0.0
    while sequence.finish_reason is None:
        engine.step()
        if not encoded and sequence.next_image is None:
            encoded = time.perf_counter() - begun
    return encoded, time.perf_counter() - begun
