"""Controls are known without torch: the router and the client import them."""

import subprocess
import sys


def test_controls_are_declared_without_torch_or_numpy() -> None:
    code = (
        "import sys; from outrider.controls import CONTROLS; assert len(CONTROLS) >= 10;"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
