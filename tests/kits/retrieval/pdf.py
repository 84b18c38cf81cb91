"""Writes PDFs to search from lines of text."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

#: Points; the pictures of such pages are small, and quickly made.
SIZE = (320, 180)


def draw_pdf(path: Path, pages: Sequence[Sequence[str]], size: int = 12) -> Path:
    """Draw a PDF with a page for each list of lines, Latin or Korean, in letters of `size` points.

    A stripe at the foot distinguishes pages in an image, too: Korean letters are not in the file,
    and a machine without such fonts shows none.
    """
    from reportlab.pdfbase import pdfmetrics
    from reportlab.pdfbase.cidfonts import UnicodeCIDFont
    from reportlab.pdfgen.canvas import Canvas

    pdfmetrics.registerFont(UnicodeCIDFont("HYSMyeongJo-Medium"))
    canvas = Canvas(str(path), pagesize=SIZE, invariant=1)
    for lines in pages:
        for number, line in enumerate(lines):
            canvas.setFont("Helvetica" if line.isascii() else "HYSMyeongJo-Medium", size)
            canvas.drawString(20, SIZE[1] - 2 * size * (number + 1), line)
        canvas.rect(0, 0, zlib.crc32("\n".join(lines).encode()) % SIZE[0], 3, fill=1)
        canvas.showPage()
    canvas.save()
    return path
