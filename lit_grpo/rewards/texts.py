"""Answers compared as texts. The module imports only Python's own, so that a task of another harness can carry it."""

import re
import unicodedata
from collections.abc import Sequence

_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff]")
_SPACE = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
_MINUS = re.compile("[\u2010\u2011\u2212\ufe63\uff0d]")


def comparable(text: str) -> str:
    r"""Return a text in the form in which answers are compared, without white space around it.

    The form is Unicode's NFC. Each kind of space, such as the no-break space, is a space; each kind of minus sign or
    hyphen is ``-``; a line end is ``\n``; and characters without width, such as a byte order mark, are left out.
    """
    text = _INVISIBLE.sub("", unicodedata.normalize("NFC", text)).replace("\r\n", "\n")
    return _MINUS.sub("-", _SPACE.sub(" ", text)).strip()


def last_answer(pattern: "re.Pattern[str] | None", text: str) -> str | None:
    """Return group 1 of the pattern's last match, or the whole text without a pattern; ``None`` without a match.

    The answer is :func:`comparable`. The pattern is searched in the comparable text, and if it has no match there, in
    the text as it is.
    """
    if pattern is None:
        return comparable(text)
    for searched in (comparable(text), text):
        answer = None
        for match in pattern.finditer(searched):
            answer = match.group(1)
        if answer is not None:
            return comparable(answer)
    return None


def is_same_answer(
    completion: str, answers: Sequence[str], pattern: "re.Pattern[str] | None" = None, ignore_case: bool = False
) -> bool:
    """Return whether the completion's answer is one of ``answers``.

    Args:
        completion: Text of the completion.
        answers: The right answers, in any form of their texts.
        pattern: Finds the completion's answer (:func:`last_answer`).
        ignore_case: Count upper and lower case as the same.
    """
    answer = last_answer(pattern, completion)
    if answer is None:
        return False
    right = [comparable(each) for each in answers]
    return answer.casefold() in [each.casefold() for each in right] if ignore_case else answer in right
