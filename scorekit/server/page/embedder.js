// The embedder: how alike two texts are.

function buildKind() {
  const [code, fault] = [codePanel(), faultLine()];
  const areas = [textarea("first"), textarea("second")];
  const prompt = choice("prompt_name", [["", "the model's default"]]);
  const truncate = el("input", { type: "checkbox", name: "truncate" });
  const result = el("section", { class: "results", "aria-label": "Similarity", "aria-live": "polite" });
  const turn = oneAtATime(fault);
  const send = () => turn.start(async (signal) => {
    result.replaceChildren();
    const empty = areas.findIndex((area) => !area.value);
    if (empty >= 0) throw new Error(`The ${["first", "second"][empty]} text is empty: the service takes no empty one.`);
    const body = { input: areas.map((area) => area.value), truncate: truncate.checked };
    if (prompt.value) body.prompt_name = prompt.value;
    code.show("v1/embeddings", body, "The similarity is the sum of the products of both vectors' numbers.");
    result.append(likeness(await callJson("v1/embeddings", body, signal)));
  });
  MAIN.append(
    el(
      "form",
      { class: "panel try", on: submits(send) },
      field("First text", areas[0]),
      field("Second text", areas[1]),
      el(
        "div",
        { class: "tools" },
        field("Prompt before both", prompt),
        el("label", { class: "mode" }, truncate, " cut a text that is too long"),
        el("button", { type: "submit", class: "go" }, "Compare"),
      ),
      fault.line,
      turn.line,
    ),
    result,
    code.box,
  );
  return (info) => {
    for (const name of info.prompts ?? []) {
      if (![...prompt.options].some((option) => option.value === name)) prompt.append(el("option", { value: name }, name));
    }
  };
}

/** Cosine of two vectors. */
function cosine(a, b) {
  const dot = (x, y) => x.reduce((sum, number, k) => sum + number * y[k], 0);
  return dot(a, b) / Math.sqrt(dot(a, a) * dot(b, b));
}

function likeness(answer) {
  const [a, b] = answer.data.map((one) => one.embedding);
  const value = cosine(a, b);
  return el(
    "article",
    { class: "card" },
    el("div", { class: "head" }, "cosine similarity ", el("strong", { class: "score" }, shown(value))),
    el("meter", { min: -1, max: 1, value, "aria-label": "similarity from -1 to 1" }),
    el("p", { class: "quiet" }, `${a.length} numbers a vector; ${answer.usage.prompt_tokens} tokens read`),
  );
}
