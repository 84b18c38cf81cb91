// The page begins: the key, what the service says of itself, and the form of its kind.

const infoFault = faultLine();
const infoList = el("dl");
const know = [];

async function learn() {
  infoFault.clear();
  try {
    const info = await callJson("v1/info");
    document.getElementById("model").textContent = info.model ?? `${info.id}, ${info.pages} pages`;
    infoList.replaceChildren(...Object.entries(info).flatMap(([name, value]) => infoLine(name, value)));
    for (const one of know) one(info);
  } catch (error) {
    if (error.status === 401 && !key.value) return; // the form for it says enough
    infoFault.show(error, learn);
  }
}

function infoLine(name, value) {
  if (value === null) return [];
  const told = typeof value === "object" ? JSON.stringify(value) : String(value);
  return [el("dt", {}, name), el("dd", {}, told)];
}

key.load();
MAIN.append(ask.build(learn), infoFault.line);
know.push(buildKind());
MAIN.append(el("details", { class: "panel" }, el("summary", {}, "About this service (/v1/info)"), infoList));
learn();
