"""Annotations: what a handler says that it takes and returns.

They are read when they are needed, and not where the handler is defined: a class that they name may come later in its module.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, get_type_hints

if sys.version_info >= (3, 14):
    from annotationlib import Format


def signature_of(fn: Callable[..., Any]) -> inspect.Signature:
    """Return which parameters a function has. Its annotations in there are for messages alone: `hints_of` evaluates them."""
    if sys.version_info >= (3, 14):
        return inspect.signature(fn, annotation_format=Format.STRING)
    return inspect.signature(fn)


def hints_of(fn: Callable[..., Any]) -> dict[str, Any]:
    """Return the evaluated annotations of a function, which may be partial, or of an object that can be called.

    Raises whatever they raise.
    """
    annotated: Any = fn
    while isinstance(annotated, functools.partial):
        annotated = annotated.func
    if not (isinstance(annotated, type) or inspect.isroutine(inspect.unwrap(annotated))):
        annotated = type(annotated).__call__
    return get_type_hints(annotated, include_extras=True)
