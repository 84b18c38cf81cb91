// Rows from a TSV, and results as CSV and JSONL.

const MOST_ROWS = 1000;
const COLUMNS = ["src", "mt", "ref"];

/** The text of a file. Excel's "Unicode text" is UTF-16. Throws an Error with a line for people. */
function decoded(bytes) {
  const wide = bytes[0] === 0xff && bytes[1] === 0xfe;
  try {
    return new TextDecoder(wide ? "utf-16le" : "utf-8", { fatal: true }).decode(bytes);
  } catch {
    throw new Error("The file is neither UTF-8 nor UTF-16: save it as UTF-8.");
  }
}

/**
 * Samples of lines `src<TAB>mt[<TAB>ref]`.
 *
 * Quotes are read as scorekit/rowfile.py says. A first line `src mt [ref]` names the columns. Throws
 * an Error that names the line of a bad row.
 */
function parseRows(text) {
  const samples = [];
  for (const [line, cells] of records(text.replace(/^\ufeff/, ""))) {
    if (cells.length === 1 && !cells[0].trim()) continue;
    if (line === 1 && cells.length > 1 && cells.every((cell, k) => cell === COLUMNS[k])) continue;
    if (cells.length < 2 || cells.length > 3) {
      const found = cells.length === 1 ? "no tab" : `${cells.length} columns`;
      throw new Error(`Line ${line}: ${found}; a row is src, tab, mt, and maybe tab, ref.`);
    }
    samples.push({ src: cells[0], mt: cells[1], ...(cells[2] ? { ref: cells[2] } : {}) });
  }
  if (!samples.length) throw new Error("No rows: give lines of src, tab, mt, and maybe tab, ref.");
  if (samples.length > MOST_ROWS) {
    throw new Error(`${samples.length} rows: this page takes ${MOST_ROWS}. \`python -m scorekit score\` takes any number.`);
  }
  return samples;
}

/** Lines as [number of the line, cells]. */
function* records(text) {
  let [at, line] = [0, 1];
  while (at < text.length) {
    const [cells, first] = [[], line];
    for (;;) {
      const [cell, next] = text[at] === '"' ? quoted(text, at) : bare(text, at);
      cells.push(cell);
      line += text.slice(at, next).split("\n").length - 1;
      at = next;
      if (text[at] !== "\t") break;
      at++;
    }
    if (text[at] === "\r") at++;
    if (text[at] === "\n") at++;
    line++;
    yield [first, cells];
  }
}

function bare(text, at) {
  const end = text.slice(at).search(/\t|\r?\n|\r$/);
  const next = end < 0 ? text.length : at + end;
  return [text.slice(at, next), next];
}

function quoted(text, at) {
  let end = at + 1;
  for (;;) {
    end = text.indexOf('"', end);
    if (end < 0) return bare(text, at);
    if (text[end + 1] !== '"') break;
    end += 2;
  }
  const closes = /^(\t|\r?\n|\r?$)/.test(text.slice(end + 1, end + 3));
  if (!closes) return bare(text, at); // "Hi," he said
  return [text.slice(at + 1, end).replaceAll('""', '"'), end + 1];
}

// What a spreadsheet would run as a formula, wide forms included.
const FORMULA = /^[=+\-@\t\r\n＝＋－＠]/;

function csvCell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "string") return typeof value === "object" ? csvCell(JSON.stringify(value)) : String(value);
  const safe = FORMULA.test(value) ? `'${value}` : value;
  return /[",\r\n\t]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

const TOLD = ["ok", "score", "tokens", "truncated", "mt_covered", "cached", "error_spans", "omissions", "unplaced", "windows"];
const UNSENT = { ok: false, error: { type: "cancelled", message: "stopped before it was scored", retryable: true } };

/** items: [{sample, result}], result null where none came. The mark at the start is for Excel. */
function asCsv(items) {
  const lines = [["row", ...COLUMNS, ...TOLD, "error_type", "error_message"]];
  items.forEach(({ sample, result }, k) => {
    const got = result ?? UNSENT;
    const own = [...COLUMNS.map((name) => sample[name]), ...TOLD.map((name) => got[name])];
    lines.push([k + 1, ...own, got.error?.type, got.error?.message]);
  });
  return `\ufeff${lines.map((cells) => `${cells.map(csvCell).join(",")}\r\n`).join("")}`;
}

function asJsonl(items) {
  return items.map(({ sample, result }) => `${JSON.stringify({ ...sample, ...(result ?? UNSENT) })}\n`).join("");
}
