"""What tests show of formats and frameworks, and the page that says so.

A test marked ``@pytest.mark.exact("Parquet", "rows as pyarrow reads them")`` shows that of one of
the ``SUBJECTS``. ``pytest -m exact --supported docs/supported.md`` writes the tables of that page:
what all tests with this mark showed, none of which failed or was skipped. Those whose package is
not installed leave the page as it is: other frameworks have an environment of their own, which
``.ci/run`` makes in ``build/frameworks``.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).parents[1]
PROPERTY = "exact"
"""Name of the property of a report that holds the claims of its test."""
_BLOCK = re.compile(r"(<!-- begin: (\w+)[^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)


class Subject(NamedTuple):
    """A format, or a framework."""

    kind: str
    """Which table it is in."""
    how: str
    extra: str = ""
    package: str = ""
    """Without which its tests are skipped."""


SUBJECTS: dict[str, Subject] = {
    "Class folders of images": Subject("formats", "`ImageFolder`", "`images`", "PIL"),
    "Tar shards, WebDataset": Subject("formats", "`ShardSource`"),
    "Parquet": Subject("formats", "`ParquetSource`", "`arrow`", "pyarrow"),
    "Arrow IPC, Feather": Subject("formats", "`ArrowSource`", "`arrow`", "pyarrow"),
    "Hugging Face `datasets`": Subject(
        "formats", "`stoker.wrap`", "`huggingface`, `torch`", "datasets"
    ),
    "NumPy, token files": Subject("formats", "`NumpySource`"),
    "TFRecord": Subject("formats", "`TFRecordSource`"),
    "MosaicML MDS": Subject("formats", "`MDSSource`", "`arrow` for zstd, Brotli, Snappy"),
    "LMDB": Subject("formats", "`LMDBSource`", "`lmdb`", "lmdb"),
    "Lance": Subject("formats", "`LanceSource`", "`lance`", "lance"),
    "HDF5": Subject("formats", "`HDF5Source`", "`hdf5`", "h5py"),
    "Zarr 2 and 3": Subject("formats", "`ZarrSource`", "`zarr`", "zarr"),
    "Audio and video": Subject("formats", "`ClipSource`", "`media`", "av"),
    "Lightning": Subject("frameworks", "`Loader`", "`torch`", "lightning"),
    "Hugging Face Trainer": Subject("frameworks", "`Loader`", "`torch`", "transformers"),
    "Accelerate": Subject("frameworks", "`Loader`", "`torch`", "accelerate"),
    "timm": Subject("frameworks", "`Loader` in `create_loader`", "`torch`", "timm"),
    "fastai": Subject("frameworks", "`Loader` in `DataLoaders`", "`torch`", "fastai"),
    "Ultralytics": Subject("frameworks", "`Loader` in a trainer", "`torch`", "ultralytics"),
    "Composer": Subject("frameworks", "`Loader` in a `Trainer`", "`torch`", "composer"),
    "torchtitan": Subject("frameworks", "`Loader` as `BaseDataLoader`", "`torch`", "torchtitan"),
    "torchdata nodes": Subject(
        "frameworks", "`Loader` in an `IterableWrapper`", "`torch`", "torchdata"
    ),
    "Ray Train": Subject("frameworks", "`Loader` in each worker", "`torch`", "ray"),
    "JAX": Subject("frameworks", "`Feed(to_device=)`", "`images`", "jax"),
    "TensorFlow": Subject("frameworks", "`Feed` in a `tf.data.Dataset`", "`images`", "tensorflow"),
    "Keras 3": Subject("frameworks", "`stoker.feed.keras`", "`images`", "keras"),
    "Grain": Subject("frameworks", "`stoker.feed.with_cache`", "`images`", "grain"),
}
"""In the order of the page."""

Claims = dict[str, list[str]]
"""What is shown of each subject, in the order of the page."""


def ordered(pairs: Iterable[tuple[str, str]]) -> Claims:
    """Return the claims by subject; KeyError for a subject that is not among ``SUBJECTS``."""
    found: Claims = {name: [] for name in SUBJECTS}
    for subject, claim in pairs:
        if claim not in found[subject]:
            found[subject].append(claim)
    return {subject: claims for subject, claims in found.items() if claims}


def written() -> Claims:
    """Return what the marks in all test files say, whether their tests pass or not."""
    files = sorted(TESTS.rglob("test_*.py"))
    return ordered(pair for file in files for pair in _marks(file.read_text()))


def _marks(text: str) -> Iterator[tuple[str, str]]:
    if "mark.exact(" not in text:
        return
    tree = ast.parse(text)
    named = {
        ast.unparse(node.targets[0]): node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    marks = [call for call in calls if ast.unparse(call.func).endswith("mark.exact")]
    for call in sorted(marks, key=lambda call: call.lineno):
        subject, claim = (
            ast.literal_eval(named.get(ast.unparse(each), each)) for each in call.args
        )
        yield subject, claim


def is_testable(subject: str) -> bool:
    """Whether the tests of a subject can run here."""
    package = SUBJECTS[subject].package
    return not package or importlib.util.find_spec(package) is not None


def rows(claims: Claims) -> dict[str, str]:
    """Return the line of each subject in its table."""
    return {
        name: f"| {name} | {SUBJECTS[name].how} | {SUBJECTS[name].extra} | {'; '.join(shown)} |"
        for name, shown in claims.items()
    }


def on_page(page: str, claims: Claims) -> str:
    """Return the page with tables of these claims between its marks."""
    lines = rows(claims)

    def table(found: re.Match[str]) -> str:
        kind = found[2]
        head = [f"| {kind.removesuffix('s')} | how | extra | what is exact |", "|---|---|---|---|"]
        body = [line for name, line in lines.items() if SUBJECTS[name].kind == kind]
        return found[1] + "\n".join([*head, *body]) + "\n" + found[3]

    return _BLOCK.sub(table, page)


def said(page: str, subject: str) -> str:
    """Return what the page says of a subject in the last column; empty if nothing."""
    lines = (line for line in page.splitlines() if line.startswith(f"| {subject} |"))
    return next((line.split("|")[-2] for line in lines), "")


def tell(items: Sequence[pytest.Item]) -> None:
    """Have the reports of these tests hold their claims, also those that come from a worker."""
    for item in items:
        claims = [list(mark.args) for mark in item.iter_markers("exact")]
        if claims:
            item.user_properties.append((PROPERTY, claims))


class Recorder:
    """Writes the page at the end of a run of tests. To be registered where reports arrive."""

    def __init__(self, page: Path) -> None:
        self._page = page
        self._passed: list[tuple[str, str]] = []
        self._others: set[tuple[str, str]] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what the test showed, or failed to show."""
        properties: Mapping[str, object] = dict(report.user_properties)
        claims = properties.get(PROPERTY, [])
        assert isinstance(claims, list)
        if report.skipped and "is not installed" in str(report.longrepr):
            return  # it was not tried: what the page says of it stays
        for subject, claim in claims:
            if not report.passed:
                self._others.add((subject, claim))
            elif report.when == "call":
                self._passed.append((subject, claim))

    def claims(self, page: str, all_of: Claims) -> Claims:
        """Return those of ``all_of`` that were shown, or that ``page`` has and no test tried."""
        shown = set(self._passed) - self._others
        tried = {*self._passed, *self._others}
        found = {
            subject: [
                claim
                for claim in claims
                if (subject, claim) in shown
                or ((subject, claim) not in tried and claim in said(page, subject))
            ]
            for subject, claims in all_of.items()
        }
        return {subject: claims for subject, claims in found.items() if claims}

    def pytest_sessionfinish(self) -> None:
        """Write it down."""
        page = self._page.read_text()
        self._page.write_text(on_page(page, self.claims(page, written())))
