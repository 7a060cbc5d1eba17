"""``certify()`` in a test suite of one's own: its files, its message, and its traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

pytestmark = pytest.mark.ranks

SUITE = """
import torch.distributed as dist
from conformance import certify

def total(state, bucket):
    future = dist.all_reduce(bucket.buffer(), group=state, async_op=True).get_future()
    return future.then(lambda fut: fut.value()[0])

def test_total():
    certify(total, world_size="2", rule=("2.1", "2.2"){results})
"""


@pytest.mark.parametrize("results", ["", pytest.param("mine", marks=pytest.mark.rarely)])
def test_a_failed_call_writes_the_report_and_shows_the_line_of_the_test(
    tmp_path: Path, results: str
) -> None:
    named = f", results={results!r}" if results else ""
    (tmp_path / "test_suite.py").write_text(SUITE.replace("{results}", named))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_suite.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the sum was not divided" in done.stdout
    assert "certify(total, world_size" in done.stdout
    assert "session/certify.py" not in done.stdout
    assert "\x1b7" not in done.stdout
    folder = tmp_path / (results or "conformance-results/test_suite_total")
    assert f"report: {folder.relative_to(tmp_path) / 'report.html'}" in done.stdout
    assert json.loads((folder / "report.json").read_text())["verdict"] == "refused"
    assert (folder / "report.html").exists()
    assert (tmp_path / "conformance-results").exists() == (not results)


def test_a_certificate_of_an_earlier_call_is_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from conformance.certificates.reader import is_result
    from conformance.session.options import Options
    from conformance.session.request import prepare_request
    from tests.made_certificates import certificate, written

    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "mine"
    folder.mkdir()
    written(folder / "certificate.json", certificate())
    request = prepare_request(Options(hook="mypkg:half"), results=folder)
    assert request.paths.folder == folder
    assert request.paths.certificate == folder / "certificate.json"
    assert not (folder / "certificate.json").exists()
    assert is_result(folder / "certificate.previous.json")
    assert len(request.notes) == 1


def test_a_search_for_claims_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It certifies nothing: no rule may be judged as if the hook claimed to be exact."""
    from conformance import certify
    from conformance.errors import UsageError
    from conformance.session.session import Session

    def begin(session: Session) -> None:
        raise AssertionError("the hook was loaded, to be judged as exact")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Session, "begin", begin)
    monkeypatch.setattr(Session, "start", lambda session: None)
    with pytest.raises(UsageError) as error:
        certify("mypkg:half", claims="auto")
    assert str(error.value) == (
        "claims='auto' proposes claims and certifies nothing: run python -m conformance certify "
        "--hook mypkg:half --claims auto, and pass the claims that you choose"
    )
