"""The testbed's text: English and German documentation from pinned Debian 12 packages.

``data/testbed/corpus.csv`` names the packages with version, SHA-256, licence and which of their files
are read. `fetch` brings them, `documents` makes plain text of them, `write_text` keeps it. The text itself
is no part of the repository.

What a page is turned into depends only on the packages' bytes and on the versions of inscriptis and lxml.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from kvlab.paths import check_out, written_whole
from kvlab.tables import data_folder
from kvlab.testbed.page_text import tidy
from kvlab.testbed.readers import file_text

HELD_OUT_SHARE = 0.02

# Characters. A page shorter than the first is a table of contents or a stub. One longer than the second, mostly a
# book in one file, becomes several documents: no single draw holds a book out, and each is still several contexts long.
SHORTEST_PAGE = 400
LONGEST_PAGE = 100_000

# A line is navigation where it is on more than this share of a package's pages, and on more than this many.
REPEATED_SHARE = 0.05
REPEATED_PAGES = 12

# The most frequent words that the other language does not have ("in", "die", "an", "was" are in both).
GERMAN = "der und das ist nicht den dem mit für auf ein eine einen einer wird werden von zu sich auch oder als im bei"
ENGLISH = "the of and to is for that with be are this it or not as by you can from which have if at"
FUNCTION_WORDS = {"de": frozenset(GERMAN.split()), "en": frozenset(ENGLISH.split())}

# Shares of a page's words that have to be function words, and of its function words that have to be its language's.
PROSE_SHARE = 0.10
OWN_SHARE = 0.85

# So many words of the other language in a line are quotations or commands.
FEW = 2

WORD = re.compile(r"[^\W\d_]+")
# Lines of code may repeat: what has one of these, or no word of four letters.
CODE = re.compile(r"[<>{}=;|\\]|^(?!.*[^\W\d_]{4})")


@dataclass(frozen=True)
class Source:
    """What is read from one package in one language.

    Attributes
    ----------
    package, version, sha256
        The Debian package, its version, and the SHA-256 of its .deb, hexadecimal.
    language
        "de" or "en".
    licence, title
        As the package's copyright file has it, and what the text is.
    pages
        Patterns of the pages' paths from the package's root, separated by spaces; ``*`` matches slashes too, and a
        pattern that begins with ``!`` takes its pages out again.
    """

    package: str
    version: str
    sha256: str
    language: str
    licence: str
    title: str
    pages: str

    @property
    def filename(self) -> str:
        """The .deb's name as apt writes it."""
        return f"{self.package}_{self.version.replace(':', '%3a')}_all.deb"

    def takes(self, path: str) -> bool:
        """Whether the page at ``path`` (from the package's root, no leading slash) belongs to this source."""
        patterns = self.pages.split()
        wanted = [pattern for pattern in patterns if not pattern.startswith("!")]
        unwanted = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
        return _matches(path, wanted) and not _matches(path, unwanted)


@dataclass(frozen=True)
class Document:
    """One page of documentation as plain text.

    Attributes
    ----------
    package, language
        Where it is from, "de" or "en".
    name
        Its path in the package; with ``#1``, ``#2``, … where a long page was cut.
    text
        NFC, at most one blank line in a row, no trailing spaces, one newline at the end.
    held_out
        Whether it is kept from training.
    """

    package: str
    language: str
    name: str
    text: str
    held_out: bool


def sources(table: Path | None = None) -> list[Source]:
    """Read the table of packages, sorted by package and language (default: ``data/testbed/corpus.csv``)."""
    rows = pd.read_csv(table or data_folder() / "testbed" / "corpus.csv", comment="#", dtype=str)
    return sorted(
        (Source(**row) for row in rows.to_dict("records")), key=lambda source: (source.package, source.language)
    )


def fetch(folder: str | Path, table: Path | None = None, *, progress: bool = True) -> list[Path]:
    """Download the packages that are not in ``folder`` yet, with apt, and check every one's SHA-256.

    Parameters
    ----------
    folder
        Where the .deb files go, or are; made where it is missing.
    table
        Another table of packages, with the same columns.
    progress
        Whether to show a progress bar.

    Returns
    -------
    list of Path
        The .deb files, sorted by package.

    Raises
    ------
    FileNotFoundError
        apt-get is missing (packages that are already in ``folder`` need none).
    ValueError
        A file has another SHA-256, or the pinned version is not on offer any more; the message says what to do.
        Or ``folder`` cannot be written.
    """
    folder = Path(folder)
    check_out(folder, "packages")
    folder.mkdir(parents=True, exist_ok=True)
    packages = {source.package: source for source in sources(table)}.values()
    for source in tqdm(packages, desc="packages", unit="package", disable=not progress):
        path = folder / source.filename
        if not path.exists():
            _download(source, path)
        _check_sha256(source, path)
    return [folder / source.filename for source in packages]


def documents(folder: str | Path, table: Path | None = None, *, progress: bool = False) -> Iterator[Document]:
    """Turn the packages' pages into clean plain text.

    Kept are pages of prose in the language they are filed under, each text once. The split is by page (a long page
    counts as several): a document is held out where the SHA-256 of ``package/name`` falls into the lowest 2%, so it
    stays on its side whatever else is added, and text held out may have neighbours from the same book in training.

    Parameters
    ----------
    folder
        Where `fetch` put the packages.
    table, progress
        As for `fetch`.

    Yields
    ------
    Document
        Sorted by package, language and name.

    Raises
    ------
    FileNotFoundError
        A package or dpkg-deb is missing.
    ValueError
        A package has another SHA-256, cannot be read, or holds no page of the table's.
    """
    seen: set[str] = set()
    for source in tqdm(sources(table), desc="text", unit="package", disable=not progress):
        path = Path(folder) / source.filename
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; fetch the packages first")
        _check_sha256(source, path)
        pages = {name: file_text(name, page, source.language) for name, page in _pages(source, path)}
        if not pages:
            raise ValueError(f"{path} holds no page like {source.pages!r}; accepted: pages the package has")
        for name, text in sorted(_without_repeated_lines(pages).items()):
            for part, text_of_part in _parts(name, _translated(text, source.language)):
                if (
                    len(text_of_part) >= SHORTEST_PAGE
                    and _is_prose(text_of_part, source.language)
                    and text_of_part not in seen
                ):
                    seen.add(text_of_part)
                    held_out = _is_held_out(f"{source.package}/{part}")
                    yield Document(source.package, source.language, part, text_of_part, held_out)


def write_text(folder: str | Path, out: str | Path, table: Path | None = None, *, progress: bool = True) -> Path:
    """Write `documents` as JSON lines, one object per document with its fields; a file there is replaced at the end.

    Raises
    ------
    FileNotFoundError, ValueError
        As `documents`, or ``out`` is a folder.
    """
    out = Path(out)
    if out.is_dir():
        raise ValueError(f"out is {str(out)!r}, a folder; accepted: a file")
    out.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(out) as scratch, scratch.open("w", encoding="utf-8") as file:
        for document in documents(folder, table, progress=progress):
            file.write(json.dumps(asdict(document), ensure_ascii=False) + "\n")
    return out


def _download(source: Source, path: Path) -> None:
    _check_program("apt-get", f"put {path.name} into {path.parent}")
    # Beside the target, so that the finished file can be renamed into place.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".download-") as unfinished:
        command = ["apt-get", "--quiet", "download", f"{source.package}={source.version}"]
        run = subprocess.run(command, cwd=unfinished, capture_output=True, text=True, check=False)
        found = list(Path(unfinished).glob("*.deb"))
        if run.returncode or not found:
            reason = (run.stderr.strip().splitlines() or ["no file"])[-1]
            raise ValueError(
                f"package {source.package} {source.version} cannot be had from this machine's apt sources ({reason}); "
                f"run apt-get update on Debian 12, or take {path.name} from "
                f"https://snapshot.debian.org/binary/{source.package}/ and put it into {path.parent}"
            )
        found[0].replace(path)


def _check_sha256(source: Source, path: Path) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != source.sha256:
        raise ValueError(f"{path} has SHA-256 {found}; accepted: {source.sha256} (delete the file and fetch it again)")


def _check_program(name: str, instead: str) -> None:
    if shutil.which(name) is None:
        raise FileNotFoundError(f"{name} is not on this machine; it comes with Debian and Ubuntu; otherwise {instead}")


def _pages(source: Source, path: Path) -> Iterator[tuple[str, bytes]]:
    _check_program("dpkg-deb", "unpack elsewhere: dpkg-deb is part of the package dpkg")
    command = ["dpkg-deb", "--fsys-tarfile", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as unpacking:
        try:
            # A stream: nothing but the pages is ever unpacked.
            with tarfile.open(fileobj=unpacking.stdout, mode="r|") as archive:
                for member in archive:
                    name = member.name.removeprefix("./")
                    if member.isfile() and source.takes(name):
                        yield name, archive.extractfile(member).read()
        except tarfile.TarError as error:
            reason = unpacking.stderr.read().decode().strip() or error
            raise ValueError(f"{path} cannot be unpacked ({reason}); accepted: a Debian package") from None


def _matches(path: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _without_repeated_lines(pages: dict[str, str]) -> dict[str, str]:
    """Take out the lines that are on many pages: navigation the page's structure did not tell."""
    on_pages = Counter(line for text in pages.values() for line in {line.strip() for line in text.splitlines()})
    most = max(REPEATED_PAGES, REPEATED_SHARE * len(pages))
    repeated = {line for line, count in on_pages.items() if count > most and not CODE.search(line)}
    return {
        name: tidy("\n".join(line for line in text.splitlines() if line.strip() not in repeated))
        for name, text in pages.items()
    }


def _parts(name: str, text: str) -> Iterator[tuple[str, str]]:
    """Cut a page longer than `LONGEST_PAGE` between paragraphs into parts of about equal length."""
    count = -(-len(text) // LONGEST_PAGE)
    if count == 1:
        yield name, text
        return
    part, length, number = [], 0, 1
    for paragraph in text.split("\n\n"):
        part.append(paragraph)
        length += len(paragraph) + 2
        if length >= number * len(text) / count:
            yield f"{name}#{number}", "\n\n".join(part).strip("\n") + "\n"
            part, number = [], number + 1
    if part:
        yield f"{name}#{number}", "\n\n".join(part).strip("\n") + "\n"


def _translated(text: str, language: str) -> str:
    """Take out the lines that are in the other language: a translation's untranslated paragraphs."""
    lines = ((line, _function_words(line)) for line in text.splitlines())
    return tidy("\n".join(line for line, hits in lines if hits.total() - hits[language] <= max(FEW, hits[language])))


def _is_prose(text: str, language: str) -> bool:
    """Tell prose in ``language`` by its function words: no tables or listings, no page of the other language."""
    hits, words = _function_words(text), len(WORD.findall(text))
    return hits[language] >= max(PROSE_SHARE * words, OWN_SHARE * hits.total())


def _function_words(text: str) -> Counter[str]:
    """Count the function words of each language."""
    counts = Counter(WORD.findall(text.lower()))
    return Counter({code: sum(counts[word] for word in words) for code, words in FUNCTION_WORDS.items()})


def _is_held_out(name: str) -> bool:
    draw = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return draw < HELD_OUT_SHARE * 2**64
