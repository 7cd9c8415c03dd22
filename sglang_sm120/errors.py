"""Typed errors of the package.

Every error that a user can cause carries three things in its text: the argument, the value it had and
what to do. ``Sm120Error`` is the common base, so that a caller can catch everything of ours and nothing
else. The classes also derive from the built-in exception a Python programmer would expect.
"""

from __future__ import annotations


class Sm120Error(Exception):
    """Base of every error raised by this package.

    Attributes:
        names_call: the text says which backend failed in which layer at which sizes (``failures.py``).
    """

    names_call = False


class FormatError(Sm120Error, ValueError):
    """A tensor does not follow the NVFP4 format: wrong dtype, shape, device, layout or scale value."""


class ConfigError(Sm120Error, ValueError):
    """A flag, environment variable or combination of them cannot be honoured."""


class UnsupportedError(Sm120Error, RuntimeError):
    """A backend cannot run here: wrong GPU, missing or wrong version of a package, illegal shape."""


class SeamError(Sm120Error, RuntimeError):
    """The installed SGLang does not have the code that a hook of ours is written for."""


class RecordError(Sm120Error, ValueError):
    """A probe record or tuning table cannot be read, trusted or written."""


class BackendError(Sm120Error, RuntimeError):
    """A backend failed while it served a layer; nothing takes over, as the results of the process may be lost."""


class PatchError(Sm120Error, RuntimeError):
    """A patch cannot be read, or an SGLang on disk cannot be patched or restored."""


class SelfTestError(Sm120Error, RuntimeError):
    """A backend gave a wrong result in its start-up check; no model is served with it."""


class VerificationError(Sm120Error, RuntimeError):
    """A layer of a running server gave a wrong result, or nothing that it computed could be checked."""


def bad_value(argument: str, value: object, remedy: str) -> str:
    """Return the one wording that every message about a bad value uses.

    Args:
        argument: the name the user wrote, for example ``--fp4-gemm-backend`` or ``global_scale``.
        value: what it was.
        remedy: an imperative sentence without a final full stop.
    """
    return f"{argument}={value!r} cannot be used: {remedy}."
