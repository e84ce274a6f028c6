"""Rules of the language of docstrings, and what breaks them.

A docstring is read alone: by ``help()``, in a search, beside other code. So its first sentence has
a subject or is an order, its sentences are short, and formats of numbers have their names.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

VERBS = frozenset(Path(__file__).with_name("verbs.txt").read_text().split())
MOST_WORDS = 25  # of a sentence

_OPENERS = {"as", "how", "of", "so", "that", "this", "those", "what", "where", "whether", "which"}
_OPENERS |= {"who", "whose", "it", "they"}
_OPENING_PHRASES = ("the same",)
_SECTIONS = ("Args:", "Attributes:", "Returns:", "Raises:", "Yields:")
_UNNAMED_FORMAT = re.compile(r"\b(?:of|in|to|with) (?:4|8|16) bits\b|\b(?:4|8)[- ]bit\b")
_VALUES = {"property", "cached_property", "setter"}  # decorators that make a value of a method
_ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|vs|cf|etc|al)\.|\.\.\.")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module


def faults(path: Path) -> Iterator[tuple[str, str]]:
    """Find what breaks a rule in a file: the name of a definition or a help text, and the fault."""
    tree = ast.parse(path.read_text())
    for text in _help_texts(tree):
        for fault in docstring_faults(text, is_order=False):
            yield f"help {text.split()[0]!r}", fault
    for name, node in _definitions(tree, ""):
        text = ast.get_docstring(node)
        if text is not None:
            for fault in docstring_faults(text, is_order=_is_order(node)):
                yield name, fault


def docstring_faults(text: str, *, is_order: bool) -> Iterator[str]:
    """Find the faults of one docstring; ``is_order``: it says what a function does."""
    first = text.split()[0].strip("`'\"(").lower().rstrip(",.:;") if text.split() else ""
    if first in _OPENERS or text.lower().startswith(_OPENING_PHRASES):
        yield f"begins with {' '.join(text.split()[:2])!r}: it has no subject"
    elif is_order and first not in VERBS:
        yield f"begins with {text.split()[0]!r}, which is no verb of verbs.txt"
    yield from text_faults(text)


def text_faults(text: str) -> Iterator[str]:
    """Find sentences that are too long and formats without a name."""
    for sentence in sentences(text):
        if (count := len(words(sentence))) > MOST_WORDS:
            yield f"has a sentence of {count} words: {' '.join(sentence.split()[:6])} ..."
    if found := _UNNAMED_FORMAT.search(text):
        yield f"says {found.group()!r} where a format has a name"


def sentences(text: str) -> Iterator[str]:
    """Split prose into sentences; indented blocks (pseudo-code, tables) are none."""
    for paragraph in _paragraphs(text):
        plain = _ABBREVIATIONS.sub(lambda found: found.group().replace(".", ""), paragraph)
        yield from filter(None, re.split(r"(?<=[.?!;:])\s+|(?<=[.?!]\))\s+", plain))


def words(sentence: str) -> list[str]:
    """Split a sentence into words; what stands between backquotes is one."""
    sentence = re.sub(r"``.*?``|`.*?`", "code", sentence)
    return [word for word in sentence.split() if re.search(r"\w", word)]


def _paragraphs(text: str) -> Iterator[str]:
    """Join the lines of paragraphs, and of the entries of sections."""
    is_section = False
    lines: list[str] = []
    for line in (*text.splitlines(), ""):
        indent = len(line) - len(line.lstrip())
        is_entry = is_section and indent == 4
        is_item = bool(re.match(r"\s*(?:[-*]|\d\.) ", line))
        if not line.strip() or line.strip() in _SECTIONS or is_entry or is_item:
            if lines:
                yield " ".join(lines)
            lines = []
        if line.strip() in _SECTIONS:
            is_section = True
        elif indent == 0 and line.strip():
            is_section = False
        if line.strip() and line.strip() not in _SECTIONS and (indent == 0 or is_section):
            lines.append(line.strip())


def _definitions(node: ast.AST, within: str) -> Iterator[tuple[str, Definition]]:
    if isinstance(node, ast.Module):
        yield "module", node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{within}{child.name}"
            yield name, child
            yield from _definitions(child, f"{name}.")
        elif not isinstance(child, ast.expr):
            yield from _definitions(child, within)


def _help_texts(tree: ast.Module) -> Iterator[str]:
    """Find the constant texts that a command's options are given as ``help``."""
    for node in ast.walk(tree):
        is_help = isinstance(node, ast.keyword) and node.arg == "help"
        if is_help and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def _is_order(node: Definition) -> bool:
    """Tell functions from values: classes, modules and properties."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    names = {part for each in node.decorator_list for part in ast.unparse(each).split(".")}
    return not names & _VALUES
