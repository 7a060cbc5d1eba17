"""docs/matrix.md is as the results on file, and says what each refusal of torch's own means."""

import pytest
import torch

from tests.matrix import PAGE, page, read
from tests.matrix_subjects import MEANINGS, TORCHS, ours


def test_each_refused_subject_of_torchs_has_a_meaning_and_no_other() -> None:
    results = read()
    refused = {
        subject.name
        for subject in TORCHS
        if results.get(subject.key, {}).get("verdict") == "refused"
    }
    assert set(MEANINGS) == refused


def test_results_on_file_are_of_subjects_of_the_page() -> None:
    assert read().keys() <= {subject.key for subject in (*TORCHS, *ours())}
    assert not [key for key, entry in read().items() if "error" in entry]


def test_the_page_is_as_the_results_on_file() -> None:
    """``python -m tests.matrix --page`` writes it."""
    if any(entry["torch"] != torch.__version__ for entry in read().values()):
        pytest.skip("the page names the results that are not of this torch")
    assert page() == PAGE.read_text()
