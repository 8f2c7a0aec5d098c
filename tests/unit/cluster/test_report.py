"""Progress as lines for people or as records for a waiting command."""

from __future__ import annotations

import os
from collections.abc import Callable

from outrider.cluster.report import Reporter, read_record


def written(act: Callable[[Reporter], None], *, as_records: bool) -> str:
    """What a reader of the pipe gets, to its end."""
    reading, writing = os.pipe()
    reporter = Reporter(writing, as_records=as_records)
    act(reporter)
    reporter.close()
    with os.fdopen(reading) as stream:
        return stream.read()


def test_records_are_read_as_they_were_written() -> None:
    def act(reporter: Reporter) -> None:
        reporter.progress('loading "x"\nand more')
        reporter.error("no")

    lines = written(act, as_records=True).splitlines()
    assert [read_record(line) for line in lines] == [("progress", 'loading "x"\nand more'), ("error", "no")]


def test_records_end_when_the_cluster_is_ready() -> None:
    def act(reporter: Reporter) -> None:
        reporter.ready("127.0.0.1:1")
        reporter.progress("a draft died")

    assert [read_record(line) for line in written(act, as_records=True).splitlines()] == [("ready", "127.0.0.1:1")]


def test_anything_else_is_no_record() -> None:
    assert read_record("plain text") is None
    assert read_record("3") is None
    assert read_record('["one"]') is None


def test_people_read_lines_also_after_the_start() -> None:
    def act(reporter: Reporter) -> None:
        reporter.progress("loading")
        reporter.ready("h:1")
        reporter.error("no")

    assert written(act, as_records=False) == "loading\nready: the router listens on h:1\nerror: no\n"


def test_a_reader_that_went_away_is_no_fault() -> None:
    reading, writing = os.pipe()
    reporter = Reporter(writing, as_records=True)
    os.close(reading)
    reporter.progress("nobody hears this")
    reporter.progress("nor this")
    reporter.close()
    reporter.error("nor this")
