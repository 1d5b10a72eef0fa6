"""`tandem serve`: the HTTP server."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.cli.loading import draft_file, model_file, resolve_npu, tune_at_first_use
from tandem.cli.options import UsageError
from tandem.devices.backends import check_device
from tandem.errors import ModelFileError, RequestError, UnsupportedModelError
from tandem.model import locate
from tandem.model.catalogue import DEFAULT_MODEL

if TYPE_CHECKING:
    from tandem.engine.model_manager import ModelSpec
    from tandem.server.settings import ServerSettings


def main(options: argparse.Namespace) -> int:
    from tandem.server.settings import ServerSettings, read_settings_file

    settings = read_settings_file(options.settings) if options.settings else ServerSettings()
    settings = dataclasses.replace(settings, **_given(options))
    options.npu = resolve_npu(options.npu)
    if not options.ray:  # otherwise replicas use the devices of their machines
        check_device(settings.device, options.split, options.placement)
    if options.synthetic and (options.models or options.ray or settings.presets):
        raise UsageError("--synthetic serves one model in this process: leave MODEL, --ray and presets out")
    if options.ray and settings.mcp:  # each session of a program is in one replica, and requests go to any
        raise UsageError("--ray serves no MCP servers: leave mcp out of the settings")
    with ExitStack() as closing:
        files = _synthetic_file(options.synthetic, closing) if options.synthetic else _files(settings)
        return _serve(options, settings, files)


def _serve(options: argparse.Namespace, settings: ServerSettings, files: dict[str, Path]) -> int:
    settings = dataclasses.replace(settings, models=tuple(files))
    from tandem.server.http.uvicorn_server import bind_socket, serve
    from tandem.server.settings import MAX_UNREAD

    bound = bind_socket(settings)
    if not options.ray:
        tune_at_first_use(settings.device, next(iter(files.values())), options.no_tune)
    engine = {"keep_alive": settings.keep_alive, "queue": settings.max_queue, **_engine(options, settings)}
    engine |= {"max_unread": MAX_UNREAD, "max_wait": settings.timeout}
    app, fatal = _app(options, settings, _specs(files, settings), engine, bound.getsockname()[1])
    serve(app, settings, bound, fatal)
    return 0


def _app(
    options: argparse.Namespace,
    settings: ServerSettings,
    specs: dict[str, ModelSpec],
    engine: dict[str, Any],
    port: int,
) -> tuple[Any, Callable[[], Exception | None]]:
    """(ASGI app of this process or of Ray replicas, function that returns a fatal error)."""
    if not options.ray:
        from tandem.engine.model_manager import ModelManager
        from tandem.server.app import create_app

        app = create_app(ModelManager(specs, **engine), settings)
        return app, app.state.server.fatal
    try:
        from tandem.server.cluster import replicas as cluster
    except ImportError:
        raise RequestError("--ray needs Ray: run `pip install 'tandem-llm[ray]'`") from None
    # A known name is resolved on each machine; other models must have the same path on all of them.
    of_presets = {preset.name: preset.file for preset in settings.presets}
    for name, spec in specs.items():
        file = of_presets.get(name, name)
        here = file if locate.is_known(file) else str(Path(spec.file).resolve())
        specs[name] = dataclasses.replace(spec, file=here)
    front = cluster.start(specs, settings, engine, replicas=options.ray, threads=settings.threads, port=port)
    return front, lambda: None


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The settings from the command line, which override the settings file."""
    from tandem.server.settings import ServerSettings

    names = {field.name for field in dataclasses.fields(ServerSettings)}
    found = {name: value for name, value in vars(options).items() if name in names and value is not None}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in found.items()
        if value != []
    }


def _files(settings: ServerSettings) -> dict[str, Path]:
    """Model name -> file. Missing models are downloaded. Without names: all models in the cache."""
    models = settings.models
    if not models and not settings.presets:
        models = tuple(model.name for model in locate.list_models() if model.files)
        if not models:
            raise RequestError(f"no model is in the cache: try `tandem serve {DEFAULT_MODEL}`")
        return {name: locate.resolve(name) for name in models}
    files: dict[str, Path] = {}
    for model in models:
        path = model_file(model)
        name = path.stem if Path(os.path.expanduser(model)) == path else model
        if files.setdefault(name, path) != path:
            raise RequestError(f"two models have the name {name}: rename the file {path}")
    for preset in settings.presets:
        if preset.name in files:
            raise RequestError(f"two models have the name {preset.name}: rename the preset")
        files[preset.name] = model_file(preset.file)
    return files


def _synthetic_file(name: str, closing: ExitStack) -> dict[str, Path]:
    """A file that names a synthetic model, in a folder that is deleted at the end."""
    from tandem.model.synthetic_file import write_synthetic_file

    folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="tandem-synthetic-")))
    file = folder / f"{name.replace(':', '-')}.gguf"
    write_synthetic_file(name, file)
    print(
        f"tandem: {name} has random weights, for load tests: its output makes no sense",
        file=sys.stderr,
        flush=True,
    )
    return {name: file}


def _engine(options: argparse.Namespace, settings: ServerSettings) -> dict[str, Any]:
    return {
        "device": settings.device,
        "context": settings.context,
        "batch": settings.batch,
        "threads": settings.threads,
        "gpu_memory": settings.gpu_memory and settings.gpu_memory * 1e9,
        "kv": settings.kv,
        "kv_memory": settings.kv_memory and settings.kv_memory * 1e9,
        "disk_cache": settings.disk_cache,
        "prompt_lookup": settings.prompt_lookup,
        "split": options.split,
        "placement": options.placement,
        "npu": options.npu,
    }


def _specs(files: dict[str, Path], settings: ServerSettings) -> dict[str, ModelSpec]:
    """Each model's file, and how it is loaded."""
    from tandem.engine.model_manager import ModelSpec

    options = _per_model_options(files, settings.draft, settings.context)
    specs = {name: ModelSpec(path, options.get(name, {})) for name, path in files.items()}
    for preset in settings.presets:
        given = {**specs[preset.name].options, **preset.options}
        if preset.draft is not None:
            given["draft"] = _checked_draft(files[preset.name], draft_file(preset.draft))
        if preset.draft is not None or preset.prompt_lookup:  # only one of them
            given = {"prompt_lookup": preset.prompt_lookup or False, "draft": None} | given
        specs[preset.name] = ModelSpec(files[preset.name], given, preset.keep_alive, preset.pinned)
    return specs


def _per_model_options(
    files: dict[str, Path], drafts: Sequence[str], context: int | None
) -> dict[str, dict[str, Any]]:
    """Options that differ between models: the draft model, and the context, which is at most the trained one."""
    options: dict[str, dict[str, Any]] = {}
    for text in drafts:
        name, _, draft = text.partition("=") if text.partition("=")[0] in files else ("", "", text)
        if not name and len(files) > 1:
            raise RequestError(
                f"several models are served: name the model of the draft, as --draft {next(iter(files))}={text}"
            )
        name = name or next(iter(files))
        options[name] = {"draft": _checked_draft(files[name], draft_file(draft))}
    if context and len(files) > 1:  # with one model, too large a context is an error
        for name, path in files.items():
            with suppress(ModelFileError, UnsupportedModelError):  # reported when the model is loaded
                options.setdefault(name, {})["context"] = min(context, _trained_context(path))
    return options


def _checked_draft(model: Path, draft: str | Path) -> str | Path:
    """Checks the draft model at startup: clients could not fix it later."""
    if isinstance(draft, str):
        return draft
    from tandem.engine.draft_model import check_vocabularies
    from tandem.model.model import open_model

    tokens = "tokenizer.ggml.tokens"
    with open_model(model) as one, open_model(draft) as other:
        check_vocabularies(one.gguf.get(tokens), other.gguf.get(tokens))
    return draft


def _trained_context(path: Path) -> int:
    from tandem.model.model import open_model

    with open_model(path) as model:
        return model.config.trained_context
