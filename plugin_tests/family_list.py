"""All families of ``docs/models.md``, in the table's order: each file of families enters its own here."""

from __future__ import annotations

from families import DECODERS, REFUSED
from families_other import OTHERS
from family_registry import Family

KINDS: dict[str, str] = {
    "decoder": "Text decoders",
    "vision-language": "Vision-language models",
    "encoder-decoder": "Encoder-decoders",
    "encoder": "Encoders",
}
"""Section title by :attr:`Family.kind`, in the table's order."""

FAMILIES: tuple[Family, ...] = (*DECODERS, *REFUSED, *OTHERS)
