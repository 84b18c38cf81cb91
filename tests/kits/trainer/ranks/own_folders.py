"""The trainer's command on hosts that share no folder: `own_folders ARGUMENTS`.

{rank} in an argument becomes the index of the process.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    from trainer.__main__ import app

    app([word.replace("{rank}", os.environ["RANK"]) for word in sys.argv[1:]])
