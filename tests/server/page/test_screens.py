"""The page on a desktop and a phone, light and dark."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.server.page.pages import settle
from tests.server.servers import Running

SHOTS = Path(__file__).parents[3] / "build" / "screenshots"


ANSWER = """Here is a small function, and what it does.

```python
def reverse_words(text: str) -> str:
    \"\"\"Words in the other order; a word's letters stay.\"\"\"
    return " ".join(reversed(text.split()))
```

It takes **linear time**, $O(n)$, and treats any run of spaces as one:

1. `split()` without arguments drops *empty* strings.
2. `reversed` walks the list backwards.

| input | output |
|---|---|
| `a b c` | `c b a` |
| one two | two one |
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["desktop", "phone"])
def test_it_fits_every_screen_and_theme(server: Running, browser: Browser, kind: str, scheme: Any) -> None:
    """Saves screenshots in build/screenshots; some of them are in docs/images."""
    phone = kind == "phone"
    size = {"width": 390, "height": 844} if phone else {"width": 1280, "height": 800}
    context = browser.new_context(
        viewport=size, color_scheme=scheme, is_mobile=phone, has_touch=phone, device_scale_factor=2 if phone else 1
    )  # fmt: skip
    page = context.new_page()
    settle(page, server, max_tokens=200)
    kept = {"id": "a", "title": "Reverse the words of a sentence", "updated": 2e12, "messages": [
        {"role": "user", "content": "Write a Python function that reverses the words of a sentence."},
        {"role": "assistant", "content": ANSWER, "model": "smollm2"}]}  # fmt: skip
    page.evaluate("c => localStorage.setItem('tandem.chat.a', c)", json.dumps(kept))
    page.reload()
    page.goto(f"{server.url}/#a")
    expect(page.locator(".hljs-keyword").first).to_be_visible()
    expect(page.locator(".katex").first).to_be_visible()
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"chat-{kind}-{scheme}.png")
    body = json.dumps(server.chat("Tell a story.", max_tokens=30, model="smollm2"))
    page.evaluate("b => { for (let i = 0; i < 3; i++) fetch('/v1/chat/completions', {method: 'POST', body: b,"
                  " headers: {'content-type': 'application/json'}}) }", body)  # fmt: skip
    page.goto(f"{server.url}/#live")
    expect(page.locator("#live-batch")).to_have_text(re.compile(r"\d"))
    page.screenshot(path=SHOTS / f"live-{kind}-{scheme}.png")
    for part in ("html", ".live"):
        assert not page.locator(part).evaluate("node => node.scrollWidth > innerWidth")
    background = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(background)
    if phone:
        page.click("#side-open")
    for _ in range(2 if scheme == "light" else 1):  # system, light, dark
        page.click("#theme")
    assert page.evaluate(background) != before
    server.wait_idle()
    context.close()
