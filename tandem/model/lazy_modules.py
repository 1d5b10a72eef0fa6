"""Modules of a package by name, imported when they are first used: a model needs one of many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from types import ModuleType


class LazyModules(Mapping[str, ModuleType]):
    def __init__(self, package: str, modules: Mapping[str, str]) -> None:
        """`modules`: the module of `package` for each name that model files use."""
        self._package, self._modules = package, modules

    def __getitem__(self, name: str) -> ModuleType:
        return import_module(f"{self._package}.{self._modules[name]}")

    def __contains__(self, name: object) -> bool:  # Mapping's own would import the module
        return name in self._modules

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)
