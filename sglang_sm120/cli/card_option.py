"""Which card a prediction is for: the one that ``--card`` names, or the one that is here."""

from __future__ import annotations

from sglang_sm120.cards import Card, card_of_device, cards, find_card
from sglang_sm120.errors import ConfigError


def card_for(key: str | None) -> Card:
    """Return the card.

    Raises:
        ConfigError: the name is not known, or none was given and the card here is not known either.
    """
    if key is not None:
        return find_card(key)
    # Looking for a GPU imports torch, which takes seconds: only where nobody named a card.
    from sglang_sm120.device import collect_facts

    name = collect_facts().device_name
    card = card_of_device(name)
    if card is None:
        raise ConfigError(
            f"The card of this machine ({name}) is not known. Add --card with one of {', '.join(cards())}."
        )
    return card


def cards_here() -> int:
    """Return how many CUDA devices this process sees, at least 1."""
    try:
        import torch
    except (ImportError, OSError):  # an OSError is a library of CUDA that torch misses
        return 1
    return max(1, torch.cuda.device_count())
