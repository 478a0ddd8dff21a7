"""A page of HTML documentation as plain text."""

from __future__ import annotations

import re
import unicodedata

from inscriptis import Inscriptis
from inscriptis.css_profiles import STRICT_CSS_PROFILE
from inscriptis.model.config import ParserConfig
from lxml import html

# Where the tools that made these pages put the text, the most specific first.
MAIN = (
    *("//main", "//*[@role='main']", "//article"),
    *("//*[@id='page-content']", "//*[@id='DisplayArea']", "//*[@id='content']", "//*[@id='main']", "//body"),
)

# What is not text, by element, class and id. MAC is what LibreOffice says to macOS's users, beside the same for others.
NOT_TEXT = {"script", "style", "nav", "footer", "aside", "noscript", "img", "svg", "form", "button"}
NAVIGATION = (
    "navheader navfooter docnav toc related sphinxsidebar headerlink nav_table nav menu toplang bottomlang indexterm "
    "nosearch quickview MAC"
)
NAVIGATION_CLASSES = frozenset(NAVIGATION.split())
NAVIGATION_IDS = {"footer", "header", "toc", "quickview", "banner"}

INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060\ufeff\x00-\x08\x0b-\x1f\x7f]")
# Columns of tables are padded to the width of the widest cell, and centred ones indented by half a line.
PADDING = re.compile(r"(?<=\S) {3,}")
CENTRED = re.compile(r"^ {24,}")


def page_text(page: bytes) -> str:
    """Turn one HTML page into the text of its main part, NFC, with tidy white space."""
    if not page.strip():
        return ""
    try:
        page.decode("utf-8")
        encoding = "utf-8"
    except UnicodeDecodeError:
        encoding = "iso-8859-1"
    root = html.document_fromstring(page, parser=html.HTMLParser(encoding=encoding))
    main = next((found[0] for xpath in MAIN if (found := root.xpath(xpath))), None)
    if main is None:
        return ""
    # The text behind it.
    main.tail = None
    for element in main.xpath(".//*|.//comment()|.//processing-instruction()"):
        if element is not main and _is_navigation(element):
            # Unlike remove(), drop_tree() keeps the text that follows the element.
            element.drop_tree()
        elif element.tag == "div" and element.get("class") == "para":
            # Publican's paragraphs.
            element.tag = "p"
    for listing in main.xpath(".//pre"):
        # inscriptis joins the lines of elements inside, such as <code>.
        listing.text, listing[:] = INVISIBLE.sub("", listing.text_content()), []
    text = Inscriptis(main, ParserConfig(css=STRICT_CSS_PROFILE)).get_text()
    return tidy(text)


def _is_navigation(element: html.HtmlElement) -> bool:
    return (
        not isinstance(element.tag, str)
        or element.tag in NOT_TEXT
        or element.get("role") in {"navigation", "search"}
        or element.get("id") in NAVIGATION_IDS
        or not NAVIGATION_CLASSES.isdisjoint(element.get("class", "").split())
    )


def tidy(text: str) -> str:
    """Return text in NFC with at most one blank line in a row, no trailing spaces and one newline at the end."""
    # Invisible characters first: they can stand between a letter and its accent.
    text = unicodedata.normalize("NFC", INVISIBLE.sub("", text)).replace("\u00a0", " ").expandtabs(4)
    lines = [PADDING.sub("  ", CENTRED.sub("", line.rstrip())) for line in text.split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n") + "\n"
