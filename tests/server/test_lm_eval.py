"""lm-eval itself, unmodified, against the server; the environment is made when there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "lm_eval_server.py"


def test_lm_eval_measures_what_the_library_computes() -> None:
    """24 log-probabilities and 16 texts of both of its clients; the script compares them."""
    command = [sys.executable, SCRIPT]  # the time includes a first installation
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout[done.stdout.index("{") :])
    choices = found["local-completions"]["facts_choice"]
    assert choices["acc"] == choices["offline_acc"]
    assert found["local-completions"]["facts_text"]["texts_equal"] == 8
    assert found["local-chat-completions"]["facts_text"]["texts_equal"] == 8
