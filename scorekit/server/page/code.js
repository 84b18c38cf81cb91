// The same request as a command and as a program.

/** A word of a POSIX shell, whatever is in it. */
function shellQuoted(text) {
  return `'${text.replaceAll("'", `'\\''`)}'`;
}

/** JSON as Python writes it. A string of JSON is one of Python. */
function pythonOf(value, indent = "") {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const deeper = `${indent}    `;
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const parts = Array.isArray(value)
    ? value.map((one) => pythonOf(one, deeper))
    : Object.entries(value).map(([k, v]) => `${JSON.stringify(k)}: ${pythonOf(v, deeper)}`);
  if (!parts.length) return open + close;
  return `${open}\n${parts.map((part) => `${deeper}${part},\n`).join("")}${indent}${close}`;
}

function asCurl(path, body) {
  const parts = [`curl -sS ${shellQuoted(BASE + path)}`];
  if (key.value) parts.push(`-H "Authorization: Bearer $SCOREKIT_API_KEY"`);
  if (body !== null) {
    parts.push(`-H 'Content-Type: application/json'`);
    const json = JSON.stringify(body);
    // A word of a command has 128 KiB at most; JSON is one line, which no mark at the end is in.
    const fits = json.length < 30_000; // of up to four bytes each, when it is quoted
    parts.push(fits ? `--data-raw ${shellQuoted(json)}` : `--data-binary @- <<'JSON'\n${json}\nJSON`);
  } else if (path.includes("/image")) {
    parts.push("-o page.png");
  }
  return parts.join(" \\\n  ");
}

function asPython(path, body) {
  const given = [`    ${JSON.stringify(BASE + path)},\n`];
  if (body !== null) given.push(`    json=${pythonOf(body, "    ")},\n`);
  if (key.value) {
    given.push(`    headers={"Authorization": f"Bearer {os.environ['SCOREKIT_API_KEY']}"},\n`);
  }
  given.push("    timeout=600,\n");
  const verb = body === null ? "get" : "post";
  const shows = path.includes("/image")
    ? 'open("page.png", "wb").write(answer.content)'
    : "print(answer.json())";
  return (
    `${key.value ? "import os\n\n" : ""}import httpx\n\nanswer = httpx.${verb}(\n${given.join("")})\n` +
    `answer.raise_for_status()\n${shows}\n`
  );
}

/** A panel with both; `show(path, body, note)` fills it. */
function codePanel() {
  const note = el("p", { class: "quiet" });
  const curl = el("pre", { tabindex: "0", class: "curl" });
  const python = el("pre", { tabindex: "0", class: "python" });
  const box = el(
    "details",
    { class: "panel code" },
    el("summary", {}, "The same by curl and Python"),
    note,
    el("h3", {}, "curl", copier(curl)),
    curl,
    el("h3", {}, "Python", copier(python)),
    python,
  );
  box.hidden = true;
  const show = (path, body = null, told = "") => {
    box.hidden = false;
    note.textContent = told;
    note.hidden = !told;
    curl.textContent = asCurl(path, body);
    python.textContent = asPython(path, body);
  };
  return { box, show };
}

function copier(source) {
  const made = button("Copy", async () => {
    try {
      await navigator.clipboard.writeText(source.textContent);
      made.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(source); // no clipboard without HTTPS: Ctrl-C takes it
      made.textContent = "Selected";
    }
  });
  return made;
}
