"""The control that docs/sampling.md adds is found by its name, and used by the kernels, with no other file touched."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "sampling.md"

# Loads outrider.controls as if the file lay in its folder, then runs the page's test and a verification.
HARNESS = """
import importlib.util, sys
import outrider
spec = importlib.util.find_spec("outrider.controls")
spec.submodule_search_locations.append(sys.argv[1])
package = importlib.util.module_from_spec(spec)
sys.modules["outrider.controls"] = outrider.controls = package
spec.loader.exec_module(package)
sys.path[:0] = [sys.argv[2]]

import pytest
import torch
from outrider.core.sampling import Sampling, Verifier
from outrider.kernels.batched.data import Chain
from outrider.kernels.batched.verify import verify

logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]] * 2)
for seed in range(50):  # p = 0.64, 0.24, 0.09, 0.03; 0.5 * 0.64 ** 2 = 0.21 keeps two
    sampling = Sampling(seed=seed, controls=(("top_a", 0.5),), verifier=Verifier.REJECTION)
    (outcome,) = verify([Chain(logits, sampling, 3, [2])])
    assert outcome.num_accepted == 0 and outcome.next_token in (0, 1), outcome
sys.exit(pytest.main(["-q", "--import-mode=importlib", "-p", "no:cacheprovider", "--rootdir", ".", sys.argv[3]]))
"""


def test_the_documented_control_works(tmp_path: Path) -> None:
    blocks = re.findall(r"^`([^`]+\.py)`:\n\n```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)
    assert [Path(name).name for name, _ in blocks] == ["top_a.py", "test_top_a.py"]
    files = [tmp_path / "controls" / "top_a.py", tmp_path / "tests" / "test_top_a.py"]
    for file, (_, text) in zip(files, blocks, strict=True):
        file.parent.mkdir()
        file.write_text(text, encoding="utf-8")
    arguments = [str(files[0].parent), str(ROOT / "tests" / "support"), str(files[1])]
    command = [sys.executable, "-c", HARNESS, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
