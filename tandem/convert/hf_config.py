"""Typed, checked access to the fields of config.json, whose names differ between families and versions."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from tandem.errors import ConversionError
from tandem.gguf.cursor import label

MAX_COUNT = (1 << 31) - 1
MAX_LAYERS, MAX_WIDTH = 9999, 1 << 16  # layers, and values of a head


class HFConfig:
    """The fields of a model, or of its language model if it has others beside it. `defaults`: of fields left out."""

    def __init__(self, path: object, fields: dict[str, Any], defaults: dict[str, Any]) -> None:
        self._path = path
        inner = fields.get("text_config")
        if isinstance(inner, dict):
            fields = fields | inner
        self._fields = defaults | {key: value for key, value in fields.items() if value is not None}

    def get(self, *names: str, default: Any = None) -> Any:
        """Returns the first of the fields that is there."""
        return next((self._fields[name] for name in names if name in self._fields), default)

    def count(self, *names: str, default: int | None = None, least: int = 0, most: int = MAX_COUNT) -> int:
        """Returns a size. Some models list one per layer; they must be equal."""
        value = self.get(*names, default=default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if type(value) is not int or not least <= value <= most:
            self.fail(names[0], f"{label(str(value))} is no size")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        return self._number(names[0], self.get(*names, default=default))

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            self.fail(name, f"{label(str(value))} is no number")
        return float(value)

    def numbers(self, name: str, values: Any) -> list[float]:
        if not isinstance(values, list) or not values:
            self.fail(name, "this is no list of numbers")
        return [self._number(name, value) for value in values]

    def fail(self, name: str, problem: str) -> NoReturn:
        raise ConversionError(f"{self._path}: {name}: {problem}: fetch it again")

    @property
    def layers(self) -> int:
        return self.count("num_hidden_layers", most=MAX_LAYERS)

    @property
    def heads(self) -> int:
        return self.count("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        return self.count("num_key_value_heads", default=self.heads)

    @property
    def head_dim(self) -> int:
        return self.count("head_dim", default=self.count("hidden_size") // max(self.heads, 1), most=MAX_WIDTH)

    def sliding(self) -> list[bool] | None:
        """Returns which layers have a sliding window; None: the config does not say."""
        kinds = self.get("layer_types")
        if not isinstance(kinds, list) or len(kinds) != self.layers:
            return None
        return [kind == "sliding_attention" for kind in kinds]

    def rope(self, kind: str = "full_attention") -> dict[str, Any]:
        """Returns the parameters of RoPE (rope_type, rope_theta, ...), of layers with full or sliding attention."""
        found = self.get("rope_parameters", "rope_scaling", default={})
        if not isinstance(found, dict):
            self.fail("rope_parameters", "these are no parameters of RoPE")
        if isinstance(nested := found.get(kind), dict):
            found = nested
        elif kind != "full_attention":
            local = self.get("rope_local_base_freq")
            return {} if local is None else {"rope_type": "default", "rope_theta": local}
        whole = {"rope_theta": self.get("rope_theta", default=10000.0)} | found
        whole["rope_type"] = found.get("rope_type", found.get("type", "default"))
        return whole
