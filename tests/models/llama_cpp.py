"""llama.cpp's logits, through the C interface that the wheel `xllamacpp` exports.

Its parameter structs change from release to release, so they are opaque here: larger than the real ones,
filled by llama.cpp's own defaults. Only the first fields of the context's are written, and then read back.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cffi
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

ffi = cffi.FFI()
ffi.cdef("""
    typedef struct { int64_t opaque[64]; } model_params;
    typedef struct { uint32_t n_ctx, n_batch, n_ubatch, other[125]; } context_params;
    typedef struct {
        int32_t n_tokens, *token; float *embd; int32_t *pos, *n_seq_id, **seq_id; int8_t *logits;
    } llama_batch;
    void llama_log_set(void (*callback)(int, const char *, void *), void *);
    model_params llama_model_default_params(void);
    context_params llama_context_default_params(void);
    void *llama_model_load_from_file(const char *, model_params);
    void *llama_init_from_model(void *, context_params);
    const void *llama_model_get_vocab(const void *);
    int32_t llama_vocab_n_tokens(const void *);
    int32_t llama_tokenize(const void *, const char *, int32_t, int32_t *, int32_t, bool, bool);
    uint32_t llama_n_ctx(const void *);
    uint32_t llama_n_batch(const void *);
    void llama_set_n_threads(void *, int32_t, int32_t);
    llama_batch llama_batch_init(int32_t, int32_t, int32_t);
    void llama_batch_free(llama_batch);
    int32_t llama_decode(void *, llama_batch);
    float *llama_get_logits_ith(void *, int32_t);
    void *llama_get_memory(const void *);
    void llama_memory_clear(void *, bool);
    void llama_free(void *);
    void llama_model_free(void *);
""")


@ffi.callback("void(int, const char *, void *)")
def _quiet(level: int, text: object, data: object) -> None: ...


class LlamaCpp:
    """A model in llama.cpp, with its defaults (float16 KV), on the CPU."""

    def __init__(self, path: str | Path, context: int, batch: int = 128, threads: int = 2) -> None:
        package = importlib.util.find_spec("xllamacpp")
        assert package and package.submodule_search_locations, "install xllamacpp"
        [library] = Path(package.submodule_search_locations[0]).glob("xllamacpp*.so")
        self.lib = ffi.dlopen(str(library))
        self.lib.llama_log_set(_quiet, ffi.NULL)
        defaults = self.lib.llama_model_default_params()
        self.model = self.lib.llama_model_load_from_file(str(path).encode(), defaults)
        assert self.model != ffi.NULL, f"llama.cpp cannot load {path}"
        params = self.lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = -(-context // 256) * 256, batch, batch
        self.context = self.lib.llama_init_from_model(self.model, params)
        taken = self.lib.llama_n_ctx(self.context), self.lib.llama_n_batch(self.context)
        assert taken == (params.n_ctx, batch), "the layout of llama.cpp's parameters has changed"
        self.lib.llama_set_n_threads(self.context, threads, threads)
        self.vocabulary = self.lib.llama_model_get_vocab(self.model)
        self.size: int = self.lib.llama_vocab_n_tokens(self.vocabulary)
        self.batch = batch

    def tokenize(self, text: str) -> list[int]:
        data = text.encode()
        ids = ffi.new("int32_t[]", len(data) + 1)
        count = self.lib.llama_tokenize(self.vocabulary, data, len(data), ids, len(ids), True, False)
        return list(ids[0:count])

    def logits(self, ids: Sequence[int]) -> Iterator[Array]:
        """The logits of one sequence from its start, in blocks of rows; a block is valid until the next."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        batch = self.lib.llama_batch_init(self.batch, 0, 1)
        for start in range(0, len(ids), self.batch):
            part = ids[start : start + self.batch]
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i], batch.pos[i] = int(token), start + i
                batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1
            assert self.lib.llama_decode(self.context, batch) == 0, "llama.cpp failed to decode"
            rows = ffi.buffer(self.lib.llama_get_logits_ith(self.context, 0), len(part) * self.size * 4)
            yield np.frombuffer(rows, np.float32).reshape(len(part), self.size)
        self.lib.llama_batch_free(batch)

    def close(self) -> None:
        self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)
