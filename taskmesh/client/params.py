"""Params from a handler's signature.

They are checked at publish, so that nothing unfit is stored, and again at execution, since code and documents do not always
change together.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from taskmesh.client.annotations import hints_of, signature_of
from taskmesh.client.returns import FORMS, MISREAD, REFUSALS
from taskmesh.model.configuration import Configuration
from taskmesh.model.dependency import After, FromDependency, label
from taskmesh.model.errors import InvalidOption, InvalidParams, TaskTooLarge
from taskmesh.model.ids import shown
from taskmesh.store.payloads import marked_secret
from taskmesh.store.values import (
    MAX_BYTES,
    TooLarge,
    Unstorable,
    as_it_comes_back,
    hides,
    is_same,
    size_of,
    storable,
    too_deep,
)

OTHERS = "**"
"""Represents all params that have no name in the signature."""


class _Schema(GenerateJsonSchema):
    """A JSON schema in which a type that JSON does not have accepts everything."""

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> JsonSchemaValue:  # noqa: ARG002 — pydantic calls it so
        return {}

    def emit_warning(self, kind: Any, detail: str) -> None:
        """Ignore defaults that JSON does not have."""


class Params:
    """The params of one handler."""

    def __init__(self, name: str, fn: Callable[..., Any]) -> None:
        self._name = name
        self._signature = signature_of(fn)
        for parameter in self._signature.parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                raise TypeError(
                    f"task {name!r}: the handler takes *{parameter.name}, but params are stored by name: name them"
                )
        self._positional = [p.name for p in self._signature.parameters.values() if p.kind is p.POSITIONAL_ONLY]
        self._open_ended = any(p.kind is p.VAR_KEYWORD for p in self._signature.parameters.values())
        self._fn = fn
        self._models: dict[frozenset[str], type[BaseModel]] = {}
        """By the params that are left out, since they come from dependencies."""
        self._names: list[tuple[str, str]] = []
        self._rewrites = False
        """Whether an annotation may convert a plain value, and convert the result again, or refuse that.

        That is: it has code, reads JSON, or accepts less than MongoDB returns."""
        self._marked: dict[str, FromDependency] | None = None

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return positional and keyword arguments by name."""
        if not args:
            return dict(kwargs)
        try:
            bound = self._signature.bind_partial(*args, **kwargs)
        except TypeError as error:
            raise InvalidParams(f"task {self._name!r} takes {self._signature}: {error}") from None
        named = dict(bound.arguments)
        for parameter in self._signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                others = named.pop(parameter.name, {})
                if twice := sorted(named.keys() & others):
                    raise InvalidParams(
                        f"task {self._name!r} takes {self._signature}: got {', '.join(twice)} by position and by name, and "
                        "params are stored by name: pass it once"
                    )
                named |= others
        return named

    @property
    def from_dependencies(self) -> Mapping[str, FromDependency]:
        """The params that are annotated to come from what the task waits for."""
        if self._marked is None:
            self._marked = {}
            for name in self._signature.parameters:
                for mark in getattr(self._hints().get(name), "__metadata__", ()):
                    if isinstance(mark, FromDependency) or mark is FromDependency:
                        self._marked[name] = mark if isinstance(mark, FromDependency) else FromDependency()
        return self._marked

    @functools.cached_property
    def _names_taken(self) -> frozenset[str] | None:
        """The names of all params; None if the handler takes others, too. Read at first use, as the model is."""
        named, others = self._taken()
        return frozenset(each.name for each in named) if others is None else None

    def is_optional(self, name: str) -> bool:
        """Whether the handler can be called without it."""
        parameter = self._signature.parameters.get(name)
        return parameter is not None and parameter.default is not parameter.empty

    def _hints(self) -> dict[str, Any]:
        return hints_of(self._fn)

    def to_store(
        self, params: Mapping[str, Any], after: After | None = None, most: int = MAX_BYTES
    ) -> tuple[dict[str, Any], int]:
        """Return checked params in MongoDB's types, and their size, of at most `most` bytes.

        Raises `InvalidParams`, `TaskTooLarge`.

        `after`: what the task waits for, which is checked against the annotations. None: not specified.
        """
        check_mapping(self._name, params)
        left_out = self._left_out(after)
        if left_out:
            self._check_left_out(left_out, params)
        if after is not None and self.from_dependencies:
            self._check_fed(after)
        if refusal := too_deep(params, "params"):  # the following checks recurse
            raise InvalidParams(f"task {self._name!r}: {refusal}")
        valid = self._valid(params, "at publish", left_out)
        checked = self._values(valid, left_out)
        stored, turned = storable(checked)
        if (turned or self._rewrites) and (lost := self._lost(stored, checked, left_out)):
            others = (form for form in self._other_forms(valid) if not self._lost(form, checked, left_out))
            other, turned = next(others, None), True
            if other is None:
                raise InvalidParams(
                    f"task {self._name!r}: {', '.join(f'{name}={checked[name]!r:.200}' for name in lost)} would not come back "
                    "from MongoDB as it is: annotate the parameter with its type, or pass plain values"
                )
            stored = other
        size = checked_size(self._name, stored, most)
        if turned:
            stored |= {name: marked_secret(stored[name]) for name, value in checked.items() if hides(value)}
        return stored, size

    def _left_out(self, after: After | None) -> frozenset[str]:
        """Return the params that come from what the task waits for."""
        marked = self.from_dependencies
        return frozenset(marked).union(after.params) if after is not None and after.params else frozenset(marked)

    def _check_left_out(self, left_out: frozenset[str], params: Mapping[str, Any]) -> None:
        """Raise `InvalidParams` for a param that is passed nevertheless, or that the handler does not have."""
        check_not_given(self._name, params, left_out)
        if self._names_taken is not None and (unknown := sorted(left_out - self._names_taken)):
            raise InvalidParams(
                f"task {self._name!r} takes {self._signature}: after names {', '.join(unknown)}, which is no parameter of it"
            )

    def _check_fed(self, after: After) -> None:
        """Raise `InvalidParams` unless each param with that annotation gets the result of what the task waits for."""
        for name, mark in self.from_dependencies.items():
            if name in after.params or self.is_optional(name):
                continue
            if mark.id is None and len(after.ids) != 1:
                raise InvalidParams(
                    f"task {self._name!r}: {name!r} is the result of its only dependency, and after names {len(after.ids)}: "
                    f"pass after=[…] with one, after={{{name!r}: handle}}, or say which in FromDependency(name, key)"
                )
            if mark.id is not None and mark.id not in after.ids:
                raise InvalidParams(
                    f"task {self._name!r}: {name!r} is the result of {label(mark.id)}, which after does not name: name it there"
                )

    def to_run(self, stored: Any) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments for the handler. Raises `InvalidParams` for what does not fit (any more)."""
        if not isinstance(stored, dict):
            raise InvalidParams(f"task {self._name!r}: the stored params must be a document, got {stored!r}")
        params = self._values(self._valid(stored, "at execution"))
        return [params.pop(name) for name in self._positional if name in params], params

    def json_schema(self) -> dict[str, Any] | None:
        """Return a JSON schema of the params, for publishers without the code; None if the annotations cannot be read here."""
        try:
            return self._model(frozenset(self.from_dependencies)).model_json_schema(schema_generator=_Schema)
        except (NameError, TypeError, PydanticUserError):
            return None

    def secrets(self) -> list[str]:
        """Return which params must not be shown, by their annotations, including `OTHERS`; none if these cannot be read here."""
        try:
            if not _mentions_secrets(self._model(frozenset(self.from_dependencies))):
                return []
            named, others = self._taken()
            hints = {each.name: each.hint for each in named} | ({} if others is None else {OTHERS: others})
            return [
                name
                for name, hint in hints.items()
                if _mentions_secrets(create_model("hint", __config__=_OF_HINTS, v=(hint, ...)))
            ]
        except (NameError, TypeError, PydanticUserError):
            return []

    def checked_projection(self, wanted: Any) -> list[str]:
        """Return which params are loaded. Raises `InvalidOption` unless the handler can be called with these alone."""
        if isinstance(wanted, str) or not all(isinstance(path, str) and path for path in wanted) or not wanted:
            raise InvalidOption(f"projection must be a list of parameter names, or None for all, got {wanted!r}")
        loaded = {path.partition(".")[0] for path in wanted}  # part of a param can be meant
        taken = {
            p.name: p for p in self._signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        }
        if (unknown := loaded - taken.keys()) and not self._open_ended:
            raise InvalidOption(
                f"task {self._name!r}: projection names {', '.join(sorted(unknown))}, which it does not take"
            )
        if missing := [n for n, p in taken.items() if n not in loaded and p.default is p.empty]:
            raise InvalidOption(
                f"task {self._name!r}: projection leaves out {', '.join(missing)}: give it a default, or load it"
            )
        return list(wanted)

    def _lost(self, stored: dict[str, Any], checked: dict[str, Any], left_out: frozenset[str]) -> list[str]:
        """Return which params the handler would not get as they were checked, if this were stored."""
        validate = self._model(left_out).__pydantic_validator__.validate_python
        try:
            again = self._values(validate(stored), left_out)
            validate(as_it_comes_back(stored))
        except ValidationError as error:
            misfits = {found["loc"][0] for found in error.errors(include_url=False, include_context=False)}
            return [name for name in checked if name in misfits]
        return [name for name, value in checked.items() if not is_same(again[name], value)]

    def _other_forms(self, valid: BaseModel) -> Iterator[dict[str, Any]]:
        """Return other forms in which to store params that do not come back from their parts: by alias, as one value, as JSON."""
        names = dict(self._names)
        absent = {name for name, value in valid.__dict__.items() if value is _ABSENT}
        for how in FORMS:
            with suppress(*REFUSALS):
                dumped = valid.__pydantic_serializer__.to_python(
                    valid, exclude=absent, round_trip=True, warnings=False, **how
                )
                yield storable(dumped if how["by_alias"] else {names.get(key, key): dumped[key] for key in dumped})[0]

    def _valid(self, params: Mapping[str, Any], when: str, left_out: frozenset[str] = frozenset()) -> BaseModel:
        try:
            valid: BaseModel = self._model(left_out).__pydantic_validator__.validate_python(params)
        except ValidationError as error:
            said = _explained(error, shows=not _mentions_secrets(self._model(left_out)))
            raise InvalidParams(f"task {self._name!r} takes {self._signature}; {when} {said}") from None
        return valid

    def _values(self, valid: BaseModel, left_out: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Return the params of the handler by name."""
        given = valid.__dict__
        values = {
            name: given[attribute]
            for attribute, name in self._names
            if name not in left_out and given[attribute] is not _ABSENT
        }
        return values | valid.model_extra if valid.model_extra else values

    def _model(self, left_out: frozenset[str]) -> type[BaseModel]:
        """Return a model of the signature without these; created at first use, when the names in the annotations exist."""
        if left_out not in self._models:
            self._models[left_out] = self._build_model(left_out)
        return self._models[left_out]

    def _build_model(self, left_out: frozenset[str]) -> type[BaseModel]:
        named, others = self._taken()
        # Numbered attributes, so that no parameter can clash with a method of the model.
        self._names = [(f"p{i}", each.name) for i, each in enumerate(named)]
        fields: dict[str, Any] = {
            f"p{i}": (each.hint, Field(each.default, alias=each.name))
            for i, each in enumerate(named)
            if each.name not in left_out
        }
        base = _Closed if others is None else _open_ended(others)
        model = create_model(f"{self._name}_params", __base__=base, **fields)
        self._rewrites = self._rewrites or _mentions(model, "'function-", "'json'", "'strict': True", *MISREAD)
        return model

    def _taken(self) -> tuple[list[_Taken], Any]:
        """Return the params with names, and the annotation of those without. None if there may be no such."""
        hints = self._hints()
        named: list[_Taken] = []
        others: Any = None
        for parameter in self._signature.parameters.values():
            hint = hints.get(parameter.name, Any)
            if parameter.kind is not parameter.VAR_KEYWORD:
                default = ... if parameter.default is parameter.empty else parameter.default
                named.append(_Taken(parameter.name, hint, default))
            elif _is_marked(hint, "Unpack"):  # **more: Unpack[ATypedDict]
                named += _unpacked(get_args(hint)[0])
            else:
                others = hint
        return named, others


class _Taken(NamedTuple):
    """A param with a name."""

    name: str
    hint: Any
    default: Any
    """`...` if it is required."""


_ABSENT: Any = object()
"""Represents a param that may be left out and has no default: the handler does not get it then."""


def _unpacked(keys: Any) -> Iterator[_Taken]:
    """Return the params that a TypedDict names."""
    keys = get_origin(keys) or keys  # a generic one
    for name, hint in get_type_hints(keys, include_extras=True).items():
        # Markers are checked first: if annotations are texts, the TypedDict itself has not read them.
        optional = _is_marked(hint, "NotRequired") or (
            name not in keys.__required_keys__ and not _is_marked(hint, "Required")
        )
        marked = _is_marked(hint, "NotRequired", "Required")
        yield _Taken(name, get_args(hint)[0] if marked else hint, _ABSENT if optional else ...)


def _is_marked(hint: Any, *marks: str) -> bool:
    """Whether it is one of these words of `typing`, or of `typing_extensions`, about a type."""
    return getattr(get_origin(hint), "_name", None) in marks


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


def _open_ended(hint: Any) -> type[BaseModel]:
    """Return the base of a model that accepts more than its fields, with this annotation (`**more: int`)."""
    body = {
        "__module__": __name__,
        "__annotations__": {"__pydantic_extra__": dict[str, hint]},
        "model_config": ConfigDict(extra="allow", arbitrary_types_allowed=True),
    }
    made: type[BaseModel] = types.new_class(
        "_OpenEnded", (BaseModel,), exec_body=lambda namespace: namespace.update(body)
    )
    return made


_OF_HINTS = ConfigDict(arbitrary_types_allowed=True)


def _mentions_secrets(model: type[BaseModel]) -> bool:
    """Whether one of pydantic's secrets occurs in the annotations of a model."""
    return _mentions(model, "Secret")


def _mentions(model: type[BaseModel], *words: str) -> bool:
    schema = repr(model.__pydantic_core_schema__)
    return any(word in schema for word in words)


def check_mapping(name: str, params: Any) -> None:
    """Raise `InvalidParams` for what has no names of parameters."""
    if not isinstance(params, Mapping):
        raise InvalidParams(
            f"task {name!r}: params must be a dict by parameter name, got {type(params).__name__} {shown(params)}"
        )


def check_not_given(name: str, params: Mapping[str, Any], fed: Collection[str]) -> None:
    """Raise `InvalidParams` for a param that is given, though it comes from a dependency."""
    if given := sorted(set(fed).intersection(params)):
        raise InvalidParams(f"task {name!r}: {', '.join(given)} comes from a dependency: leave it out of the params")


def checked_size(name: str, params: dict[str, Any], most: int = MAX_BYTES) -> int:
    """Return the size of params in bytes. Raises `InvalidParams` for what cannot be stored, `TaskTooLarge`."""
    try:
        return size_of(params, "params", most)
    except Unstorable as error:
        raise InvalidParams(f"task {name!r}: {error}") from None
    except TooLarge as error:
        raise TaskTooLarge(f"task {name!r}: {error}") from None


def with_stored_fields(name: str, configuration: Configuration) -> tuple[Configuration, int]:
    """Return the configuration with its `fields` in MongoDB's types, and their size. Raises `InvalidOption`, `TaskTooLarge`."""
    if not configuration.fields:
        return configuration, 0
    try:
        if refusal := too_deep(configuration.fields, "fields"):
            raise refusal
        stored = storable(dict(configuration.fields))[0]
        return replace(configuration, fields=stored), size_of(stored, "fields")
    except Unstorable as error:
        raise InvalidOption(f"task {name!r}: {error}") from None
    except TooLarge as error:
        raise TaskTooLarge(f"task {name!r}: {error}") from None


def _explained(error: ValidationError, *, shows: bool) -> str:
    """Return what does not fit; `shows`: with the values."""
    problems = []
    for found in error.errors(include_url=False):
        given = f"{found['input']!r:.200}" if shows else "**********"
        where = ".".join(str(part) for part in found["loc"]) or "params"
        if found["type"] == "missing":
            problems.append(f"{where!r} is missing")
        elif found["type"] == "extra_forbidden":
            problems.append(f"there is no parameter {where!r} (given: {given})")
        else:
            problems.append(f"{where!r}={given} does not fit: {found['msg'] if shows else found['type']}")
    return "; ".join(problems)
