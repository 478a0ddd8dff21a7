import hashlib
import json
import os
import re
import shutil
import subprocess
import unicodedata

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("inscriptis", reason="the extra testbed is not installed")

from kvlab.testbed import corpus, page_text

pytestmark = pytest.mark.unit

needs_dpkg = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not on this machine")

ENGLISH = "The cache of the model is read by every layer, and the keys that are kept in it have to be stored. "
GERMAN = "Der Zwischenspeicher des Modells wird von jeder Schicht gelesen, und die Schlüssel sind zu lagern. "
FOLDER = "usr/share/doc/book"


def page(main, before="", after=""):
    return f"<html><head><meta charset='utf-8'></head><body>{before}<main>{main}</main>{after}</body></html>"


def english(number, *, sentences=8):
    return "".join(f"<p>{number}. {ENGLISH}</p>" for _ in range(sentences))


class Archive:
    """Made-up packages in one folder, and the table that names them."""

    def __init__(self, root):
        self.root, self.folder, self.table, self.rows = root, root / "debs", root / "corpus.csv", []
        self.folder.mkdir()

    def add(self, pages, *, package="book", language="en", patterns=f"{FOLDER}/*.html"):
        tree = self.root / package
        control = tree / "DEBIAN" / "control"
        control.parent.mkdir(parents=True)
        fields = {
            "Package": package,
            "Version": "1:2.0",
            "Architecture": "all",
            "Maintainer": "kvlab",
            "Description": "x",
        }
        control.write_text("".join(f"{field}: {value}\n" for field, value in fields.items()))
        for name, content in pages.items():
            path = tree / FOLDER / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        deb = self.folder / f"{package}_1%3a2.0_all.deb"
        subprocess.run(["dpkg-deb", "--build", "-Znone", tree, deb], check=True, capture_output=True)
        self.name(package, hashlib.sha256(deb.read_bytes()).hexdigest(), language, patterns)
        return deb

    def name(self, package, sha256, language="en", patterns=f"{FOLDER}/*.html"):
        row = {"package": package, "version": "1:2.0", "sha256": sha256, "language": language}
        self.rows.append(row | {"licence": "CC0-1.0", "title": package, "pages": patterns})
        pd.DataFrame(self.rows).to_csv(self.table, index=False)

    def documents(self):
        return list(corpus.documents(self.folder, self.table))


@pytest.fixture
def archive(tmp_path):
    return Archive(tmp_path)


def test_the_table_names_every_package_and_language_once_with_one_hash_per_package():
    sources = corpus.sources()
    rows = [(source.package, source.language) for source in sources]
    assert rows == sorted(set(rows))
    assert {source.language for source in sources} == {"de", "en"}
    assert len({(source.package, source.version, source.sha256) for source in sources}) == len({row[0] for row in rows})
    for source in sources:
        assert len(bytes.fromhex(source.sha256)) == 32
        assert source.licence and source.title and not source.pages.startswith(("!", "/"))


def test_patterns_take_pages_and_leave_pages_out():
    source = corpus.Source("p", "1", "", "en", "", "", "a/*.html b/*.html !*/index.html !a/*.??.html")
    taken = [path for path in ("a/x.html", "a/b/x.html", "a/index.html", "a/x.de.html", "b/x.de.html", "c/x.html")
             if source.takes(path)]  # fmt: skip
    assert taken == ["a/x.html", "a/b/x.html", "b/x.de.html"]


@needs_dpkg
def test_documents_are_the_pages_main_text_in_order(archive):
    # The second one comes after a nested one.
    listing = "<pre><pre><code>for x in y:\n    <b>print</b>(x)</code></pre></pre><pre><code>a\nb</code></pre>"
    text = f"<h1>Cafe\u0301</h1><nav>Up</nav><p>soft\u00adware&nbsp;here<script>x()</script></p>{listing}{english(1)}"
    archive.add({"b.html": page(text, before="Home", after="Imprint"), "a.html": page(english(2)), "c.txt": "no page"})
    first, second = archive.documents()
    assert [first.name, second.name] == [f"{FOLDER}/a.html", f"{FOLDER}/b.html"]
    assert (second.package, second.language) == ("book", "en")
    assert second.text.startswith("Café\n\nsoftware here\n\nfor x in y:\n    print(x)\na\nb\n\n1. The cache")
    for gone in ("Home", "Imprint", "Up", "x()"):
        assert gone not in second.text


@needs_dpkg
def test_packages_are_read_in_the_tables_order_and_each_text_once(archive):
    archive.add({"a.html": page(english(1)), "copy.html": page(english(1))}, package="second")
    archive.add({"z.html": page(english(1)), "y.html": page(english(2))}, package="first")
    assert [(document.package, document.name.rsplit("/")[-1]) for document in archive.documents()] == [
        ("first", "y.html"),
        ("first", "z.html"),
    ]


@needs_dpkg
def test_lines_on_many_pages_are_navigation_unless_they_are_code(archive):
    pages = {
        f"{number:02}.html": page(f"<p>Example Manual 2.0</p><pre>}}\nx = 1</pre>{english(number)}")
        for number in range(corpus.REPEATED_PAGES + 1)
    }
    archive.add(pages)
    documents = archive.documents()
    assert len(documents) == len(pages)
    assert all("Example Manual" not in document.text for document in documents)
    assert all(document.text.startswith("}\nx = 1\n") for document in documents)


@needs_dpkg
def test_lines_on_few_pages_stay(archive):
    pages = {f"{n:02}.html": page(f"<p>Example Manual 2.0</p>{english(n)}") for n in range(corpus.REPEATED_PAGES)}
    archive.add(pages)
    assert all("Example Manual" in document.text for document in archive.documents())


@needs_dpkg
def test_short_pages_listings_and_other_languages_are_dropped_and_untranslated_paragraphs_cut(archive):
    german = f"<p>{GERMAN}</p>" * 8
    archive.add(
        {
            "english.html": page(english(1)),
            "german.html": page(german),
            "listing.html": page("<p>acos asin atan cosh sinh tanh</p>" * 40),
            "mixed.html": page(f"<p>{ENGLISH}</p>{german.replace('Modells', 'Systems')}"),
            "short.html": page(f"<p>{GERMAN}</p>"),
            "empty.html": "",
            "frameset.html": "<html><frameset></frameset></html>",
        },
        language="de",
    )
    documents = {document.name.rsplit("/")[-1]: document for document in archive.documents()}
    assert list(documents) == ["german.html", "mixed.html"]
    assert "Systems" in documents["mixed.html"].text
    assert "cache" not in documents["mixed.html"].text


@needs_dpkg
def test_pages_that_are_not_utf8_are_latin_1(archive):
    archive.add(
        {"a.html": page(f"<p>{GERMAN}</p>" * 8).replace("utf-8", "iso-8859-1").encode("latin-1")}, language="de"
    )
    assert "Schlüssel" in archive.documents()[0].text


@needs_dpkg
def test_a_book_in_one_page_becomes_several_documents(archive):
    paragraphs = "".join(f"<p>{number}. {ENGLISH}</p>" for number in range(2 * corpus.LONGEST_PAGE // len(ENGLISH)))
    archive.add({"a.html": page(paragraphs)})
    documents = archive.documents()
    assert [document.name for document in documents] == [f"{FOLDER}/a.html#{n}" for n in (1, 2, 3)]
    lengths = [len(document.text) for document in documents]
    # Cut after the paragraph that crosses the mark.
    assert max(lengths) - min(lengths) < 3 * len(ENGLISH)
    numbers = [int(number) for document in documents for number in re.findall(r"^(\d+)\. The", document.text, re.M)]
    assert numbers == list(range(2 * corpus.LONGEST_PAGE // len(ENGLISH)))


@needs_dpkg
def test_the_written_text_is_the_same_every_time_and_holds_the_documents(archive, tmp_path):
    archive.add({f"{number}.html": page(english(number)) for number in range(5)})
    once, again = (
        corpus.write_text(archive.folder, tmp_path / "out" / name, archive.table, progress=False).read_bytes()
        for name in ("once.jsonl", "again.jsonl")
    )
    assert once == again
    assert [corpus.Document(**json.loads(line)) for line in once.decode().splitlines()] == archive.documents()


@needs_dpkg
def test_what_fails_half_way_leaves_the_old_file_and_nothing_else(archive, tmp_path):
    archive.add({"a.html": page(english(1))})
    archive.name("missing", "00" * 32)
    out = tmp_path / "out" / "text.jsonl"
    out.parent.mkdir()
    out.write_text("old\n")
    with pytest.raises(FileNotFoundError, match=r"missing_1%3a2\.0_all\.deb is missing; fetch"):
        corpus.write_text(archive.folder, out, archive.table, progress=False)
    assert [path.name for path in out.parent.iterdir()] == ["text.jsonl"]
    assert out.read_text() == "old\n"


@needs_dpkg
def test_a_file_for_a_folder_and_a_folder_for_a_file_are_refused(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match=r"^packages is .*, which cannot be written .*; accepted: a folder$"):
        corpus.fetch(file)
    with pytest.raises(ValueError, match=r"^out is .*, a folder; accepted: a file$"):
        corpus.write_text(tmp_path, tmp_path)


def test_a_package_with_another_hash_is_refused(archive):
    deb = archive.add({"a.html": page(english(1))})
    deb.write_bytes(deb.read_bytes() + b"x")
    with pytest.raises(ValueError, match=r"has SHA-256 .*; accepted: "):
        archive.documents()
    with pytest.raises(ValueError, match=r"has SHA-256 .*; accepted: "):
        corpus.fetch(archive.folder, archive.table, progress=False)


@needs_dpkg
def test_patterns_without_a_page_and_files_that_are_no_package_are_refused(archive):
    archive.add({"a.html": page(english(1))}, patterns="nowhere/*.html")
    with pytest.raises(ValueError, match="holds no page like 'nowhere"):
        archive.documents()
    broken = archive.folder / "another_1%3a2.0_all.deb"
    broken.write_bytes(b"no package")
    archive.name("another", hashlib.sha256(b"no package").hexdigest())
    with pytest.raises(ValueError, match=r"another.*cannot be unpacked \(.+\); accepted: a Debian package"):
        archive.documents()


@needs_dpkg
def test_packages_that_are_there_need_no_apt(archive, monkeypatch):
    deb = archive.add({"a.html": page(english(1))})
    monkeypatch.setattr(corpus.shutil, "which", lambda name: None)
    assert corpus.fetch(archive.folder, archive.table, progress=False) == [deb]


@pytest.mark.parametrize("program", ["apt-get", "dpkg-deb"])
def test_a_missing_program_is_named(archive, monkeypatch, program):
    archive.name("book", hashlib.sha256(b"x").hexdigest())
    monkeypatch.setattr(corpus.shutil, "which", lambda name: None)
    with pytest.raises(FileNotFoundError, match=f"{program} is not on this machine"):
        if program == "apt-get":
            corpus.fetch(archive.folder, archive.table, progress=False)
        else:
            (archive.folder / "book_1%3a2.0_all.deb").write_bytes(b"x")
            archive.documents()


@pytest.fixture
def apt(tmp_path, monkeypatch):
    """Stand in for apt-get with a script of the given lines."""

    def install(script):
        program = tmp_path / "bin" / "apt-get"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)

    return install


def test_fetch_asks_apt_for_the_pinned_version(archive, apt):
    archive.name("book", hashlib.sha256(b"--quiet download book=1:2.0").hexdigest())
    apt('printf "%s" "$*" > book_1%3a2.0_all.deb')
    (path,) = corpus.fetch(archive.folder, archive.table, progress=False)
    assert path.read_bytes() == b"--quiet download book=1:2.0"
    assert list(archive.folder.iterdir()) == [path]


def test_a_version_that_is_not_offered_any_more_is_said_with_what_to_do(archive, apt):
    archive.name("book", "00" * 32)
    apt("echo \"E: Version '1:2.0' for 'book' was not found\" >&2; exit 100")
    with pytest.raises(ValueError, match=r"book 1:2\.0 cannot be had .*not found.*snapshot\.debian\.org/binary/book/"):
        corpus.fetch(archive.folder, archive.table, progress=False)
    assert list(archive.folder.iterdir()) == []


def test_held_out_is_about_the_share_and_does_not_change():
    names = [f"book/page{number}.html" for number in range(10_000)]
    held_out = [name for name in names if corpus._is_held_out(name)]
    # Five standard deviations of a binomial with 10,000 draws at 2%: 70.
    assert abs(len(held_out) - corpus.HELD_OUT_SHARE * len(names)) < 70
    digest = hashlib.sha256(held_out[0].encode()).hexdigest()
    assert int(digest[:16], 16) / 2**64 < corpus.HELD_OUT_SHARE


def test_wide_gaps_of_tables_are_closed():
    assert page_text.tidy(f"{' ' * 80}Warning{' ' * 9}now\n    x = 1") == "Warning  now\n    x = 1\n"


@given(st.text(alphabet=st.sampled_from("ab e\u0301\u00a0\u200b\t\n  =")))
def test_tidying_is_idempotent_and_leaves_tidy_text(text):
    tidy = page_text.tidy(text)
    assert page_text.tidy(tidy) == tidy
    assert tidy.endswith("\n") and "\n\n\n" not in tidy and " \n" not in tidy and "\u200b" not in tidy
    assert unicodedata.is_normalized("NFC", tidy)
