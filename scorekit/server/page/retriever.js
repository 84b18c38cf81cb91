// The retriever: a query, the pages found, and parts of them.

const [THUMB, WHOLE] = [60_000, 2_000_000];

function buildKind() {
  const [code, fault] = [codePanel(), faultLine()];
  const query = el("input", { type: "text", name: "query", dir: "auto", required: true, autocomplete: "off" });
  const top = el("input", { type: "number", name: "top_k", min: "1", max: "50", value: "8", required: true });
  const hits = el("section", { class: "results hits", "aria-label": "Pages found" });
  const page = el("section", { class: "results", "aria-label": "Page" });
  const open = (hit) => openPage(page, hit, code, fault);
  let round = 0;
  const send = async () => {
    const mine = ++round;
    fault.clear();
    for (const old of [hits, page]) leave(old);
    const body = { queries: [{ query: query.value }], top_k: Number(top.value) };
    code.show("v1/search", body);
    try {
      const result = (await callJson("v1/search", body)).results[0];
      if (mine !== round) return;
      if (!result.ok) throw new Error(`The query failed (${result.error.type}): ${result.error.message}`);
      hits.append(el("p", { role: "status" }, result.hits.length ? counted(result.hits.length, "page") : "Nothing found."));
      hits.append(...result.hits.map((hit) => hitCard(hit, open)));
    } catch (error) {
      fault.show(error, send);
    }
  };
  MAIN.append(
    el(
      "form",
      { class: "panel try", on: submits(send) },
      field("Query", query),
      el("div", { class: "tools" }, field("Most pages", top), el("button", { type: "submit", class: "go" }, "Search")),
      fault.line,
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
async function picture(path, alt) {
  const blob = await (await call(path)).blob();
  const img = el("img", { alt });
  img.src = URL.createObjectURL(blob);
  await img.decode();
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

async function openPage(section, hit, code, fault) {
  leave(section);
  fault.clear();
  const name = `${hit.document}, page ${hit.page}`;
  const part = el("div", { class: "part", "aria-live": "polite" });
  const cut = async (crop) => {
    const path = `${own(hit.image)}?crop=${crop.join(",")}`;
    code.show(path);
    try {
      const img = await picture(path, `part ${crop.join(", ")} of ${name}`);
      leave(part);
      part.append(el("p", { class: "quiet" }, `${crop.join(", ")}: ${crop[2] - crop[0]} × ${crop[3] - crop[1]} pixels`), img);
    } catch (error) {
      fault.show(error, () => cut(crop));
    }
  };
  try {
    const img = await picture(`${own(hit.image)}?max_pixels=${WHOLE}&format=webp`, name);
    const text = (await callJson(own(hit.image).replace(/\/image$/, ""))).boxes.map((box) => box.text).join("\n");
    section.append(
      el("h2", { dir: "auto", tabindex: "-1" }, `${name} · ${hit.width} × ${hit.height} pixels`),
      cropView(img, hit, cut),
      part,
      el("details", {}, el("summary", {}, "Its text"), el("pre", { dir: "auto" }, text || "(none)")),
    );
    section.querySelector("h2").focus();
  } catch (error) {
    fault.show(error, () => openPage(section, hit, code, fault));
  }
}
