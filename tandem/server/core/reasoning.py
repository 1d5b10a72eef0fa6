"""How model families mark reasoning, before the text or the calls of a response."""

from __future__ import annotations

from typing import NamedTuple


class ReasoningTags(NamedTuple):
    start: str
    end: str
    answer: str = ""  # between the reasoning and what follows it
    final: str = ""  # between that and a text
    has_label: bool = False  # a word follows `start` on its line


REASONING = (
    ReasoningTags("<think>", "</think>"),
    ReasoningTags("[THINK]", "[/THINK]"),  # Mistral
    ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),  # Command
    ReasoningTags("<seed:think>", "</seed:think>"),
    ReasoningTags("<|channel>", "<channel|>", has_label=True),  # Gemma 4
)
# gpt-oss, whose responses reach the parser with <think> (model/harmony.py).
HARMONY = ReasoningTags(
    "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant", "<|channel|>final<|message|>"
)


def reasoning_for(template: str) -> ReasoningTags | None:
    """The reasoning of the family that a chat template belongs to, if it has any."""
    return next((tags for tags in REASONING if tags.start in template), None)
