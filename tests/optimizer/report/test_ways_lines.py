"""The candidates that were compared, as the terminal and the page say them."""

from __future__ import annotations

from enginewright.optimizer.report.document import ReportDocument
from enginewright.optimizer.report.ways_lines import ways_lines
from enginewright.optimizer.search.report import Candidate


def test_what_was_taken_comes_first() -> None:
    alone = Candidate("formats alone", 97_000_000, 0.0, 0.018, False)
    both = Candidate("less of the model", 95_500_000, 0.006, 0.0175, True)
    assert ways_lines(ReportDocument(ways=(alone, both))) == [
        "less of the model: 91.1 MiB, KL 0.0175, of which 0.006 for its shape (taken)",
        "formats alone: 92.5 MiB, KL 0.018",
    ]


def test_a_candidate_that_failed_says_why() -> None:
    alone = Candidate("formats alone", 9_000, 0.0, 0.018, True)
    nothing = Candidate("less of the model", None, 0.0, None, False, "nothing that may go is within max_kl = 0.007")
    assert ways_lines(ReportDocument(ways=(nothing, alone)))[1:] == [f"{nothing.name}: {nothing.reason}"]
    assert ways_lines(ReportDocument()) == []
