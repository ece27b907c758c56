"""What a person reads is plain English: no word of ``BANNED`` or ``BRITISH`` stands in a docstring,
comment, message or page."""

import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BANNED = {
    r"behind": "after; or say in which place",
    r"foretells?|foretold|foretelling|foresight\s+of": "predict",
    r"anew": "again",
    r"otherwise\s+than": "unlike, or differently from",
    r"whoever": "the one that",
    r"wherefrom|whence": "where it is from",
    r"thereof|therein|thereby|hereby|wherein|whereby|hence|henceforth|hitherto": "a plain word",
    r"amongst": "among",
    r"lest": "so that ... not",
    r"as\s+it\s+were": "nothing",
    r"c(?:o|a)mes?\s+to\s+the\s+same": "has the same result",
    r"whatsoever|nought|betwixt|albeit|howbeit": "a plain word",
    r"on\s+end": "in a row",
    r"(?:to|for|of|by|from)\s+who": "the one that, or whom",
    r"besides?\s+which": "a plain word",
    r"be\s+it|be\s+its|be\s+they": "whether it is",
    r"for\s+it\s+has": "because it has",
}
"""Words that make a reader stop, as regular expressions, and what to write in their place."""
REAL_PLACES = re.compile(
    r"behind\s+(?:a|the|an|its|this|another)?\s*"
    r"(?:firewall|proxy|router|load\s+balancer|(?:healthy\s+)?front\s+end|same\s+address|HTTP)"
)
"""Something that does stand behind a thing."""
BRITISH = {
    r"\w*(?:behaviour|colour|favour|flavour|honour|labour|neighbour)\w*": "the American -or",
    r"\w*(?:character|custom|general|initial|maxim|minim|normal|optim|organ|quant|random|real|recogn|regular|serial"
    r"|special|standard|summar|synchron|token|util|visual)is(?:e[ds]?|ing|ations?)": "the American -ize",
    r"analyse[ds]?|analysing|catalogues?|centre[ds]?|centring|grey|judgements?|artefacts?|offences?|defences?"
    r"|programmes?|whilst": "the American spelling",
    r"(?:cancell|modell|signall|travell)(?:ed|ing)": "a single l",
    r"(?<![`\"])(?:un)?learnt(?![`\"])|(?:mis)?spelt|burnt": "trained on, learned, spelled",  # not a field
    r"(?<!\")licen(?:ces?|ced|cing)": "license",  # not the name of a file
}
"""British spellings, and what to write in their place."""
READ = {
    "lit_grpo": "*.py",
    "callbacks": "*.py",
    "benchmarks": "*.py",
    "scripts": "*.py",
    "examples": "*.py",
    "docs": "*.md",
    "configs": "*.yaml",
    "notebooks": "*.ipynb",
}
_BANNED = re.compile(r"\b(?:" + "|".join(f"(?:{word})" for word in BANNED | BRITISH) + r")\b", re.IGNORECASE)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The text of a file that a person reads, in pieces with their first lines; of Python, strings and comments.

    Of a notebook it is what its cells say, without what they print, and each begins at its number.
    """
    if path.suffix == ".ipynb":
        yield from (
            (number, "".join(cell["source"])) for number, cell in enumerate(json.loads(path.read_text())["cells"])
        )
        return
    if path.suffix != ".py":
        yield 1, path.read_text()
        return
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in kinds:
                yield token.start[0], token.string


def offenses(path: Path) -> list[str]:
    """Each banned word of a file with its place, ``path:line: word``."""
    found: list[str] = []
    if not _BANNED.search(path.read_text()):  # seldom; to tell prose from code takes longer
        return found
    for first_line, text in prose(path):
        text = REAL_PLACES.sub(lambda place: re.sub(r"\S", "-", place[0]), text)
        for word in _BANNED.finditer(text):
            line = first_line + text.count("\n", 0, word.start())
            found.append(f"{path.relative_to(ROOT)}:{line}: {' '.join(word[0].split())}")
    return found


def read_files() -> list[Path]:
    """All files whose prose is held to this."""
    inside = [path for folder, names in READ.items() for path in sorted((ROOT / folder).rglob(names))]
    return [ROOT / "README.md", *inside, *sorted((ROOT / "lit_grpo").rglob("*.yaml"))]


def test_no_banned_word_is_left() -> None:
    found = [each for path in read_files() for each in offenses(path)]
    assert not found, "\n".join(found)
