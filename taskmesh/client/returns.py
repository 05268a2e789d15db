"""What a function returns, on its way into the database and back: by its return annotation, or else as plain values.

For a handler that is the task's result; other records of what a function returned (a step) follow the same rules. The form in
which a value is stored is checked to come back as the annotated type before it counts as stored.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin
from weakref import WeakKeyDictionary

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError

from taskmesh.client.annotations import hints_of
from taskmesh.model.codec import Encrypted, NotLoaded
from taskmesh.model.errors import CannotDecrypt, PayloadMissing, UnstorableValue
from taskmesh.model.stage import Next
from taskmesh.store.payloads import marked_secret, unmarked
from taskmesh.store.values import (
    MAX_BYTES,
    TooLarge,
    Unstorable,
    as_it_comes_back,
    hides,
    is_same,
    kept,
    size_of,
    storable,
    too_deep,
)

_PLAIN = (Any, object, None, type(None), inspect.Signature.empty)
"""Annotations that say nothing about a value. `None` is among them: such a handler may still `set_result` in a transaction."""
_AS_IT_IS = (str, int, float, bool, bytes, dict, list)
"""Annotations that a value of exactly this type fits as it is."""
OF_ONE_FORM = frozenset((str, int, float, bool, type(None)))
"""Types whose values are stored, and read again, as they are."""
FORMS: tuple[dict[str, Any], ...] = (
    {"mode": "python", "by_alias": True},  # MongoDB has types for times, bytes, UUIDs and decimals
    {"mode": "python", "by_alias": False},  # a model whose aliases differ on the way in and on the way out
    {"mode": "json", "by_alias": True},  # forms that only JSON has: keys that are no texts, sets of models
)
MISREAD = ("'tz_constraint': 'naive'", "pattern_")
"""How the schema of a type shows that it does not accept all that MongoDB returns: its times have a zone, its patterns are no
`re.Pattern`."""
REFUSALS: tuple[type[Exception], ...] = (
    PydanticSerializationError,
    ValidationError,
    ValueError,
    TypeError,
    AttributeError,
    RecursionError,
)
_MOST_MISFITS = 5


class Returns:
    """What one function returns. `label` names the value in errors: "the result of task 'order'".

    `root`: how the path to a part of it starts.
    """

    def __init__(self, label: str, fn: Callable[..., Any] | None = None, root: str = "result") -> None:
        self._label = label
        self._root = root
        self._fn = fn
        self.by_queue: dict[str, Returns] = {}
        """What the handlers of single queues return."""

    def of_queue(self, queue: str) -> Returns:
        """Return what the handler of this queue returns."""
        return self.by_queue.get(queue, self)

    def kept(self, name: str, value: Any, most: int = MAX_BYTES) -> tuple[Mapping[str, Any], int]:
        """Return a document with this one field, the value as it is stored, and its size, which may be at most `most` bytes.

        Raises `UnstorableValue`. Later changes of the value do not affect the document.
        """
        said = self._said_to_return
        if type(value) in OF_ONE_FORM and (said.adapter is None or said.type is type(value)):
            with suppress(Unstorable, TooLarge):  # otherwise another form may do, or the error is raised
                return kept(name, value, self._root, most)
        found: tuple[Mapping[str, Any], int] = self._first_that_is_stored(
            value, lambda form: kept(name, form, self._root, most)
        )
        return found

    def to_store(self, value: Any) -> Any:
        """Return the value in MongoDB's types, from which `read` makes it again. Raises `UnstorableValue`."""

        def checked(form: Any) -> Any:
            size_of(form, self._root)
            return form

        return self._first_that_is_stored(value, checked)

    def read(self, stored: Any) -> Any:
        """Return a stored value in the annotated type, or as it is if nothing is annotated.

        Raises `UnstorableValue`, and `CannotDecrypt` for a value that is encrypted.
        """
        if isinstance(stored, Encrypted):
            raise CannotDecrypt(f"{self._label} cannot be read: {stored.reason}", stored.key_id)
        if isinstance(stored, NotLoaded):
            raise PayloadMissing(f"{self._label} cannot be read: {stored}")
        adapter = self._adapter
        if adapter is None or type(stored) is self._annotation:
            return stored
        stored = unmarked(stored)
        try:
            return adapter.validate_python(stored, strict=False)
        except ValidationError as error:
            raise UnstorableValue(
                f"{self._label} was stored, but does not fit {self._said} (any more): {_misfits(error)}; "
                "`(await handle.task()).successes` has it as it is stored"
            ) from None

    def _first_that_is_stored(self, value: Any, store: Callable[[Any], Any]) -> Any:
        first: Exception | None = None
        try:
            for form in self._forms(value):
                try:
                    found = store(form)
                    hidden = self._hides if self._adapter is not None else form is not value and hides(value)
                    return store(marked_secret(form)) if hidden else found
                except Unstorable as error:
                    first = first or error
        except TooLarge as error:
            raise UnstorableValue(f"{self._label} cannot be stored: {error}") from None
        raise UnstorableValue(f"{self._label} cannot be stored: {first or 'it would not come back as it is'}") from None

    def _forms(self, value: Any) -> Iterator[Any]:
        """Yield the forms in which the value might be stored, the best one first."""
        adapter = self._adapter
        if adapter is None or (type(value) in _AS_IT_IS and type(value) is self._annotation):
            yield value
            if too_deep(value, self._root) is None:
                try:
                    form, turned = storable(value)
                except RecursionError:
                    return
                if turned:
                    yield form
            return
        try:
            valid = adapter.validate_python(value)
        except ValidationError as error:
            raise UnstorableValue(f"{self._label} does not fit {self._said}: {_misfits(error)}") from None
        refusal: Exception | None = None
        tried = False
        of_another_type: list[Any] = []
        for how in FORMS:
            try:
                form = storable(adapter.dump_python(valid, round_trip=True, warnings=False, **how))[0]
                if (type(form) not in _AS_IT_IS or form is not valid) and not self._comes_back(form, valid):
                    of_another_type.append(form)
                    continue
            except REFUSALS as error:
                refusal = refusal or error
            else:
                tried = True
                yield form
        yield from of_another_type
        if not (tried or of_another_type):
            why = _misfits(refusal) if isinstance(refusal, ValidationError) else f"{type(refusal).__name__}: {refusal}"
            raise UnstorableValue(f"{self._label} would not come back as {self._said}: {why:.500}") from None

    def _comes_back(self, form: Any, valid: Any) -> bool:
        """Whether this form of a value is read as its own type, if several are annotated.

        Raises one of `REFUSALS` for what is not read as the annotated type at all.
        """
        said = self._said_to_return
        assert said.adapter is not None
        again = said.adapter.validate_python(form, strict=False)
        if said.misread:
            said.adapter.validate_python(as_it_comes_back(form), strict=False)
            if not is_same(again, valid):
                raise ValueError(f"a {type(valid).__name__} would be read as another one: return plain values")
        return not said.several or isinstance(valid, type(again)) or is_same(again, valid)

    # --- the annotation, which is read at first use: by then the names in it exist ---

    @functools.cached_property
    def _said_to_return(self) -> Annotation:
        return _annotation_of(self._fn)

    @property
    def _annotation(self) -> Any:
        return self._said_to_return.type

    @property
    def _adapter(self) -> TypeAdapter[Any] | None:
        return self._said_to_return.adapter

    @property
    def _hides(self) -> bool:
        return self._said_to_return.hides

    @property
    def _said(self) -> str:
        return f"the annotation -> {inspect.formatannotation(self._annotation)}"


class Annotation(NamedTuple):
    """What a function is annotated to return."""

    type: Any
    adapter: TypeAdapter[Any] | None
    """Checks and converts such values. None if nothing is annotated, or nothing that pydantic knows how to check."""
    hides: bool
    """Whether something in it must not be shown."""
    several: bool = False
    """Whether such a value has one of several types, and its stored form may fit another one."""
    misread: bool = False
    """Whether something in it does not accept all that MongoDB returns. See `MISREAD`."""


_known: WeakKeyDictionary[Any, Annotation] = WeakKeyDictionary()
"""By function: a step's is needed at each call, and creating an adapter takes as long as everything else about the step."""


def _annotation_of(fn: Any) -> Annotation:
    while isinstance(fn, functools.partial):
        fn = fn.func
    asked = getattr(fn, "__func__", fn)  # a bound method is a new object each time
    if isinstance(fn, type):  # its annotation is itself, and would keep it alive
        return annotation(fn)
    try:
        if (known := _known.get(asked)) is None:
            known = _known[asked] = annotation(_type_of(fn))
    except TypeError:  # it has no hash, or cannot be referred to weakly
        return annotation(_type_of(fn))
    return known


def annotation(found: Any) -> Annotation:
    """Return what checks values of this type."""
    if any(found is plain for plain in _PLAIN):
        return Annotation(found, None, hides=False)
    for config in (ConfigDict(arbitrary_types_allowed=True), None):  # a model refuses it: it has a config of its own
        try:
            adapter = TypeAdapter(found, config=config)
        except (PydanticUserError, TypeError, NameError):
            continue
        schema = repr(adapter.core_schema)
        several = get_origin(found) in (Union, UnionType) and not {Any, object} & set(get_args(found))
        misread = any(word in schema for word in MISREAD)
        return Annotation(found, adapter, "Secret" in schema, several, misread)
    return Annotation(found, None, hides=False)


def _type_of(fn: Any) -> Any:
    try:
        return _without_next(hints_of(fn).get("return", Any))
    except Exception:  # noqa: BLE001 — an annotation is anybody's code, and what cannot be read says nothing
        return Any


def _without_next(annotation: Any) -> Any:
    """Return the annotation of what is stored: `Next` says where the task goes on, and is no result."""
    if annotation is Next:
        return Any
    if get_origin(annotation) in (Union, UnionType) and Next in get_args(annotation):
        return Union[tuple(part for part in get_args(annotation) if part is not Next)]  # noqa: UP007 — of parts that are not known here
    return annotation


PLAIN = Returns("the value")
"""For a function that is not known here: plain values."""


def _misfits(error: ValidationError) -> str:
    """Say where it does not fit, without the values: more people read the reason of a failure than the result."""
    found = error.errors(include_url=False, include_context=False)
    told = [
        f"{'.'.join(map(str, each['loc'])) or 'the value'}: {each['msg']} (got {type(each['input']).__name__})"
        for each in found[:_MOST_MISFITS]
    ]
    return "; ".join(told + ["…"] * (len(found) > _MOST_MISFITS))
