"""One word, one meaning: the project's own former words do not come back in place of the field's."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[1]
# Text of the past or of others, and this table.
NOT_READ = (
    "CHANGELOG.md",
    "LICENSE",
    "benchmarks/results/",
    "tandem/server/page/assets/vendor/",
    "tests/models/text.txt",
    "tests/test_vocabulary.py",
)
ENGINE = r"^tandem/(?:engine|program|kernels|devices)/.*"
GPU = r"^(?:tandem/kernels|tandem/devices/vulkan|tests/vulkan)/.*"
NPU = r"^(?:tandem/devices/(?:npu|tensor_parallel)|tests/(?:npu|tensor_parallel)|docs/NPU\.md).*"
# Former word -> the field's. A pattern is searched in "path:line", so that it can name folders too.
WORDS = {
    r"\bTurn\b|\bturns?=|\.turns\b|_turns?\b(?!>)": "step slot, in-flight step",
    r"(?i)guess": "draft tokens, propose",
    rf"\b(?:Trust|Chance)\b|\bhope[ds]?\b|{ENGINE}\b(?:trust|chance)s?\b": "acceptance rate",
    r"\bWorth\b|\bworth\.py\b|\.worth\b|\bimport worth\b": "speculation cost model",
    r"(?i)\bcompany\b": "batch size",
    r"(?i)\bpaced?\b|\bpace_|_pace\b": "prefill budget",
    r"(?i)guest": "out-of-band forward",
    r"(?i)put_?back\b": "preempt",
    r"(?i)(?<!prompt[ _-])(?<!prompt)lookup(?!error)": "prompt lookup",
    rf"\bedits=|{ENGINE}\bedit(?:s|ed)\b": "logit adjustments",
    r"(?i)\bdrawing\b": "sampling",
    r"(?i)(?<!dot )(?<!import )\bproducts?\b|(?<!dot)_products?\b": "matmul",
    r"(?i)\bturning\b": "fused RoPE",
    r"\battention_ask\b": "prefetch",
    rf"{GPU}(?i:\bjoint\b|\bjoining\b|\bjoined\b)": "fusion, fused kernels",
    r"(?i)fragments\b|fragment_": "register cooperative matrix",
    r"(?i)\bteams?\b|_teams?\b": "multi-subgroup",
    r"(?i)(?<!round )\blegs?\b|(?<!round )\btrips?\b": "segment; in-flight step",
    r"\bSpent\b": "usage",
    r"\bNews\b|\bnews[.=(\[]": "delta",
    r"\bPieces?\b": "delta",
    r"(?i)\bthoughts?\b": "reasoning",
    r"(?i)dialect": "API",
    r"\b(?:end|stop)_ids\b": "eos_ids, stop_token_ids",
    r"\bRequestOutput\b|\bKVPlan\b|\bkv_plan\b|\bInFlightStep\b": "OutputReader, KVCacheShape, kv_size, StagedStep",
    rf"{NPU}(?i:verdict|\bjudge|\bgate\.py|\badmit(?:s|ted)\b)": "selection",
    rf"{NPU}\b(?:way_out|Way)\b": "direction",
    r"\bPreparer\b|\bbreathing\b|(?<!animation: )(?<!keyframes )\bbreathe\b": "WorkerThread; throttle",
    r"\bnext_maintenance\b|_maintain_blocks\b|needs_sampled_token|\bkv_state\b": (
        "block_boundary, _publish_and_free_blocks, wait_for_token, kv_snapshot"
    ),
    r"Hybrid(?:Device|Recording)\b|(?:devices|tests)[./]hybrid\b": "tensor_parallel (a hybrid is a kind of model)",
    r"\bengine[./]models\b": "model_manager",
    r"model's work\b": "requests that run no model",
    r"process(?:es)? apart\b": "separate process",
    r"\b(?:before|after) each half\b": "attention and feed-forward",
    r"(?i)\b(?:at most|first|every|least|up to|for|with|of) so (?:many|much)\b": "this number of",
    r"vulkan[./]step_program\b|\bmodel[./]registry\b|\bhttp[./]apis\b": "fuse_launches, locate, error_formats",
}
# (path, or folder with a slash at its end; text in the line): the word has another meaning there, or is an old name
# that must still be read.
ALLOWED = [
    ("tandem/server/anthropic/messages.py", '"end_turn"'),  # a stop reason of Anthropic's API
    ("tests/models/reference.py", "pair_that_turns"),  # a rotation
    ("tests/server/try_clients.py", "max_turns="),  # an argument of OpenAI's Agents SDK
    ("benchmarks/speculation.py", '"guesse'),  # keys and values of older results
    ("benchmarks/speculation.py", '"lookup": "prompt lookup"'),
    ("docs/SECURITY.md", "## Trust"),
    ("tandem/bench/load_generator.py", "week company system"),  # words of random prompts
    ("tandem/engine/llm.py", "lookup"),  # LLM(lookup=True) is an alias
    ("tests/engine/test_llm.py", '("lookup", "yes")'),
    ("examples/save_restore.py", "team"),  # a prompt
    ("tandem/server/page/assets/tree.js", "saved by older versions"),  # conversations kept by a browser
    ("tests/vulkan/test_quality.py", "joined("),  # lists of divergences
    ("tandem/report/sections.py", "rates.products became rates.matmuls"),
    ("", " product("),  # itertools.product
    ("docs/LESSONS.md", "product"),  # of numbers, here and below
    ("docs/NUMERICS.md", "Products within a block"),
    ("docs/NPU.md", "products want it"),
    ("tandem/devices/npu/", "roduct"),
    ("tests/npu/", "product"),
    ("tests/npu/test_numerics.py", '["admitted"]'),  # a key of the results
    ("tandem/kernels/matmul_norm_partials.py", "products"),
    ("tandem/kernels/norm_finish.py", "product"),
    ("tandem/kernels/panels.slang", "their products are the same"),
    ("tandem/kernels/rope.py", "a difference of products"),
    ("tandem/kernels/sample.slang", "bits of a product"),
]


def tracked() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in listed.stdout.split("\0") if path and (ROOT / path).is_file()]


def lines(path: str) -> list[str]:
    """Each line of a text file behind its path; of a binary file only the path."""
    data = (ROOT / path).read_bytes()
    if b"\0" in data or path.endswith((".png", ".gguf", ".npz", ".spv")):
        return [path]
    return [path, *(f"{path}:{line}" for line in data.decode().splitlines())]


def is_allowed(line: str) -> bool:
    path = line.partition(":")[0]
    return any(
        (path == where or (where[-1:] in ("", "/") and path.startswith(where))) and text in line
        for where, text in ALLOWED
    )


def old_words(lines: list[str]) -> list[str]:
    return [
        f"{line.strip()[:160]}\n    {found[0][-20:]!r}: the word is {word!r}"
        for line in lines
        for pattern, word in WORDS.items()
        if (found := re.search(pattern, line)) and not is_allowed(line)
    ]


def test_no_old_word_is_back() -> None:
    paths = [path for path in tracked() if not path.startswith(NOT_READ)]
    assert len(paths) > 300
    found = [each for path in paths for each in old_words(lines(path))]
    assert not found, f"{len(found)} old words:\n" + "\n".join(found)


def test_no_exception_is_left_over() -> None:
    texts = {
        path: (ROOT / path).read_text()
        for path in tracked()
        if path.endswith((".py", ".md", ".slang", ".js", ".cc"))
    }
    unused = [
        (where, text)
        for where, text in ALLOWED
        if not any(
            path.startswith(where) and text in content
            for path, content in texts.items()
            if path not in NOT_READ
        )
    ]
    assert not unused


@pytest.mark.parametrize(
    "line",
    [
        "tandem/engine/engine.py:    turns=2",
        "tandem/engine/engine.py:class Turn:",
        "tandem/engine/engine.py:    self._free_turn()",
        "tandem/engine/llm.py:    guesses = self.guess()",
        "tandem/engine/speculation.py:class Trust:",
        "tandem/engine/speculation.py:    chance = 0.5",
        "tandem/engine/speculation.py:    hoped = 3",
        "tandem/engine/worth.py",
        "tandem/devices/npu/verdicts.py",
        "tandem/devices/tensor_parallel/gate.py",
        "tests/npu/test_plan.py:    Port(tile, way_out=True, channel=0)",
        "tandem/engine/scheduler.py:    # depends on its company",
        "tandem/engine/scheduler.py:    pace: Pace",
        "tandem/engine/engine.py:def guest_rows():",
        "tandem/engine/scheduler.py:    self.put_back(sequence)",
        "docs/COMMANDS.md:`--lookup` drafts from the prompt",
        "tandem/kernels/sample.py:    edits: Array",
        "tandem/engine/batch.py:# the drawing of a row",
        "docs/VULKAN.md:the product of one token",
        "tandem/kernels/attention.slang:// turning inside attention",
        "tandem/kernels/rope.py:attention_ask",
        "tandem/devices/vulkan/fuse.py:    joint = True",
        "tandem/devices/vulkan/fuse.py:    joined = True",
        "tandem/devices/vulkan/paths.py:fragments",
        "tandem/kernels/matmul.slang:// teams of subgroups",
        "tandem/devices/tensor_parallel/device.py:for leg in self.legs:",
        "tandem/devices/split/stage.py:# a trip over the stages",
        "tandem/engine/output.py:class Spent:",
        "tandem/engine/output.py:class News:",
        "tandem/server/core/output_parser.py:class Piece:",
        "tandem/server/core/output_parser.py:thoughts: str",
        "tandem/server/app.py:# each dialect",
        "tandem/devices/hybrid/device.py:class HybridDevice:",
        "tandem/server/app.py:from tandem.engine.models import Models",
        "docs/SECURITY.md:requests without a model's work",
        "docs/ARCHITECTURE.md:compiles the constraint in a process apart",
        "tandem/model/architectures/olmo2.py:norms after each half instead of before",
        "tandem/engine/llm.py:keeps it on disk, in at most so many bytes",
    ],
)
def test_each_old_word_is_found(line: str) -> None:
    assert old_words([line])


@pytest.mark.parametrize(
    "line",
    [
        "docs/a.md:each in turn, a conversation of several turns; lowering turns ops into launches",
        'tandem/model/a.py:"<start_of_turn>": gemma, turns = []',
        "docs/a.md:prompt lookup, --prompt-lookup, prompt_lookup, PromptLookup, ProcessLookupError",
        "docs/a.md:integer dot products, a round trip, test_round_trip, address.fragment",
        "docs/a.md:a spent budget, a piece of text, an edited file, worth some layers",
    ],
)
def test_other_meanings_are_not(line: str) -> None:
    assert not old_words([line])
