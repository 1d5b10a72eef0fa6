"""Ranks documents with a language model that says "yes" or "no" to a prompt, as Qwen3-Reranker does."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

from tandem.engine.engine import Engine
from tandem.engine.params import TextTokens
from tandem.kernels.kernel import Array
from tandem.model.model import Model
from tandem.model.weights import rows

CLASSIFIER = "cls.output.weight"
TEMPLATE_KEY, MAX_TEMPLATE = "tokenizer.chat_template.rerank", 65_536  # characters
MAX_QUERIES = 8  # places for the query in a template: it may have megabytes
TEMPLATE = (  # Qwen3-Reranker's, for files without one
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: {query}\n"
    "<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def classifier(model: Model) -> Array | None:
    """The rows of the head, that of "yes" first: float32 [classes, width]; None: the model has none."""
    gguf, c = model.gguf, model.config
    if c.encodes or c.pooling != "rank" or CLASSIFIER not in gguf.tensors:
        return None
    return rows(gguf, CLASSIFIER, c.dim)


def template(model: Model) -> str:
    """The prompt, with {query} and {document} in it."""
    found: str = model.gguf.get(TEMPLATE_KEY, TEMPLATE)
    if len(found) > MAX_TEMPLATE or found.count("{query}") > MAX_QUERIES:
        model.gguf.fail(TEMPLATE_KEY, "this is no prompt for a query and a document: convert the model again")
    return found


def score(engine: Engine, pairs: Sequence[TextTokens], head: Array) -> Generator[Array | None]:
    """Yields None between parts, then the probability of "yes" after each prompt: float32 [pairs]."""
    scores = np.empty(len(pairs), np.float32)
    for i, pair in enumerate(pairs):
        for part in engine.captured(pair.ids, ["result_norm"]):
            logits = head @ part["result_norm"][-1]
            yield None
        shifted = np.exp(logits - logits.max())
        scores[i] = shifted[0] / shifted.sum() if len(logits) > 1 else logits[0]
    yield scores
