"""Harmony, the chat format of gpt-oss: channels become reasoning, text and tool calls, whatever a model forgets."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tandem import LLM
from tandem.engine.output import Detokenizer
from tandem.gguf.file import GGUF
from tandem.model.harmony import HarmonyDecoder
from tandem.model.tokenizer import Tokenizer
from tandem.server.core.output_parser import GenerationResult, OutputParser
from tandem.server.core.prompt import GenerationRequest, build_prompt
from tandem.server.core.tool_calls import Tool
from tests.cli.tiny_model import write_tiny_model

pytestmark = pytest.mark.fast

CONTROL = (
    "<|start|>", "<|return|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>",
)  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.thinking }}{{ m.content }}<|end|>{% endfor %}"
    "{% if tools %}functions{% endif %}{# tool_calls #}<|start|>assistant"
)
THINK, NEXT = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
# response: text, reasoning, calls
RESPONSES = {
    f"{THINK}Hm.{NEXT}{FINAL}Yes é.<|return|>": ("Yes é.", "Hm.", []),
    f"{FINAL}Yes.<|return|>": ("Yes.", "", []),
    f"{THINK}Hm": ("", "Hm", []),
    f"{THINK}a{NEXT}{THINK}b{NEXT}{FINAL}c": ("c", "a\n\nb", []),
    f'{THINK}Hm.{NEXT}{CALL}{{"x": 3}}<|call|>': ("", "Hm.", [("f", {"x": 3})]),
    f'{NEXT} to=functions.f<|channel|>commentary json<|message|>{{"x": "a<b"}}<|call|>': (
        "", "", [("f", {"x": "a<b"})],
    ),
    f'<|channel|>commentary<|message|>I look.{NEXT}{CALL}{{"x": 3}}<|call|>': ("I look.", "", [("f", {"x": 3})]),
    f'{CALL}{{"x": 3}}{NEXT}{CALL}{{"x": 4}}<|call|>': ("", "", [("f", {"x": 3}), ("f", {"x": 4})]),
    f"{THINK}Hm.{FINAL}No end.": ("No end.", "Hm.", []),
    "No header.<|return|>": ("No header.", "", []),
    f"{THINK}Hm.{NEXT}tomorrow": ("tomorrow", "Hm.", []),
    f"{FINAL}a<|message|>b<|constrain|>c<|return|>": ("abc", "", []),
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harmony")
    return write_tiny_model(folder / "harmony.gguf", template=TEMPLATE, control=CONTROL)


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    with GGUF.open(path) as gguf:
        return Tokenizer.from_gguf(gguf)


def parsed(tokenizer: Tokenizer, prompt: str, response: str) -> tuple[str, str, list[tuple[str, object]]]:
    decoder = Detokenizer(tokenizer, (), tokenizer.encode(prompt, special=True, bos=False))
    parser, result = OutputParser({"f": {}}), GenerationResult()
    for id in tokenizer.encode(response, special=True, bos=False):
        result.add(parser.push("" if id in tokenizer.eos_ids else decoder.push(id)))
    result.add(parser.push(decoder.flush(), last=True))
    return result.text, result.reasoning, [(c.name, json.loads(c.arguments)) for c in result.tool_calls]


@pytest.mark.parametrize("response", RESPONSES)
def test_responses(tokenizer: Tokenizer, response: str) -> None:
    prompt = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
    text, reasoning, calls = RESPONSES[response]
    got = parsed(tokenizer, prompt, response)
    assert (got[0].strip(), got[1].strip(), got[2]) == (text, reasoning, calls)


def test_a_prompt_that_is_no_conversation_is_continued_as_text(tokenizer: Tokenizer) -> None:
    assert parsed(tokenizer, "Once upon", " a time") == (" a time", "", [])


def test_a_header_without_end_is_text(tokenizer: Tokenizer) -> None:
    """And takes no time that grows with its square, in a prompt or in a response."""
    text, _, _ = parsed(tokenizer, "<|start|>assistant", f"<|channel|>{'a' * 3000}")
    assert text.endswith("a" * 3000)
    begun = time.thread_time()
    decoder = Detokenizer(tokenizer, (), tokenizer.encode(f"<|start|>{CALL}{'é' * 100_000}", special=True))
    assert decoder.push(tokenizer.encode("b")[-1]) == "b"
    assert time.thread_time() - begun < 2


def test_a_channel_named_again_and_again_is_one(tokenizer: Tokenizer) -> None:
    decoder = HarmonyDecoder(tokenizer, tokenizer.harmony, [])  # type: ignore[arg-type]
    for id in tokenizer.encode("<|channel|>" * 1000, special=True, bos=False):
        assert decoder.push(id) == ""
    assert len(decoder._header or "") < 100


@pytest.mark.parametrize(
    "name", ['f"}', "f\\", "f\u202e\x1b[2J", "</tool_call>", "functions.", "x" * 900, "f<|end|>"]
)
def test_odd_names_of_functions_are_no_calls(tokenizer: Tokenizer, name: str) -> None:
    _, _, calls = parsed(
        tokenizer, "<|start|>assistant", f"<|channel|>commentary to={name}<|message|>{{}}<|call|>"
    )
    assert not calls


def test_a_message_does_not_end_the_response(tokenizer: Tokenizer) -> None:
    ends = {tokenizer.find(text) for text in ("<|return|>", "<|call|>")}
    assert tokenizer.eos_ids == ends


def test_other_vocabularies_are_not_harmony(tmp_path: Path) -> None:
    with GGUF.open(write_tiny_model(tmp_path / "a.gguf")) as gguf:
        assert Tokenizer.from_gguf(gguf).harmony is None


def test_constrained_answers_begin_without_reasoning(path: Path) -> None:
    """A grammar has no control tokens."""
    with LLM(path, device="cpu", threads=1, context=256) as llm:
        messages = [{"role": "user", "content": "Hi"}]
        plain = build_prompt(llm, GenerationRequest("harmony", messages=messages))
        held = build_prompt(llm, GenerationRequest("harmony", messages=messages, params={"regex": "Yes[.]"}))
        assert llm.tokenizer.decode(plain.ids, special=True).endswith("<|start|>assistant")
        assert llm.tokenizer.decode(held.ids, special=True).endswith(FINAL)
        assert llm.generate([held.ids], max_tokens=9, regex="Yes[.]")[0].text == "Yes."


def test_what_was_thought_before_a_call_is_in_the_prompt(path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm."}
    messages = [{"role": "user", "content": "Hi"}, {**said, "tool_calls": [call]}, said]
    with LLM(path, device="cpu", threads=1, context=256) as llm:
        ids = build_prompt(llm, GenerationRequest("harmony", messages=messages)).ids
        off = GenerationRequest("harmony", messages=messages, template_kwargs={"enable_thinking": False})
        answer = build_prompt(llm, off).ids
        text = llm.tokenizer.decode(ids, special=True)
    assert "<|message|>Hm.\n\nI look.<|end|>" in text and "<|message|>I look.<|end|>" in text
    # Without reasoning, the answer begins at once.
    assert answer[: len(ids)] == ids and len(answer) > len(ids)


def test_a_required_call_is_one(path: Path) -> None:
    schema = {"type": "object", "properties": {"x": {"enum": [3]}}, "required": ["x"]}
    request = GenerationRequest(
        "harmony",
        messages=[{"role": "user", "content": "Hi"}],
        tools=[Tool("f", "", schema)],
        tool_choice="required",
        template_kwargs={"enable_thinking": False},
    )
    with LLM(path, device="cpu", threads=1, context=512) as llm:
        prompt = build_prompt(llm, request)
        answer = llm.generate([prompt.ids], max_tokens=99, **prompt.params)[0]
        [call] = prompt.new_parser().push(answer.text, last=True).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("f", {"x": 3})
