"""Triton's interpreter in tests, where nearly all of the time goes into what it does once for every operation."""

from typing import Any

import pytest


def language_patched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch replaces functions of triton.language; so does every call of a function in it, for nothing, and for most
    of its time. A table of dtypes is made for every value.
    """
    from triton.language import standard
    from triton.runtime import interpreter

    patch, launches = interpreter._patch_lang, []

    class Inner:
        def restore(self) -> None:
            pass

    class Outer:
        def __init__(self, *scopes: Any) -> None:
            self.scopes = scopes

        def restore(self) -> None:
            launches.clear()
            for scope in reversed(self.scopes):
                scope.restore()

    def once(function: Any) -> Any:
        if launches:
            return Inner()
        launches.append(function)
        return Outer(patch(function), patch(standard.max.fn))  # triton.language, triton.language.core

    monkeypatch.setattr(interpreter, "_patch_lang", once)
    kinds: dict[str, Any] = {}
    dtype_of = interpreter._get_np_dtype

    def known(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in kinds:
            kinds[name] = dtype_of(kind)
        return kinds[name]

    monkeypatch.setattr(interpreter, "_get_np_dtype", known)
