"""Values that not everybody may read: encrypted, or marked as secret. This file defines how they are stored.

A value is put into a box: a BSON binary with a subtype of our own, which says what it contains, and with which key. What has to
stay a text in the document, since pipelines read it as one (a reason, a line of a log), becomes a text that starts with
`<encrypted>`. A box is bound to its task and to its place in it. Params are boxed one by one, so their names stay, and
projections work.

A plain value of a plain task is stored as it is, and costs nothing here.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

import bson
from bson import ObjectId
from bson.binary import Binary
from bson.errors import BSONError
from pydantic import Secret

from taskmesh.model.codec import ENCRYPTED, Codec, Encrypted, NotLoaded, listed, needed_for
from taskmesh.model.errors import CannotDecrypt, IncompatibleCollection, PayloadMissing
from taskmesh.model.task import Task
from taskmesh.store import apart, values
from taskmesh.store.apart import Apart
from taskmesh.store.finish import Outcome
from taskmesh.store.mongodb.driver import CODEC, Document
from taskmesh.store.store import Store

_SUBTYPE = 0xA7
"""One of the binary subtypes that BSON leaves to users."""
_MAGIC = b"tm1"
_SECRET, _ENCRYPTED, _APART = 1, 2, 4
_SHOWN_BYTES = 1_000_000
"""Pages and commands load no value that is larger."""
_SHORTEST_REDACTED = 4
_REFERENCE_BYTES = 100
_TEXT = f"{ENCRYPTED}\n{_MAGIC.decode()}:"

_concealed: ContextVar[bool] = ContextVar("taskmesh values concealed", default=False)


@contextmanager
def concealed() -> Iterator[None]:
    """Inside the block a task is read as pages and commands show it: nothing is decrypted, even with the key."""
    before = _concealed.set(True)
    try:
        yield
    finally:
        _concealed.reset(before)


class _Box(NamedTuple):
    flags: int
    key_id: str
    data: bytes

    @property
    def is_encrypted(self) -> bool:
        return bool(self.flags & _ENCRYPTED)

    @property
    def apart(self) -> tuple[ObjectId, int] | None:
        """Where its data is, and how many bytes it has, if it is stored separately."""
        if not self.flags & _APART:
            return None
        return ObjectId(self.data[:12]), int.from_bytes(self.data[12:])

    def packed(self) -> bytes:
        key_id = self.key_id.encode()
        return _MAGIC + bytes([self.flags, *len(key_id).to_bytes(2)]) + key_id + self.data

    @classmethod
    def unpacked(cls, packed: bytes) -> _Box:
        start = len(_MAGIC) + 3
        end = start + int.from_bytes(packed[start - 2 : start])
        return cls(packed[start - 3], packed[start:end].decode(), packed[end:])


def is_boxed(value: Any) -> bool:
    """Whether a stored value is in a box."""
    return type(value) is Binary and value.subtype == _SUBTYPE and value.startswith(_MAGIC)


def _box_of(value: Any) -> _Box | None:
    """Return the box, if a stored value is one; None for a plain value."""
    return _Box.unpacked(value) if is_boxed(value) else None


def marked_secret(value: Any) -> Binary:
    """Return the value in a box that says that it must not be shown. This does not encrypt it."""
    return Binary(_Box(_SECRET, "", bson.encode({"v": value}, codec_options=CODEC)).packed(), _SUBTYPE)


def unmarked(value: Any) -> Any:
    """Return the value given to `marked_secret`, or the content of a `Secret`; anything else as it is."""
    if isinstance(value, Secret):
        return value.get_secret_value()
    box = _box_of(value)
    return value if box is None or box.is_encrypted else _plain(box.data)


def _plain(data: bytes) -> Any:
    return bson.decode(data, CODEC)["v"]


class Payloads:
    """How the values of one mesh's tasks are written and read."""

    def __init__(self, codec: Codec | None = None, threshold: int | None = None) -> None:
        self._codec = codec
        self._threshold = threshold
        self.most_bytes = values.MAX_BYTES if threshold is None else apart.MAX_BYTES
        """The most bytes of params, or of a result."""
        self.codecs: dict[str, Codec] = {}
        """The codecs of single tasks, by name."""

    def set_codec(self, name: str, codec: Codec) -> None:
        """Give the tasks of this name a codec of their own."""
        self.codecs[name] = codec

    def codec_of(self, name: str) -> Codec | None:
        """Return the codec for the values of the tasks of this name. None: they are plain."""
        return self.codecs.get(name, self._codec)

    def needs_of(self, name: str) -> Mapping[str, Any]:
        """Return which labels a worker needs for such a task as it is published now."""
        codec = self.codec_of(name)
        return {} if codec is None else needed_for(codec.current)

    def labels(self) -> dict[str, Any]:
        """Return the labels of a worker of this mesh for the keys that it has."""
        codecs = [*self.codecs.values(), *([] if self._codec is None else [self._codec])]
        return {name: value for codec in codecs for id_ in codec.key_ids for name, value in needed_for(id_).items()}

    # --- on the way in ---

    def sealed(self, id_: str, place: str, value: Any) -> Any:
        """Return a value as it is stored in this place of this task. None stays None."""
        codec = self.codec_of(_name(id_))
        if codec is None or value is None:
            return value
        box = _box_of(value)
        if box is not None and box.is_encrypted:
            return value
        flags, data = (0, bson.encode({"v": value}, codec_options=CODEC)) if box is None else (box.flags, box.data)
        encrypted = codec.encrypt(data, _context(id_, place))
        return Binary(_Box(flags | _ENCRYPTED, codec.current, encrypted).packed(), _SUBTYPE)

    def sealed_params(self, id_: str, params: Document) -> Document:
        """Return params as they are stored, each boxed by itself."""
        if self.codec_of(_name(id_)) is None:
            return params
        return {name: self.sealed(id_, f"params.{name}", value) for name, value in params.items()}

    def sealed_text(self, id_: str, text: str) -> str:
        """Return a text as it is stored: a text that shows nothing of it."""
        codec = self.codec_of(_name(id_))
        if codec is None:
            return text
        data = text.encode("utf-8", "surrogatepass")
        box = _Box(_ENCRYPTED, codec.current, codec.encrypt(data, _context(id_, "text")))
        return _TEXT + base64.b64encode(box.packed()).decode()

    def sealed_entry(self, id_: str, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what an execution leaves in its entry, or for the task's next stage, as it is stored."""
        if self.codec_of(_name(id_)) is None:
            return entry
        seal: dict[str, Callable[[Any], Any]] = {
            "returns": lambda value: self.sealed(id_, "result", value),
            "fail_reason": lambda text: self.sealed_text(id_, text),
            "params": lambda params: self.sealed_params(id_, params),
        }
        return {name: seal[name](value) if name in seal else value for name, value in entry.items()}

    def sealed_record(self, id_: str, fields: Document) -> Document:
        """Return the fields of a record as they are stored."""
        if self.codec_of(_name(id_)) is None:
            return fields
        seal: dict[str, Callable[[Any], Any]] = {
            "value": lambda value: self.sealed(id_, "record", value),
            "error": lambda text: self.sealed_text(id_, text),
        }
        return {name: seal[name](value) if name in seal else value for name, value in fields.items()}

    # --- on the way in, stored separately ---

    def is_large(self, size: int) -> bool:
        """Whether params, or a result, of so many bytes are stored separately."""
        return self._threshold is not None and size > self._threshold

    def apart_params(self, id_: str, params: Document) -> tuple[Document, list[Apart], int]:
        """Return params with references instead of the largest, until the rest is small; what to write; and the size."""
        assert self._threshold is not None
        sizes = {name: len(bson.encode({"v": value}, codec_options=CODEC)) for name, value in params.items()}
        rest, stored, put = sum(sizes.values()), dict(params), []
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            if rest <= self._threshold:
                break
            stored[name], value = _put_apart(id_, params[name])
            rest -= sizes[name] - _REFERENCE_BYTES
            put.append(value)
        return stored, put, rest

    def apart_result(self, outcome: Outcome) -> Outcome:
        """Return the outcome with a reference instead of a large result, and with what to write first."""
        if self.is_large(outcome.size) and "returns" in outcome.entry:
            reference, value = _put_apart(outcome.id, outcome.entry["returns"])
            rest = {name: each for name, each in outcome.entry.items() if name != "returns"}
            size = len(bson.encode(rest, codec_options=CODEC)) + 2 * _REFERENCE_BYTES
            return replace(outcome, entry={"returns": reference, **rest}, size=size, apart=(value,))
        return outcome

    # --- on the way out, stored separately ---

    async def fetched(self, store: Store, document: Document) -> Document:
        """Return the document of a task with its separately stored values."""
        if _is_plain(document):
            return document
        return _stored_values(document, await self._fetch(store, _values_of(document)))  # type: ignore[no-any-return]  # as it was

    async def ends(self, store: Store, ends: Collection[Document]) -> dict[str, Document]:
        """Return the outcomes of children, by their `_id`s, with `value` and `reasons` as they were given.

        Raises `CannotDecrypt`.
        """
        fetched = await self._fetch(store, [end.get("value") for end in ends])
        return {end["_id"]: self._unsealed_end(end, fetched(end.get("value"))) for end in ends}

    async def _fetch(self, store: Store, stored: Iterable[Any]) -> Callable[[Any], Any]:
        """Read what these values refer to. Return a function that puts it in their places."""
        wanted = {}
        for value in stored:
            box = _box_of(value)
            if box is not None and box.apart is not None and not (_concealed.get() and _is_not_shown(box)):
                id_, size = box.apart
                wanted[id_] = size
        found = await apart.read(store, wanted) if wanted else {}

        def fetched(value: Any) -> Any:
            box = _box_of(value)
            if box is None or box.apart is None:
                return value
            id_, size = box.apart
            data = found.get(id_, b"")
            return Binary(data, _SUBTYPE) if len(data) == size else value

        return fetched

    # --- on the way out ---

    def unsealed(self, id_: str, place: str, value: Any) -> Any:
        """Return a stored value as it was given. Raises `CannotDecrypt`."""
        box = _box_of(value)
        return value if box is None else _plain(self._decrypted(id_, place, box))

    def unsealed_params(self, id_: str, params: Document) -> Document:
        """Return stored params as they were given. Raises `CannotDecrypt`."""
        return {name: self.unsealed(id_, f"params.{name}", value) for name, value in params.items()}

    def decrypted_params(self, id_: str, params: Document) -> Document:
        """Return stored params in the clear, with secrets still marked as such. Raises `CannotDecrypt`."""

        def decrypted(place: str, value: Any) -> Any:
            found = self.unsealed(id_, place, value)
            box = _box_of(value)
            return marked_secret(found) if box is not None and box.flags & _SECRET else found

        return {name: decrypted(f"params.{name}", value) for name, value in params.items()}

    def secrets_in(self, id_: str, params: Document) -> Iterator[str]:
        """Yield the texts in those stored params that must not be shown, except for short ones, which occur in many texts."""
        for name, value in params.items():
            box = _box_of(value)
            if box is not None and box.flags & _SECRET:
                yield from _texts(self.unsealed(id_, f"params.{name}", value))

    def unsealed_text(self, id_: str, text: str) -> str:
        """Return a stored text as it was given. Raises `CannotDecrypt`."""
        box = _box_in(text)
        return text if box is None else self._decrypted(id_, "text", box).decode("utf-8", "surrogatepass")

    def unsealed_record(self, id_: str, record: Document) -> Document:
        """Return a record as it was made. Raises `CannotDecrypt`."""
        value, error = record.get("value"), record.get("error")
        if is_boxed(value):
            record = record | {"value": self.unsealed(id_, "record", value)}
        return record if error is None else record | {"error": self.unsealed_text(id_, error)}

    def _unsealed_end(self, end: Document, value: Any) -> Document:
        id_ = end["_id"]
        reasons = [self.unsealed_text(id_, reason) for reason in end["reasons"]]
        return end | {"value": self.unsealed(id_, "result", value), "reasons": reasons}

    def task(self, document: Document) -> Task:
        """Read a stored task, for display.

        An `Encrypted` represents what cannot be read here, pydantic's `Secret` what is marked as secret. Raises
        `IncompatibleCollection` if it is no task of ours.
        """
        try:
            return Task.from_document(self._shown(document))
        except (BSONError, UnicodeError, IndexError) as error:
            raise IncompatibleCollection(
                f"the document {document.get('_id')!r} has a value that taskmesh did not write so ({error})"
            ) from error

    def shown_params(self, id_: str, params: Document) -> Document:
        """Return stored params for display."""
        return {name: self._shown_value(id_, f"params.{name}", value) for name, value in params.items()}

    def _shown(self, document: Document) -> Document:
        id_, state = document.get("_id"), document.get("task_state")
        if (
            _is_plain(document) or not isinstance(id_, str) or not isinstance(state, dict)
        ):  # a foreign document, which is reported when it is read
            return document

        def value(place: str) -> Callable[[Any], Any]:
            return lambda stored: self._shown_value(id_, place, stored)

        def text(stored: Any) -> Any:
            return self._shown_text(id_, stored)

        def params(stored: Any) -> Any:
            return self.shown_params(id_, stored) if isinstance(stored, dict) else stored

        steps = _each(_fields(value=value("record"), error=text))
        entries = _each(_fields(returns=value("result"), fail_reason=text, logs=_each(_fields(message=text))))
        shown = _fields(
            worker_states=entries,
            progress=_fields(message=text),
            steps=steps,
            signals=_each(_fields(payload=value("record"))),
            stages=_each(_fields(params=params, steps=steps)),
        )
        return _fields(params=params, task_state=shown)(document)  # type: ignore[no-any-return]  # a document, as it was

    def _shown_value(self, id_: str, place: str, stored: Any) -> Any:
        box = _box_of(stored)
        if box is None:
            return stored
        found = self._read(id_, place, box)
        if isinstance(found, (Encrypted, NotLoaded)):
            return found
        return Secret(_plain(found)) if box.flags & _SECRET else _plain(found)

    def _shown_text(self, id_: str, stored: Any) -> Any:
        box = _box_in(stored) if isinstance(stored, str) else None
        if box is None:
            return stored
        found = self._read(id_, "text", box)
        return found.decode("utf-8", "surrogatepass") if isinstance(found, bytes) else found

    def _read(self, id_: str, place: str, box: _Box) -> bytes | Encrypted | NotLoaded:
        """Return the content of a box, for display."""
        if box.is_encrypted and _concealed.get():
            return Encrypted.because(box.key_id, "pages and commands show no encrypted values")
        if box.apart is not None:
            return NotLoaded(f"<{box.apart[1]:,} bytes, stored apart>")
        try:
            return self._decrypted(id_, place, box)
        except CannotDecrypt as error:
            return Encrypted.because(error.key_id, str(error))

    def _decrypted(self, id_: str, place: str, box: _Box) -> bytes:
        name, _, key = id_.partition(":")
        if box.apart is not None:
            raise PayloadMissing(
                f"{_SAID.get(place, place)} of task {name!r} {key!r}: its {box.apart[1]:,} bytes, which are stored apart, are "
                "not there: the task was changed a moment ago, or somebody has removed them"
            )
        if not box.is_encrypted:
            return box.data
        codec = self.codec_of(name)
        what = f"{_SAID.get(place, place)} of task {name!r} {key!r}"
        if codec is None or box.key_id not in codec.key_ids:
            has = "has no codec for it" if codec is None else f"has only the keys {listed(codec.key_ids)}"
            remedy = "give TaskMesh or the task a codec with that key"
            raise CannotDecrypt(
                f"{what}: encrypted with key {box.key_id!r}, and this process {has}: {remedy}", box.key_id
            )
        try:
            return codec.decrypt(box.key_id, box.data, _context(id_, place))
        except ValueError:
            raise CannotDecrypt(
                f"{what}: encrypted with another key {box.key_id!r} than this process has under that id, or changed since: "
                "compare the keys of publishers and workers",
                box.key_id,
            ) from None


def references(document: Mapping[str, Any]) -> Iterator[ObjectId]:
    """Yield the references in the document of a task."""
    for value in _values_of(document):
        box = _box_of(value)
        if box is not None and box.apart is not None:
            yield box.apart[0]


def _is_plain(document: Mapping[str, Any]) -> bool:
    """Whether nothing in a task's document is boxed. That is the usual case, and then it is read as it is."""
    try:
        return not any(map(_is_sealed, _stored(document)))
    except (AttributeError, TypeError):  # a foreign document: its reader examines it
        return False


def _is_sealed(value: Any) -> bool:
    kind = type(value)
    return (kind is Binary and is_boxed(value)) or (kind is str and value.startswith(_TEXT))


def _stored(document: Mapping[str, Any]) -> Iterator[Any]:
    """Yield all values in a task's document that may be boxed."""
    yield from (document.get("params") or {}).values()
    state = document.get("task_state", {})
    yield (state.get("progress") or {}).get("message")
    for entry in state.get("worker_states") or ():
        yield entry.get("returns")
        yield entry.get("fail_reason")
        for line in entry.get("logs") or ():
            yield line.get("message")
    stages = state.get("stages") or ()
    for stage in stages:
        yield from (stage.get("params") or {}).values()
    for steps in (state.get("steps") or (), *(stage.get("steps") or () for stage in stages)):
        for step in steps:
            yield step.get("value")
            yield step.get("error")
    for signal in state.get("signals") or ():
        yield signal.get("payload")


def _values_of(document: Mapping[str, Any]) -> list[Any]:
    """Return the values in a task's document that may be stored separately."""
    found: list[Any] = []

    def note(value: Any) -> Any:
        found.append(value)
        return value

    _stored_values(document, note)
    return found


def _stored_values(document: Any, change: Callable[[Any], Any]) -> Any:
    """Return the document with each of those values changed."""

    def params(stored: Any) -> Any:
        return {name: change(value) for name, value in stored.items()} if isinstance(stored, dict) else stored

    state = _fields(worker_states=_each(_fields(returns=change)), stages=_each(_fields(params=params)))
    return _fields(params=params, task_state=state)(document)


def _put_apart(id_: str, value: Any) -> tuple[Binary, Apart]:
    """Return a reference to a value as it would be stored, and what to write for it."""
    box = _box_of(value) or _Box(0, "", bson.encode({"v": value}, codec_options=CODEC))
    data = box.packed()
    where = Apart(ObjectId(), id_, data)
    reference = _Box(box.flags | _APART, box.key_id, where.id.binary + len(data).to_bytes(8))
    return Binary(reference.packed(), _SUBTYPE), where


def _is_not_shown(box: _Box) -> bool:
    """Whether pages and commands show nothing of it, so that it is not loaded for them."""
    return box.is_encrypted or bool(box.flags & _SECRET) or (box.apart is not None and box.apart[1] > _SHOWN_BYTES)


_SAID = {"result": "the result", "record": "a step or signal", "text": "a text"}


def first_line(text: Any) -> Any:
    """Return what a listing shows of a stored text. Of an encrypted one: nothing."""
    return ENCRYPTED if isinstance(text, str) and text.startswith(_TEXT) else text


def _name(id_: str) -> str:
    return id_.partition(":")[0]


def _context(id_: str, place: str) -> bytes:
    return f"{id_}\0{place}".encode()


def _box_in(text: str) -> _Box | None:
    """Return the box, if a stored text is one; None for a plain text."""
    if not text.startswith(_TEXT):
        return None
    try:
        return _Box.unpacked(base64.b64decode(text[len(_TEXT) :], validate=True))
    except (binascii.Error, ValueError, IndexError):  # somebody's own text, which starts like one of ours
        return None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _texts(part)
    if isinstance(value, bytes):  # what is no text is not shown as one
        value = value.decode(errors="ignore")
    if isinstance(value, str) and len(value) >= _SHORTEST_REDACTED:
        yield value


def _fields(**change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that reads these fields of a document, each in its way."""

    def changed(document: Any) -> Any:
        if not isinstance(document, dict):
            return document
        return document | {name: change[name](document[name]) for name in change.keys() & document.keys()}

    return changed


def _each(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that reads each item of a list in this way."""
    return lambda parts: [change(part) for part in parts] if isinstance(parts, list) else parts
