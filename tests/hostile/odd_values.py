"""The parts of which api_requests.py makes requests: odd texts and values, schemas, names."""

from __future__ import annotations

import base64
from typing import Any

from tests.hostile.images import png_that_claims

TEXTS = (
    *(
        "",
        " ",
        "Hi",
        "a" * 300,
        "\u0301" * 40,
        "\U0001f468\u200d\U0001f469",
        "\x00",
        "\u2028\r\n",
        "%s{}{{x}}",
        "\ufffe",
    ),
    *(
        "<|im_end|>",
        "<|im_start|>system\n",
        "<image>",
        "<start_of_image>",
        "<tool_call>",
        "</think>",
        "<think>\n",
    ),
    *('{"name": "f", "arguments": {}}', "```json\n[1]\n```", "[TOOL_CALLS]", "{% raw %}", "../../etc/passwd"),
)
ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -0.0,
        -1,
        1,
        2,
        20,
        0.5,
        1.0,
        1e-45,
        1e30,
        2**31 - 1,
        2**31,
        2**53,
        2**63,
        2**64 - 1,
        -(2**63),
    ),
    *(
        "",
        "x",
        "auto",
        "none",
        "\ud7ff",
        [],
        {},
        [[]],
        [None],
        {"": None},
        ["a", 1],
        {"type": "object"},
        {"type": None},
    ),
)
PATTERNS = (
    "a+",
    "[a-z]{1,3}",
    "(",
    "(a|b)*c?",
    "\\d",
    "a{1000}",
    "\\p{L}",
    "(?=a)",
    "[^\\x00-\\xff]",
    "^a$",
    "",
)
GRAMMARS = (
    *(
        'root ::= "a"',
        'root ::= [a-z]+ | root "b"',
        "root ::= x",
        'start: "a" | /b+/',
        "start: %json {}",
        "",
        "root ::= root",
    ),
    *(
        'root ::= ("a" | "b"){2,3}',
        "start: T\nT: /[a-c]{1,4}/",
        "start: @a\n",
        "%llguidance {}\nstart: /a/",
        'root ::= "\\x"',
    ),
)
SCHEMAS: tuple[Any, ...] = (
    *(
        {},
        {"type": "object"},
        {"type": "string", "maxLength": 3},
        {"enum": []},
        {"enum": ["a", 1, None]},
        {"const": {}},
    ),
    *(
        {"$ref": "#"},
        {"$ref": "#/definitions/x"},
        {"$ref": "http://127.0.0.1:1/x"},
        {"type": ["string", "null"]},
    ),
    *(
        {"anyOf": []},
        {"not": {}},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"pattern": "("},
        {"type": 3},
    ),
    *(
        {"properties": {"a": {"type": "integer"}}, "required": ["a", "b"], "additionalProperties": False},
        {"items": {"$ref": "#"}},
    ),
    *(
        {"x-guidance": {"whitespace_pattern": "("}},
        {"type": "array", "minItems": 2**40},
        {"multipleOf": 0},
        {"format": "date"},
    ),
)
NAMES = ("f", "get_weather", "a-b", "", "f" * 300, "é", 'a"b', "f\n", "json", "{{", "f.g")
ROLES = ("user", "user", "user", "assistant", "system", "tool", "developer", "x")
PIXEL = base64.b64encode(png_that_claims(1, 1, b"\0\xff\0\0")).decode()
