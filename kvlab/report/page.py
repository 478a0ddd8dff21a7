"""The page: sections of what the files show, in one HTML file that asks for nothing else."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markdown_it import MarkdownIt
from markupsafe import Markup

from kvlab import provenance
from kvlab.paths import written_whole
from kvlab.report.reading import READERS, Figure, Item, Table, Text, read_file

OPEN = 24
"""Rows up to which a table is unfolded."""
ENDINGS = (".html", ".htm")
SECTION_LEVEL = 2
"""Of the headings of sections, whose own headings are below."""


@dataclass(frozen=True)
class Section:
    """Files of one name: a figure beside its numbers."""

    title: str
    files: list[Path]
    items: list[Item]


def write_report(sources: Iterable[Path], out: Path) -> list[Section]:
    """Write one self-contained HTML page of measurements.

    Parameters
    ----------
    sources
        Files, and folders whose files are shown: figures (SVG, or PNG where there is no SVG of the same name), tables
        (CSV, and the JSON documents of ``kvlab … --json``), Markdown. Files of the same name share a section.
    out
        The page, a name that ends in ``.html``. It appears once it is complete.

    Returns
    -------
    list of Section
        What the page shows, in its order.

    Raises
    ------
    ValueError
        There is nothing to show, a file is not what its ending says, or ``out`` cannot be written.
    """
    accepted = "accepted: a file name that ends in .html, in a folder that can be written"
    # Tables and figures never end so: no source can be overwritten.
    writable = out.parent.is_dir() and os.access(out.parent, os.W_OK) and not out.is_dir()
    if out.suffix.lower() not in ENDINGS or not writable:
        raise ValueError(f"out is {str(out)!r}; {accepted}")
    sources = [Path(source) for source in sources]
    sections = _sections(sources)
    page = _render(sections, ", ".join(map(str, sources)))
    try:
        with written_whole(out) as scratch:
            # Halves of surrogate pairs, from JSON or a file's name, are in no text: a question mark stands for them.
            scratch.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"out is {str(out)!r}, which cannot be written ({error.strerror}); {accepted}") from None
    return sections


def _sections(sources: list[Path]) -> list[Section]:
    files = list(dict.fromkeys(file for source in sources for file in _files(source)))
    by_name: dict[Path, list[Path]] = {}
    for file in files:
        by_name.setdefault(file.with_suffix(""), []).append(file)
    often = Counter(name.name for name in by_name)
    sections = []
    for name, group in by_name.items():
        group.sort(key=lambda file: list(READERS).index(file.suffix.lower()))
        endings = {file.suffix.lower() for file in group}
        shown = [file for file in group if file.suffix.lower() != ".png" or ".svg" not in endings]
        title = name.name.replace("_", " ")
        title = f"{name.parent.resolve().name} / {title}" if often[name.name] > 1 else title
        sections.append(Section(title, shown, [item for file in shown for item in read_file(file)]))
    # What is written about the others comes first.
    return sorted(sections, key=lambda section: not isinstance(section.items[0], Text))


def _files(source: Path) -> list[Path]:
    """Return the files to show: all that can be of a folder, and a file whatever it is."""
    endings = ", ".join(READERS)
    if source.is_dir():
        found = sorted(
            file
            for file in source.iterdir()
            if file.is_file() and file.suffix.lower() in READERS and not file.name.startswith(".")
        )
        if not found:
            raise ValueError(f"folder is {str(source)!r}, with nothing to show; accepted: one with {endings} files")
        return found
    if not source.is_file():
        raise ValueError(f"source is {str(source)!r}; accepted: folders and files that exist ({endings})")
    if source.suffix.lower() not in READERS:
        raise ValueError(f"file is {str(source)!r}; accepted: names that end in {endings}")
    return [source]


def _render(sections: list[Section], sources: str) -> str:
    # Whatever a template is given is escaped.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["markdown"] = _markdown
    environment.tests |= {
        kind.__name__.lower(): lambda item, kind=kind: isinstance(item, kind) for kind in (Figure, Table, Text)
    }
    template = environment.get_template("page.html")
    return template.render(
        sections=sections, sources=sources, versions=provenance.versions(), today=provenance.today(), open=OPEN
    )


def _markdown(source: str) -> Markup:
    """Render Markdown: HTML in it is text, and its images, which would be asked for elsewhere, are not shown."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    tokens = parser.parse(source)
    for token in tokens:
        if token.type.startswith("heading_"):
            # Below the section's own, as far as there are levels.
            token.tag = f"h{min(int(token.tag[1:]) + SECTION_LEVEL, 6)}"
    return Markup(parser.renderer.render(tokens, parser.options, {}))
