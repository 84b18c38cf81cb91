// Elements and texts. A text becomes part of the page as textContent alone, never as HTML.

/** An element with properties and children. on: listeners by event; class, data and aria by name. */
function el(name, props = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(props)) {
    if (key === "on") {
      for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
    } else if (value === false || value === null || value === undefined) {
      continue;
    } else if (key in made && typeof value !== "string") {
      made[key] = value;
    } else {
      made.setAttribute(key, value === true ? "" : value);
    }
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

let fields = 0;

/** A label above its control. */
function field(label, control, hint = null) {
  control.id ||= `field-${++fields}`;
  const told = hint && el("small", { id: `${control.id}-hint` }, hint);
  if (told) control.setAttribute("aria-describedby", told.id);
  return el("div", { class: "field" }, el("label", { for: control.id }, label), control, told);
}

function textarea(name, rows = 3) {
  return el("textarea", { name, rows: String(rows), dir: "auto", spellcheck: "false" });
}

function button(label, listener, props = {}) {
  return el("button", { type: "button", on: { click: listener }, ...props }, label);
}

/** Listeners of a form that sends by itself. */
function submits(send) {
  return {
    submit: (event) => {
      event.preventDefault();
      send();
    },
  };
}

/** A list to choose from: [[value, label], ...]. */
function choice(name, options, chosen = null) {
  const made = el("select", { name });
  for (const [value, label] of options) {
    made.append(el("option", { value, selected: value === chosen }, label));
  }
  return made;
}

/** A number as people read it: four digits behind the point at most. */
function shown(number) {
  return typeof number === "number" ? String(Number(number.toFixed(4))) : "–";
}

/** What a score means: "0 to 25, lower is better". told: by `/v1/info`, of the service or of a task. */
function scale(told) {
  if (!told?.score_range) return "";
  const { min, max } = told.score_range;
  const range = min === null ? `up to ${max}` : max === null ? `from ${min}` : `${min} to ${max}`;
  return `${min === max ? "" : `${range}, `}${told.higher_is_better ? "higher" : "lower"} is better`;
}

/** A number of things: "1 error", "2 errors". */
function counted(number, thing) {
  return `${number} ${thing}${number === 1 ? "" : "s"}`;
}

function download(name, type, text) {
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

const MAIN = document.getElementById("main");
