// A part of a picture: chosen by dragging, or by numbers. Pixels are the page's own.

/** The corners of a drag in pixels of the page, or null where it has no area. */
function cropOf(from, to, page) {
  const inside = (value, most) => Math.max(0, Math.min(most, Math.round(value)));
  const [x1, x2] = [from.x, to.x].map((x) => inside(x, page.width)).sort((a, b) => a - b);
  const [y1, y2] = [from.y, to.y].map((y) => inside(y, page.height)).sort((a, b) => a - b);
  return x1 < x2 && y1 < y2 ? [x1, y1, x2, y2] : null;
}

/** The picture `img` of a page of that size; `chosen(crop)` is called with [x1, y1, x2, y2]. */
function cropView(img, page, chosen) {
  const frame = el("div", { class: "frame", hidden: true });
  const stage = el("div", { class: "stage" }, img, frame);
  const numbers = ["x1", "y1", "x2", "y2"].map((name) =>
    el("input", { type: "number", name, min: "0", max: String(name[0] === "x" ? page.width : page.height), step: "1", required: true }),
  );
  let from = null;
  const at = (event) => {
    const box = img.getBoundingClientRect();
    return {
      x: ((event.clientX - box.left) / box.width) * page.width,
      y: ((event.clientY - box.top) / box.height) * page.height,
    };
  };
  const draw = (crop) => {
    frame.hidden = crop === null;
    if (crop === null) return;
    numbers.forEach((input, k) => (input.value = String(crop[k])));
    const share = (pixels, whole) => `${(100 * pixels) / whole}%`;
    frame.style.left = share(crop[0], page.width);
    frame.style.top = share(crop[1], page.height);
    frame.style.width = share(crop[2] - crop[0], page.width);
    frame.style.height = share(crop[3] - crop[1], page.height);
  };
  const end = (event) => {
    const crop = from && cropOf(from, at(event), page);
    from = null;
    if (crop) chosen(crop);
  };
  stage.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    event.preventDefault();
    stage.setPointerCapture(event.pointerId);
    from = at(event);
  });
  stage.addEventListener("pointermove", (event) => from && draw(cropOf(from, at(event), page)));
  stage.addEventListener("pointerup", end);
  stage.addEventListener("pointercancel", () => (from = null));
  const submit = (event) => {
    event.preventDefault();
    const [x1, y1, x2, y2] = numbers.map((input) => Number(input.value));
    const crop = cropOf({ x: x1, y: y1 }, { x: x2, y: y2 }, page);
    draw(crop);
    if (crop) chosen(crop);
  };
  draw([0, 0, page.width, page.height]);
  frame.hidden = true;
  const form = el(
    "form",
    { class: "tools crop", on: { submit } },
    numbers.map((input) => field(input.name, input)),
    el("button", { type: "submit" }, "Crop"),
  );
  const hint = "Drag over the picture to cut a part of it, or give its corners in pixels.";
  return el("div", {}, el("p", { class: "quiet" }, hint), stage, form);
}
