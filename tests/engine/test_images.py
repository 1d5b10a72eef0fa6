"""Images in prompts: the same tokens alone, in a batch, in small steps and after preemption; keys; what is refused."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

from tandem import LLM
from tandem.engine import image_encoder, kv_snapshot
from tandem.engine.images import PLACEHOLDER, Image, ImageSpan, images_in, sectioned_positions, whole_images
from tandem.engine.input_processor import _cut_at_images
from tandem.engine.kv_cache import extend_block_hashes
from tandem.engine.load_options import DRAFT_HEAD, NO_DRAFT
from tandem.engine.sampling import COUNT, TOKEN, Sampled
from tandem.errors import RequestError, TandemError, TemplateError, UnsupportedModelError
from tandem.kernels.abi import KV_BLOCK
from tandem.model.chat_template import ChatTemplate
from tandem.model.encoders import gemma3
from tests.engine.simulation import FixedCost
from tests.models import draft_heads
from tests.models.test_vision import GOLDENS, NAMES, load

pytestmark = pytest.mark.fast


def picture(seed: int, size: tuple[int, int] = (70, 50)) -> Pillow.Image:
    return Pillow.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8))


def as_png(image: Pillow.Image, format: str = "PNG") -> bytes:
    out = io.BytesIO()
    image.save(out, format)
    return out.getvalue()


def message(*parts: object) -> list[dict[str, object]]:
    """A text is the path of an image if it has a slash."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str) and "/" not in part
        else {"type": "image", "image": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def test_path_bytes_and_pillow_are_the_same_image(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(as_png(picture(1)))
    with load() as llm:
        sources = (str(path), path, path.read_bytes(), picture(1))
        prompts = [llm.chat_ids(message("What is", source)) for source in sources]
        assert len({prompt.images[0].image.digest for prompt in prompts}) == 1
        assert (
            llm.chat_ids(message("What is", picture(2))).images[0].image.digest
            != prompts[0].images[0].image.digest
        )
        answers = {llm.generate(prompt, max_tokens=6, temperature=0).text for prompt in prompts}
        assert len(answers) == 1
        assert llm.engine.images.encoded == 1


def test_one_pixel_changes_the_keys() -> None:
    tokens, pixels = list(range(4 * KV_BLOCK)), np.zeros((8, 8, 3), np.uint8)
    at = KV_BLOCK + 2
    other = pixels.copy()
    other[3, 5, 1] = 1

    def keys(*spans: tuple[int, np.ndarray]) -> list[bytes]:
        hashes: list[bytes] = []
        extend_block_hashes(hashes, tokens, [ImageSpan(begin, Image(data, 20)) for begin, data in spans])
        return hashes

    assert keys((at, pixels)) == keys((at, pixels.copy()))
    assert keys((at, pixels))[0] == keys((at, other))[0] == keys()[0], "the image is after the first block"
    for others in (keys((at, other)), keys((at + 1, pixels)), keys()):
        assert all(a != b for a, b in zip(keys((at, pixels))[1:], others[1:], strict=True))


def test_no_image_is_cut() -> None:
    spans = [ImageSpan(10, Image(np.zeros(1, np.uint8), 20)), ImageSpan(35, Image(np.zeros(2, np.uint8), 20))]
    assert whole_images(spans, 0, 5, 64) == 5
    assert whole_images(spans, 0, 15, 64) == 10, "stops before an image that does not fit"
    assert whole_images(spans, 10, 15, 64) == 20, "an image may exceed the budget"
    assert whole_images(spans, 10, 15, 19) == 0, "and waits for room"
    assert whole_images(spans, 16, 4, 14) == 14, "the rest of one whose beginning is cached"
    assert whole_images(spans, 10, 60, 64) == 60
    assert whole_images([], 0, 7, 7) == 7


def test_an_image_takes_as_many_positions_as_its_longer_side() -> None:
    """Where positions have sections: those of a part of a sequence are that part of all positions."""
    grids, spans, begin = ((3, 5), (5, 2), (1, 4)), [], 4
    for rows, columns in grids:
        image = Image(np.zeros(rows, np.uint8), rows * columns, is_whole=False, grid=(rows, columns))
        spans.append(ImageSpan(begin, image))
        begin += rows * columns + (0 if rows == 3 else 6)  # the second follows the first
    expected, position, end = [], 0, begin + 3
    starts = {span.begin: span.image.grid for span in spans}
    while len(expected) < end:
        rows, columns = starts.get(len(expected), (0, 0))
        if not rows:
            expected.append((position,) * 3)
        expected += [
            (position, position + row, position + column) for row in range(rows) for column in range(columns)
        ]
        position += max(rows, columns, 1)
    for first, last in ((0, end), (6, 12), (9, 30), (0, 3), (19, 20), (end - 2, end)):
        assert sectioned_positions(spans, first, last).tolist() == [
            list(each) for each in expected[first:last]
        ]
    shift = sum(max(span.image.grid) - span.image.tokens for span in spans)
    assert expected[-1] == (end - 1 + shift,) * 3


SAMPLED = {"max_tokens": 12, "temperature": 1.0, "seed": 3, "ignore_eos": True, "logprobs": 3}
PROMPTS = [
    message("first", picture(1), "the same", picture(2), "end"),
    message(picture(3)),
    message("no image at all, but some text"),
    message("first", picture(1), "the same", picture(4), "other end"),
    message(picture(1), picture(1), "twice"),
]


def answers(llm: LLM, *prompts: object) -> list[list[Sampled]]:
    """Tokens with their log-probabilities: all bits of them must be the same."""
    outputs = [llm.prepare(prompt, **SAMPLED) for prompt in prompts]
    llm.driver.run(outputs)
    return [output.sequence.generated for output in outputs]


@pytest.fixture(scope="module", params=NAMES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def opened(family: str, **options: object) -> LLM:
    return load(name=family, kv="f16", context=512 if family == "smolvlm" else 256, **options)


@pytest.fixture(scope="module")
def alone(family: str) -> list[list[Sampled]]:
    found = []
    for prompt in PROMPTS:
        with opened(family) as llm:
            found += answers(llm, prompt)
    return found


def test_together_as_alone(family: str, alone: list[list[Sampled]]) -> None:
    """Requests with and without images at the same time, twice: the second time from caches."""
    with opened(family) as llm:
        for _ in range(2):
            assert answers(llm, *PROMPTS) == alone
        tiles = {span.digest for prompt in PROMPTS for span in images_in(llm.chat_ids(prompt))}
        assert llm.engine.images.encoded == len(tiles) >= 4, "each of them once"
        assert llm.stats().cached_prompt_tokens > 0
    assert alone[0] != alone[3], "the images matter"


def test_32_requests_as_alone(family: str, alone: list[list[Sampled]]) -> None:
    """At the same time, in mixed order, in small steps."""
    order = [i * 7 % len(PROMPTS) for i in range(32)]
    with opened(family) as llm:
        assert answers(llm, *(PROMPTS[i] for i in order)) == [alone[i] for i in order]


def test_steps_are_cut_around_images(
    family: str, alone: list[list[Sampled]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of a few tokens: an image whose tokens see each other is in one of them, and the rest is cut anywhere."""
    size = {"gemma4": 72, "gemma4u": 72}.get(family, 8)  # images of these have up to 70 tokens
    monkeypatch.setattr("tandem.engine.engine.STEP_TOKENS", size)
    with opened(family) as llm:
        steps: list[tuple[int, int]] = []
        llm.engine.on_step = lambda chunks, _: steps.extend((c.begin, c.begin + c.count) for c in chunks)
        assert answers(llm, PROMPTS[0]) == [alone[0]]
        spans = images_in(llm.chat_ids(PROMPTS[0]))
        assert all(a[1] == b[0] for a, b in pairwise(steps))
        assert max(end - begin for begin, end in steps) <= size
        cut = any(span.begin < end < span.end for span in spans for _, end in steps)
        assert cut != spans[0].image.is_whole


def test_preempted_requests_continue(family: str, alone: list[list[Sampled]]) -> None:
    with opened(family) as llm:
        outputs = [llm.prepare(prompt, **SAMPLED) for prompt in PROMPTS]
        llm.driver.submit(outputs)
        while any(output.sequence.finish_reason is None for output in outputs):
            llm.engine.step()
            running = llm.engine.scheduler.running
            if running and llm.engine.num_steps % 3 == 0:
                llm.engine.wait()
                llm.engine.scheduler._preempt(running[-1])
        assert llm.stats().preemptions > 2
        assert [output.sequence.generated for output in outputs] == alone


def test_prompt_lookup_with_images(family: str, alone: list[list[Sampled]]) -> None:
    with opened(family, prompt_lookup=True) as llm:
        assert answers(llm, PROMPTS[4]) == [alone[4]]


def test_the_draft_head_with_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its positions have sections, too; drafts change no bit of what is sampled."""
    monkeypatch.setattr(draft_heads, "GOLDENS", GOLDENS)
    path, found = draft_heads.write_with_draft_head(tmp_path / "qwen35.gguf", "qwen35"), []
    for draft in (NO_DRAFT, DRAFT_HEAD):
        options = {"device": "cpu", "threads": 2, "context": 256, "draft": draft}
        with LLM(path, mmproj=GOLDENS / "mmproj-qwen35.gguf", **options) as llm:
            if speculator := llm.engine.scheduler.speculator:
                speculator.cost_model = FixedCost(0.001)
            found.append(answers(llm, *PROMPTS))
            assert not speculator or speculator.drafted > 20
    assert found[0] == found[1]


def test_penalties_do_not_count_images(family: str) -> None:
    """The id that stands for their tokens is used as often as the texts use it: never."""
    with opened(family) as llm:
        sequence = llm.prepare(PROMPTS[0], max_tokens=1, repeat_penalty=1.5).sequence
        counted = sequence.sampling.adjustments_at(0)
        ids = [
            token
            for i, token in enumerate(sequence.tokens)
            if not any(s.begin <= i < s.end for s in sequence.images)
        ]
        assert counted[:, TOKEN].tolist() == sorted(set(ids)) and PLACEHOLDER not in counted[:, TOKEN]
        assert counted[:, COUNT].sum() == len(ids)


def test_structured_output_with_images(family: str) -> None:
    with opened(family) as llm:
        result = llm.chat(PROMPTS[0], max_tokens=8, temperature=0, choices=["yes", "no"])
        assert result.text in ("yes", "no")


def test_a_cancelled_request_leaves_the_encoder_to_others(family: str, alone: list[list[Sampled]]) -> None:
    with opened(family) as llm:
        stream = llm.stream(PROMPTS[1], max_tokens=12, temperature=0)
        llm.engine.step()
        stream.close()
        assert answers(llm, PROMPTS[0]) == [alone[0]]


def test_logits_between_two_parts_of_an_image(
    family: str, alone: list[list[Sampled]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder has memory for one image: that of a request is done before those of an out-of-band forward."""
    monkeypatch.setattr(image_encoder, "PART_SECONDS", 0.0)
    with opened(family, batch=80) as llm:
        request = llm.prepare(PROMPTS[0], **SAMPLED)
        llm.driver.submit([request])
        llm.engine.step()
        assert llm.engine.images.encoded == 0
        llm.logits(llm.chat_ids(PROMPTS[1]))
        while not request.done:
            llm.driver.advance([request])
        assert request.sequence.generated == alone[0]


def test_without_an_encoder_it_says_what_to_give(tmp_path: Path) -> None:
    copy = tmp_path / "model.gguf"
    copy.write_bytes((GOLDENS / "gemma3.gguf").read_bytes())
    with LLM(copy, device="cpu", threads=1, context=128) as llm, pytest.raises(RequestError, match="mmproj"):
        llm.chat(PROMPTS[1])
    with pytest.raises(UnsupportedModelError, match="not a vision encoder"):
        LLM(copy, device="cpu", context=128, mmproj=copy)


def test_an_encoder_beside_the_model_is_found() -> None:
    with LLM(GOLDENS / "gemma3.gguf", device="cpu", threads=1, context=128) as llm:
        assert llm.engine.encoder is not None
    options = {"device": "cpu", "threads": 1, "context": 128, "mmproj": "none"}
    with LLM(GOLDENS / "gemma3.gguf", **options) as llm, pytest.raises(RequestError, match="mmproj = none"):
        llm.chat(PROMPTS[1])


@pytest.mark.parametrize(
    ("model", "options", "problem"),
    [
        (GOLDENS.parent / "qwen3.gguf", {}, "of another kind of model"),  # of the same width
        (GOLDENS.parent / "gemma3-27b.gguf", {}, "of another kind of model"),  # without tokens for images
        (GOLDENS / "gemma3.gguf", {"width": 31}, "embeddings of 31 numbers, the model's have 32"),
        (GOLDENS / "gemma3.gguf", {"step": 4}, "use a larger context"),
        (GOLDENS / "gemma3.gguf", {"device": "cpu,cpu"}, "needs a single device"),
        (GOLDENS / "gemma3.gguf", {"device": "cpu,cpu", "placement": "columns"}, "needs a single device"),
        (GOLDENS / "gemma3.gguf", {"cut": 1000}, "the file is damaged"),
    ],
)
def test_an_encoder_that_does_not_fit_does_no_harm(
    model: Path, options: dict[str, object], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it was named: then it is an error."""
    options = {"device": "cpu", "threads": 1, "context": 128} | options
    monkeypatch.setattr("tandem.engine.engine.STEP_TOKENS", options.pop("step", 512))
    if width := options.pop("width", 0):
        read = gemma3.config
        monkeypatch.setattr(gemma3, "config", lambda m: replace(read(m), out_dim=width))
        monkeypatch.setattr(gemma3, "tensors", lambda c: {})
    data, cut = (GOLDENS / "mmproj-gemma3.gguf").read_bytes(), options.pop("cut", None)
    copy, mmproj = tmp_path / "model.gguf", tmp_path / "mmproj-model.gguf"
    copy.write_bytes(model.read_bytes())
    mmproj.write_bytes(data[:cut])
    with LLM(copy, **options) as llm:
        assert llm.engine.encoder is None and llm.generate("a", max_tokens=2).text is not None
        with pytest.raises(RequestError, match=problem) as raised:
            llm.chat(PROMPTS[1])
        assert str(tmp_path) not in str(raised.value)
    with pytest.raises(TandemError, match=problem):
        LLM(copy, mmproj=mmproj, **options)


def test_of_several_encoders_the_one_for_the_model_is_used(tmp_path: Path) -> None:
    for name in ("gemma3.gguf", "mmproj-gemma3.gguf"):
        (tmp_path / name).write_bytes((GOLDENS / name).read_bytes())
    (tmp_path / "a-mmproj-f16.gguf").write_bytes((GOLDENS / "gemma3.gguf").read_bytes())
    with LLM(tmp_path / "gemma3.gguf", device="cpu", threads=1, context=128) as llm:
        assert llm.engine.encoder and llm.engine.encoder.model.path.name == "mmproj-gemma3.gguf"


# Like Gemma 3's and Qwen's: a content is a text or parts. Like SmolVLM's: it is parts.
TEXT_OR_PARTS = (
    "{% for m in messages %}[{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<start_of_image>{% else %}{{ p.text | trim }}{% endif %}{% endfor %}"
    "{% endif %}]{% endfor %}"
)
PARTS = (
    "{% for m in messages %}[{% for p in m.content %}{% if p['type'] == 'text' %}{{ p['text'] }}"
    "{% elif p['type'] == 'image' %}<start_of_image>{% endif %}{% endfor %}]{% endfor %}"
)
TEXT = "{% for m in messages %}[{{ '' + m.content }}]{% endfor %}"


@pytest.mark.parametrize("template", [TEXT_OR_PARTS, PARTS, TEXT])
def test_templates_say_where_images_are(template: str) -> None:
    image = {"type": "image", "image": b"..."}
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "a <start_of_image> "}, image, image]},
        {"role": "assistant", "content": "<start_of_image>"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, image]},
    ]
    texts = _cut_at_images(ChatTemplate(template), chat, {}, gemma3, 3)
    space = "" if template == TEXT_OR_PARTS else " "
    assert texts == [f"[a <start_of_image>{space}", "", "][<start_of_image>][b", "]"]


def test_a_template_that_takes_only_parts_gets_them() -> None:
    assert ChatTemplate(PARTS).render([{"role": "user", "content": "Hi"}]) == "[Hi]"


def test_a_template_without_images_is_refused() -> None:
    chat = [{"role": "user", "content": [{"type": "image", "image": b""}]}]
    with pytest.raises(TemplateError, match="leaves out images"):
        _cut_at_images(ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}"), chat, {}, gemma3, 1)


def test_what_a_prompt_with_images_cannot_have() -> None:
    with load() as llm:
        with pytest.raises(RequestError, match="prompt_logprobs"):
            llm.chat(PROMPTS[0], prompt_logprobs=1)
        with pytest.raises(RequestError, match="more than 64 images"):
            llm.chat(message(*[picture(1, (1, 1))] * 65))
        for bad in (7, None, "no such file.png", b"", b"GIF89a", as_png(picture(1))[:-40]):
            with pytest.raises(RequestError):
                llm.chat([{"role": "user", "content": [{"type": "image", "image": bad}]}])


def test_a_saved_chat_with_an_image_is_found_by_its_image_only(family: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.kv"
    chat, other = (
        message("Look at this picture and say what is", picture(i), "in it, please, in one short sentence.")
        for i in (1, 2)
    )
    with opened(family) as llm:
        saved = llm.save(chat, path)
        spans = images_in(llm.chat_ids(chat))
        assert saved > spans[-1].end
        answer = llm.chat(chat, max_tokens=6).text
    with opened(family) as llm:
        assert len(llm.restore(path)) == saved
        assert llm.chat(other, max_tokens=1).usage.cached_tokens <= spans[0].begin
        found = llm.chat(chat, max_tokens=6)
        assert found.text == answer and found.usage.cached_tokens >= saved - KV_BLOCK


@pytest.mark.parametrize(
    "images",
    ["x", [[0, 4]], [[4, 2, "00"]], [["0", 4, "00"]], [[0, 4, 7]], [[0, 9, "00"], [3, 12, "00"]], {"a": 1}],
)
def test_a_state_with_wrong_images_is_refused(images: object) -> None:
    assert kv_snapshot._images(images) is None
