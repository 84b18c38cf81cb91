// The reward model: a conversation, or one text or two, and what the model gives for it.

const FORMS = [
  ["messages", "A conversation"],
  ["pair", "Two texts"],
  ["text", "One text"],
];

function buildKind() {
  let weights = {};
  const [code, fault] = [codePanel(), faultLine()];
  const form = choice("form", FORMS);
  const system = textarea("system", 2);
  const [first, second] = [textarea("first"), textarea("second")];
  const cut = el("input", { type: "checkbox", name: "truncate" });
  const fields = el("div");
  const take = () => {
    const rows = {
      messages: [field("System, optional", system), field("User", first), field("Assistant", second)],
      pair: [field("First text", first), field("Second text", second)],
      text: [field("Text", first)],
    };
    fields.replaceChildren(...rows[form.value]);
  };
  form.addEventListener("change", take);
  take();
  const result = el("section", { class: "results", "aria-label": "Score", "aria-live": "polite" });
  const turn = oneAtATime(fault);
  const sample = () => {
    if (form.value === "text") return { text: first.value };
    if (form.value === "pair") return { text: first.value, pair: second.value };
    const turns = [["system", system.value], ["user", first.value], ["assistant", second.value]];
    return { messages: turns.filter(([role, text]) => text || role !== "system").map(([role, content]) => ({ role, content })) };
  };
  const send = () => turn.start(async (signal) => {
    result.replaceChildren();
    const body = { samples: [sample()] };
    if (cut.checked) body.options = { overlong: "truncate" };
    code.show("v1/score", body);
    const [answer] = (await callJson("v1/score", body, signal)).results;
    result.append(rewardCard(answer, weights));
  });
  MAIN.append(
    el(
      "form",
      { class: "panel try", on: submits(send) },
      field("What is scored", form),
      fields,
      el(
        "div",
        { class: "tools" },
        el("label", { class: "mode" }, cut, " cut a text that is too long"),
        el("button", { type: "submit", class: "go" }, "Score"),
      ),
      fault.line,
      turn.line,
    ),
    result,
    code.box,
  );
  return (info) => {
    weights = info.labels ?? {};
    const taken = { messages: info.has_chat_template, pair: info.takes_pairs, text: true };
    for (const option of form.options) option.disabled = !taken[option.value];
    const valid = [...form.options].find((option) => !option.disabled);
    if (form.selectedOptions[0].disabled) {
      form.value = valid.value;
      take();
    }
  };
}

function rewardCard(answer, weights) {
  if (!answer.ok) return el("article", { class: "card" }, badge(answer.error.type, "bad"), " ", answer.error.message);
  const rows = Object.entries(answer.labels).map(([name, value]) =>
    el("li", {}, `${name}: `, el("strong", {}, shown(value)), ` with weight ${weights[name] ?? "?"}`));
  return el(
    "article",
    { class: "card" },
    el(
      "div",
      { class: "head" },
      "score ",
      el("strong", { class: "score" }, shown(answer.score)),
      answer.cached ? badge("cached", "quiet") : null,
      answer.truncated.mt || answer.truncated.src ? badge("cut", "bad") : null,
    ),
    el("ul", {}, ...rows),
    el("p", { class: "quiet" }, `${answer.tokens} tokens read`),
  );
}
