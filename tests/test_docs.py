"""Documents: results keep their commands, links lead somewhere, and the English stays plain."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
DETAILS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), RESULTS, *DETAILS]


def anchors(page: Path) -> set[str]:
    """The names by which headings of a page are linked to, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_their_anchors_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        other = page.parent / name if name else page
        assert other.exists(), target
        assert not anchor or anchor in anchors(other), target


def test_results_are_one_page_that_leads_to_all_details() -> None:
    text = RESULTS.read_text()
    assert len(text.splitlines()) <= 120 and len(text.split()) <= 2_500
    assert [page.name for page in DETAILS if f"results/{page.name}" not in text] == []


def test_every_headline_says_its_kind_its_commit_and_its_command() -> None:
    section = RESULTS.read_text().split("## Headline figures")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        *_, kind, runs, commit, command, _ = (cell.strip() for cell in row.split("|"))
        assert kind.startswith(("measured", "simulated")) and runs, row
        assert re.fullmatch(r"[0-9a-f]{7}", commit), row
        assert command == "as above" or re.match(r"`\w+\.py\b", command), row
        program = re.match(r"`(\w+\.py)", command)
        assert program is None or (ROOT / "benchmarks" / program[1]).exists(), row


@pytest.mark.parametrize("page", DETAILS, ids=lambda page: page.name)
def test_every_table_of_results_has_its_command(page: Path) -> None:
    """In its own section, or in the one that the section is part of."""
    above: dict[int, str] = {}
    for heading in re.split(r"^(?=#)", page.read_text(), flags=re.M)[1:]:
        level = len(heading) - len(heading.lstrip("#"))
        above = {depth: text for depth, text in above.items() if depth < level} | {level: heading}
        if "\n| " in heading:
            given = "\n".join(above.values())
            assert re.search(r"`(python benchmarks/\w+\.py|stoker )", given), heading[:60]


STRANGE = re.compile(
    r"\b(?:[Aa]new|[Nn]obody|[Ww]hoever|[Ss]omebody|to be had|in the midst"
    r"|(?:is|are|was|were|be) refused|[Gg]o on|[Gg]oes on|[Gg]oing on|gone on|went on)\b"
)
"""Words that a native engineer would not write here: say again, no process, the caller, raises,
available, in the middle, resume or continue."""


def strange_lines(path: Path) -> list[str]:
    """The lines with such words, apart from code in documents and printed results."""
    text = path.read_text()
    if path.suffix == ".md":
        text = re.sub(r"`[^`]*`", "", text)
    is_result = "results" in path.parts
    return [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for line in text.splitlines()
        if STRANGE.search(line) and not (is_result and re.match(r"\||- .*\(target ", line))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documents_are_in_plain_english(page: Path) -> None:
    assert strange_lines(page) == []


def parts() -> dict[str, list[Path]]:
    """The files of each package of the source, and of the native code."""
    source = ROOT / "src" / "stoker"
    folders = {path.name: path for path in source.iterdir() if (path / "__init__.py").exists()}
    files = {name: [*path.rglob("*.py")] for name, path in folders.items()}
    files["stoker"] = [*source.glob("*.py"), *source.glob("*.pyi")]
    for name in ("benchmarks", "examples"):
        files[name] = [*(ROOT / name).rglob("*.py")]
    for name in ("bindings", "fuzz", "native", "shim"):
        found = (ROOT / name).rglob("*")
        files[name] = [path for path in found if path.suffix in (".cpp", ".h", ".c", ".md")]
    return files


@pytest.mark.parametrize("part", sorted(parts()))
def test_the_source_is_in_plain_english(part: str) -> None:
    assert [line for path in sorted(parts()[part]) for line in strange_lines(path)] == []
