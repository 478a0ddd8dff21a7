"""Files of a package as text, one small file of each kind."""

import bz2
import gzip
import struct

import pytest

pytest.importorskip("inscriptis", reason="the extra testbed is not installed")

from kvlab.testbed.readers import SHORTEST_MESSAGE, file_text

pytestmark = pytest.mark.unit


def read(name, text, language="de"):
    return file_text(name, text if isinstance(text, bytes) else text.encode(), language)


def catalog(messages):
    """Write gettext's binary format: header, two tables of lengths and offsets, then the texts."""
    pairs = sorted((key.encode(), value.encode()) for key, value in messages.items())
    begin = 28 + 16 * len(pairs)
    tables, texts = [[], []], b""
    for side in (0, 1):
        for pair in pairs:
            tables[side].append(struct.pack("<II", len(pair[side]), begin + len(texts)))
            texts += pair[side] + b"\0"
    header = struct.pack("<7I", 0x950412DE, 0, len(pairs), 28, 28 + 8 * len(pairs), 0, begin)
    return header + b"".join(tables[0]) + b"".join(tables[1]) + texts


def test_packed_files_are_read_as_what_they_are():
    page = b"<body><p>Die Schicht</p></body>"
    assert read("a/index.html", page) == "Die Schicht\n"
    assert read("a/index.cache.bz2", bz2.compress(page)) == "Die Schicht\n"
    assert read("a/b.html.gz", gzip.compress(page)) == "Die Schicht\n"
    assert read("words.dict.dz", gzip.compress(b"one  \r\ntwo")) == "one\ntwo\n"


@pytest.mark.parametrize("encoding", ["utf-8", "iso-8859-1"])
def test_text_of_either_encoding_is_read(encoding):
    assert read("README", "Schlüssel\n%%\n\n\nmit Größe".encode(encoding)) == "Schlüssel\n\nmit Größe\n"


def test_mallard_and_docbook_give_paragraphs():
    page = """<page xmlns="http://projectmallard.org/1.0/"><info><desc>left out</desc></info><title>Filter</title>
    <p>Wählen Sie
       <guiseq><gui>Datei</gui><gui>Neu</gui></guiseq> oder <keyseq><key>Strg</key><key>N</key></keyseq>.</p>
    <list><item><p>Ein Punkt</p></item></list></page>"""
    assert read("a.page", page) == "Filter\n\nWählen Sie Datei > Neu oder Strg+N.\n\nEin Punkt\n"
    book = """<!DOCTYPE article [<!ENTITY app "Rechner">]><article><articleinfo><title>left out</title></articleinfo>
    <sect1><title>Start</title><para>Der &app; zeigt <!-- left out --><emphasis>alles</emphasis>.</para>
    <screen>ls -l
  rm x</screen></sect1></article>"""
    assert read("a.docbook", book) == "Start\n\nDer Rechner zeigt alles.\n\nls -l\n  rm x\n"
    assert read("a.docbook", "") == read("a.docbook", "no XML") == ""


def test_catalogs_give_sentences_of_either_language():
    long, lang = (
        "The keys are kept in <b>the cache</b> until another session needs &quot;room&quot;.",
        "Lange bleiben " * 8 + "sie.",
    )
    messages = {
        "": "Content-Type: text/plain; charset=UTF-8\n",
        long: lang,
        f"menu\x04{long} Again.": "{color=red}Noch einmal: {/color}" + "sie bleiben " * 6 + "hier!",
        "Open": "Öffnen.",
        "x" * SHORTEST_MESSAGE: "y" * SHORTEST_MESSAGE,
    }
    packed = catalog(messages)
    german, english = (set(read("a.mo", packed, language).strip().split("\n\n")) for language in ("de", "en"))
    assert german == {lang, "Noch einmal: {/color}" + "sie bleiben " * 6 + "hier!"}
    plain = long.replace("<b>", "").replace("</b>", "").replace("&quot;", '"')
    assert english == {plain, f"{plain} Again."}
    # Of the same messages, whatever the order of the translations.
    assert read("a.mo", packed, "en").split("\n\n")[0].strip() in english


def test_books_of_lyx_give_sentences_without_notes():
    text = r"""\begin_layout Title
not the body
\begin_body
\begin_layout Section
Einleitung
\end_layout
\begin_layout Standard
Mit \SpecialChar LaTeX
-Befehlen geht es schnel
ler
\begin_inset Foot
status collapsed
\begin_layout Plain Layout
left out
\end_layout
\end_inset
:
\begin_inset space
\end_inset
\begin_inset Quotes gld
\end_inset
Datei\SpecialChar menuseparator
Neu
\begin_inset Quotes grd
\end_inset
 und
\begin_inset space
\end_inset
\begin_inset Formula $a+b$
\end_inset
 in
\begin_inset space
\end_inset
\series bold
\begin_inset Flex Code
status open
\begin_layout Plain Layout
\backslash
frac
\end_layout
\end_inset
.
\end_layout
\end_body
"""
    want = 'Einleitung\n\nMit LaTeX-Befehlen geht es schneller: "Datei > Neu" und $a+b$ in \\frac.\n'
    assert read("a.lyx", text) == want


def test_manual_pages_give_paragraphs():
    text = r""".\" left out
.de Sp
.PP
left out
..
.if n \{\
.  left out
left out
.\}
.TH LESS 1 "left out"
.SH "BEZEICHNUNG UND ZWECK"
less \- Gegenteil von \(lqmore\(rq
.PP
Eine \fBfette\fP
Zeile von \fI\%less\/\fP mit \[u00E4]\(aq und
.BR more (1),
.I beiden
Teilen.
.TP
.B \-\-hilfe
zeigt sie.
.Vb 2
a  b
c
.Ve
.TS
left out
.TE
Ende."""
    want = """BEZEICHNUNG UND ZWECK

less - Gegenteil von “more”

Eine fette Zeile von less mit ä' und more(1), beiden Teilen.

--hilfe zeigt sie.

a  b
c

Ende.
"""
    for name in ("less.1", "r.what.1grass", "proc.5"):
        assert read(name, text) == want
    assert read("ssh.1.gz", gzip.compress(b".Dd today\n.Dt SSH 1\n.Sh NAME\nssh\n")) == ""
