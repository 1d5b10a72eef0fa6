"""The FastAPI app: the endpoints of all APIs over one set of models."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from tandem import __version__
from tandem.engine.model_manager import ModelManager
from tandem.server import utility_routes
from tandem.server.anthropic import messages
from tandem.server.core.serving import Server
from tandem.server.http import errors
from tandem.server.http.background import start_threads
from tandem.server.http.errors import LOG
from tandem.server.llama_cpp import completion, server_info, texts
from tandem.server.mcp import routes as mcp
from tandem.server.monitoring.metrics import live_router
from tandem.server.ollama import chat as ollama_chat
from tandem.server.ollama import create as ollama_create
from tandem.server.ollama import models as ollama_models
from tandem.server.openai import chat, compaction, completions, conversations, embeddings, responses
from tandem.server.openai import models as openai_models
from tandem.server.page import api_docs
from tandem.server.page.static import page_router
from tandem.server.settings import ServerSettings

ROUTERS = (
    chat.router,
    openai_models.router,
    completions.router,
    embeddings.router,
    compaction.router,
    responses.router,
    conversations.router,
    messages.router,
    ollama_chat.router,
    ollama_models.router,
    ollama_create.router,
    completion.router,
    server_info.router,
    texts.router,
    mcp.router,
    utility_routes.router,
    api_docs.router,
)


def create_app(models: ModelManager, settings: ServerSettings) -> FastAPI:
    """An app that serves `models` and closes them when it shuts down."""
    server = Server(models, settings)
    models.report = LOG.info

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        start_threads()
        server.start()
        yield
        await server.grammars.close()
        await server.images.close()
        server.responses.close()
        await server.tools.close()
        await models.close()

    app = FastAPI(
        title="Tandem",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.state.server = server
    for router in ROUTERS:
        app.include_router(router)
    app.include_router(page_router())
    app.include_router(live_router(models))
    errors.install(app)
    return app
