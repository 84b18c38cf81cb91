// Texts with their errors in colour. Offsets are code points; strings of JavaScript are UTF-16.

const GRAVITY = ["MINOR", "MAJOR", "CRITICAL"];

const tip = el("div", { id: "tip", role: "tooltip", hidden: true });
document.body.append(tip);
let pointed = null; // the mark that it tells of
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideTip();
});
// To Tab to a mark further down scrolls: the tip goes with it.
for (const event of ["scroll", "resize"]) addEventListener(event, placeTip, { passive: true });

function gravity(span) {
  return GRAVITY.indexOf(span.severity); // another service's word is the least
}

/** What is known of an error, in a line. */
function told(span, what) {
  const parts = [`${what}: ${span.severity}`];
  parts.push(typeof span.confidence === "number" ? `confidence ${shown(span.confidence)}` : "confidence not known");
  if (span.category) parts.push(span.category);
  return parts.join(" · ");
}

function showTip(mark) {
  pointed = mark;
  tip.replaceChildren(...mark.told.map((line) => el("div", {}, line)));
  placeTip();
}

function hideTip() {
  pointed = null;
  tip.hidden = true;
}

/** Beside the first line of the mark that can be seen. */
function placeTip() {
  const at = pointed && [...pointed.getClientRects()].find(({ bottom }) => bottom > 0);
  tip.hidden = !at || at.top > innerHeight;
  if (tip.hidden) return;
  const own = tip.getBoundingClientRect();
  const below = at.bottom + 6 + own.height < innerHeight;
  tip.style.left = `${Math.max(4, Math.min(at.left, innerWidth - own.width - 4))}px`;
  tip.style.top = `${below ? at.bottom + 6 : Math.max(4, at.top - own.height - 6)}px`;
}

function markOf(text, spans, what) {
  const gravest = spans.reduce((a, b) => (gravity(b) > gravity(a) ? b : a));
  const kind = GRAVITY.includes(gravest.severity) ? gravest.severity.toLowerCase() : "other";
  const mark = el("mark", { class: kind, tabindex: "0", "aria-describedby": "tip" }, text);
  mark.told = spans.map((span) => told(span, what));
  for (const event of ["mouseenter", "focus"]) mark.addEventListener(event, () => showTip(mark));
  for (const event of ["mouseleave", "blur"]) mark.addEventListener(event, hideTip);
  return mark;
}

/**
 * A paragraph of `text`.
 *
 * spans: errors; where some overlap, the stretch that they share has the colour of the gravest and
 * tells of all. covered: code points that the model read; the rest is grey. borders: [[offset,
 * label], ...] of windows. what: how an error is called here.
 */
function markedText(text, { spans = [], covered = null, borders = [], what = "error" } = {}) {
  const points = Array.from(text);
  const read = covered === null ? points.length : Math.min(covered, points.length);
  const inside = spans.filter((span) => span.start < span.end && span.end <= points.length);
  const cuts = new Set([0, points.length, read]);
  for (const span of inside) cuts.add(span.start).add(span.end);
  for (const [offset] of borders) cuts.add(Math.min(offset, points.length));
  const sorted = [...cuts].sort((a, b) => a - b);
  const made = el("p", { class: "text", dir: "auto" });
  sorted.forEach((from, k) => {
    for (const [offset, label] of borders) {
      if (offset === from) made.append(el("span", { class: "window", "data-label": label }));
    }
    const to = sorted[k + 1];
    if (to === undefined) return;
    const piece = points.slice(from, to).join("");
    const over = inside.filter((span) => span.start <= from && to <= span.end);
    const part = over.length ? markOf(piece, over, what) : document.createTextNode(piece);
    made.append(from >= read ? el("span", { class: "unread", title: "not read" }, part) : part);
  });
  if (!points.length) made.append(el("span", { class: "quiet" }, "(empty)"));
  return made;
}
