"""A child process that ignores SIGTERM and has a child itself. Both write their process ids."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(folder / "child").write_text(str(os.getpid()))
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
partial = folder / "partial"
partial.write_text(str(grandchild.pid))
partial.rename(folder / "grandchild")
time.sleep(60)
