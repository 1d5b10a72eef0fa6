"""What models write: Markdown, code and LaTeX as DOM nodes, and no HTML of theirs."""

from __future__ import annotations

import json

from playwright.sync_api import Browser, Page, Route, expect

from tests.server.browsers import wait_until
from tests.server.page.pages import answered, send
from tests.server.servers import Running
from tests.server.servers import wait_until as wait_for

SCRIPT = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"


def test_html_is_shown_as_text(page: Page) -> None:
    """A schema with a single value makes the model write a script."""

    def constrain(route: Route) -> None:
        schema = {"name": "x", "schema": {"const": SCRIPT}}
        body = {
            **route.request.post_data_json,
            "response_format": {"type": "json_schema", "json_schema": schema},
        }
        route.continue_(post_data=json.dumps({**body, "max_tokens": 100}))

    page.route("**/v1/chat/completions", constrain)
    send(page, f"{SCRIPT} [x](javascript:window.hacked=1)")
    answered(page)
    assert SCRIPT in page.locator("article.reply .text").inner_text()
    assert SCRIPT in page.locator("article.user .bubble").inner_text()
    assert page.evaluate("window.hacked") is None
    assert page.locator("#thread :is(img, script, iframe)").count() == 0


def test_the_content_security_policy_blocks_scripts(page: Page, problems: list[str]) -> None:
    """Even inserted HTML may not run or load anything."""
    page.evaluate(
        "h => { document.getElementById('thread').innerHTML = h }", "<img src=x onerror='window.hacked=1'>"
    )
    page.evaluate("() => { const s = document.createElement('script'); s.textContent = 'window.hacked=1';"
                  " document.body.append(s) }")  # fmt: skip

    def refused() -> int:
        page.wait_for_timeout(20)  # for the browser to report
        return sum("Content Security Policy" in problem for problem in problems)

    wait_for(lambda: refused() == 2)
    assert page.evaluate("window.hacked") is None
    problems.clear()


NEW_TAB = 'target="_blank" rel="noopener noreferrer"'
MARKDOWN = {
    "*a* **b** `c*` ~~d~~": "<p><em>a</em> <strong>b</strong> <code>c*</code> <del>d</del></p>",
    "snake_case_name 2*3*4": "<p>snake_case_name 2<em>3</em>4</p>",
    "# T\ntext\nmore": "<h2>T</h2><p>text<br>more</p>",
    "- a\n- b\n  1. c\n\nend": "<ul><li>a</li><li>b<ol><li>c</li></ol></li></ul><p>end</p>",
    "> q\n> r": "<blockquote><p>q<br>r</p></blockquote>",
    "---": "<hr>",
    "|a|b|\n|-|-:|\n|1|2|": '<div class="table" tabindex="0" role="group"><table><thead><tr><th>a</th>'
    '<th class="right">b</th></tr></thead>'
    '<tbody><tr><td>1</td><td class="right">2</td></tr></tbody></table></div>',
    "[x](https://a.b/c) <https://d.e>": '<p><a href="https://a.b/c" target="_blank" rel="noopener noreferrer">x</a> '
    '<a href="https://d.e" target="_blank" rel="noopener noreferrer">https://d.e</a></p>',
    "![i](https://a.b/i.png)": '<p><a href="https://a.b/i.png" target="_blank" rel="noopener noreferrer">i</a></p>',
    "[x](javascript:alert(1))": "<p><span>x</span></p>",
    "[x](data:text/html,y)": "<p><span>x</span></p>",
    "<b>b</b> &amp;": "<p>&lt;b&gt;b&lt;/b&gt; &amp;amp;</p>",
    "**open `tick": "<p>**open `tick</p>",
    "1\n2\n3": "<p>1<br>2<br>3</p>",
    "[a](http://x.org/b_(c))!": f'<p><a href="http://x.org/b_(c)" {NEW_TAB}>a</a>!</p>',
    "(http://x.org/b_(c))": f'<p>(<a href="http://x.org/b_(c)" {NEW_TAB}>http://x.org/b_(c)</a>)</p>',
    r"\(a^2 * b * c\) and \[x_1 _y_\]": r'<p><span class="math">\(a^2 * b * c\)</span> and '
    r'<span class="math display">\[x_1 _y_\]</span></p>',
}


def test_markdown(page: Page) -> None:
    render = """async (text) => { const { show } = await import('/page/markdown.js');
        const node = document.createElement('div'); show(node, text); return node.innerHTML }"""
    for text, html in MARKDOWN.items():
        assert page.evaluate(render, text) == html, text
    code = page.evaluate(render, "```py\nx = 1 < 2\n\ny\n```\nafter")
    assert "<code>x = 1 &lt; 2\n\ny</code>" in code and code.endswith("<p>after</p>") and "Copy" in code
    hostile = [
        "*" * 20_000,
        "[" * 20_000,
        "> " * 5_000 + "x",
        "- " * 5_000,
        "`" * 9_999,
        "_a" * 20_000,
        "|" * 5_000,
        "![" * 20_000,
        "$" * 20_000,
        "\\(" * 20_000,
        "\\[\n" * 5_000,
        "$a " * 10_000,
        "|a" * 200 + "\n" + "|-" * 200 + "\n" + ("|a" * 200 + "\n") * 100,
    ]
    for text in hostile:
        page.evaluate(render, text)
    # Streaming renders the same as the complete text, at every length.
    grown = """async (text) => { const { show } = await import('/page/markdown.js');
        const node = document.createElement('div'), whole = document.createElement('div');
        for (let i = 0; i <= text.length; i++) show(node, text.slice(0, i));
        show(whole, text); return node.innerHTML === whole.innerHTML }"""
    assert page.evaluate(grown, "\n\n".join(MARKDOWN) + "\n```py\nx\n```\nend")


TYPESET = r"""```python
def f(x):  # <b>&amp;
    return "</span><script>window.hacked=1</script>"
```

$\frac{a}{b}$, \(x\) and

$$
\begin{pmatrix} a & \color{red}{b} \end{pmatrix} \rule{900em}{900em}
$$

It costs $5 or $6, $\href{javascript:window.hacked=1}{x}$, $\htmlClass{a}{b}$, $\includegraphics{/a.png}$
and $\def\a{\a\a}\a$. $\frac{$ is no formula."""


def test_code_is_highlighted_and_maths_typeset(page: Page) -> None:
    """The libraries come when a text needs them, from this server; what they show has neither scripts nor images."""
    show = """async (text) => { const { show } = await import('/page/markdown.js');
        const node = document.getElementById('thread'); node.replaceChildren(); show(node, text); }"""
    assert not page.evaluate("'katex' in window")
    page.evaluate(show, TYPESET)
    expect(page.locator("code .hljs-keyword").first).to_have_text("def")
    assert page.locator("pre code").inner_text() == TYPESET[len("```python\n") :].partition("\n```")[0]
    expect(page.locator(".math .katex")).to_have_count(6)
    assert page.locator(".math.display").bounding_box()["height"] < 1000  # type: ignore[index]
    thread = page.locator("#thread")
    for source in (r"$5 or $6", r"$\def\a{\a\a}\a$", r"$\frac{$ is no formula"):
        expect(thread).to_contain_text(source)
    assert thread.locator("img, script, a, [onclick]").count() == 0
    # Texts for which the libraries take 20 to 140 s.
    timed = """async (text) => { const { show } = await import('/page/markdown.js');
        const node = document.createElement('div'), begun = performance.now(); show(node, text);
        return [performance.now() - begun, node.innerText] }"""
    for text in (
        "```csharp\n" + "fn " * 13_300 + "\n```",
        "$$\\def\\a{" + "x" * 1900 + "}" + "\\a " * 60 + "$$",
        "$$" + "x" * 300_000 + "$$",
        ("$$\\begin{matrix}" + "&" * 1900 + "\\end{matrix}$$\n\n") * 100,
        ("$" + r"\sqrt{x^{y_z}}" * 135 + "$\n\n") * 100,
    ):
        took, shown = page.evaluate(timed, text)
        assert took < 10_000 and shown, (took, text[:40])
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.fonts.check('16px KaTeX_Math')")


def test_the_first_view_is_small_and_fast(server: Running, browser: Browser) -> None:
    """Under 600 KB and painted within 0.3 s; a chat with code and maths stays under 600 KB, too."""
    # Without the service worker: what goes through it is not counted.
    context = browser.new_context(viewport={"width": 1280, "height": 800}, service_workers="block")
    page = context.new_page()
    transferred = """() => [...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]
        .reduce((sum, entry) => sum + entry.transferSize, 0)"""
    page.goto(server.url)
    expect(page.locator("#model option")).to_have_count(2)
    first = page.evaluate(transferred)
    page.evaluate(
        """async (text) => { const { show } = await import('/page/markdown.js');
        show(document.getElementById('thread'), text); }""",
        TYPESET,
    )
    expect(page.locator(".hljs-keyword, .katex").first).to_be_visible()
    page.evaluate("document.fonts.ready.then(() => 0)")
    assert 10_000 < first < 200_000 and first < page.evaluate(transferred) < 600_000
    painted: list[float] = []
    while min(painted, default=999) >= 300 and len(painted) < 20:  # ms; the machine may have other work
        page.goto("about:blank")
        page.goto(server.url)
        wait_until(page, "performance.getEntriesByName('first-contentful-paint').length")
        painted.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
    assert min(painted) < 300, painted
    context.close()


DIAGRAMS = """```mermaid
graph TD
  A[Start] --> B["Is it <img src=x onerror='parent.hacked=1'>?"]
```

```mermaid
this is none
```
"""


def test_diagrams_are_drawn_in_a_frame_apart(page: Page, server: Running, problems: list[str]) -> None:
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.evaluate(
        "async (text) => (await import('/page/markdown.js')).show(document.getElementById('thread'), text)",
        DIAGRAMS,
    )
    good, bad = page.get_by_role("button", name="Diagram").all()
    assert not [url for url in requests if "mermaid.js" in url], "it is large: it waits until a user asks"
    good.click()
    inside = page.frame_locator("iframe")
    expect(inside.locator("svg")).to_contain_text("Start")
    expect(good).to_have_attribute("aria-expanded", "true")
    assert all("Content Security Policy" in problem for problem in problems), problems  # of the text's HTML
    assert page.evaluate("window.hacked") is None
    wait_until(page, "() => document.querySelector('iframe').offsetHeight > 130")  # it grew to the diagram
    frame = page.frames[1]
    assert frame.evaluate("origin") == "null" and "sandbox" in policy(server, "/page/diagram.html")
    for attempt in ("parent.document", "localStorage", "fetch('/live')", "open('/')"):
        tried = f"async () => {{ try {{ return Boolean(await {attempt}) }} catch {{ return false }} }}"
        assert frame.evaluate(tried) is False, attempt
    bad.click()
    expect(page.locator("#toast")).to_contain_text("The diagram cannot be drawn")
    expect(page.locator("iframe")).to_have_count(1)
    good.click()
    expect(page.locator("iframe")).to_have_count(0)
    problems.clear()


def policy(server: Running, path: str) -> str:
    return str(server.ask(path)[1]["content-security-policy"])
