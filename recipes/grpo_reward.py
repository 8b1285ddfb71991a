"""The reward of `grpo.yaml`: 1 where the last number of an answer is the right one, else 0."""

from __future__ import annotations

import re
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> float | None:
    """The last number in a text, thousands separated by commas or not; None where there is none."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def last_number_is_right(completions: list[Any], answer: list[Any], **columns: Any) -> list[float]:
    """The rewards of a batch, as TRL asks for them.

    Args:
        completions: what the model wrote: texts, or lists of messages where prompts are conversations.
        answer: the data set's column of that name, one for each completion: a number, or a text that ends with one.
        columns: what else the data set holds.
    """
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [float(last_number(text) == last_number(str(right))) for text, right in zip(texts, answer, strict=True)]
