// One result: its score, its texts with their errors, or why there is none.

function badge(text, kind = "") {
  return el("span", { class: `badge ${kind}` }, text);
}

/** sample: with src and mt; {}: a row that is none. result: of the service; null: there is none yet. */
function resultCard(sample, result, number = null, line = null) {
  const head = el("div", { class: "head" });
  if (number !== null) head.append(el("span", { class: "quiet" }, `#${number}`));
  if (line !== null) head.append(el("span", { class: "line" }, `line ${line}`));
  const card = el("article", { class: "card" }, head);
  if (result === null) {
    head.append(badge("not scored yet"));
    card.append(plain("src", sample.src), plain("mt", sample.mt));
  } else if (!result.ok) {
    card.classList.add("failed");
    head.append(badge(`failed: ${result.error.type}`, "bad"));
    card.append(el("p", { class: "why" }, result.error.message));
    if ("src" in sample) card.append(plain("src", sample.src), plain("mt", sample.mt));
  } else {
    head.append(el("strong", { class: "score" }, shown(result.score)), ...badges(result));
    card.append(...texts(sample, result));
  }
  return card;
}

function badges(result) {
  const made = [];
  const cut = Object.entries(result.truncated ?? {}).filter(([, was]) => was);
  if (cut.length) made.push(badge(`cut, not read to the end: ${cut.map(([f]) => f).join(", ")}`, "warn"));
  if (result.windows) made.push(badge(counted(result.windows.length, "window"), "warn"));
  if (result.error_spans) made.push(badge(counted(result.error_spans.length, "error")));
  if (result.omissions) made.push(badge(counted(result.omissions.length, "omission")));
  if (typeof result.tokens === "number") made.push(badge(counted(result.tokens, "token"), "quiet"));
  if (result.cached) made.push(badge("cached", "quiet"));
  return made;
}

function texts(sample, result) {
  const windows = result.windows ?? [];
  const at = (side) => windows.map((w, k) => [w[side], `${k + 1}: ${shown(w.score)}`]);
  const made = [
    row("src", markedText(sample.src, { spans: result.omissions ?? [], borders: at("src_start"), what: "left out" })),
    row(
      "mt",
      markedText(sample.mt, {
        spans: result.error_spans ?? [],
        covered: result.truncated?.mt ? result.mt_covered : null,
        borders: at("mt_start"),
      }),
    ),
  ];
  if (sample.ref) made.push(plain("ref", sample.ref));
  if (result.unplaced?.length) made.push(unplacedList(result.unplaced));
  return made;
}

/** Errors that count and have no place in the text. */
function unplacedList(errors) {
  const line = (error) =>
    el(
      "li",
      {},
      el("q", { dir: "auto" }, error.quote),
      ` · ${error.severity}${error.category ? ` · ${error.category}` : ""} · in ${error.of}: `,
      error.reason === "absent" ? "not found there" : "there more than once",
    );
  return el("div", { class: "unplaced" }, el("p", {}, "Errors without a place:"), el("ul", {}, errors.map(line)));
}

function row(label, paragraph) {
  return el("div", { class: "row" }, el("span", { class: "name" }, label), paragraph);
}

function plain(label, text) {
  return row(label, markedText(text));
}

/** What the colours mean. */
function legend() {
  const one = (kind) => el("mark", { class: kind.toLowerCase() }, kind);
  const parts = GRAVITY.flatMap((kind) => [one(kind), " "]);
  return el("p", { class: "legend quiet" }, ...parts, "hover, tap or Tab to an error tells more");
}
