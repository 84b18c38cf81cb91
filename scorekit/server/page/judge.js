// The judge: a task, its texts and pictures, and the verdict.

// What the built-in rubrics want; another's texts are named by hand.
const TASKS = {
  translation_filter: ["source_lang", "target_lang", "source_text", "candidate"],
  answer_correctness: ["query", "answer", "reference"],
  answer_grounded: ["query", "answer"],
  mqm: ["src", "mt", "src_lang", "tgt_lang", "ref"],
};
const OPTIONAL = new Set(["ref"]);

function buildKind() {
  let info = {};
  const [code, fault] = [codePanel(), faultLine()];
  const names = el("datalist", { id: "tasks" }, Object.keys(TASKS).map((name) => el("option", { value: name })));
  const task = el("input", { type: "text", name: "task", list: "tasks", required: true, autocomplete: "off" });
  const texts = textFields();
  const pictures = el("input", { type: "file", name: "images", multiple: true, accept: "image/png,image/jpeg,image/webp" });
  const result = el("section", { class: "results", "aria-label": "Verdict", "aria-live": "polite" });
  task.value = "translation_filter";
  task.addEventListener("change", () => texts.take(TASKS[task.value]));
  texts.take(TASKS[task.value]);
  const turn = oneAtATime(fault);
  const send = () => turn.start(async (signal) => {
    result.replaceChildren();
    const images = await Promise.all([...pictures.files].map(inBase64));
    signal.throwIfAborted();
    const sample = { task: task.value.trim(), ...texts.values(), ...(images.length ? { images } : {}) };
    const body = { samples: [sample] };
    code.show("v1/score", body);
    const [answer] = (await callJson("v1/score", body, signal)).results;
    result.append(verdictCard(sample, answer, scale(info.tasks?.[sample.task])));
  });
  MAIN.append(
    el(
      "form",
      { class: "panel try", on: submits(send) },
      names,
      field("Task (rubric)", task, "One of the list, or a rubric of this service."),
      texts.box,
      field("Pictures, where the rubric wants some", pictures),
      el("div", { class: "tools" }, el("button", { type: "submit", class: "go" }, "Judge")),
      fault.line,
      turn.line,
    ),
    result,
    code.box,
  );
  return (told) => {
    info = told;
    if (info.tasks) names.replaceChildren(...Object.keys(info.tasks).map((name) => el("option", { value: name })));
  };
}

/** The texts of a sample; more can be named by hand. */
function textFields() {
  const list = el("div");
  const name = el("input", { type: "text", name: "variable", autocomplete: "off", pattern: "[A-Za-z_][A-Za-z0-9_]*" });
  const add = (variable) => {
    const area = textarea(variable, variable.endsWith("lang") ? 1 : 3);
    list.append(field(OPTIONAL.has(variable) ? `${variable}, optional` : variable, area));
  };
  const more = button("Add a text", () => {
    const wanted = name.value.trim();
    if (!wanted || !name.reportValidity()) return;
    if (![...list.querySelectorAll("textarea")].some((area) => area.name === wanted)) add(wanted);
    name.value = "";
  });
  const box = el("div", {}, list, el("div", { class: "tools" }, field("Another text of the rubric, by its name", name), more));
  const take = (variables) => {
    list.replaceChildren();
    (variables ?? []).forEach(add);
  };
  const values = () => {
    const areas = [...list.querySelectorAll("textarea")].filter((area) => area.value || !OPTIONAL.has(area.name));
    return Object.fromEntries(areas.map((area) => [area.name, area.value]));
  };
  return { box, take, values };
}

/** meaning: of the score, in words. */
function verdictCard(sample, result, meaning = "") {
  if (!result.ok || !result.verdict) {
    const card = resultCard({ src: sample.src ?? "", mt: sample.mt ?? "", ref: sample.ref }, result);
    if (result.ok) {
      card.querySelector(".head").append(el("span", { class: "quiet" }, meaning));
      card.append(legend());
    }
    if (sample.src === undefined) card.querySelectorAll(".row").forEach((one) => one.remove());
    return card;
  }
  const { verdict } = result;
  const head = el(
    "div",
    { class: "head" },
    badge(verdict.pass ? "pass" : "no pass", verdict.pass ? "good" : "bad"),
    el("strong", { class: "score" }, shown(result.score)),
    badge(verdict.reason_code),
    result.cached ? badge("cached", "quiet") : null,
    el("span", { class: "quiet" }, meaning),
  );
  const card = el("article", { class: "card verdict" }, head);
  if (verdict.notes) card.append(el("p", { class: "text", dir: "auto" }, verdict.notes));
  if (result.usage) {
    const { prompt_tokens: read, completion_tokens: written } = result.usage;
    card.append(el("p", { class: "quiet" }, `The LLM read ${read} tokens and wrote ${written}.`));
  }
  return card;
}
