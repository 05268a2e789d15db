"""What encrypts the values of tasks, and what represents a value that cannot be read here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from taskmesh.model.errors import InvalidOption
from taskmesh.model.ids import checked_text, shown

ENCRYPTED = "<encrypted>"
"""Shown by pages and commands instead of an encrypted value."""
_KEY_LABEL = "encryption-key:"
_LONGEST_KEY_ID = 100
LEAST_APART = 1_000
"""Params or a result must have more bytes than this to be stored separately from the task."""


@runtime_checkable
class Codec(Protocol):
    """Encrypts values. `AESCodec` is one; your own may ask a key management service that answers from memory.

    Both methods are called often, in event loops and threads alike: they must not block. `context` names the task and the place
    in it, and has to be authenticated, so that no value can be moved to the place of another.
    """

    @property
    def current(self) -> str:
        """The id of the key that encrypts, 1 to 100 characters. It is stored in the clear beside each encrypted value."""

    @property
    def key_ids(self) -> frozenset[str]:
        """The ids of all keys that decrypt."""

    def encrypt(self, data: bytes, context: bytes) -> bytes:
        """Return the data encrypted with the current key."""

    def decrypt(self, key_id: str, data: bytes, context: bytes) -> bytes:
        """Return what `encrypt` was given. Raises `ValueError` unless the key of this id has encrypted it, in this context."""


class NotLoaded(str):
    """Represents a value that is stored separately and is not shown: a text that says how large it is."""

    __slots__ = ()


class Encrypted(str):
    """Represents a value that is encrypted and cannot be read here: a text, `<encrypted>`."""

    __slots__ = ("key_id", "reason")

    key_id: str
    """The id of the key with which it is encrypted."""
    reason: str
    """Why it cannot be read."""

    @classmethod
    def because(cls, key_id: str, reason: str) -> Encrypted:
        """Return the representation of a value that was encrypted with this key."""
        encrypted = cls(ENCRYPTED)
        encrypted.key_id, encrypted.reason = key_id, reason
        return encrypted

    def __reduce__(self) -> tuple[Any, ...]:
        return Encrypted.because, (self.key_id, self.reason)


def checked_codec(codec: Any) -> Codec | None:
    """Return the codec, or None for none. Raises `InvalidOption` for anything else."""
    if codec is None:
        return None
    if isinstance(codec, type) or not isinstance(codec, Codec):
        raise InvalidOption(f"codec must be an AESCodec, or have its methods, got {shown(codec)}")
    for key_id in codec.key_ids:
        checked_key_id(key_id)
    if codec.current not in codec.key_ids:
        raise InvalidOption(f"codec: its current key {codec.current!r} is none of its keys: {listed(codec.key_ids)}")
    return codec


def checked_key_id(key_id: Any) -> str:
    """Return the id of a key, or raise `InvalidOption`."""
    if "=" in checked_text("the id of a key", key_id, most=_LONGEST_KEY_ID):
        raise InvalidOption(f"the id of a key must not have a '=', got {key_id!r}: give it another id")
    return str(key_id)


def checked_threshold(payload_threshold: Any) -> int | None:
    """Return the number of bytes, or None for none. Raises `InvalidOption`."""
    if payload_threshold is None:
        return None
    if isinstance(payload_threshold, bool) or not isinstance(payload_threshold, int) or payload_threshold < LEAST_APART:
        raise InvalidOption(
            f"payload_threshold must be a whole number of bytes of at least {LEAST_APART}, or None, "
            f"got {shown(payload_threshold)}"
        )
    return payload_threshold


def listed(key_ids: frozenset[str]) -> str:
    """Name these keys in a sentence."""
    return ", ".join(repr(key_id) for key_id in sorted(key_ids)) or "none"


def needed_for(key_id: str) -> Mapping[str, Any]:
    """Return the labels that a worker needs for a task whose params this key has encrypted."""
    return {f"{_KEY_LABEL}{key_id}": True}
