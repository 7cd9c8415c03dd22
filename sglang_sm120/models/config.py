"""Typed access to the fields of a ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_sm120.errors import ConfigError, bad_value

#: No dimension of a model is larger; a number beyond it is damage.
_LARGEST = 1 << 40
#: Layers are listed one by one; the deepest published models have some hundred.
MOST_LAYERS = 4096


@dataclass(frozen=True)
class Reader:
    """The fields of one configuration; ``label`` is for messages."""

    config: Mapping[str, Any]
    label: str

    def number(self, *names: str, largest: int = _LARGEST) -> int:
        """Return the first of the fields that is given, as a positive integer of at most ``largest``.

        Raises:
            ConfigError: none is given, or it is no such integer.
        """
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= largest:
                remedy = f"a positive integer of at most {largest} is needed"
                raise ConfigError(bad_value(f"{name} of {self.label}", value, remedy))
            return value
        raise ConfigError(
            f"The configuration of {self.label} has no {' or '.join(names)}, which this model type needs."
        )

    def optional(self, name: str, default: int, largest: int = _LARGEST) -> int:
        """Return a field that may be absent, null or zero.

        Raises:
            ConfigError: it is no integer, negative, or more than ``largest``.
        """
        value = self.config.get(name)
        if value is None:
            return default
        if value == 0:
            return 0
        return self.number(name, largest=largest)
