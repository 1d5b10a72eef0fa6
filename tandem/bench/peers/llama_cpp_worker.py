"""llama.cpp's side of a comparison: a script for a Python that has llama_cpp, and need not have Tandem.

    python llama_cpp_worker.py MODEL THREADS ROOM [GPU_LAYERS]      serves JSON lines on stdin (see worker.py)
    python llama_cpp_worker.py MODEL THREADS --first-token PROMPT   prints the first token of an answer
                                           --first-token-of-chat  the same, of a prompt in the model's chat template

It uses the C interface as llama-bench and llama-batched-bench do: batches of tokens through llama_decode, logits of
the last token of each sequence only, a KV stream a sequence, weights repacked and mapped as llama.cpp chooses.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
import time
import types
from typing import Any


def bindings(whole: bool) -> Any:
    """The whole package, or only its C bindings, which are closer to a program in C."""
    if not whole:
        spec = importlib.util.find_spec("llama_cpp")
        assert spec is not None and spec.submodule_search_locations, "this Python has no llama_cpp"
        package = types.ModuleType("llama_cpp")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["llama_cpp"] = package
    return importlib.import_module("llama_cpp.llama_cpp")


llama: Any = bindings(whole="--first-token" in sys.argv)
quiet = llama.llama_log_callback(lambda level, text, data: None)
MAX_BATCH = 512  # tokens
KV_TYPES = {"f16": 1, "q8": 8}  # ggml type numbers


class LlamaCppModel:
    def __init__(self, path: str, threads: int, gpu_layers: int | None = None) -> None:
        llama.llama_log_set(quiet, None)
        llama.llama_backend_init()
        self.threads = threads
        params = llama.llama_model_default_params()
        if gpu_layers is not None:
            params.n_gpu_layers = gpu_layers
        self.model = llama.llama_model_load_from_file(path.encode(), params)
        assert self.model, f"llama.cpp cannot load {path}"
        self.vocab = llama.llama_model_get_vocab(self.model)
        self.words = llama.llama_vocab_n_tokens(self.vocab)

    def context(self, tokens: int, sequences: int = 1, flash: bool | None = None, kv: str = "f16") -> Any:
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max = tokens * sequences, sequences
        params.n_batch = params.n_ubatch = MAX_BATCH
        params.type_k = params.type_v = KV_TYPES[kv]
        params.n_threads = params.n_threads_batch = self.threads
        params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_AUTO if flash is None else int(flash)
        context = llama.llama_init_from_model(self.model, params)
        assert context, "llama.cpp cannot make a context"
        return context

    def tokenize(self, text: str, special: bool = False) -> list[int]:
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 8))()
        count = llama.llama_tokenize(self.vocab, data, len(data), ids, len(ids), True, special)
        return list(ids[:count])

    def chat(self, prompt: str) -> str:
        # The one model without its own.
        template = llama.llama_model_chat_template(self.model, None) or b"gemma"
        message = llama.llama_chat_message(role=b"user", content=prompt.encode())
        out = ctypes.create_string_buffer(4096)
        length = llama.llama_chat_apply_template(template, ctypes.byref(message), 1, True, out, len(out))
        return out.raw[:length].decode()


class Side:
    def __init__(self, model: LlamaCppModel, room: int) -> None:
        import numpy as np

        self.np, self.model, self.room = np, model, room
        self.batch = llama.llama_batch_init(MAX_BATCH, 0, 1)
        names = ("token", "pos", "n_seq_id", "logits")
        self.fields = {name: np.ctypeslib.as_array(getattr(self.batch, name), (MAX_BATCH,)) for name in names}
        self.context: Any = None

    def info(self) -> dict[str, str]:
        return {
            "version": llama.llama_version().decode(),
            "system": llama.llama_print_system_info().decode(),
        }

    def tokenize(self, text: str) -> dict[str, list[int]]:
        return {"ids": self.model.tokenize(text)}

    def open(
        self, prompts: list[list[int]], sequences: int = 0, flash: bool = True, room: int = 0, kv: str = "f16"
    ) -> None:
        """Sequences that grow by one token each a step: one a prompt, or `sequences` copies of the only one, or empty
        ones."""
        self.sequences = sequences or max(1, len(prompts))
        self.context = self.model.context(room or self.room, self.sequences, flash, kv)
        self.memory = llama.llama_get_memory(self.context)
        first = [self.read(ids, 0, i) for i, ids in enumerate(prompts)]
        if len(first) == 1:
            first *= self.sequences
            for i in range(1, self.sequences):
                llama.llama_memory_seq_cp(self.memory, 0, i, -1, -1)
        self.next = self.np.array(first or [[0]] * self.sequences, self.np.int32).ravel()
        self.position = self.opened = len(prompts[0]) if prompts else 0

    def rewind(self) -> None:
        """To where the sequences were opened."""
        for i in range(self.sequences):
            assert llama.llama_memory_seq_rm(self.memory, i, self.opened, -1), "llama.cpp cannot go back"
        self.position = self.opened

    def steps(self, count: int) -> dict[str, float]:
        everyone = range(self.sequences)
        started = time.perf_counter()
        for _ in range(count):
            self.next = self.feed(self.next, self.position, everyone, everyone)
            self.position += 1
        return {"seconds": time.perf_counter() - started}

    def prefill(self, tokens: list[int]) -> dict[str, float]:
        self.rewind()
        started = time.perf_counter()
        self.read(tokens, self.opened, 0)
        return {"seconds": time.perf_counter() - started}

    def close(self) -> None:
        llama.llama_free(self.context)

    def read(self, tokens: list[int], begin: int, owner: int) -> Any:
        """Runs a prompt; the likeliest token after it."""
        for at in range(0, len(tokens), MAX_BATCH):
            some = tokens[at : at + MAX_BATCH]
            last = at + MAX_BATCH >= len(tokens)
            positions = range(begin + at, begin + at + len(some))
            found = self.feed(some, positions, [owner] * len(some), [len(some) - 1] if last else [])
        return found

    def feed(self, tokens: Any, positions: Any, owners: Any, sampled: Any) -> Any:
        """Runs a batch; the likeliest next token after each of the `sampled` ones."""
        count = self.batch.n_tokens = len(tokens)
        fields = self.fields
        fields["token"][:count], fields["pos"][:count], fields["n_seq_id"][:count] = tokens, positions, 1
        fields["logits"][:count] = 0
        fields["logits"][list(sampled)] = 1
        for i, owner in enumerate(owners):
            self.batch.seq_id[i][0] = owner
        assert llama.llama_decode(self.context, self.batch) == 0, "llama.cpp failed to decode"
        if not sampled:
            return None
        logits, values = llama.llama_get_logits(self.context), len(sampled) * self.model.words
        memory = (ctypes.c_float * values).from_address(ctypes.addressof(logits.contents))
        return self.np.frombuffer(memory, self.np.float32).reshape(len(sampled), -1).argmax(axis=1)


def serve(side: Side) -> None:
    reply: Any = side.info()
    while True:
        print(json.dumps(reply), flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        request = json.loads(line)
        started = time.process_time()
        reply = getattr(side, request.pop("do"))(**request) or {}
        reply["cpu"] = time.process_time() - started


def first_token(model: LlamaCppModel, prompt: str, chat: bool) -> None:
    ids = model.tokenize(model.chat(prompt), special=True) if chat else model.tokenize(prompt)
    context = model.context(4096)
    tokens = (ctypes.c_int32 * len(ids))(*ids)
    assert llama.llama_decode(context, llama.llama_batch_get_one(tokens, len(ids))) == 0
    token = llama.llama_sampler_sample(llama.llama_sampler_init_greedy(), context, -1)
    text = ctypes.create_string_buffer(256)
    length = llama.llama_token_to_piece(model.vocab, token, text, len(text), 0, True)
    sys.stdout.buffer.write(text.raw[:length])
    sys.stdout.flush()


def main(path: str, threads: str, room: str, *more: str) -> None:
    if room.startswith("--first-token"):
        first_token(LlamaCppModel(path, int(threads)), more[0], chat=room == "--first-token-of-chat")
    else:
        serve(Side(LlamaCppModel(path, int(threads), *map(int, more)), int(room)))


if __name__ == "__main__":
    main(*sys.argv[1:])
