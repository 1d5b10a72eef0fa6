"""llama.cpp's side of the comparison: run by the peer's Python, which has no Tandem.

    python peer_llama_cpp.py MODEL THREADS ROOM                   serves JSON lines on stdin (see workers.py)
    python peer_llama_cpp.py MODEL THREADS --first-token PROMPT   prints the first token of an answer
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
    """The package as its users import it, or the C interface alone, which is nearer to a program in C."""
    if not whole:
        spec = importlib.util.find_spec("llama_cpp")
        assert spec is not None and spec.submodule_search_locations, "this Python has no llama_cpp"
        package = types.ModuleType("llama_cpp")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["llama_cpp"] = package
    return importlib.import_module("llama_cpp.llama_cpp")


llama: Any = bindings(whole="--first-token" in sys.argv)
quiet = llama.llama_log_callback(lambda level, text, data: None)


class Model:
    def __init__(self, path: str, threads: int) -> None:
        llama.llama_log_set(quiet, None)
        llama.llama_backend_init()
        self.threads = threads
        self.model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        assert self.model, f"llama.cpp cannot load {path}"
        self.vocab = llama.llama_model_get_vocab(self.model)
        self.words = llama.llama_vocab_n_tokens(self.vocab)

    def context(self, tokens: int, sequences: int = 1, flash: bool | None = None) -> Any:
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = (
            tokens * sequences,
            512,
            512,
            sequences,
        )
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
        template = (
            llama.llama_model_chat_template(self.model, None) or b"gemma"
        )  # the one model without its own
        message = llama.llama_chat_message(role=b"user", content=prompt.encode())
        out = ctypes.create_string_buffer(4096)
        length = llama.llama_chat_apply_template(template, ctypes.byref(message), 1, True, out, len(out))
        return out.raw[:length].decode()


class Side:
    def __init__(self, model: Model, room: int) -> None:
        import numpy as np

        self.np, self.model, self.room = np, model, room
        self.batch = llama.llama_batch_init(512, 0, 1)
        names = ("token", "pos", "n_seq_id", "logits")
        self.fields = {name: np.ctypeslib.as_array(getattr(self.batch, name), (512,)) for name in names}
        self.context: Any = None

    def info(self) -> dict[str, str]:
        return {
            "version": llama.llama_version().decode(),
            "system": llama.llama_print_system_info().decode(),
        }

    def tokenize(self, text: str) -> dict[str, list[int]]:
        return {"ids": self.model.tokenize(text)}

    def open(self, prompts: list[list[int]], sequences: int = 0, flash: bool = True) -> None:
        """Sequences that grow by one token each a step: one a prompt, or `sequences` copies of the only one."""
        self.sequences = sequences or max(1, len(prompts))
        self.context = self.model.context(self.room, self.sequences, flash)
        self.memory = llama.llama_get_memory(self.context)
        first = [
            self.feed(ids, range(len(ids)), [i] * len(ids), [len(ids) - 1]) for i, ids in enumerate(prompts)
        ]
        if len(first) == 1:
            first *= self.sequences
            for i in range(1, self.sequences):
                llama.llama_memory_seq_cp(self.memory, 0, i, -1, -1)
        self.next = self.np.array(first, self.np.int32).ravel()
        self.position = len(prompts[0]) if prompts else 0

    def steps(self, count: int) -> dict[str, float]:
        everyone = range(self.sequences)
        started = time.perf_counter()
        for _ in range(count):
            self.next = self.feed(self.next, self.position, everyone, everyone)
            self.position += 1
        return {"seconds": time.perf_counter() - started}

    def prefill(self, tokens: list[int]) -> dict[str, float]:
        llama.llama_memory_clear(self.memory, False)
        positions, owners = range(len(tokens)), [0] * len(tokens)
        started = time.perf_counter()
        self.feed(tokens, positions, owners, [len(tokens) - 1])
        return {"seconds": time.perf_counter() - started}

    def close(self) -> None:
        llama.llama_free(self.context)

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


def first_token(model: Model, prompt: str, chat: bool) -> None:
    ids = model.tokenize(model.chat(prompt), special=True) if chat else model.tokenize(prompt)
    context = model.context(4096)
    tokens = (ctypes.c_int32 * len(ids))(*ids)
    assert llama.llama_decode(context, llama.llama_batch_get_one(tokens, len(ids))) == 0
    token = llama.llama_sampler_sample(llama.llama_sampler_init_greedy(), context, -1)
    text = ctypes.create_string_buffer(256)
    length = llama.llama_token_to_piece(model.vocab, token, text, len(text), 0, True)
    sys.stdout.buffer.write(text.raw[:length])
    sys.stdout.flush()


def main(path: str, threads: str, room: str, *prompt: str) -> None:
    model = Model(path, int(threads))
    if prompt:
        first_token(model, prompt[0], chat=room == "--first-token-of-chat")
    else:
        serve(Side(model, int(room)))


if __name__ == "__main__":
    main(*sys.argv[1:])
