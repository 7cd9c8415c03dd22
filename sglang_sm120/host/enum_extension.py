"""Add members to an existing :class:`enum.Enum` in place.

SGLang's ``Fp4GemmRunnerBackend`` is closed, but other modules may already hold the class and its members.
Replacing the class would leave two classes whose members are never equal; so the class itself grows. The
three look-up structures written here are the same in CPython 3.10 to 3.14:

    _member_names_      definition order, drives iteration and len()
    _member_map_        name  -> member, drives Cls["NAME"] and __members__
    _value2member_map_  value -> member, drives Cls(value), `in` and unpickling

plus the class attribute ``Cls.NAME``. Python 3.13 added ``_hashable_values_`` as a second index of values.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from sglang_sm120.errors import SeamError


def add_members(cls: type[Enum], members: Mapping[str, str]) -> list[str]:
    """Add ``name -> value`` members that ``cls`` lacks and return the names added.

    A value that the class already has is left alone, whatever its name, so that a release which brings
    the value itself stays in force; calling twice changes nothing.

    Raises:
        SeamError: a name is taken by something else (another value, a method). Nothing has been added.
    """
    known = cls._value2member_map_
    wanted = {name: value for name, value in members.items() if value not in known}
    taken = [name for name in wanted if name in cls._member_map_ or name in vars(cls)]
    if taken:
        raise SeamError(
            f"{cls.__module__}.{cls.__qualname__} already uses the name {taken[0]!r} for something other than "
            f"the value {wanted[taken[0]]!r}; this SGLang release is not supported."
        )
    for name, value in wanted.items():
        _add_member(cls, name, value)
    return list(wanted)


def remove_members(cls: type[Enum], names: list[str]) -> None:
    """Undo :func:`add_members` for ``names``; used only to roll back an installation that failed half-way."""
    for name in names:
        member = cls._member_map_.pop(name)
        cls._member_names_.remove(name)
        cls._value2member_map_.pop(member.value)
        if hasattr(cls, "_hashable_values_"):
            cls._hashable_values_.remove(member.value)
        type.__delattr__(cls, name)


def _add_member(cls: type[Enum], name: str, value: str) -> None:
    # Enum.__new__ is replaced by a look-up once a class is complete, hence object.__new__.
    member = object.__new__(cls)
    member._name_ = name
    member._value_ = value
    member.__objclass__ = cls  # type: ignore[attr-defined]
    member._sort_order_ = len(cls._member_names_)  # type: ignore[attr-defined]
    # EnumType.__setattr__ refuses to rebind members, so it must not see the name as one yet.
    type.__setattr__(cls, name, member)
    cls._member_names_.append(name)
    cls._member_map_[name] = member
    cls._value2member_map_[value] = member
    if hasattr(cls, "_hashable_values_"):
        cls._hashable_values_.append(value)
