"""The judge condemns no honest kernel: 200 whole runs, of which ``make honest`` makes 10,000."""

from __future__ import annotations

import pytest
from tests.harness.honest import main


@pytest.mark.slow
def test_no_honest_kernel_is_condemned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(200) == 0, capsys.readouterr().out
