// The retriever: a query, the pages found, and parts of them.

const [THUMB, WHOLE] = [60_000, 2_000_000];

function buildKind() {
  const [code, fault] = [codePanel(), faultLine()];
  const query = el("input", { type: "text", name: "query", dir: "auto", required: true, autocomplete: "off" });
  const top = el("input", { type: "number", name: "top_k", min: "1", max: "50", value: "8", required: true });
  const hits = el("section", { class: "results hits", "aria-label": "Pages found" });
  const page = el("section", { class: "results", "aria-label": "Page" });
  const turn = oneAtATime(fault);
  const open = (hit) => openPage(page, hit, code, turn);
  const send = () => turn.start(async (signal) => {
    for (const old of [hits, page]) leave(old);
    const body = { queries: [{ query: query.value }], top_k: Number(top.value) };
    code.show("v1/search", body);
    const [result] = (await callJson("v1/search", body, signal)).results;
    if (!result.ok) throw new Error(`The query failed (${result.error.type}): ${result.error.message}`);
    hits.append(el("p", { role: "status" }, result.hits.length ? counted(result.hits.length, "page") : "Nothing found."));
    hits.append(...result.hits.map((hit) => hitCard(hit, open)));
  });
  MAIN.append(
    el(
      "form",
      { class: "panel try", on: submits(send) },
      field("Query", query),
      el("div", { class: "tools" }, field("Most pages", top), el("button", { type: "submit", class: "go" }, "Search")),
      fault.line,
      turn.line,
    ),
    hits,
    page,
    code.box,
  );
  return () => {};
}

/** Empty a part of the page, and let go of the pictures in it. */
function leave(section) {
  for (const img of section.querySelectorAll("img")) URL.revokeObjectURL(img.src);
  section.replaceChildren();
}

/** A path of the service as a path of `call`. */
function own(path) {
  return path.replace(/^\/+/, "");
}

/** A picture: fetched with the key, which an address in `src` could not carry. */
async function picture(path, alt, signal = null) {
  const blob = await (await call(path, null, signal)).blob();
  const img = el("img", { alt });
  img.src = URL.createObjectURL(blob);
  await img.decode();
  signal?.throwIfAborted();
  return img;
}

function hitCard(hit, open) {
  const place = el("div", { class: "thumb" });
  const name = `${hit.document}, page ${hit.page}`;
  const card = el(
    "button",
    { type: "button", class: "hit", on: { click: () => open(hit) } },
    place,
    el("span", { class: "title", dir: "auto" }, `${hit.rank}. ${name}`),
    el("span", { class: "quiet" }, `score ${shown(hit.score)}`),
  );
  picture(`${own(hit.image)}?max_pixels=${THUMB}&format=webp`, name).then(
    (img) => place.append(img),
    (error) => place.append(el("span", { class: "why" }, error.message)),
  );
  return card;
}

function openPage(section, hit, code, turn) {
  const name = `${hit.document}, page ${hit.page}`;
  const part = el("div", { class: "part", "aria-live": "polite" });
  const cut = (crop) => turn.start(async (signal) => {
    const path = `${own(hit.image)}?crop=${crop.join(",")}`;
    code.show(path);
    const img = await picture(path, `part ${crop.join(", ")} of ${name}`, signal);
    leave(part);
    part.append(el("p", { class: "quiet" }, `${crop.join(", ")}: ${crop[2] - crop[0]} × ${crop[3] - crop[1]} pixels`), img);
  });
  turn.start(async (signal) => {
    leave(section);
    const img = await picture(`${own(hit.image)}?max_pixels=${WHOLE}&format=webp`, name, signal);
    const told = await callJson(own(hit.image).replace(/\/image$/, ""), null, signal);
    const text = told.boxes.map((box) => box.text).join("\n");
    section.append(
      el("h2", { dir: "auto", tabindex: "-1" }, `${name} · ${hit.width} × ${hit.height} pixels`),
      cropView(img, hit, cut),
      part,
      el("details", {}, el("summary", {}, "Its text"), el("pre", { dir: "auto" }, text || "(none)")),
    );
    section.querySelector("h2").focus();
  });
}
