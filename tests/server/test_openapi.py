"""Valid and invalid requests generated from our OpenAPI document: no 5xx, and each response matches the document."""

from __future__ import annotations

from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import checks

from tests.server.servers import Running

CHECKS: Any = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
COMMON: Any = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "database": None,
    "derandomize": True,
}


RIGHT, WRONG = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
PARTS = 16  # of a soak, each with some of the operations: a request takes 10 to 40 ms to generate


@pytest.mark.parametrize(
    ("mode", "examples", "part"),
    [
        (RIGHT, 50, slice(None)),
        (WRONG, 25, slice(None)),
        *(
            pytest.param(mode, examples, slice(part, None, PARTS), marks=pytest.mark.soak)
            for mode, examples in ((RIGHT, 2000), (WRONG, 1000))
            for part in range(PARTS)
        ),
    ],
)
def test_generated_requests(
    tiny: Running, mode: schemathesis.GenerationMode, examples: int, part: slice
) -> None:
    document = schemathesis.openapi.from_url(f"{tiny.url}/openapi.json")
    count, session = 0, requests.Session()
    found = [
        one.ok() for one in document.exclude(path="/api/pull").get_all_operations()
    ]  # it uses the network
    if mode == WRONG:
        found = [one for one in found if one.method not in ("get", "delete")]  # which cannot be invalid
    for operation in found[part]:

        @settings(max_examples=examples, **COMMON)
        @given(case=operation.as_strategy(generation_mode=mode))
        def send(case: schemathesis.Case) -> None:
            nonlocal count
            count += 1
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                case.body["model"] = "tiny"  # or nearly all would be rejected
            case.call_and_validate(checks=CHECKS, session=session, timeout=60)

        send()
    print(f"{count} {mode.value} requests")
    assert count > examples


def test_the_document_names_every_route(tiny: Running) -> None:
    status, _, found = tiny.ask("/openapi.json")
    assert status == 200 and {
        "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models", "/v1/responses", "/v1/messages",
        "/api/chat", "/api/generate", "/api/embed", "/api/tags", "/api/show", "/api/ps", "/api/pull", "/api/version",
        "/api/create", "/api/copy", "/api/delete",
        "/tokenize", "/detokenize", "/health", "/metrics",
    } <= found["paths"].keys()  # fmt: skip


def test_the_docs_page_loads_nothing_from_other_hosts(tiny: Running) -> None:
    status, headers, page = tiny.ask("/docs")
    assert status == 200 and "/v1/chat/completions" in page and "max_completion_tokens" in page
    assert "http" not in page and "default-src 'none'" in headers["content-security-policy"]
