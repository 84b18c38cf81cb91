// Scoring translations: MetricX, xCOMET and whatever else answers /v1/score with their samples.

const TEXT_NAMES = { src: "Source (src)", mt: "Translation (mt)", ref: "Reference (ref)" };

function buildKind() {
  let info = {};
  const code = codePanel();
  const results = batchView(() => info);
  const fault = faultLine();
  const one = oneForm();
  const many = manyForm(fault);
  const overlong = choice("overlong", [["truncate", "cut it"], ["error", "fail it"], ["windows", "score it in windows"]]);
  const modes = modeTabs([["One translation", one.box], ["Many rows (TSV)", many.box]]);
  const submit = (event) => {
    event.preventDefault();
    fault.clear();
    let samples;
    try {
      samples = modes.chosen() === 0 ? [one.sample()] : many.samples();
    } catch (error) {
      fault.show(error);
      return;
    }
    const request = (some) => ({
      samples: some, // what is as by default is not said: it may be no option of this service
      ...(overlong.value === "truncate" ? {} : { options: { overlong: overlong.value } }),
      ...(samples.length > 1 ? { priority: "bulk" } : {}),
    });
    const few = samples.slice(0, 3);
    code.show("v1/score", request(few), samples.length > 3 ? `The first 3 of ${samples.length} rows.` : "");
    results.begin(samples, request);
  };
  MAIN.append(
    el(
      "form",
      { class: "panel try", on: { submit } },
      modes.box,
      one.box,
      many.box,
      el("div", { class: "tools" }, field("A text that is too long", overlong), el("button", { type: "submit", class: "go" }, "Score")),
      fault.line,
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

function manyForm(fault) {
  const area = textarea("rows", 8);
  area.placeholder = "src⇥mt⇥ref";
  const file = el("input", { type: "file", name: "file", accept: ".tsv,.txt,text/tab-separated-values,text/plain" });
  file.addEventListener("change", async () => {
    if (!file.files.length) return;
    try {
      area.value = decoded(new Uint8Array(await file.files[0].arrayBuffer()));
      fault.clear();
    } catch (error) {
      fault.show(error);
    }
    file.value = ""; // so that the same file can be taken again
  });
  const box = el("div", {}, field("Rows", area, " "), field("or a TSV file", file));
  const know = (wanted) => {
    const ref = { required: "tab, ref", ignored: "(a third column, ref, is not read)" }[wanted?.ref] ?? "and maybe tab, ref";
    box.querySelector("small").textContent = `A row is src, tab, mt, ${ref}; up to ${MOST_ROWS}. A field may stand in quotes.`;
  };
  know(null);
  return { box, know, samples: () => parseRows(area.value) };
}
