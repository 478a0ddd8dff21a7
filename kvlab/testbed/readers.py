"""What stands in a package as plain text: pages, manuals, books and message catalogs, read by how their names end."""

from __future__ import annotations

import bz2
import gettext
import gzip
import hashlib
import html
import io
import re
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

from lxml import etree

from kvlab.testbed.page_text import page_text, tidy

# dictd's .dz is gzip's format, with an index in it.
UNPACK: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.decompress, ".dz": gzip.decompress, ".bz2": bz2.decompress}

# Parts the texts of a plain file.
RULE = re.compile(r"^%+$", re.MULTILINE)

# Mallard's and DocBook's: what is a paragraph, what keeps its line breaks, what is left out.
PARAGRAPHS = {
    "p",
    "para",
    "simpara",
    "title",
    "subtitle",
    "term",
    "desc",
    "screen",
    "code",
    "programlisting",
    "literallayout",
}
VERBATIM = {"screen", "code", "programlisting", "literallayout"}
LEFT_OUT = {"info", "articleinfo", "bookinfo", "legalnotice", "indexterm", "revhistory", "index", "comment", "media"}

# Menus' and keys' names, with what stands between them.
SEQUENCES = {"guiseq": " > ", "menuchoice": " > ", "keyseq": "+", "keycombo": "+"}

# A catalog's shorter messages are labels, and what does not end like this is no sentence.
SHORTEST_MESSAGE = 60
SENTENCE_END = re.compile(r"[.!?…][\"'»“”)\]]*\s*$")
MARKUP = re.compile(r"</?[A-Za-z][^<>]*>|\{[a-z]+=[^{}]*\}")

# LyX: what its special characters and insets are as text; insets that are no part of a sentence are left out.
SPECIAL = {"menuseparator": " > ", "ldots": "…", "endofsentence": ".", "nobreakdash": "-", "slash": "/"}
NAMES = {"LyX", "LaTeX", "LaTeX2e", "TeX"}
SPECIAL_CHARACTER = re.compile(r"\\SpecialChar (\S+)")
INSETS = {"Quotes": '"', "space": " ", "Newline": "\n"}

# roff: macros of fonts, of headings and of paragraphs; what a block begins and ends with that holds no prose.
FONTS = {"B", "I", "R", "SM", "SB", "BI", "BR", "IB", "IR", "RB", "RI"}
HEADINGS = {"SH", "SS"}
BREAKS = {"PP", "P", "LP", "TP", "TQ", "IP", "HP", "sp", "br", "RS", "RE", "EX", "EE", "nf", "fi", "Vb", "Ve", "Sp"}
FILLED = {"nf": False, "EX": False, "Vb": False, "fi": True, "EE": True, "Ve": True}
SKIPPED = {"TS": ".TE", "EQ": ".EN", "de": "..", "ig": ".."}
GLYPHS = {"lq": "“", "rq": "”", "aq": "'", "dq": '"', "em": "—", "en": "–", "bu": "•", "co": "©", "oq": "‘", "cq": "’"}
ESCAPE = re.compile(
    r"\\(?:f(?:\[[^]]*\]|\(..|.)|s[+-]?\d+|\((?P<two>..)|\[(?P<name>[^]]*)\]|\*(?:\[(?P<long>[^]]*)\]|\((?P<short>..)|.)|"
    r"[mnk](?:\[[^]]*\]|\(..|.)|[hvw]'[^']*'|(?P<one>.))"
)
ARGUMENT = re.compile(r'"((?:[^"]|"")*)"?|(\S+)')


def file_text(name: str, data: bytes, language: str) -> str:
    """Turn a file of a package into plain text, as `kvlab.testbed.page_text.tidy` leaves it.

    Parameters
    ----------
    name
        Its path; ``.gz``, ``.dz`` and ``.bz2`` are unpacked, what stands before them says what it is: ``.html``,
        ``.cache`` (KDE's manuals), ``.page``, ``.docbook`` and ``.xml`` (Mallard, DocBook), ``.mo`` (gettext's
        catalogs), ``.lyx``, ``.1`` to ``.8`` (manual pages, also ``.1grass``); all else is plain text.
    data
        What is in it.
    language
        "de" or "en"; a catalog holds English and a translation.

    Returns
    -------
    str
        Empty where there is no text in it.
    """
    path = PurePosixPath(name)
    if unpack := UNPACK.get(path.suffix):
        path, data = path.with_suffix(""), unpack(data)
    match path.suffix:
        case ".html" | ".htm" | ".cache":
            return page_text(data)
        case ".page" | ".docbook" | ".xml":
            return _xml_text(data)
        case ".mo":
            return _catalog_text(data, language)
        case ".lyx":
            return _book_text(_decoded(data))
        case suffix if re.fullmatch(r"\.[1-8][a-z]*", suffix):
            return _manual_text(_decoded(data))
    return tidy(RULE.sub("", _decoded(data).replace("\r\n", "\n")))


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("iso-8859-1")


def _xml_text(data: bytes) -> str:
    # An empty file is an error even where broken ones are not.
    root = etree.fromstring(data, etree.XMLParser(recover=True, no_network=True)) if data.strip() else None
    if root is None:
        return ""
    for kind, joint in SEQUENCES.items():
        for sequence in root.iter(f"{{*}}{kind}"):
            for child in sequence[:-1]:
                child.tail = joint
    return tidy("\n\n".join(_paragraphs(root)))


def _paragraphs(element: etree._Element) -> Iterator[str]:
    """Yield the paragraphs below an element; one that stands inside another is part of it."""
    for child in element.iterchildren(etree.Element):
        kind = etree.QName(child).localname
        if kind in PARAGRAPHS:
            text = "".join(child.itertext(etree.Element, etree.Entity, with_tail=True)).removesuffix(child.tail or "")
            yield text if kind in VERBATIM else " ".join(text.split())
        elif kind not in LEFT_OUT:
            yield from _paragraphs(child)


def _catalog_text(data: bytes, language: str) -> str:
    """Join a catalog's sentences; in an order of their hashes, as in theirs neighbours would begin alike."""
    messages: dict[str, str] = {}
    for source, translation in gettext.GNUTranslations(io.BytesIO(data))._catalog.items():
        # Of plurals one is enough.
        english = source[0] if isinstance(source, tuple) else source
        # What stands before the byte tells equal messages apart.
        english = english.rpartition("\x04")[2]
        text = html.unescape(MARKUP.sub("", english if language == "en" else translation))
        if len(text) >= SHORTEST_MESSAGE and SENTENCE_END.search(text):
            messages[english] = text.strip()
    return tidy(
        "\n\n".join(messages[key] for key in sorted(messages, key=lambda key: hashlib.sha256(key.encode()).digest()))
    )


def _book_text(text: str) -> str:
    """Turn a LyX file into text; its lines are cut anywhere, and only layouts are paragraphs."""
    found: list[str] = []
    # Of each open inset, whether it is left out.
    hidden: list[bool] = []
    for line in text.partition("\\begin_body")[2].split("\n"):
        if line.startswith("\\begin_inset "):
            _, kind, *rest = line.split(" ", 2)
            if not any(hidden):
                found += rest if kind == "Formula" else [INSETS.get(kind, "")]
            hidden.append(kind != "Flex")
        elif line == "\\end_inset":
            hidden.pop()
        elif any(hidden) or (hidden and line.startswith("status ")):
            continue
        elif line.startswith("\\begin_layout") and not hidden:
            found.append("\n\n")
        elif line == "\\backslash":
            found.append("\\")
        elif not line.startswith("\\") or line.startswith("\\SpecialChar"):
            found.append(SPECIAL_CHARACTER.sub(lambda match: _special(match[1]), line))
    return tidy("".join(found))


def _special(name: str) -> str:
    return name if name in NAMES else SPECIAL.get(name, "")


def _manual_text(text: str) -> str:
    """Turn a manual page in the macros of ``man`` into text; one in those of ``mdoc`` has none that this reads."""
    lines: list[str] = []
    filled, skip_to, depth = True, None, 0
    for line in text.split("\n"):
        if skip_to is not None:
            skip_to = None if line.startswith(skip_to) else skip_to
        elif not line.startswith((".", "'")):
            if depth:
                depth += line.count("\\{") - line.count("\\}")
            elif not line.strip():
                lines.append("\n")
            else:
                lines.append(_unescaped(line) + (" " if filled else "\n"))
        else:
            macro, _, rest = line[1:].lstrip().partition(" ")
            if macro.startswith("Dd"):
                return ""
            if depth or macro in {"if", "ie", "el"}:
                depth += line.count("\\{") - line.count("\\}")
            elif macro in SKIPPED:
                skip_to = SKIPPED[macro]
            elif macro in HEADINGS:
                lines.append(f"\n\n{' '.join(_arguments(rest))}\n\n")
                filled = True
            elif macro in FONTS:
                # Two fonts alternate without a space.
                joint = "" if len(macro) == 2 and macro not in {"SM", "SB"} else " "
                lines.append(joint.join(_arguments(rest)) + (" " if filled else "\n"))
            elif macro in BREAKS:
                filled = FILLED.get(macro, filled)
                lines.append("\n" if macro in {"br", "nf", "fi"} else "\n\n")
                if macro == "IP" and (arguments := _arguments(rest)):
                    lines.append(f"{arguments[0]} ")
    return tidy(re.sub(r" *\n", "\n", "".join(lines)))


def _arguments(text: str) -> list[str]:
    found = ARGUMENT.findall(text.partition('\\"')[0])
    return [_unescaped(quoted.replace('""', '"') or plain) for quoted, plain in found]


def _unescaped(text: str) -> str:
    def glyph(match: re.Match[str]) -> str:
        if one := match["one"]:
            return {"-": "-", "e": "\\", "\\": "\\", "~": " ", " ": " ", "0": " ", "'": "´", "`": "`", ".": "."}.get(
                one, ""
            )
        name = match["two"] or match["name"] or match["long"] or match["short"] or ""
        if re.fullmatch(r"u[0-9A-F]{4,6}", name):
            return chr(int(name[1:], 16))
        return GLYPHS.get(name.lower(), "")

    return ESCAPE.sub(glyph, text.partition('\\"')[0])
