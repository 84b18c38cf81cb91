// Rows: the service reads them, as it reads a file of the command; results become CSV and JSONL.

const MOST_BYTES = 2 ** 20;
const COLUMNS = ["src", "mt", "ref"];

/** What rows are: the answer to `POST page/rows`. given: {name, text} or {name, base64}; columns: field -> name. */
async function readRows(given, columns) {
  const body = { ...given, ...columns };
  if (new TextEncoder().encode(JSON.stringify(body)).length > MOST_BYTES) {
    throw new Error("These rows are larger than this page takes (1 MiB, a file 768 KiB). `scorekit score` takes files of any size.");
  }
  return callJson("page/rows", body);
}

/** Rows as items of the results. One that is no sample has failed before it is sent. */
function itemsOf(rows) {
  const failed = (message) => ({ ok: false, error: { type: "invalid_input", message, retryable: false } });
  return rows.map(({ line, id, sample, problem }) => ({ line, id, sample: sample ?? {}, result: sample ? null : failed(problem) }));
}

/** What was read, in words; `show(answer)` fills it. choose(columns): the names that a person has chosen. */
function rowsTold(choose) {
  const counts = el("p", { "aria-live": "polite" });
  const notes = el("ul", { class: "notes quiet" });
  const likely = el("p");
  const columns = el("div", { class: "columns" });
  const box = el("div", { class: "told", hidden: true }, counts, notes, likely, columns);

  function show(answer) {
    box.hidden = answer === null;
    if (answer === null) return;
    counts.textContent = countsOf(answer);
    counts.hidden = Boolean(answer.problem);
    const bad = answer.rows.filter(({ problem }) => problem).slice(0, 20);
    const lines = [...answer.notes, ...bad.map(({ line, problem }) => `${answer.unit} ${line}: ${problem}`)];
    if (answer.bad > bad.length && bad.length) lines.push(`and ${answer.bad - bad.length} more`);
    notes.replaceChildren(...lines.map((line) => el("li", {}, line)));
    notes.hidden = !lines.length;
    const pairs = Object.entries(answer.likely);
    const words = pairs.map(([field, name]) => `${field} from “${name}”`).join(", ");
    likely.replaceChildren(...(pairs.length ? [button(`Take ${words}`, () => choose(answer.likely))] : []));
    likely.hidden = !pairs.length;
    columns.replaceChildren(...(answer.names.length ? choices(answer) : []));
  }

  function choices({ names, columns: taken }) {
    const unused = names.filter((name) => !Object.values(taken).includes(name));
    const made = Object.entries(taken).map(([name, column]) => {
      const options = [...new Set([column, ...names])].filter(Boolean).map((one) => [one, one]);
      const none = column && ["src", "mt"].includes(name) ? [] : [["", "– none –"]];
      const list = choice(`column-${name}`, [...none, ...options], column ?? "");
      list.addEventListener("change", () => choose({ [name]: list.value }));
      return field(FROM[name], list);
    });
    const rest = unused.length ? el("p", { class: "quiet" }, `Not used: ${unused.join(", ")}`) : null;
    return [el("div", { class: "pair" }, made), ...(rest ? [rest] : [])];
  }
  return { box, show };
}

const FROM = { src: "Source (src) from", mt: "Translation (mt) from", ref: "Reference (ref) from", id: "Id from" };

/** The blank rows are in the notes. */
function countsOf({ rows, bad, empty }) {
  const parts = [`${counted(rows.length, "row")}`];
  if (bad) parts.push(`${bad} of them cannot be scored`);
  if (empty) parts.push(`${empty} without a translation`);
  return `${parts.join("; ")}.`;
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

/** items: [{sample, result, line, id}], result null where none came. The mark at the start is for Excel. */
function asCsv(items) {
  const lines = [["row", ...COLUMNS, ...TOLD, "error_type", "error_message", "line", "id"]];
  items.forEach(({ sample, result, line, id }, k) => {
    const got = result ?? UNSENT;
    const own = [...COLUMNS.map((name) => sample[name]), ...TOLD.map((name) => got[name])];
    lines.push([k + 1, ...own, got.error?.type, got.error?.message, line, id]);
  });
  return `\ufeff${lines.map((cells) => `${cells.map(csvCell).join(",")}\r\n`).join("")}`;
}

function asJsonl(items) {
  const told = ({ sample, result, line, id }) => ({ line, ...sample, ...(result ?? UNSENT), id });
  return items.map((item) => `${JSON.stringify(told(item))}\n`).join("");
}
