"""Writes PDFs with annotations and form fields, object by object."""

from __future__ import annotations

from collections.abc import Sequence

#: Width and height of a page, in points.
SIZE = (400, 300)
WIDGET = "/Type /Annot /Subtype /Widget"
_FONT = "<< /Type /Font /Subtype /Type1 /BaseFont /{} {} >>"
_FONTS = "/Font << /Helv 5 0 R /ZaDb 6 0 R >>"


def pdf_of(*objects: str) -> bytes:
    """Return a PDF of these objects; the first is its catalog."""
    content, offsets = b"%PDF-1.7\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(content))
        content += f"{number} 0 obj\n{body}\nendobj\n".encode("latin-1")
    start, size = len(content), len(objects) + 1
    entries = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    table = f"xref\n0 {size}\n0000000000 65535 f \n{entries}trailer << /Size {size} /Root 1 0 R >>"
    return content + f"{table}\nstartxref\n{start}\n%%EOF\n".encode()


def stream(content: str, entries: str = "") -> str:
    """Return a stream object."""
    return f"<< {entries} /Length {len(content)} >>\nstream\n{content}\nendstream"


def appearance(text: str, font: str = "/Helv", size: int = 12, width: int = 150) -> str:
    """Return the appearance of an annotation of width x 20 points: a line of text."""
    content = f"q BT {font} {size} Tf 2 5 Td ({text}) Tj ET Q" if text else ""
    entries = f"/Type /XObject /Subtype /Form /BBox [0 0 {width} 20] /Resources << {_FONTS} >>"
    return stream(content, entries)


def annotated_pdf(
    *annotations: str | tuple[str, ...],
    text: str = "",
    has_form: bool = True,
    page: str = "",
    form: str = "",
    catalog: str = "",
) -> bytes:
    """Return a PDF of one page with annotations.

    annotations: entries of a dictionary; with further objects, which are @0, @1, ... in them.
    text: of the page itself.
    has_form: list the annotations as fields.
    page, form, catalog: more entries.
    """
    objects: list[str] = []
    references = []
    for annotation in annotations:
        entries, *more = [annotation] if isinstance(annotation, str) else annotation
        number = 7 + len(objects)
        for k in range(len(more)):
            entries = entries.replace(f"@{k}", f"{number + 1 + k} 0 R")
        objects += [f"<< {entries} >>", *more]
        references.append(f"{number} 0 R")
    listed = " ".join(references)
    acroform = f"/AcroForm << /Fields [{listed}] /DR << {_FONTS} >> /DA (/Helv 12 Tf 0 g) {form} >>"
    return pdf_of(
        f"<< /Type /Catalog /Pages 2 0 R {acroform if has_form else ''} {catalog} >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {SIZE[0]} {SIZE[1]}] /Contents 4 0 R "
        f"/Resources << {_FONTS} >> /Annots [{listed}] {page} >>",
        stream(text),
        _FONT.format("Helvetica", "/Encoding /WinAnsiEncoding"),
        _FONT.format("ZapfDingbats", ""),
        *objects,
    )


def text_at(x: int, y: int, text: str) -> str:
    """Return the page content that draws a text."""
    return f"BT /Helv 12 Tf {x} {y} Td ({text}) Tj ET\n"


def field(
    kind: str,
    rect: Sequence[int],
    value: str = "",
    flags: int = 0,
    more: str = "",
    visibility: int = 4,
) -> str:
    """Return the entries of a form field.

    kind: Tx, Ch, Btn, Sig.
    flags: Ff.
    visibility: F.
    """
    box = " ".join(map(str, rect))
    head = f"{WIDGET} /F {visibility} /FT /{kind} /T (f{box}) /Rect [{box}] /DA (/Helv 12 Tf 0 g)"
    return f"{head} {f'/V {value}' if value else ''} {f'/Ff {flags}' if flags else ''} {more}"
