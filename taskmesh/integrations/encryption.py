"""AES-GCM for the values of tasks (extra `encryption`)."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping

from taskmesh.model.codec import checked_key_id, listed
from taskmesh.model.distribution import check_extra
from taskmesh.model.errors import InvalidOption

_KEY_BYTES = (16, 24, 32)
_NONCE_BYTES = 12


class AESCodec:
    """Encrypts with AES-GCM: `TaskMesh(codec=AESCodec(keys={"2026": key}, current="2026"))`.

    `keys`: by ids of your own, each of 16, 24 or 32 random bytes, or the base64 text of such; `new_key` makes one. `current`: the
    id of the key that encrypts from now on; all of them decrypt, so an old key stays for as long as tasks are kept that it has
    encrypted.
    Each value has a random nonce: use a key for at most 2**32 values. Raises `InvalidOption`, `ExtraMissing`.
    """

    def __init__(self, keys: Mapping[str, bytes | str], current: str) -> None:
        check_extra("encryption", ("cryptography",), "AESCodec")
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415 — an extra

        if not isinstance(keys, Mapping):
            raise InvalidOption(f"keys must be a mapping of keys by their ids, got {type(keys).__name__}")
        self._ciphers = {checked_key_id(id_): AESGCM(_checked_key(id_, key)) for id_, key in keys.items()}
        if not self._ciphers:
            raise InvalidOption("keys is empty: give it the key named by `current`; AESCodec.new_key() makes one")
        if current not in self._ciphers:
            raise InvalidOption(
                f"current must be the id of one of the keys, {listed(self.key_ids)}, got {current!r:.100}"
            )
        self._current = current

    @staticmethod
    def new_key() -> str:
        """Return a new random key of 32 bytes, as the text that `keys` takes."""
        return base64.b64encode(os.urandom(32)).decode()

    @property
    def current(self) -> str:
        """The id of the key that encrypts."""
        return self._current

    @property
    def key_ids(self) -> frozenset[str]:
        """The ids of all keys that decrypt."""
        return frozenset(self._ciphers)

    def encrypt(self, data: bytes, context: bytes) -> bytes:
        """Return a nonce, and the data encrypted with the current key."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._ciphers[self._current].encrypt(nonce, data, context)

    def decrypt(self, key_id: str, data: bytes, context: bytes) -> bytes:
        """Return what `encrypt` was given. Raises `ValueError` if the key of this id did not encrypt it, or not so."""
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415 — an extra

        try:
            return self._ciphers[key_id].decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], context)
        except (InvalidTag, KeyError):
            raise ValueError(f"key {key_id!r} does not decrypt it") from None

    def __repr__(self) -> str:
        return f"AESCodec(keys {listed(self.key_ids)}, current={self._current!r})"


def _checked_key(id_: str, key: object) -> bytes:
    """Return the bytes of a key. Raises `InvalidOption`, which does not say what the key is."""
    data: object = key
    if isinstance(key, str):
        try:
            data = base64.b64decode(key, validate=True)
        except (binascii.Error, ValueError):
            data = None
    if not isinstance(data, (bytes, bytearray)) or len(data) not in _KEY_BYTES:
        got = f"{len(data)} bytes" if isinstance(data, (bytes, bytearray)) else type(key).__name__
        raise InvalidOption(
            f"the key {id_!r} must be 16, 24 or 32 bytes, or their base64 text, got {got}: AESCodec.new_key() makes one"
        )
    return bytes(data)
