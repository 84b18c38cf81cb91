// Scoring translations: MetricX, xCOMET and whatever else answers /v1/score with their samples.

const TEXT_NAMES = { src: "Source (src)", mt: "Translation (mt)", ref: "Reference (ref)" };

function buildKind() {
  let info = {};
  const code = codePanel();
  const results = batchView(() => info);
  const one = oneForm();
  const many = manyForm();
  const overlong = choice("overlong", [["truncate", "cut it"], ["error", "fail it"], ["windows", "score it in windows"]]);
  const modes = modeTabs([["One translation", one.box], ["Many rows", many.box]]);
  const submit = async (event) => {
    event.preventDefault();
    const items = modes.chosen() === 0 ? [{ sample: one.sample(), result: null }] : await many.items();
    if (!items) return; // the form of the rows says why
    const samples = items.filter(({ result }) => result === null).map(({ sample }) => sample);
    const request = (some) => ({
      samples: some, // what is as by default is not said: it may be no option of this service
      ...(overlong.value === "truncate" ? {} : { options: { overlong: overlong.value } }),
      ...(samples.length > 1 ? { priority: "bulk" } : {}),
    });
    const few = samples.slice(0, 3);
    code.show("v1/score", request(few), samples.length > 3 ? `The first 3 of ${samples.length} rows.` : "");
    results.begin(items, request);
  };
  MAIN.append(
    el(
      "form",
      { class: "panel try", on: { submit } },
      modes.box,
      one.box,
      many.box,
      el("div", { class: "tools" }, field("A text that is too long", overlong), el("button", { type: "submit", class: "go" }, "Score")),
    ),
    results.box,
    code.box,
  );
  return (told) => {
    info = told;
    one.know(told.inputs);
    many.know(told.inputs);
  };
}

function modeTabs(parts) {
  const radios = parts.map(([label, box], k) => {
    const input = el("input", { type: "radio", name: "mode", value: String(k), checked: k === 0 });
    input.addEventListener("change", () => parts.forEach(([, other]) => (other.hidden = other !== box)));
    box.hidden = k !== 0;
    return el("label", { class: "mode" }, input, " ", label);
  });
  const box = el("fieldset", { class: "modes" }, el("legend", {}, "What to score"), radios);
  return { box, chosen: () => Number(box.querySelector("input:checked").value) };
}

function oneForm() {
  const inputs = { src: textarea("src"), mt: textarea("mt"), ref: textarea("ref", 2) };
  const labelled = Object.entries(inputs).map(([name, input]) => [name, field(TEXT_NAMES[name], input)]);
  const langs = ["src_lang", "tgt_lang"].map((name) => el("input", { type: "text", name, autocomplete: "off" }));
  const languages = el(
    "details",
    { class: "languages" },
    el("summary", {}, "Languages, for scorers that ask for them"),
    el("div", { class: "pair" }, field("Of the source (src_lang)", langs[0]), field("Of the translation (tgt_lang)", langs[1])),
  );
  const box = el("div", {}, labelled.map(([, made]) => made), languages);
  const sample = () => {
    const made = { src: inputs.src.value, mt: inputs.mt.value };
    for (const input of [inputs.ref, ...langs]) if (input.value && !input.closest("[hidden]")) made[input.name] = input.value;
    return made;
  };
  const know = (wanted) => {
    for (const [name, made] of labelled) {
      const how = wanted?.[name] ?? (name === "ref" ? "optional" : "required");
      made.hidden = how === "ignored" && name === "ref";
      made.querySelector("label").textContent = `${TEXT_NAMES[name]}${how === "required" ? "" : `, ${how}`}`;
    }
  };
  know(null);
  return { box, sample, know };
}

function manyForm() {
  const area = textarea("rows", 8);
  area.placeholder = "src⇥mt⇥ref\nThe house is red.⇥집은 빨간색이다.⇥";
  const file = el("input", { type: "file", name: "file", accept: ".tsv,.csv,.txt,.json,.jsonl" });
  const fault = faultLine();
  let chosen = {}; // the columns that a person has named
  let answer = null; // the promise of what the service reads in the rows as they are
  const told = rowsTold((columns) => {
    chosen = { ...chosen, ...columns };
    read();
  });

  /** Has the rows read, and shows what they are. */
  function read() {
    fault.clear();
    const reading = (answer = rowsGiven().then((given) => readRows(given, chosen)));
    reading.then(
      (made) => {
        if (answer !== reading) return; // they are others by now
        told.show(made);
        if (made.problem) fault.show(new Error(made.problem));
      },
      (error) => {
        if (answer !== reading) return;
        answer = null;
        told.show(null);
        fault.show(error, read);
      },
    );
    return reading;
  }

  async function rowsGiven() {
    const [one] = file.files;
    return one ? { name: one.name, base64: await inBase64(one) } : { text: area.value };
  }

  function changed() {
    [chosen, answer] = [{}, null];
    told.show(null);
    fault.clear();
    if (area.value || file.files.length) read();
  }
  area.addEventListener("change", () => {
    if (area.value) file.value = "";
    changed();
  });
  file.addEventListener("change", () => {
    if (file.files.length) area.value = "";
    changed();
  });
  const box = el("div", {}, field("Rows", area, " "), field("or a file", file, "Drop one here, too."), fault.line, told.box);
  box.addEventListener("dragover", (event) => event.preventDefault());
  box.addEventListener("drop", (event) => {
    if (!event.dataTransfer.files.length) return; // a text
    event.preventDefault();
    file.files = event.dataTransfer.files;
    file.dispatchEvent(new Event("change"));
  });
  const know = (wanted) => {
    const names = { required: "src, mt and ref", ignored: "src and mt (ref is not read)" }[wanted?.ref] ?? "src, mt and perhaps ref";
    box.querySelector("small").textContent =
      `The first line names the columns: ${names}, in any order. A table from a spreadsheet, CSV, TSV or JSON lines; up to 1,000 rows.`;
  };
  know(null);

  /** The items to score; null where there are none. */
  async function items() {
    try {
      const { problem, rows } = await (answer ?? read());
      return problem ? null : itemsOf(rows);
    } catch {
      return null;
    }
  }
  return { box, know, items };
}
