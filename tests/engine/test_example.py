"""The example of this part runs as it is shown."""

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_serve_checkpoint(capsys):
    runpy.run_path(str(EXAMPLES / "serve_checkpoint.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.count("length after") == 5
