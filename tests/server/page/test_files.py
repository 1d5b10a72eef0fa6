"""Files of a message in the browser: images, texts and PDFs, picked, pasted and dropped."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect

from tests.engine.test_images import as_png, picture
from tests.models.test_vision import GOLDENS
from tests.server.browsers import wait_until
from tests.server.page.pages import answered, choose_in_menu, kept, send, settle
from tests.server.servers import Running, serving

PNG = as_png(picture(1))
SEEING = {"name": "a.png", "mimeType": "image/png", "buffer": PNG}
DROP = """([name, type, data]) => {
    const bytes = Uint8Array.from(atob(data), c => c.charCodeAt(0)), transfer = new DataTransfer();
    transfer.items.add(new File([bytes], name, {type}));
    const view = document.getElementById('chat-view');
    for (const kind of ['dragover', 'drop'])
        view.dispatchEvent(new DragEvent(kind, {dataTransfer: transfer, bubbles: true, cancelable: true}));
}"""
PASTE = """([name, type, data]) => {
    const bytes = Uint8Array.from(atob(data), c => c.charCodeAt(0)), transfer = new DataTransfer();
    transfer.items.add(new File([bytes], name, {type}));
    document.getElementById('input').dispatchEvent(
        new ClipboardEvent('paste', {clipboardData: transfer, bubbles: true, cancelable: true}));
}"""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A tiny random Gemma 3 with its vision encoder."""
    folder = tmp_path_factory.mktemp("seeing")
    for name in ("gemma3.gguf", "mmproj-gemma3.gguf"):
        (folder / name).write_bytes((GOLDENS / name).read_bytes())
    with serving(
        folder, folder / "gemma3.gguf", "--device", "cpu", "--threads", "1", context=128, shutdown=1
    ) as running:
        yield running


def pdf(*pages: str) -> bytes:
    """A PDF with a line of text on each page."""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for i, text in enumerate(pages):
        drawn = f"BT /F1 24 Tf 72 700 Td ({text}) Tj ET"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * i} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>"
        )
        objects.append(f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream")
    out, places = "%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    return (
        f"{out}xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
        f"trailer << /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(out)}\n%%EOF"
    ).encode()


def scan() -> bytes:
    """A PDF of one image without text."""
    out = io.BytesIO()
    Image.new("RGB", (300, 200), "navy").save(out, "PDF")
    return out.getvalue()


def sent_content(page: Page, text: str) -> Any:
    """Sends a text; the content of the last message of the request."""
    page.fill("#input", text)
    with page.expect_request("**/v1/chat/completions") as request:
        page.click("#send")  # on a phone, Enter starts a new line
    return request.value.post_data_json["messages"][-1]["content"]


@pytest.mark.parametrize("phone", [False, True], ids=["desktop", "phone"])
def test_images_are_pasted_dropped_picked_and_stay(seeing: Running, browser: Browser, phone: bool) -> None:
    size = {"width": 390, "height": 844} if phone else {"width": 1280, "height": 800}
    context = browser.new_context(viewport=size, is_mobile=phone, has_touch=phone)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(seeing.url)
    page.evaluate("localStorage.setItem('tandem.settings', JSON.stringify({max_tokens: 3}))")
    page.reload()
    expect(page.locator("#model")).to_have_value("gemma3")
    data = base64.b64encode(PNG).decode()
    page.evaluate(PASTE, ["pasted.png", "image/png", data])
    expect(page.locator("#files img")).to_have_count(1)
    page.evaluate(DROP, ["dropped.png", "image/png", data])
    page.set_input_files("#pick", [SEEING, {**SEEING, "name": "b.png", "buffer": as_png(picture(2))}])
    expect(page.locator("#files img")).to_have_count(4)
    page.get_by_label("Remove dropped.png").click()
    page.get_by_label("Remove a.png").click()
    expect(page.locator("#files img")).to_have_count(2)
    page.fill("#input", "What is this?")
    with page.expect_request("**/v1/chat/completions") as request:
        page.click("#send")
    *images, text = request.value.post_data_json["messages"][-1]["content"]
    assert text == {"type": "text", "text": "What is this?"} and len(images) == 2
    assert images[0]["image_url"]["url"] == f"data:image/png;base64,{data}", "the file itself"
    answered(page)
    assert not page.locator("article.reply .error").count()
    page.reload()
    expect(page.locator("article.user img")).to_have_count(2)
    loaded = "() => [...document.querySelectorAll('article.user img')].every(i => i.naturalWidth > 0)"
    wait_until(page, loaded)
    page.get_by_label("Show pasted.png").click()
    expect(page.locator("dialog.viewer img")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("dialog.viewer")).to_have_count(0)
    content = sent_content(page, "And now?")
    assert content == "And now?"  # the images are in the first message of the request
    answered(page, 2)
    assert not problems
    context.close()


def test_large_images_are_made_smaller_and_fit_in_a_request(seeing: Running, browser: Browser) -> None:
    page = browser.new_page()
    page.goto(seeing.url)
    expect(page.locator("#model")).to_have_value("gemma3")
    noise = Image.effect_noise((1800, 1350), 90).convert("RGB")
    photo = io.BytesIO()
    noise.save(photo, "JPEG", quality=95)
    page.set_input_files(
        "#pick",
        [{"name": f"{i}.jpg", "mimeType": "image/jpeg", "buffer": photo.getvalue()} for i in range(4)],
    )
    expect(page.locator("#files img")).to_have_count(4)
    with page.expect_request("**/v1/chat/completions") as request:
        send(page, "")
    assert len(photo.getvalue()) > 1_000_000 and len(request.value.post_data or "") < 3_500_000
    for part in request.value.post_data_json["messages"][-1]["content"]:
        image = Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2])))
        assert image.format == "JPEG" and max(image.size) <= 1536
        assert abs(image.size[0] / image.size[1] - 4 / 3) < 0.02
    page.close()


def test_a_model_that_cannot_see_says_so(page: Page, problems: list[str]) -> None:
    page.set_input_files("#pick", [SEEING])
    expect(page.locator("#fine")).to_have_text("smollm2 cannot see images.")
    send(page, "What is this?")
    expect(page.locator("article.reply .error")).to_contain_text("mmproj")
    page.get_by_label("Edit").click()
    page.get_by_label("Remove a.png").click()
    page.get_by_label("Edit message").press("Enter")
    answered(page)
    expect(page.locator(".stats")).to_contain_text("tokens")
    assert page.locator("article.user img").count() == 0
    assert len(problems) == 1 and "400" in problems.pop()


def test_texts_and_pdfs(page: Page, server: Running) -> None:
    settle(page, server, temperature=0, max_tokens=5)
    source = "# Notes\r\n```\ncode\n```\n"
    page.set_input_files(
        "#pick",
        [
            {"name": "notes.md", "mimeType": "text/markdown", "buffer": source.encode()},
            {"name": "two.pdf", "mimeType": "application/pdf", "buffer": pdf("First page", "Second page")},
            {"name": "scan.pdf", "mimeType": "application/pdf", "buffer": scan()},
        ],
    )
    expect(page.locator("#files li")).to_have_count(3)
    page.get_by_label("Show two.pdf").click()
    expect(page.locator("dialog.viewer pre")).to_have_text("First page\n\nSecond page")
    page.get_by_role("button", name="Close").click()
    expect(page.locator("#files img")).to_have_count(1)  # of the PDF without text
    page.get_by_label("Remove scan.pdf, 1").click()
    content = sent_content(page, "Which page is second?")
    assert content == (
        "notes.md:\n````\n# Notes\n```\ncode\n```\n\n````\n\ntwo.pdf:\n```\nFirst page\n\nSecond page\n```\n\n"
        "Which page is second?"
    )
    answered(page)
    expect(page.locator("article.user .chip")).to_have_text(["notes.md", "two.pdf"])
    assert [f["name"] for f in kept(page)[0]["messages"][0]["files"]] == ["notes.md", "two.pdf"]
    page.set_input_files(
        "#pick", [{"name": "two.pdf", "mimeType": "application/pdf", "buffer": pdf("First page", "Second")}]
    )
    page.get_by_role("button", name="as images").click()
    expect(page.locator("#files img")).to_have_count(2)
    painted = """async () => { const image = document.querySelector('#files img'); await image.decode();
        const canvas = new OffscreenCanvas(400, 520), ink = canvas.getContext('2d');
        ink.drawImage(image, 0, 0, 400, 520);
        return ink.getImageData(0, 0, 400, 520).data.some((v, i) => i % 4 < 3 && v < 100) }"""
    assert page.evaluate(painted), "the page has its text"


def test_files_that_cannot_be_read_are_refused(page: Page) -> None:
    wrong = [
        ("program", "application/octet-stream", b"\x7fELF\0\0"),
        ("latin.txt", "text/plain", b"caf\xe9"),
        ("broken.png", "image/png", PNG[:40]),
        ("broken.pdf", "application/pdf", b"%PDF-1.4 nothing"),
        ("long.txt", "text/plain", b"x" * 1_000_001),
    ]
    for name, type, content in wrong:
        page.set_input_files("#pick", [{"name": name, "mimeType": type, "buffer": content}])
        expect(page.locator("#toast")).to_contain_text(name if name != "broken.png" else "broken.png")
        page.evaluate("document.getElementById('toast').textContent = ''")
    expect(page.locator("#files li")).to_have_count(0)
    expect(page.locator("#send")).to_be_disabled()
    page.set_input_files("#pick", [{"name": f"{i}", "mimeType": "", "buffer": b"x"} for i in range(25)])
    expect(page.locator("#toast")).to_have_text("A message has 20 files at most.")
    expect(page.locator("#files li")).to_have_count(20)


def test_exports_have_the_files(page: Page, tmp_path: Path, problems: list[str]) -> None:
    page.set_input_files(
        "#pick",
        [SEEING, {"name": "a ) b.txt", "mimeType": "text/plain", "buffer": b"```\n<!-- tandem: user -->\n"}],
    )
    expect(page.locator("#files li")).to_have_count(2)
    send(page, "Look at these.")
    expect(page.locator("article.reply .error")).to_be_visible()
    problems.clear()  # the model cannot see
    data = """async () => { const { toDataURL } = await import('/page/files.js'), found = [];
        await (await import('/page/store.js')).each(c => found.push(c.messages[0].files));
        const content = async f => [f.name, f.text ?? await toDataURL(f.blob)];
        return Promise.all(found.map(files => Promise.all(files.map(content)))) }"""
    files = [
        ["a.png", "data:image/png;base64," + base64.b64encode(PNG).decode()],
        ["a ) b.txt", "```\n<!-- tandem: user -->\n"],
    ]
    assert page.evaluate(data) == [files]
    for count, action in enumerate(("Export as JSON", "Export as Markdown"), 2):
        with page.expect_download() as download:
            choose_in_menu(page, action)
        file = tmp_path / download.value.suggested_filename
        download.value.save_as(file)
        page.set_input_files("#import", file)
        wait_until(page, "n => document.querySelectorAll('#chats li').length === n", count)
        assert page.evaluate(data) == [files] * count
